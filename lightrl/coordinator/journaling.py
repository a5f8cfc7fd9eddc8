"""Write and load the journal of a run for the coordinator.

Decides when a segment begins, and delays actions until entries are durable. core/log_entries.py
defines entries, core/recovery.py recovers a core from them, journal/ writes them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path

from lightrl.config import schema, sections
from lightrl.core.coordinator import Coordinator
from lightrl.core.log_entries import LogEntry, ShardSent, ShellNote
from lightrl.core.recovery import take_snapshot
from lightrl.errors import JournalError, ProtocolError
from lightrl.journal import read
from lightrl.journal.disk import FOLDER
from lightrl.journal.write import MAX_TROUBLE_S, JournalWriter
from lightrl.keys import JOIN_FILE, join_hint
from lightrl.messages.training import TrainShard
from lightrl.metrics import sinks
from lightrl.metrics.rounds import HISTORY_STEPS, Records, RecordsNote
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.threads import in_thread
from lightrl.wire import from_json


def new_records(settings: schema.Config, run_dir: Path, head: str, address: str = "") -> Records:
    """`head`: the name of the coordinator's daemon, which listens at `address`; "" if it has
    ended."""
    bind, key = settings.run.bind, run_dir.absolute() / JOIN_FILE
    return Records(
        settings.run.name,
        str(run_dir),
        head,
        settings.eval.last_step(settings.train.steps),
        settings.rollout.max_response_length,
        join_hint(address, bind, key) if address else "",
    )


def load_entries(run_dir: Path) -> tuple[list[LogEntry], list[str]]:
    """Return the entries of the newest readable segment, and lines that report losses.

    Newer segments are moved aside. Raises JournalError if no segment can be read.
    """
    segment, entries, lines = read.newest(run_dir / FOLDER, read.LOG)
    if aside := read.trim(run_dir / FOLDER, segment):
        lines.append(f"what cannot be used is set aside in {run_dir / FOLDER}: {', '.join(aside)}")
    return entries, lines


def noted(entries: Iterable[LogEntry]) -> RecordsNote | None:
    """Return the newest note of the metrics. Raises JournalError, one line."""
    notes = (entry.data for entry in entries if isinstance(entry, ShellNote))
    try:
        return next((from_json(data, RecordsNote) for data in notes), None)
    except ProtocolError as e:
        raise JournalError(
            "the journal is of another version of LightRL: go on with that one, or begin a new run "
            f"with lightrl up --from ({e})"
        ) from None


def recall(records: Records, core: Coordinator, run_dir: Path, known: RecordsNote) -> None:
    """Restore the records and the elapsed time of a run whose core is recovered."""
    records.recall(known, core, sinks.read(run_dir, HISTORY_STEPS, until=core.step))
    core.started_at -= known.elapsed_s


class Journaling:
    """Write the journal. With `journal.enabled = false` only run actions, immediately."""

    def __init__(
        self,
        run_dir: Path,
        settings: sections.Journal,
        report: Callable[[str], None],
        max_trouble_s: float = MAX_TROUBLE_S,
    ) -> None:
        """`max_trouble_s`: how long writes may fail. Raises JournalError if the folder cannot be
        used, or another coordinator has it open."""
        self._folder = run_dir / FOLDER
        self._report = report
        self._segment_bytes = settings.segment_mb << 20
        # the next segment will contain what is recorded now,
        self._is_step_over = False
        self._shards: list[ShardSent] = []  # except these
        self._acts: list[Callable[[], object]] = []  # which wait for them
        self._writer: JournalWriter[LogEntry] | None = None
        if settings.enabled:
            self._writer = JournalWriter(
                self._folder,
                read.LOG,
                settings.flush_ms,
                report,
                settings.keep_history,
                max_trouble_s,
            )

    def begin(self, core: Coordinator, note: bytes) -> None:
        """Begin a segment with a snapshot of the core; no DrawPrompts may be pending."""
        self._is_step_over = False
        if self._writer is not None:
            self._writer.begin(core.step, take_snapshot(core, ShellNote(note)))
        shards, acts = self._shards, self._acts
        self._shards, self._acts = [], []
        for shard in shards:
            self.record(shard)
        for act in acts:
            self.when_durable(act)

    def record(self, entry: LogEntry) -> None:
        if self._is_step_over:
            if isinstance(entry, ShardSent):
                self._shards.append(entry)
        elif self._writer is not None:
            self._writer.append(entry)

    def close_step(self) -> None:
        """Record nothing until the next `begin`, whose snapshot of the core will contain it."""
        self._is_step_over = True

    @property
    def is_due(self) -> bool:
        """Return whether to `begin` a segment: a step is over, or the current segment is long."""
        if self._is_step_over or self._writer is None:
            return self._is_step_over
        if self._writer.is_beginning:
            return False
        return self._writer.news_bytes > max(self._segment_bytes, self._writer.base_bytes)

    def when_durable(self, act: Callable[[], object]) -> None:
        """Call `act` once all entries so far are durable, in order of these calls."""
        if self._is_step_over:
            self._acts.append(act)
        elif self._writer is None:
            act()
        else:
            self._writer.after_flush(act)

    async def shards(self, step: int) -> AsyncGenerator[TrainShard, None]:
        """Yield the shards of a trained step in the portions in which they were accumulated.

        Raises JournalError.
        """
        if self._writer is None:
            raise JournalError(f"step {step} cannot be trained again: journal.enabled = false")
        flushed = asyncio.Event()
        self._writer.after_flush(flushed.set)
        await flushed.wait()
        what = f"training step {step} again"

        def warn(line: str) -> None:
            self._report(f"WARNING: {line}")

        sent, portions = await retry_on_resource_limit(
            lambda: in_thread(read.shards, self._folder, read.LOG, step), what, warn
        )
        for part in read.recut(sent, portions):
            yield part

    @property
    def pending_bytes(self) -> int:
        """Bytes recorded that are not durable yet."""
        return self._writer.pending_bytes if self._writer is not None else 0

    def drop_before(self, step: int) -> None:
        """Drop segments before `step`: every checkpoint kept is at least as new."""
        if self._writer is not None:
            self._writer.drop_before(step)

    def check(self) -> None:
        """Raises JournalError if writes have failed for too long."""
        if self._writer is not None:
            self._writer.check_alive()

    async def close(self) -> None:
        if self._writer is not None:
            await self._writer.close()
