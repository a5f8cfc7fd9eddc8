"""Read rounds, tokens, scores and versions of a run from its journal.

Each segment is passed to `core/recovery.py`, as on a resume, and the report is read from the
recovered core. Changes no file. A journal reaches back as far as a resume may need.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightrl.config.run_file import CONFIG_FILE, load_config
from lightrl.config.schema import Config
from lightrl.coordinator.journaling import new_records, noted, recall
from lightrl.core.arrays import encode
from lightrl.core.commands import CloseRound, Command
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import ResponseScored
from lightrl.core.log_entries import LogEntry, ShardSent
from lightrl.core.recovery import recover
from lightrl.core.state import Response, Round, sampled_spans
from lightrl.core_settings import settings_of
from lightrl.errors import InvariantViolation, JournalError, LightRLError
from lightrl.journal.disk import FOLDER
from lightrl.journal.read import LOG, Segment, newest, read_merged, segments
from lightrl.messages.episodes import EpisodeStop
from lightrl.messages.responses import FinishReason
from lightrl.messages.snapshot import INTERRUPTED, Snapshot

READ_TRIES = 10  # of a run that is still running


@dataclass
class RoundReport:
    """One round. `step`: the step that it feeds; for an evaluation, the steps done before it."""

    step: int
    kind: str
    num_prompts: int = 0
    # with at least one token
    num_responses: int = 0
    num_tokens: int = 0
    num_scored: int = 0
    # whose reward failed
    num_unscored: int = 0
    reward_sum: float = 0.0
    num_shards: int = 0
    num_trained: int = 0  # responses
    # of the version that came of it
    digest: str = ""
    is_done: bool = False

    @property
    def reward(self) -> float | None:
        return self.reward_sum / self.num_scored if self.num_scored else None


@dataclass
class TurnReport:
    """An observation of an episode, and the tokens sampled after it, from `start` to `end`."""

    num_inserted: int
    # messages, as JSON: the model's before it, and those of the environment
    record: str
    reward: float | None
    start: int
    end: int


@dataclass
class ResponseReport:
    response: str
    step: int
    attempt: int = 0
    # (policy version, tokens)
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    num_tokens: int = 0
    finish_reason: FinishReason | EpisodeStop | None = None
    reward: float | None = None
    failure: str = ""
    is_scored: bool = False
    is_trained: bool = False
    # of an episode
    turns: list[TurnReport] = field(default_factory=list["TurnReport"])
    # int32; only of the response that was asked for
    token_ids: bytes = b""


class Replay:
    """Reads segments in order; a later segment replaces what an earlier one reported."""

    def __init__(self, config: Config, wanted: str = "") -> None:
        """Keep the tokens of the response `wanted` only."""
        self.responses: dict[str, ResponseReport] = {}
        self.steps_done = 0
        self.version: int | None = None
        self.first_step: int | None = None  # of the journal
        self.num_open = 0  # responses of the rounds that are not over
        self.open_tokens = 0
        self._config = config
        self._wanted = wanted
        self._rounds: dict[tuple[int, bool], RoundReport] = {}  # (step, is training)
        # Facts that a core does not keep.
        self._sent: dict[int, list[set[str]]] = {}  # step -> responses of its shards
        self._failures: dict[tuple[str, int], str] = {}  # (response, attempt) -> why no reward

    @property
    def rounds(self) -> list[RoundReport]:
        """Rounds by step; an evaluation precedes the training round of its step."""
        return [self._rounds[key] for key in sorted(self._rounds)]

    def read_segment(self, entries: Sequence[LogEntry]) -> str:
        """Read one segment. Return one line why a coordinator would refuse it, or ""."""
        try:
            core = _new_core(self._config, entries)
        except JournalError as e:  # its note has another version
            return str(e)
        commands, problem = list[Command](), ""
        try:
            commands = recover(core, entries, now=0.0)
        except (InvariantViolation, JournalError) as e:
            problem = str(e)
        for entry in entries:
            self._remember(entry)
        closed = [c.round for c in commands if isinstance(c, CloseRound) and c.round.is_eval]
        for round in (*closed, *core.table.rounds):
            self._report_round(round)
        for (step, is_training), report in self._rounds.items():
            report.is_done |= is_training and step < core.step
            if is_training:
                report.digest = core.fleet.digests.get(step + 1, (report.digest,))[-1]
        published = core.fleet.published
        self.version = published.policy_version if published is not None else None
        self.steps_done = core.step
        self.first_step = core.step if self.first_step is None else self.first_step
        self.num_open = len(core.table.responses)
        self.open_tokens = sum(len(r.tokens) for r in core.table.responses.values())
        return problem

    def _remember(self, entry: LogEntry) -> None:
        match entry:
            case ShardSent(shard):
                if shard.index == 0:  # the step starts over
                    self._sent[shard.step] = []
                trained = {r.response for group in shard.groups for r in group.responses}
                self._sent.setdefault(shard.step, []).append(trained)
            case ResponseScored(response, attempt, None, failure):
                self._failures.setdefault((response, attempt), failure)  # the first is the cause
            case _:
                pass

    def _report_round(self, round: Round) -> None:
        sent = [] if round.is_eval else self._sent.get(round.step, [])
        trained = set[str]().union(*sent)
        report = RoundReport(round.step, round.kind, len(round.groups))
        report.num_shards, report.num_trained = len(sent), len(trained)
        self._rounds[round.step, not round.is_eval] = report
        for group in round.groups.values():
            for response in group.responses:
                if response.tokens or response.scored:
                    self._report_response(report, response, response.id in trained)

    def _report_response(self, round: RoundReport, r: Response, is_trained: bool) -> None:
        failure = self._failures.get((r.id, r.attempt)) if r.scored else None
        report = self.responses[r.id] = ResponseReport(
            r.id,
            round.step,
            r.attempt,
            r.spans,
            r.num_sampled,
            r.finish_reason if r.outcome is None else r.outcome.stop,
            reward=r.reward if failure is None else None,  # not the value of reward.on_failure
            failure=failure or "",
            is_scored=r.scored,
            is_trained=is_trained,
            turns=_turns(r) if r.id == self._wanted else [],
            token_ids=encode(r.tokens) if r.id == self._wanted else b"",
        )
        round.num_responses += report.num_tokens > 0
        round.num_tokens += report.num_tokens
        if report.reward is not None:
            round.num_scored += 1
            round.reward_sum += report.reward
        else:
            round.num_unscored += r.scored


def _turns(r: Response) -> list[TurnReport]:
    """Return the turns of an episode; the last one has no tokens, if it is what ended it."""
    spans = sampled_spans(r.turns, len(r.tokens))
    turns = [
        TurnReport(turn.num_inserted, turn.record, turn.reward, *span)
        for turn, span in zip(r.turns, spans, strict=True)
    ]
    if (last := r.outcome) is not None and last.record:
        turns.append(TurnReport(0, last.record, last.turn_reward, len(r.tokens), len(r.tokens)))
    return turns


def _new_core(config: Config, entries: Sequence[LogEntry]) -> Coordinator:
    """Build a core with the settings of the coordinator that wrote the segment."""
    note = noted(entries)
    num_prompts = note.num_prompts if note is not None else sys.maxsize
    settings = settings_of(config, num_prompts, note.eval_sizes if note is not None else None)
    # train.steps may have been lowered since
    return Coordinator(replace(settings, num_steps=sys.maxsize), now=0.0)


@dataclass(frozen=True)
class JournalReport:
    replay: Replay
    files: list[str]
    damage: list[str]  # one line each


def read_run(run_dir: Path, wanted: str = "") -> JournalReport:
    """Read the whole journal of a run. Raises LightRLError if it has none."""
    for _ in range(READ_TRIES):
        found = segments(run_dir / FOLDER)
        if not found:
            raise LightRLError(f"{run_dir}: has no journal")
        report = _read(load_config(run_dir / CONFIG_FILE), found, wanted)
        if set(found) <= set(segments(run_dir / FOLDER)):
            return report
        # A running coordinator has removed segments that a checkpoint replaces.
    raise LightRLError(f"{run_dir}: its journal changes faster than it can be read; try again")


def _read(config: Config, found: list[Segment], wanted: str) -> JournalReport:
    replay, damage = Replay(config, wanted), list[str]()
    for segment in found:
        entries, reading = read_merged(segment.path, LOG)
        if reading.damage is not None:
            damage.append(str(reading.damage))
        if reading.base_is_whole and (problem := replay.read_segment(entries)):
            damage.append(f"{segment.path}: {problem}")
    return JournalReport(replay, [s.path.name for s in found], damage)


def interrupted(run_dir: Path) -> Snapshot | None:
    """Return the snapshot that a resumed coordinator would send first.

    None if the run has no journal, or the journal cannot be read.
    """
    try:
        config = load_config(run_dir / CONFIG_FILE)
        _, entries, damage = newest(run_dir / FOLDER, LOG)
        core = _new_core(config, entries)
        closed = [c.round for c in recover(core, entries, now=0.0) if isinstance(c, CloseRound)]
        records = new_records(config, run_dir, "")
        if (known := noted(entries)) is not None:
            recall(records, core, run_dir, known)
    except LightRLError:
        return None
    for round in closed:
        if round.is_eval:
            records.close_eval(round, lambda prompt: "")
        else:
            records.close_round(round, core, {})
    elapsed_s = -core.started_at
    for line in damage:
        records.event(elapsed_s, f"WARNING: {line}")
    records.event(elapsed_s, "the coordinator is gone; continue with lightrl resume")
    return replace(records.snapshot(core, now=0.0), state=INTERRUPTED, nodes=(), wait=None)
