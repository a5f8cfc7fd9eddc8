"""Every response of the open rounds: where it is, what it holds, what is still waited for.

Owns responses and their queue; a response is in exactly one place. Which node gets one is decided
in `placement`, who wins in `race`, what a round holds in `rounds`. Methods append what is to be
done to `out`.
"""

import math
from collections import deque

from lightrl.core import attempts, placement, race
from lightrl.core.arrays import decode, encode, native
from lightrl.core.commands import Command, Record, Report, Score, Send
from lightrl.core.events import ResponseScored
from lightrl.core.fleet import Fleet
from lightrl.core.length_predictor import LengthPredictor
from lightrl.core.log_entries import TokensTaken
from lightrl.core.orders import orders
from lightrl.core.queue import WorkQueue
from lightrl.core.state import (
    Counters,
    Group,
    GroupState,
    Node,
    Response,
    ResponseState,
    Round,
    Settings,
)
from lightrl.errors import InvariantViolation
from lightrl.messages import Abort, ResponseRequest, ResponseTokens, Sampling, TokenChunk


class ResponseTable:
    def __init__(self, settings: Settings, fleet: Fleet, predictor: LengthPredictor) -> None:
        self.rounds: deque[Round] = deque()  # oldest first; more than one only in asynchronous mode
        self.responses: dict[str, Response] = {}  # of these rounds
        expect = predictor.expect if settings.foresight else self._know_nothing
        self.queue = WorkQueue(settings, expect)
        self.counters = Counters()
        self.was_recovered = False  # nodes may have attempts that another coordinator has given out
        # groups in which nothing goes on any more, until someone looks
        self.decided: list[Group] = []
        self._settings = settings
        self._fleet = fleet
        self._expect: placement.Foresee = expect
        self._num_running = 0
        self._is_dirty = False  # work has come, or slots were set free by more than the nodes below
        self._taken: list[ResponseTokens] = []  # of the chunk at hand
        self._freed: dict[str, Node] = {}  # nodes with a slot more than at the last dispatch

    @property
    def round(self) -> Round | None:
        return self.rounds[0] if self.rounds else None

    def open(self, round: Round) -> None:
        self.rounds.append(round)

    def retire(self) -> None:
        """The oldest round is over; what it held is released."""
        for group in self.rounds.popleft().groups.values():
            for response in group.responses:
                if self.responses.get(response.id) is response:
                    del self.responses[response.id]

    def start(self, responses: list[Response]) -> None:
        for response in responses:
            self.responses[response.id] = response
            self._enqueue(response)

    def _know_nothing(self, response: Response) -> float:
        return float(self._settings.max_response_tokens)

    # Tokens

    def accept(self, node: Node, chunk: TokenChunk, now: float, out: list[Command]) -> str | None:
        """Takes what is new in a chunk; returns what is wrong with it, if its sender cannot be
        trusted."""
        if chunk.digest != self._fleet.digests.get(chunk.policy_version):
            self.counters.bad_chunks += 1
            return f"sent tokens of version {chunk.policy_version} with an unconfirmed digest"
        batch, before, problem = len(node.running), node.num_tokens, None
        self._taken = []
        for item in chunk.responses:
            response = self.responses.get(item.response)
            is_fresh = (
                response is not None and response.node is node and response.attempt == item.attempt
            )
            if response is None or not (is_fresh or self._comes_back(node, response, chunk, item)):
                self.counters.chunks_ignored += 1  # late news of an attempt we gave up on
            elif (
                problem := self._extend(node, response, chunk.policy_version, item, out)
            ) is not None:
                self.counters.bad_chunks += 1
                break
        if self._taken:
            out.append(Record(TokensTaken(chunk.policy_version, tuple(self._taken))))
        num_tokens = node.num_tokens - before
        node.observe(now, batch, num_tokens)
        if self.rounds and self.rounds[0].kind == "eval":  # then no other round is open
            self.counters.eval_tokens += num_tokens
        else:
            self.counters.rollout_tokens += num_tokens
        return problem

    def _extend(
        self, node: Node, response: Response, version: int, item: ResponseTokens, out: list[Command]
    ) -> str | None:
        """The one function that runs for every response in every chunk: no more work than must
        be."""
        settings, group, data = self._settings, response.group, item.token_ids
        round = group.round
        if not round.step - settings.max_staleness <= version <= round.step:
            return f"sent tokens of version {version} for step {round.step}"
        size = len(data)
        if size % 4 or size != len(item.logprobs) or item.offset < 0:
            return "sent a malformed chunk"
        tokens = response.tokens
        held = len(tokens)
        known = held - item.offset
        if known < 0:  # a hole: resume from what we hold
            self.counters.holes += 1
            self._abort(response, out)
            self._requeue(response)
            return None
        if size > 4 * known:
            logprobs = item.logprobs
            if known:
                data, logprobs = data[4 * known :], logprobs[4 * known :]
            new = decode("I", data)  # unsigned: a negative token is far outside the vocabulary
            if max(new) >= settings.vocabulary:
                return f"sent a token outside the vocabulary of {settings.vocabulary}"
            if not math.isfinite(sum(decode("f", logprobs))):
                return "sent a logprob that is not finite"
            num_new = len(new)
            if held + num_new > settings.max_response_tokens:
                return f"sent more than {settings.max_response_tokens} tokens for one response"
            if response.version != version:
                response.version = version
                response.starts.append((version, held))
            held += num_new
            tokens.frombytes(native(data))
            response.logprobs.frombytes(native(logprobs))
            node.take(response, num_new, item.finish_reason is None)
            self._taken.append(item)
        elif item.finish_reason is not None and item.finish_reason != "abort":
            self._taken.append(item)
        if item.finish_reason is None:
            if held >= group.bound or held >= round.cut:
                self.give_up(response, out)
        elif (
            item.finish_reason == "abort"
        ):  # the node gave it up: it drains, or loads a new version
            self.counters.responses_moved += 1
            self._requeue(response)
        else:
            self._finish(response, item, out)
        return None

    def _comes_back(
        self, node: Node, response: Response, chunk: TokenChunk, item: ResponseTokens
    ) -> bool:
        """A node kept what it finished while nobody heard it. Its tokens are those that any other
        node would sample, so a response that only waits takes them; it is then as if it ran
        there."""
        if response.state is not ResponseState.QUEUED or item.finish_reason not in {
            "stop",
            "length",
        }:
            return False
        if not attempts.can_exist(response, item.attempt, self.was_recovered):
            return False
        staleness = response.group.round.step - chunk.policy_version
        known = response.tokens[item.offset :]
        is_sequel = 0 <= item.offset <= len(response.tokens) and item.token_ids.startswith(
            encode(known)
        )
        if not is_sequel or not 0 <= staleness <= self._settings.max_staleness:
            return False  # another version, or another batch, has sampled other tokens since
        self.adopt(node, response, item.attempt)
        return True

    def adopt(self, node: Node, response: Response, attempt: int) -> None:
        """A response that waits runs at a node already, since before we knew."""
        response.move(ResponseState.RUNNING, node)
        response.attempt, response.is_placed = attempt, True
        node.running[response.id] = response
        self._num_running += 1

    def replay_tokens(self, version: int, item: ResponseTokens, out: list[Command]) -> None:
        """Tokens that were accepted before the coordinator was started again. Raises
        InvariantViolation."""
        response = self.responses.get(item.response)
        if response is None or response.state is not ResponseState.QUEUED:
            return
        held, known = len(response.tokens), len(response.tokens) - item.offset
        if known < 0:
            raise InvariantViolation(
                f"{response.id}: tokens {held} to {item.offset} are not in the journal"
            )
        response.attempt = max(response.attempt, item.attempt)
        if len(item.token_ids) > 4 * known:
            if response.version != version:
                response.version = version
                response.starts.append((version, held))
            response.tokens.frombytes(native(item.token_ids[4 * known :]))
            response.logprobs.frombytes(native(item.logprobs[4 * known :]))
        num_tokens = len(response.tokens) - held
        if response.group.round.is_eval:
            self.counters.eval_tokens += num_tokens
        else:
            self.counters.rollout_tokens += num_tokens
        if item.finish_reason in {"stop", "length"}:
            response.move(ResponseState.RUNNING)  # somewhere
            self._num_running += 1
            self._finish(response, item, out)
            self._num_running -= 1
        elif race.has_lost(response):
            self.give_up(response, out)

    def _finish(self, response: Response, item: ResponseTokens, out: list[Command]) -> None:
        response.finish_reason = item.finish_reason
        self._release(response)
        response.move(ResponseState.DONE)
        group = response.group
        if race.has_lost(response):
            self.give_up(response, out)
        else:
            out.append(Score(response, group.prompt.id, "eval" if group.round.is_eval else "train"))

    # Races

    def score(
        self, name: str, attempt: int, reward: float | None, failure: str, out: list[Command]
    ) -> None:
        """Takes the score of a finished response."""
        response = self.responses.get(name)
        if response is None or response.attempt != attempt or response.scored:
            return
        if response.state is not ResponseState.DONE:
            return
        group = response.group
        out.append(Record(ResponseScored(name, attempt, reward, failure)))
        if reward is None:
            self.counters.rewards_failed += 1
            out.append(Report(f"no reward for {name}: {failure}"))
            reward = None if group.round.is_eval else self._settings.reward_on_failure
        response.reward, response.scored = reward, True
        if response.resolved:
            return
        if reward is not None or group.round.is_eval:
            for lost in race.take_score(self._settings, response):
                self.give_up(lost, out)
        self._settle(response)

    def give_up(self, response: Response, out: list[Command]) -> None:
        """It is out of the race; one that still waits for its score keeps waiting, without
        consequence."""
        if response.resolved:
            return
        if response.state is ResponseState.RUNNING:
            self._abort(response, out)
            self._release(response)
        if response.state is not ResponseState.DONE:
            response.move(ResponseState.ABORTED)
        self._settle(response)

    def drop(self, group: Group, to: GroupState, out: list[Command]) -> None:
        """The group is out of its round: dropped, or put off."""
        for response in group.responses:
            self.give_up(response, out)
        group.move(to)

    def _settle(self, response: Response) -> None:
        group = response.group
        response.resolved = True
        group.num_open -= 1
        if not group.num_open:
            group.round.num_open -= 1
        if not group.num_open or race.is_out(group):
            self.decided.append(group)

    def count_aborted(self, round: Round) -> None:
        """Tokens of a closed round that are not trained."""
        kept = {r.id for g in round.accepted for r in g.kept}
        self.counters.aborted_tokens += sum(
            len(r.tokens) for g in round.groups.values() for r in g.responses if r.id not in kept
        )

    # Places

    @property
    def has_idle_room(self) -> bool:
        """A node got room, and nothing waits for it, but others may have more than they should."""
        if not self._freed or self.queue or len(self._fleet.ready) < 2:
            return False
        return any(r.num_open for r in self.rounds)

    def dispatch(self, out: list[Command]) -> None:
        """Sends waiting responses to nodes with free slots.

        A node that is about to serve the newest version has its share kept for it: else the first
        node to load would take the work of all the others. But a node that has nothing to do does
        not wait for one that is slow to load.
        """
        if not self.queue or not (self._is_dirty or self._freed):
            return
        nodes = list(self._fleet.ready.values()) if self._is_dirty else list(self._freed.values())
        nodes = [n for n in nodes if n.free > 0 and self._fleet.ready.get(n.name) is n]
        most = min(sum(n.free for n in nodes), self._unreserved(nodes))
        self._is_dirty = False
        self._freed.clear()
        sent: dict[tuple[str, Sampling], list[ResponseRequest]] = {}
        for response, node in placement.assign(self._pop(most, out), nodes, self._expect):
            key = (node.name, response.group.round.sampling)
            sent.setdefault(key, []).append(self._place(response, node))
        self._generate(sent, out)

    def _unreserved(self, nodes: list[Node]) -> int:
        """Waiting responses that are not the share of nodes that still load."""
        updating, waiting = self._fleet.share_updating, len(self.queue)
        if not updating:
            return waiting
        share = updating / (updating + self._fleet.share_ready)
        idle = sum(not n.running for n in nodes)
        return max(idle, waiting - math.ceil(share * (waiting + self._num_running)))

    def rebalance(self, out: list[Command]) -> None:
        """Moves running responses to where they finish earlier, when nothing waits for a slot."""
        nodes = [n for n in self._fleet.ready.values() if n.speed.num_observed or not n.running]
        sent: dict[tuple[str, Sampling], list[ResponseRequest]] = {}
        for response, node in placement.moves(nodes, self._expect, self._settings.chunk_tokens):
            key = (node.name, response.group.round.sampling)
            self._abort(response, out)
            self._release(response)
            response.move(ResponseState.QUEUED)
            sent.setdefault(key, []).append(self._place(response, node))
            self.counters.migrations += 1
            self.counters.responses_moved += 1
        # What is idle after this is looked at again: a prediction may turn out wrong meanwhile.
        busy = any(n.running for n in self._fleet.ready.values())
        self._freed = {n.name: n for n in self._fleet.ready.values() if busy and not n.running}
        self._generate(sent, out)

    def mark_free(self, node: Node) -> None:
        """The node has room that it had not before."""
        self._freed[node.name] = node

    def mark_dirty(self) -> None:
        """What was reserved for a node that still loaded is free for the others."""
        self._is_dirty = True

    def reconcile(
        self, node: Node, claims: dict[str, int], is_ready: bool, out: list[Command]
    ) -> int:
        """A node says again what it generates: (response -> attempt). Returns how many were taken
        back.

        What it does not have any more is queued; what runs elsewhere or is not wanted, it must
        abort.
        """
        for response in list(node.running.values()):
            if claims.get(response.id) != response.attempt:
                self._abort(response, out)  # if the order was only late
                self.counters.responses_moved += 1
                self._requeue(response)
        num_before = len(node.running)
        unwanted: list[tuple[str, int]] = []
        for name, attempt in claims.items():
            response = self.responses.get(name)
            if response is not None and response.node is node:
                continue
            fits = is_ready and node.free > 0
            waits = fits and response is not None and response.state is ResponseState.QUEUED
            if response and waits and attempts.is_current(response, attempt, self.was_recovered):
                self.adopt(node, response, attempt)
            else:
                unwanted.append((name, attempt))
        if unwanted:
            out.append(Send(node.name, Abort(tuple(unwanted))))
        return len(node.running) - num_before

    def requeue_all(self, node: Node) -> int:
        """Responses of a leaving node go to the head of the queue: their prefixes are already paid
        for."""
        leaving = list(node.running.values())
        for response in leaving:
            self._requeue(response)
        self.counters.responses_moved += len(leaving)
        return len(leaving)

    def _pop(self, most: int, out: list[Command]) -> list[Response]:
        taken: list[Response] = []
        while len(taken) < most and (response := self.queue.pop()) is not None:
            if race.has_lost(response):
                self.give_up(response, out)
            else:
                taken.append(response)
        return taken

    def _generate(
        self, sent: dict[tuple[str, Sampling], list[ResponseRequest]], out: list[Command]
    ) -> None:
        version = self._fleet.published.policy_version if self._fleet.published is not None else 0
        for (node, sampling), requests in sent.items():
            out += (Send(node, order) for order in orders(version, sampling, requests))

    def _place(self, response: Response, node: Node) -> ResponseRequest:
        response.move(ResponseState.RUNNING, node)
        response.attempt += 1
        response.is_placed = True
        node.running[response.id] = response
        self._num_running += 1
        return ResponseRequest(
            response=response.id,
            attempt=response.attempt,
            seed=response.seed,
            prompt=response.group.prompt.tokens,
            prefix=encode(response.tokens),
            max_new_tokens=self._settings.max_response_tokens - len(response.tokens),
        )

    def _enqueue(self, response: Response, resumed: bool = False) -> None:
        self.queue.push(response, resumed)
        self._is_dirty = True

    def _requeue(self, response: Response) -> None:
        self._release(response)
        response.move(ResponseState.QUEUED)
        self._enqueue(response, resumed=True)

    def _release(self, response: Response) -> None:
        node = response.node
        if node is not None:
            del node.running[response.id]
            self._num_running -= 1
            self._freed[node.name] = node
            if not node.running:
                node.chunk_at = None  # else the pause would count as decoding

    def _abort(self, response: Response, out: list[Command]) -> None:
        assert response.node is not None
        out.append(Send(response.node.name, Abort(((response.id, response.attempt),))))
