"""What a journal tells of a run: rounds, tokens, scores, versions; and how an interrupted run
stands.

Owns that account. Decides nothing, changes nothing: what a coordinator makes of the same entries is
core/recovery.py's. The journal of a run goes as far back as something may still be needed of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lightrl.coordinator.journaling import FOLDER, noted
from lightrl.core.events import PromptsDrawn, ResponseScored
from lightrl.core.log_entries import (
    LogEntry,
    RoundOpened,
    RoundSnapshot,
    ShardSent,
    SnapshotBegan,
    TokensTaken,
    VersionPublished,
)
from lightrl.core.state import Counters
from lightrl.errors import LightRLError
from lightrl.journal.read import LOG, Segment, newest, read_segment, segments
from lightrl.messages import FinishReason, ResponseTokens, Snapshot, StepDone
from lightrl.metrics import sinks
from lightrl.metrics.rounds import RecordsNote
from lightrl.run_file import load_config
from lightrl.wire import from_json

READ_TRIES = 10  # of a run that goes on
INTERRUPTED = "interrupted"  # the state of a run whose coordinator is gone without a last word


@dataclass
class ToldRound:
    """One round. `step` is the one that it feeds; for an evaluation, the steps done before it."""

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
    # responses
    num_trained: int = 0
    # of the version that came of it
    digest: str = ""
    is_done: bool = False

    @property
    def reward(self) -> float | None:
        return self.reward_sum / self.num_scored if self.num_scored else None


@dataclass
class ToldResponse:
    response: str
    step: int
    attempt: int = 0
    # (policy version, tokens)
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    reward: float | None = None
    failure: str = ""
    is_scored: bool = False
    is_trained: bool = False
    # int32; only of the response that was asked for
    token_ids: bytes = b""


class Replay:
    """Take facts in order; what a segment states again of an earlier one counts once."""

    def __init__(self, wanted: str = "") -> None:
        """`wanted` is the response whose tokens are kept."""
        self.rounds: dict[tuple[int, bool], ToldRound] = {}  # (step, is evaluation), in order
        self.responses: dict[str, ToldResponse] = {}
        self.steps_done = 0
        self.version: int | None = None
        self.counters = Counters()
        self.first_step: int | None = None  # the journal tells nothing of those before
        self._wanted = wanted
        self._holder: dict[str, ToldRound] = {}  # prompt -> the round that it was drawn for
        self._opened: ToldRound | None = None  # last, of those that are trained
        self._filling: ToldRound | None = None  # prompts drawn now are for it

    def take(self, fact: LogEntry) -> None:
        match fact:
            case SnapshotBegan():
                self.first_step = fact.step if self.first_step is None else self.first_step
                self._stand(fact)
            case RoundSnapshot(step, kind):
                self._open(step, kind, [held.prompt.id for held in fact.prompts], anew=True)
            case RoundOpened(step, kind):
                self._open(step, kind, [])
            case PromptsDrawn(prompts):
                self._draw([p.id for p in prompts])
            case TokensTaken(version, items):
                for item in items:
                    self._tokens(version, item)
            case ResponseScored():
                self._score(fact)
            case VersionPublished(version, digest):
                self.version = version
                if (round := self.rounds.get((version - 1, False))) is not None:
                    round.digest = digest
            case ShardSent():
                self._train(fact)
            case StepDone(step):
                self.steps_done = step + 1
                if (round := self.rounds.get((step, False))) is not None:
                    round.is_done = True
            case _:
                pass  # the end of what a segment states again

    def _stand(self, fact: SnapshotBegan) -> None:
        """A segment begins; what ended the step before it is told by this alone."""
        self.steps_done, self.version, self.counters = fact.step, fact.version, fact.counters
        for (step, is_eval), round in self.rounds.items():
            if not is_eval:
                round.is_done |= step < fact.step
                round.digest = fact.digests.get(step + 1, round.digest)

    def _open(self, step: int, kind: str, prompts: list[str], anew: bool = False) -> None:
        key = (step, kind == "eval")
        if key not in self.rounds or not anew:
            self.rounds[key] = ToldRound(step, kind)
        round = self.rounds[key]
        if kind != "eval":
            self._opened = round
        if prompts:
            round.num_prompts = len(prompts)
        self._holder |= dict.fromkeys(prompts, round)
        self._filling = round

    def _draw(self, prompts: list[str]) -> None:
        round = self._filling
        if round is not None:
            round.num_prompts += len(prompts)
            if round.kind != "eval":
                self._holder |= dict.fromkeys(prompts, round)

    def _tokens(self, version: int, item: ResponseTokens) -> None:
        told = self.responses.get(item.response)
        # A prompt that was put off begins again under the same names, and later attempts.
        if told is None or (
            item.offset == 0 and item.attempt > told.attempt and not told.is_trained
        ):
            told = self._begin(item.response, told)
        fresh = item.offset + len(item.token_ids) // 4 - told.num_tokens
        told.attempt = max(told.attempt, item.attempt)
        told.finish_reason = item.finish_reason or told.finish_reason
        if fresh <= 0:
            return
        told.num_tokens += fresh
        if item.response == self._wanted:
            told.token_ids += item.token_ids[-4 * fresh :]
        if told.spans and told.spans[-1][0] == version:
            told.spans[-1] = (version, told.spans[-1][1] + fresh)
        else:
            told.spans.append((version, fresh))
        if (round := self._round_of(told)) is not None:
            round.num_tokens += fresh

    def _begin(self, response: str, before: ToldResponse | None) -> ToldResponse:
        group = response.rpartition("#")[0]
        prompt, _, label = group.rpartition("@")
        if label.startswith("eval"):
            round = self.rounds.get((int(label.removeprefix("eval")), True))
        else:
            round = self._holder.get(prompt)
            # put off, and taken up by a later round
            if round is None or round.step < self.steps_done:
                round = self._opened
        told = self.responses[response] = ToldResponse(
            response, round.step if round is not None else -1
        )
        if round is not None and before is not None and before.step == told.step:
            round.num_tokens -= before.num_tokens  # told again
        elif round is not None:
            round.num_responses += 1
        return told

    def _round_of(self, told: ToldResponse) -> ToldRound | None:
        return self.rounds.get((told.step, "@eval" in told.response))

    def _score(self, fact: ResponseScored) -> None:
        told = self.responses.get(fact.response)
        if told is None or told.is_scored:
            return
        told.is_scored, told.reward, told.failure = True, fact.reward, fact.failure
        if (round := self._round_of(told)) is not None:
            if fact.reward is None:
                round.num_unscored += 1
            else:
                round.num_scored += 1
                round.reward_sum += fact.reward

    def _train(self, fact: ShardSent) -> None:
        shard = fact.shard
        round = self.rounds.setdefault((shard.step, False), ToldRound(shard.step, "plain"))
        if shard.index == 0:  # the step begins anew
            round.num_shards = round.num_trained = 0
        round.num_shards += 1
        for group in shard.groups:
            round.num_trained += len(group.responses)
            for r in group.responses:
                told = self.responses.setdefault(r.response, ToldResponse(r.response, shard.step))
                told.is_trained = True


@dataclass(frozen=True)
class ToldRun:
    replay: Replay
    files: list[str]
    # one line each
    damage: list[str]


def read_run(run_dir: Path, wanted: str = "") -> ToldRun:
    """All that the journal of a run holds. Raises LightRLError if it has none."""
    for _ in range(READ_TRIES):
        found = segments(run_dir / FOLDER)
        if not found:
            raise LightRLError(f"{run_dir}: has no journal")
        told = _read(found, wanted)
        if set(found) <= set(segments(run_dir / FOLDER)):
            return told
        # The run goes on: a checkpoint has made some of them needless, and newer ones tell it all.
    raise LightRLError(f"{run_dir}: its journal changes faster than it can be read; try again")


def _read(found: list[Segment], wanted: str) -> ToldRun:
    replay, damage = Replay(wanted), list[str]()
    for segment in found:
        reading = read_segment(segment.path, LOG)
        for fact in reading:
            replay.take(fact)
        if reading.damage is not None:
            damage.append(str(reading.damage))
    return ToldRun(replay, [s.path.name for s in found], damage)


def interrupted(run_dir: Path) -> Snapshot | None:
    """How a run without a coordinator stands; None if it has no journal, or one that cannot be
    read."""
    try:
        config = load_config(run_dir / "config.toml")
        _, facts, damage = newest(run_dir / FOLDER, LOG)
        note = noted(facts)
        known_s = from_json(note, RecordsNote).elapsed_s if note is not None else 0.0
    except LightRLError:
        return None
    replay = _told(facts)
    records = [r for r in sinks.read(run_dir) if r["step"] <= replay.steps_done]
    trained = [r for r in records if "timing_s/step" in r]
    open_responses = [r for r in replay.responses.values() if not r.is_trained]
    done = sum(r.finish_reason is not None for r in open_responses)
    round = next((r for r in reversed(replay.rounds.values()) if not r.is_done), None)
    seconds = [r["timing_s/step"] for r in trained]
    elapsed_s = max(known_s, sum(seconds))  # a resumed run counts on from what it knows
    news = [f"WARNING: {line}" for line in damage] + [
        "the coordinator is gone; continue with lightrl resume"
    ]
    return Snapshot(
        run=config.run.name,
        run_dir=str(run_dir),
        state=INTERRUPTED,
        step=replay.steps_done,
        num_steps=config.train.steps,
        policy_version=replay.version,
        elapsed_s=elapsed_s,
        round_kind=round.kind if round is not None else "",
        round_needed=config.train.prompts_per_step
        if round is not None and round.kind != "eval"
        else 0,
        responses_queued=len(open_responses) - done,
        responses_done=done,
        max_staleness=config.async_.max_staleness,
        rollout_tokens=replay.counters.rollout_tokens + replay.counters.eval_tokens,
        rewards=tuple(r["reward/mean"] for r in trained if "reward/mean" in r),
        lengths=tuple(r["response_length/mean"] for r in trained if "response_length/mean" in r),
        step_seconds=tuple(seconds),
        evals=tuple(
            (int(r["step"]), value)
            for r in records
            for name, value in r.items()
            if name.startswith("eval/") and "/avg@" in name
        ),
        metrics=trained[-1] if trained else {},
        events=tuple((elapsed_s, line) for line in news),
    )


def _told(facts: Iterable[LogEntry]) -> Replay:
    replay = Replay()
    for fact in facts:
        replay.take(fact)
    return replay
