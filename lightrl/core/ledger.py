"""Every response of the current round: where it is, what it holds, what is still waited for.

Owns responses and their queue; a response is in exactly one place. Which node gets one is decided in
`placement`; when a round is over, in `rounds`. Methods append what is to be done to `out`.
"""

import math
import sys
from array import array
from collections import deque
from typing import Any

from lightrl.core import placement, rounds
from lightrl.core.commands import Command, Report, Score, Send
from lightrl.core.fleet import Fleet
from lightrl.core.state import (
    Counters,
    DrawnPrompt,
    Group,
    GroupState,
    Node,
    Response,
    ResponseState,
    Round,
    RoundState,
    Settings,
)
from lightrl.messages import Abort, Generate, ResponseRequest, ResponseTokens, TokenChunk


class Ledger:
    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self.round: Round | None = None
        self.responses: dict[str, Response] = {}
        self.queue: deque[str] = deque()  # waiting responses; aborted ones are skipped when they come up
        self.counters = Counters()
        self._settings = settings
        self._fleet = fleet

    def open(self, round: Round) -> None:
        """A new round; everything of the last one is released."""
        self.round = round
        self.responses = {}
        self.queue.clear()

    def fill(self, prompts: tuple[DrawnPrompt, ...]) -> None:
        if self.round is not None and self.round.state is RoundState.FILLING:
            started = rounds.fill(self.round, prompts, self._settings)
            self.responses = {r.id: r for r in started}
            self.queue = deque(self.responses)

    # Tokens

    def accept(self, node: Node, chunk: TokenChunk, out: list[Command]) -> str | None:
        """Takes what is new in a chunk; returns what is wrong with it, if its sender cannot be trusted."""
        for item in chunk.responses:
            response = self.responses.get(item.response)
            if response is None or response.node != node.name or response.attempt != item.attempt:
                self.counters.chunks_ignored += 1  # late news of an attempt we gave up on
            elif (problem := self._extend(node, response, chunk, item, out)) is not None:
                self.counters.bad_chunks += 1
                return problem
        return None

    def _extend(
        self, node: Node, response: Response, chunk: TokenChunk, item: ResponseTokens, out: list[Command]
    ) -> str | None:
        round, published = self.round, self._fleet.published
        assert round is not None
        assert published is not None
        if chunk.policy_version != round.policy_version or chunk.digest != published.digest:
            return f"sent tokens of version {chunk.policy_version} with an unconfirmed digest"
        if len(item.token_ids) % 4 or len(item.token_ids) != len(item.logprobs) or item.offset < 0:
            return "sent a malformed chunk"
        known = len(response.tokens) - item.offset
        if known < 0:  # a hole: resume from what we hold
            self.counters.holes += 1
            self._abort(response, out)
            self._requeue(response)
            return None
        tokens, logprobs = _decode("i", item.token_ids)[known:], _decode("f", item.logprobs)[known:]
        if len(response.tokens) + len(tokens) > self._settings.max_response_tokens:
            return f"sent more than {self._settings.max_response_tokens} tokens for one response"
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._settings.vocabulary):
            return f"sent a token outside the vocabulary of {self._settings.vocabulary}"
        if not all(map(math.isfinite, logprobs)):
            return "sent a logprob that is not finite"
        response.append(chunk.policy_version, tokens, logprobs)
        node.num_tokens += len(tokens)
        if round.is_eval:
            self.counters.eval_tokens += len(tokens)
        else:
            self.counters.rollout_tokens += len(tokens)
        if item.finish_reason == "abort":  # the node gave it up: it drains, or its engine cannot go on
            self.counters.responses_moved += 1
            self._requeue(response)
        elif item.finish_reason is not None:
            self._finish(round, response, item, out)
        return None

    def _finish(self, round: Round, response: Response, item: ResponseTokens, out: list[Command]) -> None:
        response.finish_reason = item.finish_reason
        self._release(response)
        response.move(ResponseState.DONE)
        group = round.groups[response.group]
        out.append(Score(response, group.prompt.id, "eval" if round.is_eval else "train"))
        if all(r.state is ResponseState.DONE for r in group.responses):
            group.move(GroupState.COMPLETE)

    # Scores

    def score(self, name: str, reward: float | None, failure: str, out: list[Command]) -> Group | None:
        """Takes the score of a finished response; returns its group if that was the last one it needed."""
        response, round = self.responses.get(name), self.round
        if response is None or round is None or response.state is not ResponseState.DONE or response.scored:
            return None
        if reward is None:
            self.counters.rewards_failed += 1
            out.append(Report(f"no reward for {name}: {failure}"))
            reward = None if round.is_eval else self._settings.reward_on_failure
        response.reward, response.scored = reward, True
        group = round.groups[response.group]
        if group.state is GroupState.DROPPED:
            return None
        if reward is None and not round.is_eval:
            self._drop(round, group, out)
            return None
        if not all(r.scored for r in group.responses):
            return None
        rounds.settle(round, group, GroupState.SCORED)
        return group

    def _drop(self, round: Round, group: Group, out: list[Command]) -> None:
        rounds.settle(round, group, GroupState.DROPPED)
        self.counters.groups_dropped += 1
        for response in group.responses:
            self.counters.aborted_tokens += len(response.tokens)
            if response.state is ResponseState.RUNNING:
                self._abort(response, out)
                self._release(response)
            if response.state is not ResponseState.DONE:
                response.move(ResponseState.ABORTED)

    # Places

    def dispatch(self, out: list[Command]) -> None:
        """Sends waiting responses to nodes with free slots.

        Nodes that are about to serve the round's version count as free, and what falls to them waits
        for them: else the first node to load a new version would take the work of all the others. But
        a node that would have nothing to do does not wait for one that is slow to load.
        """
        round = self.round
        if not self.queue or round is None or round.state is not RoundState.RUNNING:
            return
        serving = self._fleet.serving(round.policy_version)
        nodes = serving + self._fleet.updating()
        free = sum(n.slots - len(n.running) for n in nodes)
        wanted: list[str] = []
        while self.queue and len(wanted) < free:
            response = self.queue.popleft()
            if self.responses[response].state is ResponseState.QUEUED:
                wanted.append(response)
        sent: dict[str, list[ResponseRequest]] = {}
        reserved: list[str] = []
        for name, node in placement.assign(wanted, nodes):
            if self._fleet.nodes[node].serves(round.policy_version):
                sent.setdefault(node, []).append(self._place(round, self.responses[name], node))
            else:
                reserved.append(name)
        if reserved:
            idle = [n for n in serving if not n.running]
            for name, node in placement.assign(reserved, idle):
                sent.setdefault(node, []).append(self._place(round, self.responses[name], node))
            reserved = [r for r in reserved if self.responses[r].state is ResponseState.QUEUED]
        self.queue.extendleft(reversed(reserved))
        out += [
            Send(node, Generate(round.policy_version, round.sampling, tuple(requests)))
            for node, requests in sent.items()
        ]

    def requeue_all(self, node: Node) -> int:
        """Responses of a leaving node go to the head of the queue: their prefixes are already paid for."""
        leaving = list(node.running)
        for name in reversed(leaving):
            self._requeue(self.responses[name])
        self.counters.responses_moved += len(leaving)
        return len(leaving)

    def _place(self, round: Round, response: Response, node: str) -> ResponseRequest:
        response.move(ResponseState.RUNNING, node)
        response.attempt += 1
        self._fleet.nodes[node].running[response.id] = None
        return ResponseRequest(
            response=response.id,
            attempt=response.attempt,
            seed=response.seed,
            prompt=round.groups[response.group].prompt.tokens,
            prefix=encode(response.tokens),
            max_new_tokens=self._settings.max_response_tokens - len(response.tokens),
        )

    def _requeue(self, response: Response) -> None:
        self._release(response)
        response.move(ResponseState.QUEUED)
        self.queue.appendleft(response.id)

    def _release(self, response: Response) -> None:
        if response.node is not None:
            self._fleet.nodes[response.node].running.pop(response.id)

    def _abort(self, response: Response, out: list[Command]) -> None:
        assert response.node is not None
        out.append(Send(response.node, Abort(((response.id, response.attempt),))))


def encode(values: "array[Any]") -> bytes:
    """As raw little-endian bytes."""
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def _decode(kind: str, data: bytes) -> "array[Any]":
    values: array[Any] = array(kind, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
