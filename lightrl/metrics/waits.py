"""What a run waits for, in words: for snapshots, logs and plain output.

`core/waits.py` decides what it is. Here: the text, the duration, and how often it is reported: once
it has lasted, then more and more rarely. No clock and no I/O.
"""

from collections.abc import Callable, Iterator

from lightrl.core.coordinator import Coordinator
from lightrl.core.waits import Scoring, Wait, WaitClock, WaitKind, decide
from lightrl.messages.snapshot import WaitRow
from lightrl.metrics.display import duration

REPORT_AFTER_S = 10.0
REPEAT_FACTOR = 2.0  # a wait is reported again when it has lasted this many times as long
USUAL_FACTOR = 2.0  # and only if it lasts this many times as long as usual, or as the last time
MAX_NAMED = 8  # nodes in a row
MAX_SHOWN = 3  # in a line
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

K = WaitKind


class Waits:
    def __init__(self, hint: str = "") -> None:
        """`hint`: one line, how to add a rollout node."""
        self.scoring: Callable[[], Scoring] = Scoring  # until there are reward workers
        self._hint = hint
        self._clock = WaitClock()
        self._lines = WaitLines()

    def row(self, core: Coordinator, now: float) -> WaitRow | None:
        wait = self._clock.look(decide(core, self.scoring()), now)
        return None if wait is None else _row(wait, now, self._hint)

    def report(self, core: Coordinator, now: float, write: Callable[[str], None]) -> None:
        """Report a wait that is due; called about every second."""
        for line in self._lines.lines(self.row(core, now), now):
            write(line)


class WaitLines:
    """The lines about waits in one output."""

    def __init__(self) -> None:
        self._row: WaitRow | None = None  # the current wait
        self._seen_at = 0.0
        self._reported_s = 0.0  # its duration when it was reported; 0 = it was not
        self._last_s: dict[str, float] = {}  # duration of the last wait of each kind

    def lines(self, row: WaitRow | None, now: float) -> Iterator[str]:
        """Yield a line for a wait that has lasted, and for the end of a reported one."""
        before = self._row
        if before is not None and (row is None or _is_other(row, before)):
            lasted_s = before.lasted_s + now - self._seen_at
            if self._reported_s:
                yield f"waited {duration(lasted_s)} for {what(before)}"
            self._last_s[before.kind] = lasted_s
            self._reported_s = 0.0
        self._row, self._seen_at = row, now
        if row is None:
            return
        usual_s = max(row.usual_s or 0.0, self._last_s.get(row.kind, 0.0))
        if row.lasted_s >= (
            REPEAT_FACTOR * self._reported_s or max(REPORT_AFTER_S, USUAL_FACTOR * usual_s)
        ):
            self._reported_s = row.lasted_s
            yield f"waiting {waiting(row)}"


def waiting(row: WaitRow) -> str:
    """Example: for one reward worker to score 31 responses of step 5 (0:12)"""
    hint = f"; {row.hint}" if row.hint else ""
    return f"for {what(row)} ({duration(row.lasted_s)}){hint}"


def what(row: WaitRow) -> str:
    """Return the text after "waiting for"."""
    who = _named(row)
    of_step = _of_step(row)
    match K(row.kind):
        case K.LAST_CHECKPOINT:
            return f"the last checkpoint, of {row.step} steps, to be written"
        case K.LEAVING:
            return f"{who} to leave"
        case K.TRAINER_LOST:
            left = "" if row.left_s is None else f"; the run ends in {duration(row.left_s)}"
            return f"{_trainers(row)} to come back{left}"
        case K.TRAINER:
            return f"{_trainers(row)} to join"
        case K.DEVICES:
            return f"devices to change sides: {who}"
        case K.RANKS:
            return f"{who or 'the trainer'} to load the model"
        case K.CHECKPOINT:
            return f"a checkpoint of {row.step} steps to be written"
        case K.TRAINING:
            usual = "" if row.usual_s is None else f", usually {row.usual_s:.1f} s"
            return f"the trainer, which trains{of_step}{usual}"
        case K.ROLLOUT:
            return "a rollout node: none takes part"
        case K.PROMPTS:
            return f"{row.num:,} prompts{of_step} to be read"
        case K.ENGINES:
            return f"the engine{'s' * (row.num_nodes > 1)} of {who} to load"
        case K.WEIGHTS:
            return f"version {row.step} of the weights to reach {who}"
        case K.SCORES:
            plural = "s" * (row.num != 1)
            return f"{_workers(row.of)} to score {row.num:,} response{plural}{of_step}"
        case K.ENVIRONMENTS if not row.num:
            return "an environment node"
        case K.ENVIRONMENTS:
            return f"observations of {row.num:,} episode{'s' * (row.num != 1)}{of_step}, on {who}"
        case K.TAIL:
            last = "last response" if row.num == 1 else f"last {row.num:,} responses"
            return f"the {last}{of_step}, on {who}"


def _of_step(row: WaitRow) -> str:
    if row.step is None:
        return ""
    # People count steps from 1.
    where = f"the evaluation after step {row.step}" if row.is_eval else f"step {row.step + 1}"
    return f" {where}" if row.kind == K.TRAINING else f" of {where}"


def _row(wait: Wait, now: float, hint: str) -> WaitRow:
    return WaitRow(
        str(wait.kind),
        max(0.0, now - wait.since),
        wait.num,
        wait.of,
        wait.step,
        wait.is_eval,
        wait.nodes[:MAX_NAMED],
        len(wait.nodes),
        wait.usual_s,
        None if wait.ends_at is None else max(0.0, wait.ends_at - now),
        hint if wait.kind is K.ROLLOUT else "",
    )


def _is_other(row: WaitRow, before: WaitRow) -> bool:
    return (row.kind, row.step) != (before.kind, before.step) or row.lasted_s < before.lasted_s


def _named(row: WaitRow) -> str:
    first = row.nodes[:MAX_SHOWN]
    more = row.num_nodes - len(first)
    return ", ".join(first) + (f" and {more:,} more" if more > 0 else "")


def _trainers(row: WaitRow) -> str:
    return f"{row.num} of {row.of} trainer nodes" if row.of > 1 else "a trainer node"


def _workers(count: int) -> str:
    number = NUMBERS[count] if count < len(NUMBERS) else f"{count:,}"
    return f"{number} reward worker{'s' * (count != 1)}"
