"""What of a run is on the disk: the journal as the coordinator's shell uses it.

Owns when a segment begins and what waits until something is durable. What an entry is, and how a
core comes of entries, is said in core/log_entries.py and core/recovery.py; how they are written, in
journal/.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path

from lightrl.config import schema
from lightrl.core.coordinator import Coordinator
from lightrl.core.log_entries import LogEntry, ShardSent, ShellNote
from lightrl.core.recovery import take_snapshot
from lightrl.errors import JournalError, ProtocolError
from lightrl.joining import join_hint
from lightrl.journal import read
from lightrl.journal.disk import FOLDER
from lightrl.journal.write import MAX_TROUBLE_S, JournalWriter
from lightrl.keys import JOIN_FILE
from lightrl.messages.training import TrainShard
from lightrl.metrics.rounds import HISTORY_STEPS, Records, RecordsNote
from lightrl.metrics.sinks import read_newest
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.threads import in_thread
from lightrl.wire import from_json


def new_records(settings: schema.Config, run_dir: Path, head: str, address: str = "") -> Records:
    """`head` is the name of the coordinator's daemon, which listens at `address`; "" if it is
    gone."""
    bind, key = settings.run.bind, run_dir.absolute() / JOIN_FILE
    return Records(
        settings.run.name,
        str(run_dir),
        head,
        settings.eval.last_step(settings.train.steps),
        settings.rollout.max_response_length,
        join_hint(address, bind, key) if address else "",
    )


def last_stand(run_dir: Path) -> tuple[list[LogEntry], list[str]]:
    """The entries to go on from, and lines that say what is lost; newer segments that cannot be
    used are moved aside, and where to. Raises JournalError if there is nothing to go on from."""
    segment, entries, lines = read.newest(run_dir / FOLDER, read.LOG)
    if aside := read.trim(run_dir / FOLDER, segment):
        lines.append(f"what cannot be used is set aside in {run_dir / FOLDER}: {', '.join(aside)}")
    return entries, lines


def noted(entries: Iterable[LogEntry]) -> RecordsNote | None:
    """What the shell wrote down last. Raises JournalError, one line."""
    notes = (entry.data for entry in entries if isinstance(entry, ShellNote))
    try:
        return next((from_json(data, RecordsNote) for data in notes), None)
    except ProtocolError as e:
        raise JournalError(
            "the journal is of another version of LightRL: go on with that one, or begin a new run "
            f"with lightrl up --from ({e})"
        ) from None


def recall(records: Records, core: Coordinator, run_dir: Path, known: RecordsNote) -> None:
    """What was shown of the run so far, and its time, go on where they were; the core is recovered
    already."""
    records.recall(known, core, read_newest(run_dir, HISTORY_STEPS, until=core.step))
    core.started_at -= known.elapsed_s


class Journaling:
    """Switched off (`journal.enabled = false`), nothing is written and nothing waits."""

    def __init__(
        self,
        run_dir: Path,
        settings: schema.Journal,
        report: Callable[[str], None],
        max_trouble_s: float = MAX_TROUBLE_S,
    ) -> None:
        """`max_trouble_s`: how long the disk may refuse. Raises JournalError if the folder cannot
        be used, or another coordinator has it open."""
        self._folder = run_dir / FOLDER
        self._report = report
        self._segment_bytes = settings.segment_mb << 20
        # what is recorded now will be in what the next segment begins with
        self._is_step_over = False
        self._shards: list[ShardSent] = []  # but for these
        self._acts: list[Callable[[], object]] = []  # that wait for them
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
        """A new segment that says where the run stands; no DrawPrompts may be unanswered."""
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
        """From here on until it is begun anew, as `is_due` says, the core's state is the record."""
        self._is_step_over = True

    @property
    def is_due(self) -> bool:
        """Whether it is time to `begin` again: a step is over, or recovering would take long."""
        if self._is_step_over or self._writer is None:
            return self._is_step_over
        if self._writer.is_beginning:
            return False
        return self._writer.news_bytes > max(self._segment_bytes, self._writer.base_bytes)

    def when_durable(self, act: Callable[[], object]) -> None:
        """At once without a journal; in order."""
        if self._is_step_over:
            self._acts.append(act)
        elif self._writer is None:
            act()
        else:
            self._writer.after_flush(act)

    async def shards(self, step: int) -> AsyncGenerator[TrainShard, None]:
        """Of a step that was trained, cut as they were accumulated, read one by one. Raises
        JournalError."""
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
        parts = read.recut(sent, portions, sent.num_groups)
        # A `next` that was refused for lack of a thread has not been called, so no part is skipped.
        while (
            part := await retry_on_resource_limit(lambda: in_thread(next, parts, None), what, warn)
        ) is not None:
            yield part

    @property
    def pending_bytes(self) -> int:
        """Recorded and not on the disk yet."""
        return self._writer.pending_bytes if self._writer is not None else 0

    def drop_before(self, step: int) -> None:
        """Nobody will train the steps before this one again: no checkpoint that is kept has
        fewer."""
        if self._writer is not None:
            self._writer.drop_before(step)

    def check(self) -> None:
        """Raises JournalError if the disk has refused for too long."""
        if self._writer is not None:
            self._writer.check_alive()

    async def close(self) -> None:
        if self._writer is not None:
            await self._writer.close()
