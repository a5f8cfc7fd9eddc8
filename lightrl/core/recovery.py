"""Restore a core from its journal, and take the snapshot that begins a new segment.

Owns the application of entries, and a consistent snapshot of a core while the core continues.
Entries drive the same functions as events, so that every decision has one implementation. Places of
work are not stored: every unfinished response waits in the queue until a node reports that it runs
the response, or a node continues the response from its tokens.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import NamedTuple, assert_never

from lightrl.core.arrays import encode
from lightrl.core.commands import CloseRound, Command, DrawPrompts
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import PromptsDrawn, ResponseScored
from lightrl.core.log_entries import (
    LogEntry,
    ObservationTaken,
    RoundOpened,
    RoundSnapshot,
    ShardSent,
    ShellNote,
    SnapshotBegan,
    SnapshotEnded,
    TokensTaken,
    VersionPublished,
    VersionRetrained,
)
from lightrl.core.rounds import rounds
from lightrl.core.rounds.backlog import Deferred
from lightrl.core.state import (
    Group,
    Response,
    ResponseState,
    Round,
    RoundKind,
    RoundState,
    Turn,
    sampled_spans,
)
from lightrl.errors import InvariantViolation, JournalError
from lightrl.messages.episodes import EpisodeEnded
from lightrl.messages.responses import FinishReason, ResponseTokens
from lightrl.messages.training import StepDone
from lightrl.messages.weights import PublishWeights

MAX_ENTRY_TOKENS = 1 << 20  # in one entry: some 8 MiB


class RunSnapshot:
    """The state of a core at one moment, as entries from which `recover` restores it.

    Can be iterated over repeatedly, in any thread, while the core continues: entries are created
    lazily. Tokens are copied only then, since the tokens of a response are only ever appended to.
    """

    def __init__(self, entries: list[LogEntry], rounds: "list[_RoundCopy]") -> None:
        self._entries = entries
        self._rounds = rounds

    def __iter__(self) -> Iterator[LogEntry]:
        yield from self._entries
        for round in self._rounds:
            yield from round.entries()
        yield SnapshotEnded()


def take_snapshot(core: Coordinator, *notes: ShellNote) -> RunSnapshot:
    """Return the state of a core and `notes`; requires that no DrawPrompts is unanswered."""
    steps, backlog, published = core.steps, core.backlog, core.fleet.published
    began = SnapshotBegan(
        step=core.step,
        num_drawn=backlog.num_drawn,
        spare=tuple(backlog.held_back),
        last_cut=steps.last_cut,
        evaluated=steps.evaluated,
        version=published.policy_version if published is not None else None,
        digests=dict(core.fleet.digests),
        canaries=dict(core.fleet.canaries),
        num_bytes=published.num_bytes if published is not None else 0,
        manifest_bytes=published.manifest_bytes if published is not None else 0,
        base=published.base if published is not None else None,
        counters=replace(core.table.counters),
        memory=core.predictor.memory(),
        learned=core.scaling.learned.copy(),
        sharing=core.policy.memory(),
        planner=core.sizes.memory(),
        slowest_s=dict(core.lifecycle.slowest_s),
    )
    entries: list[LogEntry] = [began, *notes, *backlog.deferred]
    return RunSnapshot(entries, [_snapshot_of(round) for round in core.table.rounds])


def recover(core: Coordinator, entries: Iterable[LogEntry], now: float) -> list[Command]:
    """Apply entries to a new core. Return the commands that result: rounds that closed since the
    segment began, prompts to draw, finished responses without a score.

    Raises InvariantViolation if the entries contradict each other or the settings, JournalError if
    the run has more steps than the settings allow.
    """
    recovery = _Recovery(core, now)
    for entry in entries:
        recovery.apply(entry)
    return recovery.conclude()


class _Recovery:
    def __init__(self, core: Coordinator, now: float) -> None:
        self._core = core
        self._now = now
        self._began = SnapshotBegan()
        self._deferred: list[Deferred] = []  # when the segment began
        self._closed: list[Round] = []  # of those in the snapshot
        # tokens of responses that do not exist yet: a journal that is read merged has all tokens
        # before the scores, and a score may cause the draw that replaces a group without signal
        self._early: list[tuple[int, ResponseTokens]] = []

    def apply(self, entry: LogEntry) -> None:
        core = self._core
        if not isinstance(entry, TokensTaken | ResponseScored):
            self._early.clear()  # of responses that had been given up
        match entry:
            case SnapshotBegan():
                self._began = entry
                self._restore()
            case Deferred():
                self._hold(entry)
            case RoundSnapshot():
                self._set_up(entry)
            case SnapshotEnded():
                self._begin()
            case RoundOpened(step, kind):
                self._open(step, kind)
            case PromptsDrawn(prompts):
                core.steps.fill(prompts)
            case TokensTaken(version, items):
                self._take(version, items)
            case ObservationTaken() | EpisodeEnded():
                core.episodes.replay(entry)
            case ResponseScored():
                self._score(entry)
                early, self._early = self._early, []
                for version, item in early:
                    self._take(version, (item,))
            case VersionPublished():
                core.fleet.set_current_version(_message_of(entry))
                core.steps.set_published_at(self._now)
            case VersionRetrained():
                core.fleet.add_retrained_version(_message_of(entry))
            case StepDone():
                core.steps.on_step_done(entry)
            case ShardSent() | ShellNote():
                pass  # for a trainer that trains this step again; for the shell
            case _:
                assert_never(entry)
        core.steps.close_finished_rounds(self._now)

    def _take(self, version: int, items: tuple[ResponseTokens, ...]) -> None:
        for item in items:
            if item.response in self._core.table.responses:
                self._core.arrivals.replay(version, item)
            else:
                self._early.append((version, item))

    def conclude(self) -> list[Command]:
        core = self._core
        if core.steps.opened > core.settings.num_steps:
            raise JournalError(
                f"train.steps = {core.settings.num_steps}: the run has begun step "
                f"{core.steps.opened} already"
            )
        closed = [c for c in core.outbox.drain() if isinstance(c, CloseRound)]
        for round in core.steps.draws:
            core.outbox.add(DrawPrompts(round.source, core.steps.num_missing(round)))
        held = core.table.responses.values()
        for response in held:
            is_finished = response.state is ResponseState.DONE
            if is_finished and not response.scored and not response.resolved:
                core.outbox.score(response)
            response.was_stepped |= response.state is ResponseState.WAITING
        if core.fleet.published is not None:
            core.trainer_feed.lost(self._now)
        num_tokens = sum(len(r.tokens) for r in held)
        core.outbox.report(
            f"resumed at step {core.step} with {len(held)} open responses of {num_tokens} tokens"
        )
        core.episodes.claims_until = self._now + core.settings.lease_s
        core.lifecycle.forgive()
        core.scaling.forget_open()
        core.scaling.announce()
        return [*closed, *core.outbox.drain()]

    def _restore(self) -> None:
        """Restore all state outside the open rounds."""
        core, steps, began = self._core, self._core.steps, self._began
        steps.step, steps.evaluated, steps.last_cut = began.step, began.evaluated, began.last_cut
        steps.opened, steps.step_began = max(steps.opened, began.step), self._now
        core.backlog.restore(began.num_drawn, self._deferred, began.spare)
        core.table.counters = replace(began.counters)
        core.predictor.recall(began.memory)
        core.scaling.learned = began.learned.copy()
        core.policy.recall(began.sharing)
        core.sizes.recall(began.planner)
        core.lifecycle.slowest_s = dict(began.slowest_s)
        core.fleet.digests.update(began.digests)
        core.fleet.canaries.update(began.canaries)
        if (version := began.version) is not None:
            digest, canary = began.digests[version][-1], began.canaries.get(version)
            sizes = began.num_bytes, began.manifest_bytes
            core.fleet.set_current_version(
                PublishWeights(version, digest, *sizes, canary=canary, base=began.base)
            )

    def _set_up(self, entry: RoundSnapshot) -> None:
        """Restore an open round, in the state FILLING: no prompts are drawn for it, and it does not
        close."""
        core = self._core
        round = rounds.new_round(core.settings, entry.kind, entry.step, self._now)
        round.prompts_launched = entry.prompts_launched
        core.table.open(round)
        core.steps.opened += not round.is_eval
        core.table.start(rounds.add(core.settings, round, entry.prompts, core.predictor))
        if entry.is_closed:
            self._closed.append(round)

    def _hold(self, entry: Deferred) -> None:
        """Restore a deferred group; after a RoundSnapshot, the held responses of one of its
        groups."""
        if not self._core.table.rounds:
            self._deferred.append(entry)
            return
        for group in self._core.table.rounds[-1].groups.values():
            if group.prompt == entry.prompt:
                group.held = entry.held

    def _begin(self) -> None:
        """Start the open rounds; undo their side effects, which the snapshot includes already."""
        for round in self._core.table.rounds:
            round.transition(RoundState.RUNNING)
            round.published_at = self._now  # overwritten if the version is published later
            if round in self._closed:
                self._core.steps.close_round(round, self._now)
        self._restore()

    def _open(self, step: int, kind: RoundKind) -> None:
        core = self._core
        expected = core.steps.next_kind()
        # A run that was extended has flush rounds before its former end.
        at_end = {"short", "flush"}
        if kind not in {"eval", expected} and not {kind, expected} <= at_end:
            raise InvariantViolation(
                f"journal: round {step} was {kind}, and now would be {expected}"
            )
        core.steps.open(rounds.new_round(core.settings, kind, step, self._now))

    def _score(self, entry: ResponseScored) -> None:
        core = self._core
        response = core.table.responses.get(entry.response)
        if response is not None:
            response.attempt = max(response.attempt, entry.attempt)
            core.lifecycle.score(replace(entry, attempt=response.attempt))


def _message_of(entry: VersionPublished | VersionRetrained) -> PublishWeights:
    sizes = entry.num_bytes, entry.manifest_bytes
    return PublishWeights(entry.version, entry.digest, *sizes, canary=entry.canary, base=entry.base)


class _HeldTokens(NamedTuple):
    """The tokens of a response at one moment."""

    response: Response
    attempt: int
    # as Response.starts
    starts: tuple[tuple[int, int], ...]
    num_tokens: int
    finish_reason: FinishReason | None
    # of an episode
    turns: tuple[Turn, ...] = ()
    finishes: tuple[FinishReason, ...] = ()
    outcome: EpisodeEnded | None = None


@dataclass(frozen=True, slots=True)
class _RoundCopy:
    """A round at one moment. Constant, except that the arrays of responses may grow."""

    snapshot: RoundSnapshot
    deferred: list[Deferred]
    held: list[_HeldTokens]
    scores: list[LogEntry]

    def entries(self) -> Iterator[LogEntry]:
        yield self.snapshot
        yield from self.deferred
        items: dict[tuple[int, int], list[ResponseTokens]] = {}
        num_tokens = 0
        for held in self.held:
            if held.turns or held.outcome is not None:
                yield from _episode(held)
                continue
            for number, (version, item) in enumerate(_spans(held)):
                items.setdefault((number, version), []).append(item)
            num_tokens += held.num_tokens
            if num_tokens >= MAX_ENTRY_TOKENS:
                yield from _token_entries(items)
                num_tokens = 0
        yield from _token_entries(items)
        yield from self.scores


def _snapshot_of(round: Round) -> _RoundCopy:
    """Return a copy of a round, in time independent of lengths: the event loop is blocked."""
    groups: list[Group] = list(round.groups.values())
    prompts = tuple(Deferred(g.prompt, g.attempts, g.since) for g in groups)
    is_closed = round.state is RoundState.CLOSED
    default = ((round.step, 0),)
    return _RoundCopy(
        RoundSnapshot(round.step, round.kind, round.prompts_launched, prompts, is_closed),
        [Deferred(g.prompt, g.attempts, g.since, g.held) for g in groups if g.held],
        [
            _HeldTokens(
                r,
                r.attempt,
                tuple(r.starts) or default,
                len(r.tokens),
                r.finish_reason,
                tuple(r.turns),
                tuple(r.finishes),
                r.outcome,
            )
            for g in groups
            for r in g.responses
        ],
        list(_scores(round)),
    )


def _token_entries(items: dict[tuple[int, int], list[ResponseTokens]]) -> Iterator[LogEntry]:
    """Yield entries by number of the span in its response: an older version may follow a newer."""
    for number, version in sorted(items):
        yield TokensTaken(version, tuple(items[number, version]))
    items.clear()


def _spans(held: _HeldTokens) -> Iterator[tuple[int, ResponseTokens]]:
    """Yield (policy version, tokens) of each span; the last one has the finish reason.

    Copies arrays, since an array with a view cannot grow.
    """
    response, num_tokens = held.response, held.num_tokens
    ids, logprobs = encode(response.tokens), encode(response.logprobs)  # may have grown since
    ends = [start for _, start in held.starts[1:]] + [num_tokens]
    for (version, start), end in zip(held.starts, ends, strict=True):
        finish = held.finish_reason if end == num_tokens else None
        if end > start or finish is not None:
            part = slice(4 * start, 4 * end)
            yield (
                version,
                ResponseTokens(response.id, held.attempt, start, ids[part], logprobs[part], finish),
            )


def _episode(held: _HeldTokens) -> Iterator[LogEntry]:
    """Yield the observations of an episode and the tokens of its turns, in order."""
    response = held.response
    ids, logprobs = encode(response.tokens), encode(response.logprobs)
    spans = sampled_spans(held.turns, held.num_tokens)
    for turn, (begin, end), finish in zip_longest(held.turns, spans, held.finishes):
        observation = ids[4 * turn.start : 4 * begin]
        yield ObservationTaken(response.id, response.incarnation, turn, observation)
        cuts = [start for _, start in held.starts if begin < start < end]
        for a, z in pairwise([begin, *cuts, end]):
            versions = [version for version, start in held.starts if start <= a]
            part, last = slice(4 * a, 4 * z), finish if z == end else None
            if z > a or last is not None:
                what = held.attempt, a, ids[part], logprobs[part], last
                tokens = ResponseTokens(response.id, *what)
                yield TokensTaken(versions[-1] if versions else 0, (tokens,))
    if held.outcome is not None:
        yield held.outcome


def _scores(round: Round) -> Iterator[LogEntry]:
    """Yield scores in the order in which they counted, then those without reward, then the late."""
    counted: list[tuple[int, Response]] = []
    failed: list[Response] = []
    late: list[Response] = []
    for group in round.groups.values():
        times = {index: time for time, index in group.finishers}
        for r in group.responses:
            if r.scored and r.index in times:
                counted.append((times[r.index], r))
            elif r.scored:
                (failed if r.reward is None else late).append(r)
    counted.sort(key=lambda pair: pair[0])
    for r in [*(r for _, r in counted), *failed, *late]:
        yield ResponseScored(r.id, r.attempt, r.reward, "" if r.reward is not None else "no score")
