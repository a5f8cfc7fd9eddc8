"""The bookkeeping of one episode on an environment node: tokens, turns, rewards, limits. Pure.

The ids are the conversation: what is held is only appended to, and never rendered again.
"""

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from typing import Any, TypeAlias

from lightrl.environments.calls import Returned, TurnTokens
from lightrl.errors import LightRLError
from lightrl.messages.episodes import (
    BeginEpisode,
    EpisodeEnded,
    EpisodeStop,
    Observed,
    RecordedTurn,
    StepEpisode,
)
from lightrl.messages.fields import MAX_METRICS, MAX_TEXT, MAX_WORD
from lightrl.messages.responses import FinishReason
from lightrl.wire import pack_i32, unpack_f32, unpack_i32

Answer: TypeAlias = Observed | EpisodeEnded


class Stopped(LightRLError):
    """The episode ends before its next observation. The text is the failure, if it is one."""

    def __init__(self, stop: EpisodeStop, failure: str = "") -> None:
        super().__init__(failure)
        self.stop: EpisodeStop = stop
        self.failure = failure


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of every episode of a run. Example: EpisodeLimits(max_turns=16, max_length=2048)."""

    max_turns: int
    # tokens, inserted and sampled
    max_length: int
    # sampled tokens of one turn; 0 = as many as the episode may have
    max_turn_length: int = 0


@dataclass(slots=True)
class HeldTurn:
    """An observation, and what was sampled after it. Example: HeldTurn(end=9, digest="5f0c")"""

    # index of the first token after the observation
    end: int
    # of what the environment returned
    digest: str
    reward: float | None = None
    # of the environment after it; kept for the newest turn only
    state: bytes = b""
    # int32; None: it is being sampled
    sampled: bytes | None = None
    finish_reason: FinishReason = "stop"
    # float32; for agents only
    logprobs: bytes = b""
    policy_version: int = 0


@dataclass(slots=True, eq=False)
class HeldEpisode:
    """One episode. `take` and `observe` alternate, until `end`."""

    begun: BeginEpisode
    limits: EpisodeLimits
    row: dict[str, Any]
    # int32, inserted and sampled
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    turns: list[HeldTurn] = field(default_factory=list[HeldTurn])
    # of this episode, beside those of the run; known after `reset`
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    # its name at the pool, another one whenever its environment begins again
    handle: str = ""
    # a worker has its environment, in the state after the newest observation
    is_live: bool = False
    # deaths of workers in calls of this episode
    num_lost: int = 0
    # the answer to the last order, until the next one
    last: Answer | None = None

    @classmethod
    def begin(cls, begun: BeginEpisode, limits: EpisodeLimits) -> "HeldEpisode":
        """Return the episode with the recorded turns, the last of which is to be stepped."""
        episode = cls(begun, limits, json.loads(begun.row or "{}"))
        for turn in begun.turns:
            episode.ids.extend(unpack_i32(turn.observation))
            episode._append(HeldTurn(len(episode.ids), turn.digest, turn.reward, turn.state))
            episode._sampled(turn)
        return episode

    def _append(self, turn: HeldTurn) -> None:
        if self.turns:
            self.turns[-1].state = b""
        self.turns.append(turn)

    def _sampled(self, given: RecordedTurn | StepEpisode) -> None:
        turn = self.turns[-1]
        turn.sampled = given.sampled if isinstance(given, RecordedTurn) else given.token_ids
        turn.finish_reason, turn.logprobs = given.finish_reason, given.logprobs
        turn.policy_version = given.policy_version
        self.ids.extend(unpack_i32(turn.sampled))

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.sampled or b"") // 4 for turn in self.turns)

    def take(self, step: StepEpisode) -> "HeldEpisode":
        """Take the tokens of a turn. Return this episode; or another one, if it is to be stepped
        from an earlier turn than the newest: a coordinator that was restarted may have lost the end
        of its journal. Raises Stopped if the turn's observation is not known."""
        if step.turn >= len(self.turns):
            raise Stopped("failed", f"turn {step.turn} of {len(self.turns)} cannot be stepped")
        episode = self
        if step.turn < len(self.turns) - 1 or self.turns[-1].sampled is not None:
            turns = [*self.turns[: step.turn], replace(self.turns[step.turn], sampled=None)]
            ids = self.ids[: turns[-1].end]
            episode = HeldEpisode(self.begun, self.limits, self.row, ids, turns, self.tools)
        episode.last = None
        episode._sampled(step)
        return episode

    def has_taken(self, step: StepEpisode) -> bool:
        """Return whether this is the order that was taken last."""
        newest = [k for k, turn in enumerate(self.turns) if turn.sampled is not None][-1:]
        return newest == [step.turn] and self.turns[step.turn].sampled == step.token_ids

    def sampled_ids(self, turn: int) -> "array[int]":
        """Return the tokens that were sampled after an observation."""
        return array("i", unpack_i32(self.turns[turn].sampled or b""))

    def tokens_of(self, turn: int) -> TurnTokens:
        """Return what was sampled after an observation, for its agent."""
        at, sampled = self.turns[turn], self.sampled_ids(turn)
        logprobs = array("f", unpack_f32(at.logprobs))
        prompt = self.ids[: at.end]
        return TurnTokens(prompt, sampled, logprobs, at.finish_reason, at.policy_version)

    @property
    def is_cut(self) -> bool:
        """Return whether a limit of the episode has cut its newest turn. An agent that asked for
        fewer tokens has its answer."""
        if not self.turns or self.turns[-1].finish_reason != "length":
            return False
        turn = self.turns[-1]
        num = len(turn.sampled or b"") // 4
        return num >= self._most(self.num_sampled - num, turn.end)

    def _most(self, num_sampled: int, length: int) -> int:
        """Return how many tokens the limits allow for a turn, after so many."""
        left = self.begun.max_tokens - num_sampled
        most = min(left, self.limits.max_length - length)
        return min(most, self.limits.max_turn_length or left)

    def require_digest(self, turn: int, digest: str) -> None:
        """Raise Stopped if a replay has given another observation than was recorded."""
        if digest != self.turns[turn].digest:
            what = f"the observation of turn {turn}" if turn else "the first observation"
            why = "when it was replayed, so it cannot be resumed"
            raise Stopped("diverged", f"{what} was another one {why}")

    def note(self, returned: Returned) -> None:
        """Keep the figures of what `reset` or `step` returned. Raises Stopped if its reward is
        no number."""
        if returned.reward is not None and not isfinite(returned.reward):
            raise Stopped("failed", f"it returned the reward {returned.reward}")
        found = returned.metrics.items()
        named = {k: v for k, v in found if k.isprintable() and len(k) <= MAX_WORD}
        self.metrics = dict(islice((self.metrics | named).items(), MAX_METRICS))

    def stop_after(self, returned: Returned) -> EpisodeStop | None:
        """Return how an episode ends with what was returned; None: it continues. Raises Stopped
        if nothing was sampled."""
        if not self.turns:
            if returned.done:
                raise Stopped("failed", "reset ended it")
            return None
        if returned.done:
            return "done"
        if len(self.turns) >= self.limits.max_turns:
            return "turns"
        return "length" if self.num_sampled >= self.begun.max_tokens else None

    def fits(self, ids: Sequence[int]) -> bool:
        """Return whether the tokens of an observation leave one to be sampled. Raises Stopped
        if there are none, or if those of the first observation do not."""
        if not ids:
            raise Stopped("failed", "an observation has no tokens")
        if len(self.ids) + len(ids) < self.limits.max_length:
            return True
        if not self.turns:
            why = f"does not fit into {self.limits.max_length} tokens (environment.max_length)"
            raise Stopped("failed", f"the first observation, of {len(ids)} tokens, {why}")
        return False

    def observe(self, returned: Returned, ids: Sequence[int], record: str) -> Observed:
        """Append the tokens of an observation, and return the message with them."""
        turn, offset = len(self.turns), len(self.ids)
        self.ids.extend(ids)
        self._append(HeldTurn(len(self.ids), returned.digest, returned.reward, returned.state))
        most = self._most(self.num_sampled, len(self.ids))
        most = min(most, returned.max_tokens or most)
        what = (turn, offset, pack_i32(ids), most, returned.digest, record)
        gave = (returned.reward, returned.state, returned.seconds, returned.num_tool_calls)
        return Observed(*self._key, *what, *gave)

    def end(
        self,
        stop: EpisodeStop,
        record: str,
        returned: Returned | None = None,
        failure: str = "",
    ) -> EpisodeEnded:
        """Return the end of an episode, without a score if there is a `failure`. `returned`: by the
        last step, if it came to one."""
        last = returned.reward if returned is not None else None
        reward = total([*(turn.reward for turn in self.turns), last])
        if failure:
            reward = None
        elif reward is None and stop != "done":
            reward = 0.0
        what = (len(self.turns), stop, reward, last, failure[:MAX_TEXT], record, self.metrics)
        seconds, num_tool_calls = 0.0, 0
        if returned is not None:
            seconds, num_tool_calls = returned.seconds, returned.num_tool_calls
        return EpisodeEnded(*self._key, *what, seconds, num_tool_calls)

    @property
    def _key(self) -> tuple[str, int]:
        return self.begun.response, self.begun.incarnation


def total(rewards: Iterable[float | None]) -> float | None:
    """Return the sum of the rewards that were given; None if none was."""
    given = [reward for reward in rewards if reward is not None]
    return sum(given) if given else None
