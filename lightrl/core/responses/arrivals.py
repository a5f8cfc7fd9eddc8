"""Accept tokens of responses from nodes, which are not trusted, and from the journal.

Owns the checks of a chunk and finds its new part. `append` appends all accepted tokens.
`group_lifecycle` decides the outcome of a response, and `responses` owns the assignment to a node.
"""

import math
from dataclasses import dataclass, field

from lightrl.core.arrays import decode, encode, native
from lightrl.core.commands import Outbox
from lightrl.core.log_entries import TokensTaken
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses.responses import ResponseTable, can_exist
from lightrl.core.rounds import race
from lightrl.core.rounds.group_lifecycle import GroupLifecycle
from lightrl.core.settings import Settings
from lightrl.core.state import Node, Response, ResponseState
from lightrl.errors import InvariantViolation
from lightrl.messages.responses import ResponseTokens, TokenChunk

HIT_WEIGHT = 1 / 16  # of one turn in the hit rate of its node


@dataclass(eq=False)
class Arrivals:
    """Appends the new tokens of each chunk to their responses. Decides which tokens are new, and
    whether the sender of a chunk can be trusted."""

    _settings: Settings
    _fleet: Fleet
    _table: ResponseTable
    _lifecycle: GroupLifecycle
    _outbox: Outbox
    # accepted from the current chunk: the items with new data, and the number of new tokens
    _taken: list[ResponseTokens] = field(default_factory=list[ResponseTokens], init=False)
    _num_tokens: int = field(default=0, init=False)

    def accept(self, node: Node, chunk: TokenChunk, now: float) -> str | None:
        """Accept the new part of a chunk; return the reason if its sender cannot be trusted."""
        table, version = self._table, chunk.policy_version
        if chunk.digest not in self._fleet.digests.get(version, ()):
            table.counters.bad_chunks += 1
            return f"sent tokens of version {version} with an unconfirmed digest"
        batch, problem = len(node.running), None
        self._taken, self._num_tokens = [], 0
        for item in chunk.responses:
            response = table.responses.get(item.response)
            if response is None or not (
                (response.node is node and response.attempt == item.attempt)
                or self._comes_back(node, response, version, item)
            ):
                table.counters.chunks_ignored += 1  # late tokens of an attempt that was given up
            elif (problem := self._extend(node, response, version, item)) is not None:
                table.counters.bad_chunks += 1
                break
        if self._taken:
            self._outbox.record(TokensTaken(version, tuple(self._taken)))
        node.observe(now, batch, self._num_tokens)
        table.counters.count_tokens(self._num_tokens, table.is_evaluating)
        return problem

    def _extend(
        self, node: Node, response: Response, version: int, item: ResponseTokens
    ) -> str | None:
        """Accept the new tokens of one response. Performance-critical: runs for every item."""
        settings, group, round = self._settings, response.group, response.group.round
        if not round.step - settings.max_staleness <= version <= round.step:
            return f"sent tokens of version {version} for step {round.step}"
        data, logprobs, finish = item.token_ids, item.logprobs, item.finish_reason
        size = len(data)
        if size % 4 or size != len(logprobs) or item.offset < 0:
            return "sent a malformed chunk"
        held = len(response.tokens)
        known = held - item.offset
        if known < 0:  # tokens are missing: resume from the held ones
            self._table.counters.holes += 1
            self._table.abort(response)
            self._table.requeue(response)
            return None
        if size > 4 * known:
            if known:
                data, logprobs = data[4 * known :], logprobs[4 * known :]
            new = decode("I", data)  # unsigned: a negative token is far outside the vocabulary
            if max(new) >= settings.vocabulary:
                return f"sent a token outside the vocabulary of {settings.vocabulary}"
            if not math.isfinite(sum(decode("f", logprobs))):
                return "sent a logprob that is not finite"
            num_new = len(new)
            most = group.max_response_tokens - held
            if num_new > (response.max_new_tokens if response.turns else most):
                return f"sent more than {group.max_response_tokens} tokens for one response"
            append(response, version, data, logprobs)
            self._num_tokens += num_new
            self._taken.append(item)
        elif finish is not None and finish != "abort":
            self._taken.append(item)
        if finish is None:
            held = len(response.tokens) - response.num_inserted
            if held >= group.bound or held >= round.cut:  # as race.has_lost
                self._lifecycle.give_up(response)
        elif finish == "abort":  # by the node, which is draining or loads a new version
            self._table.counters.responses_moved += 1
            self._table.requeue(response)
        else:
            _learn_hit_rate(node, response, item.num_cached)
            self._lifecycle.finish(response, finish)
        return None

    def _comes_back(
        self, node: Node, response: Response, version: int, item: ResponseTokens
    ) -> bool:
        """Return whether a queued response accepts tokens that a node finished while disconnected.

        Any other node would sample the same tokens. If so, the response now runs on this node."""
        has_ended = item.finish_reason in {"stop", "length"}
        if response.state is not ResponseState.QUEUED or not has_ended:
            return False
        if self._settings.episodes is not None and not response.turns:
            return False  # it is not begun
        if not can_exist(response, item.attempt):
            return False
        staleness = response.group.round.step - version
        known = encode(response.tokens[item.offset :])
        is_sequel = 0 <= item.offset <= len(response.tokens) and item.token_ids.startswith(known)
        if not is_sequel or not 0 <= staleness <= self._settings.max_staleness:
            return False  # another version or batch has sampled different tokens since
        self._table.run(response, node, item.attempt)
        return True

    def replay(self, version: int, item: ResponseTokens) -> None:
        """Append journaled tokens that were accepted before the coordinator was restarted."""
        response = self._table.responses.get(item.response)
        if response is None or response.state is not ResponseState.QUEUED:
            return
        held, known = len(response.tokens), len(response.tokens) - item.offset
        if known < 0:
            raise InvariantViolation(
                f"{response.id}: tokens {held} to {item.offset} are not in the journal"
            )
        response.attempt = max(response.attempt, item.attempt)
        if len(item.token_ids) > 4 * known:
            append(response, version, item.token_ids[4 * known :], item.logprobs[4 * known :])
        num_tokens = len(response.tokens) - held
        self._table.counters.count_tokens(num_tokens, response.group.round.is_eval)
        if item.finish_reason in {"stop", "length"}:
            response.transition(ResponseState.RUNNING)  # the journal does not store the node
            self._lifecycle.finish(response, item.finish_reason)
        elif race.has_lost(response):
            self._lifecycle.give_up(response)


def _learn_hit_rate(node: Node, response: Response, num_cached: int | None) -> None:
    """Learn how much of its KV a node still had for a turn that came back to it."""
    if num_cached is not None and response.came_back:
        known = response.turns[-1].start
        node.hit_rate += HIT_WEIGHT * (min(1.0, num_cached / max(1, known)) - node.hit_rate)


def append(response: Response, version: int | None, token_ids: bytes, logprobs: bytes) -> None:
    """Append tokens to a response; every source of tokens uses this function. `version`: that
    sampled them; None = an environment inserted them."""
    if version is not None and response.version != version:
        response.version = version
        response.starts.append((version, len(response.tokens)))
    response.tokens.frombytes(native(token_ids))
    response.logprobs.frombytes(native(logprobs))
