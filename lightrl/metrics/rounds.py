"""Records of a run: figures of rounds and steps, histories for the TUI, the summary at the end.

Reads the core's rounds when they close. Does no I/O.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import ParamSpec, TypeVar

from lightrl.core.commands import CloseStep
from lightrl.core.coordinator import Coordinator
from lightrl.core.settings import Settings
from lightrl.core.state import (
    OVER,
    GroupState,
    Response,
    ResponseState,
    Round,
    RoundState,
    RunState,
)
from lightrl.log import WARNING
from lightrl.messages.fields import MAX_EVALS
from lightrl.messages.load import Drafting
from lightrl.messages.snapshot import SampleText, Snapshot, TailRow, WarningRow
from lightrl.metrics.cost_and_nodes import NodeRows, cost_figures, cost_row, turns_figures
from lightrl.metrics.evaluation import Scores, eval_figures, eval_scores, mean_score
from lightrl.metrics.round_figures import (
    ScoringTime,
    digest_responses,
    episode_figures,
    figure_name,
    histogram,
    mean,
    num_devices,
    sampled_entropy,
    scoring_figures,
    step_figures,
    total_tokens,
)
from lightrl.metrics.selection_bias import Bias, BiasState
from lightrl.metrics.speeds import SpeedRecorder
from lightrl.metrics.totals import SpeculationMetrics, Totals, WeightsMetrics
from lightrl.metrics.waits import Waits
from lightrl.metrics.warned import Warnings
from lightrl.wire import to_json

P = ParamSpec("P")
Result = TypeVar("Result")

HISTORY_STEPS = 500
NUM_EVENTS = 200
NUM_SAMPLES = 64
SCORED = {GroupState.COMPLETE, GroupState.ACCEPTED, GroupState.TRAINED}


@dataclass(frozen=True, slots=True)
class RecordsNote:
    """What a restarted coordinator needs of the records: the shell's note in the journal, of all
    steps before it. A note of another version of LightRL is refused: see `noted` in
    `coordinator/journaling.py`."""

    digest: str
    evals: list[tuple[int, Scores]]
    rl_wall_s: float
    elapsed_s: float
    # set -> digest of its rows: see `coordinator/prompts.py`
    data: dict[str, str]
    bias: BiasState
    # steps that are not over, and whose rounds are in `bias`
    bias_steps: list[int]
    # of the training data
    num_prompts: int
    # prompts of each set to evaluate on
    eval_sizes: dict[str, int]
    drafting: Drafting
    weights: Totals
    warnings: tuple[WarningRow, ...]


@dataclass(frozen=True, slots=True)
class _Closed:
    """The figures that a closed round adds to the record of its step."""

    figures: dict[str, float]
    digest: Future[bytes]
    # see `sampled_entropy`
    entropy: Future[float]
    num_tokens: int
    histogram: tuple[tuple[int, int], ...]


class Records:
    def __init__(
        self,
        run: str,
        run_dir: str,
        head: str,
        num_steps: int,
        max_response_tokens: int,
        join_hint: str = "",
    ) -> None:
        """`head` is the name of the coordinator's daemon."""
        self._run = run
        self._run_dir = run_dir
        self._num_steps = num_steps
        self._max_response_tokens = max_response_tokens
        self._hashing = ThreadPoolExecutor(1, "hashing")
        self._adding = ThreadPoolExecutor(1, "adding")  # done long before the step is trained
        # of all trained responses so far, chained step by step
        self._digest = _done(bytes(16))
        self._bias = Bias(max_response_tokens)
        self._bias_so_far = self._bias.figures()
        self._bias_steps = set[int]()  # not over, but in the bias
        self._closed: dict[int, _Closed] = {}  # step -> its round, closed but not yet trained
        self._num_migrations = 0
        # of the responses of open rounds
        self._reward_figures: dict[str, dict[str, float]] = {}
        self._scorings: dict[str, ScoringTime] = {}
        self._records: deque[dict[str, float]] = deque(maxlen=HISTORY_STEPS)  # the newest last
        self._histogram: tuple[tuple[int, int], ...] = ()
        self._events: deque[tuple[float, str]] = deque(maxlen=NUM_EVENTS)
        self._warnings = Warnings()
        self._samples: deque[SampleText] = deque(maxlen=NUM_SAMPLES)
        self._rl_wall_s = 0.0
        self._num_tokens = 0  # trained so far, prompts and responses
        self.nodes, self.waits = NodeRows(head), Waits(join_hint)
        self.evals: list[tuple[int, Scores]] = []  # with the number of steps done
        self.speculation = SpeculationMetrics()
        self.weights = WeightsMetrics()
        self.speeds = SpeedRecorder()
        self.bad_frames = 0

    # Events

    def event(self, elapsed_s: float, text: str, is_warning: bool = False) -> None:
        """Add a line to the events; one that begins with WARNING is a warning, too."""
        self._events.append((elapsed_s, text))
        if is_warning or text.startswith(WARNING):
            self._warnings.add(text, elapsed_s)

    def sample(self, sample: SampleText) -> None:
        self._samples.appendleft(sample)

    def scored(
        self, response: Response, figures: dict[str, float], failure: str, seconds: float
    ) -> None:
        """`figures`: what the reward functions returned besides the reward; `failure`: why there is
        no reward; `seconds`: of the call."""
        round = response.group.round
        if not round.is_eval and round.state is not RoundState.CLOSED:
            self._scorings[response.id] = ScoringTime(failure, seconds)
            self.speeds.called(response.id, seconds)
            if figures:
                self._reward_figures[response.id] = figures

    def close_eval(self, round: Round, source_of: Callable[[str], str]) -> dict[str, float]:
        """Return the record of an evaluation. `source_of`: the `data_source` of a prompt, "" =
        none."""
        groups = round.groups.values()
        self.evals.append((round.step, eval_scores(groups)))
        seconds = {"eval/seconds": round.closed_at - round.opened_at}
        return eval_figures(groups, source_of) | seconds

    def close_round(self, round: Round, core: Coordinator, history: dict[str, float]) -> None:
        """`history`: the figures of the store of earlier responses."""
        trained = [r for group in round.accepted for r in group.kept]
        figures = {**step_figures(round), **self._close_reward_figures(round, trained)}
        # After a restart a closed round is closed again; a later one may close before it.
        bias = self._bias.add(round, core.backlog, count=round.step not in self._bias_steps)
        self._bias_steps.add(round.step)
        self._bias_so_far = self._bias.figures()
        if core.settings.tail.races:
            figures |= {f"tail/{name}": value for name, value in bias.items()}
            figures |= {f"tail_run/{name}": value for name, value in self._bias_so_far.items()}
            figures |= {
                f"round/is_{kind}": float(round.kind == kind) for kind in ("short", "long", "flush")
            }
        figures |= episode_figures(round, core.table)
        figures["migration/moves"] = float(core.table.counters.migrations - self._num_migrations)
        self._num_migrations = core.table.counters.migrations
        self._closed[round.step] = _Closed(
            figures | history,
            in_thread(self._hashing, digest_responses, round.step, trained),
            in_thread(
                self._adding,
                sampled_entropy,
                [r.sampled_logprobs for g in round.groups.values() for r in g.responses],
            ),
            total_tokens(round),
            histogram([r.num_sampled for r in trained], self._max_response_tokens),
        )

    def _close_reward_figures(self, round: Round, trained: list[Response]) -> dict[str, float]:
        """Return means over the trained responses that have the figure."""
        figures = {
            r.id: self._reward_figures.get(r.id, {})
            for g in round.groups.values()
            for r in g.responses
        }
        for g in round.groups.values():
            # responses that a later round continues count there
            for r in g.responses[g.size if g.continues else 0 :]:
                self._reward_figures.pop(r.id, None)
        scorings = [self._scorings.pop(r) for r in list(figures) if r in self._scorings]
        return scoring_figures(scorings) | {
            figure_name(name): mean([figures[r.id][name] for r in trained if name in figures[r.id]])
            for name in dict.fromkeys(name for r in trained for name in figures[r.id])
        }

    def close_step(self, done: CloseStep, core: Coordinator) -> dict[str, float]:
        """Return the record of a finished step. Its round may still be hashed: see `hashed`."""
        closed = self._closed.pop(done.step)
        self._bias_steps.discard(done.step)
        seconds = done.rollout_s + done.train_s + done.weights_s
        self._rl_wall_s += seconds
        self._num_tokens += closed.num_tokens
        device_s = seconds * num_devices(core)
        record = {
            "step": float(done.step + 1),
            **closed.figures,
            **self.speculation.figures(),
            **self.weights.figures(done.metrics.get("weights/publish_s")),
            **done.metrics,
            "timing_s/step": seconds,
            "timing_s/rollout": done.rollout_s,
            "timing_s/train_after_rollout": done.train_s,
            "timing_s/weights": done.weights_s,
            "entropy/sampled": closed.entropy.result(),
            "perf/tokens_per_gpu_s": closed.num_tokens / device_s if device_s else 0.0,
            "num_tokens_total": float(self._num_tokens),
            "epoch": core.backlog.num_drawn / max(1, core.settings.num_prompts),
            "policy_version": float(done.step + 1),
            **{f"cost/{name}": value for name, value in cost_figures(core).items()},
            **turns_figures(core, done.step),
        }
        self._digest = in_thread(self._hashing, _chain, self._digest, closed.digest)
        self._histogram = closed.histogram
        self._records.append(record)
        return record

    @property
    def is_hashed(self) -> bool:
        """Return whether all closed steps are hashed; a gigabyte of tokens takes a second."""
        return self._digest.done()

    async def hashed(self) -> None:
        """Wait until all closed steps are hashed. Cancelling does not stop the hashing."""
        while not self.is_hashed:
            await asyncio.wait([asyncio.wrap_future(self._digest)])

    # After a restart

    def note(self, elapsed_s: float, data: dict[str, str], settings: Settings) -> bytes:
        """Return a `RecordsNote` as JSON, when all steps are `hashed`."""
        sizes = {one.name: one.num_prompts for one in settings.eval_sets}
        return to_json(
            RecordsNote(
                self._digest.result(0).hex(),
                self.evals,
                self._rl_wall_s,
                elapsed_s,
                data,
                self._bias.state,
                sorted(self._bias_steps),
                settings.num_prompts,
                sizes,
                self.speculation.total,
                self.weights.totals,
                self._warnings.rows(),
            )
        )

    def recall(
        self, note: RecordsNote, core: Coordinator, steps: Iterable[dict[str, float]]
    ) -> None:
        """Continue from a note; `steps`: the newest records before it, to be shown."""
        self._digest, self.evals = _done(bytes.fromhex(note.digest)), note.evals
        self._rl_wall_s = note.rl_wall_s
        self._bias.state = note.bias
        self._bias_so_far = self._bias.figures()
        self._records.extend(record for record in steps if "reward/mean" in record)
        if self._records:
            self._num_tokens = int(self._records[-1].get("num_tokens_total", 0))
        self.speculation.total, self.weights.totals = note.drafting, note.weights
        self._warnings.recall(note.warnings)
        self._bias_steps = set(note.bias_steps)
        self._num_migrations = core.table.counters.migrations

    # Summary and snapshots

    def summary(self, core: Coordinator, reason: str, elapsed_s: float) -> dict[str, object]:
        """Return summary.json, when all steps are `hashed`. Equal digests mean equal final weights
        and equal trained responses."""
        c, bias = core.table.counters, self._bias.state
        return {
            "run": self._run,
            "state": _final(core.state),
            "reason": reason,
            "steps": core.step,
            "eval_start": mean_score(self.evals[0][1]) if self.evals else None,
            "eval_end": mean_score(self.evals[-1][1]) if self.evals else None,
            "evals": [(step, mean_score(scores)) for step, scores in self.evals],
            "eval_sets": self._by_set(),
            "eval_prompts": {one.name: one.num_prompts for one in core.settings.eval_sets},
            "rl_wall_s": round(self._rl_wall_s, 3),
            "total_wall_s": round(elapsed_s, 3),
            "rollout_tokens": c.rollout_tokens,
            "eval_tokens": c.eval_tokens,
            "trained_responses": c.trained_responses,
            "aborted_tokens": c.aborted_tokens,
            "speculation": {
                k.partition("/")[2]: round(v, 6) for k, v in self.speculation.whole().items()
            },
            "weights": {k: round(v, 6) for k, v in self.weights.totals.figures().items()},
            "tail": {
                "mode": _tail_mode(core.settings),
                "rounds": dict(bias.num_rounds),
                "prompts_put_off": c.prompts_put_off,
                "queue": len(core.backlog.deferred),
                "max_wait_steps": bias.max_wait_steps,
                **{name: round(value, 6) for name, value in self._bias_so_far.items()},
            },
            "cost": {k: round(v, 6) for k, v in cost_figures(core).items()},
            "weights_digest": core.fleet.published.digest if core.fleet.published else None,
            "responses_digest": self._digest.result(0).hex(),
            "counters": self._counters(core),
            "warnings": self._warnings.rows(),
        }

    def snapshot(self, core: Coordinator, now: float, over: bool = False) -> Snapshot:
        """`over`: it is the last one, whatever the state of the core."""
        round = core.table.round
        scored = sum(g.state in SCORED for g in round.groups.values()) if round is not None else 0
        states = [r.state for r in core.table.responses.values()]
        rows = self.nodes.rows(core.fleet, now)
        return Snapshot(
            run=self._run,
            run_dir=self._run_dir,
            state=str(core.state) if not over else _final(core.state),
            step=core.step,
            num_steps=self._num_steps,
            policy_version=core.fleet.published.policy_version if core.fleet.published else None,
            elapsed_s=now - core.started_at,
            nodes=rows,
            round_kind=round.kind if round is not None else "",
            round_accepted=min(scored, round.needed) if round is not None else 0,
            round_needed=round.needed if round is not None else 0,
            responses_running=states.count(ResponseState.RUNNING),
            responses_queued=states.count(ResponseState.QUEUED),
            responses_waiting=states.count(ResponseState.WAITING),
            responses_done=states.count(ResponseState.DONE),
            wait=None if over else self.waits.row(core, now),
            tail=self._tail(core) if core.settings.tail.races else None,
            cost=cost_row(core),
            max_staleness=core.settings.max_staleness,
            rollout_tokens=core.table.counters.rollout_tokens + core.table.counters.eval_tokens,
            tokens_per_s=sum(r.tokens_per_s for r in rows),
            rewards=tuple(r["reward/mean"] for r in self._records),
            lengths=tuple(r["response_length/mean"] for r in self._records),
            step_seconds=tuple(r["timing_s/step"] for r in self._records),
            evals=tuple(self.evals[-MAX_EVALS:]),
            length_histogram=self._histogram,
            metrics=self._records[-1] if self._records else {},
            counters=self._counters(core),
            events=tuple(self._events),
            warnings=self._warnings.rows(),
            samples=tuple(self._samples),
        )

    def _by_set(self) -> dict[str, list[tuple[int, float]]]:
        names = dict.fromkeys(name for _, scores in self.evals for name in scores)
        return {
            name: [(step, scores[name]) for step, scores in self.evals if name in scores]
            for name in names
        }

    def _tail(self, core: Coordinator) -> TailRow:
        figures, rounds = self._bias_so_far, self._bias.state.num_rounds
        return TailRow(
            mode=_tail_mode(core.settings),
            queue=len(core.backlog.deferred),
            num_short=rounds.get("short", 0),
            num_long=rounds.get("long", 0) + rounds.get("flush", 0),
            kept_length=figures["kept_length"],
            launched_length=figures["launched_length_km"],
            kept_reward=figures["kept_reward"],
            scored_reward=figures["scored_reward"],
        )

    def _counters(self, core: Coordinator) -> dict[str, int]:
        return {
            **asdict(core.table.counters),
            "nodes_joined": core.fleet.num_joined,
            "weights_failed": core.fleet.num_weights_failed,
            "bad_sources": core.fleet.num_bad_sources,
            "broadcasts": core.fleet.broadcasts.num_sent,
            "broadcasts_lost": core.fleet.broadcasts.num_lost,
            "bad_frames": self.bad_frames,
        }


def _final(state: RunState) -> str:
    """Return the final state of a run; one that ends in any other state has failed."""
    return str(state if state in OVER else RunState.FAILED)


def _tail_mode(settings: Settings) -> str:
    """Return the value of `round.tail_batching`."""
    if not settings.tail.races:
        return "off"
    return "both" if settings.tail.eta_responses > 1 else "prompts"


def in_thread(
    threads: ThreadPoolExecutor, act: Callable[P, Result], *args: P.args, **kwargs: P.kwargs
) -> Future[Result]:
    """Submit a call; run it here if no thread can be started."""
    try:
        return threads.submit(act, *args, **kwargs)
    except RuntimeError:
        return _done(act(*args, **kwargs))


def _done(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def _chain(before: Future[bytes], of_step: Future[bytes]) -> bytes:
    """Run in the thread that has finished both."""
    return hashlib.blake2b(before.result(0) + of_step.result(0), digest_size=16).digest()
