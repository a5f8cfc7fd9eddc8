"""The responses of the open rounds and their places: in the queue, at a node, at their environment,
or held here.

Owns responses and their places; a response is in exactly one. `placement` chooses nodes,
`arrivals` appends tokens, `group_lifecycle` decides the outcome.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from lightrl.core.arrays import encode
from lightrl.core.commands import Outbox
from lightrl.core.log_entries import Counters
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses.placement import LengthForecast, is_home
from lightrl.core.responses.queue import WorkQueue
from lightrl.core.settings import Settings
from lightrl.core.state import Node, Response, ResponseState, Round
from lightrl.messages.episodes import EndEpisode
from lightrl.messages.responses import Abort, FinishReason, Generate, ResponseRequest, Sampling

MEAN_OF = 256  # values of a moving average


@dataclass(slots=True)
class MeanTime:
    """A moving average, in seconds."""

    seconds: float = 0.0
    num: int = 0

    def add(self, seconds: float) -> None:
        self.num = min(self.num + 1, MEAN_OF)
        self.seconds += (seconds - self.seconds) / self.num


class ResponseTable:
    def __init__(
        self, settings: Settings, fleet: Fleet, expect: LengthForecast, outbox: Outbox
    ) -> None:
        self.rounds: deque[Round] = deque()  # oldest first; more than one only in asynchronous mode
        self.responses: dict[str, Response] = {}  # of these rounds
        numbers = count(1)
        self.queue = WorkQueue(settings, expect, numbers)
        self.unbegun = WorkQueue(settings, expect, numbers)  # episodes without an observation
        # episodes that wait for their environment, and that no environment node was sent; in order
        self.to_step: OrderedDict[str, Response] = OrderedDict()
        self.open_episodes: set[str] = set()  # begun and not over
        self.turn_s = MeanTime()  # of a turn at its rollout node
        self.num_running = 0
        self.num_finished = 0  # in the run so far, as seen by this core
        self.counters = Counters()
        self.settings = settings
        self._fleet = fleet
        self._outbox = outbox
        self._is_dirty = False  # work was added, or slots of nodes outside `_freed` became free
        self._freed: dict[str, Node] = {}  # nodes with a slot more than at the last dispatch

    # Rounds

    @property
    def round(self) -> Round | None:
        return self.rounds[0] if self.rounds else None

    @property
    def training(self) -> Round | None:
        """The round that is being trained; rounds of later steps wait for it."""
        return None if self.round is None or self.round.is_eval else self.round

    @property
    def is_evaluating(self) -> bool:
        """Return whether an evaluation is open; no other round is open then."""
        return bool(self.rounds) and self.rounds[0].kind == "eval"

    def open(self, round: Round) -> None:
        self.rounds.append(round)

    def retire(self) -> None:
        """Remove the oldest round, which is over, and its responses."""
        for group in self.rounds.popleft().groups.values():
            for response in group.responses:
                if self.responses.get(response.id) is response:
                    del self.responses[response.id]

    # Work that waits

    def start(self, responses: list[Response]) -> None:
        for response in responses:
            self.responses[response.id] = response
            if response.turns and response.outcome is None:
                self.open_episodes.add(response.id)
            if response.state is ResponseState.WAITING:
                self.to_step[response.id] = response
            elif response.state is ResponseState.QUEUED:
                self._enqueue(response)

    def requeue(self, response: Response, resumed: bool = True) -> None:
        """Queue a response to continue from its tokens, ahead of others: its prefix is paid for."""
        self.release(response)
        response.transition(ResponseState.QUEUED)
        self._enqueue(response, resumed)

    def wait(self, response: Response, finish: FinishReason) -> None:
        """Let an episode wait for its environment, after a turn that ended with `finish`."""
        if response.node is not None:
            self.turn_s.add(self._fleet.now - response.since)
        self.release(response)
        response.finishes.append(finish)
        response.was_stepped = False
        response.transition(ResponseState.WAITING)
        self.to_step[response.id] = response

    def forget_environment(self, response: Response) -> None:
        """Send the environment node of an episode, if it has one, an EndEpisode."""
        self.to_step.pop(response.id, None)
        self.open_episodes.discard(response.id)
        if (node := response.environment) is not None:
            del node.episodes[response.id]
            response.environment = None
            self._outbox.send(node.name, EndEpisode(((response.id, response.incarnation),)))

    def requeue_all(self, node: Node) -> int:
        """Queue all responses of a leaving node; return their number."""
        leaving = list(node.running.values())
        for response in leaving:
            self.requeue(response)
        self.queue.forget_home(node.name)
        self.counters.responses_moved += len(leaving)
        return len(leaving)

    def _enqueue(self, response: Response, resumed: bool = False) -> None:
        if self.settings.episodes is not None and not response.turns:
            self.unbegun.push(response)
            return
        self.queue.push(response, resumed)
        self._is_dirty = True

    # Room for it

    def nodes_with_room(self) -> list[Node]:
        """Return nodes with room for waiting work, once after each increase of room or work."""
        if not self.queue or not (self._is_dirty or self._freed):
            return []
        ready = self._fleet.ready
        nodes = ready.values() if self._is_dirty else self._freed.values()
        found = [n for n in nodes if n.free > 0 and ready.get(n.name) is n]
        self._is_dirty = False
        self._freed.clear()
        return found

    def mark_free(self, node: Node) -> None:
        """Record that a node has more room than before."""
        self._freed[node.name] = node

    def mark_dirty(self) -> None:
        """Record that work reserved for a loading node is free for the others."""
        self._is_dirty = True

    @property
    def has_unused_room(self) -> bool:
        """Return whether a node has room while no response waits: others may have too much work."""
        if not self._freed or self.queue or len(self._fleet.ready) < 2:
            return False
        return any(r.num_open for r in self.rounds)

    def mark_unused(self) -> None:
        """Limit unused room to what there is while others are busy: one may become slow."""
        nodes = self._fleet.ready.values()
        busy = any(n.running for n in nodes)
        self._freed = {n.name: n for n in nodes if busy and n.free > 0}

    # Work that runs

    def dispatch(self, placed: Iterable[tuple[Response, Node]]) -> None:
        """Send each response to its node; stop it first at another node where it runs."""
        sent: dict[tuple[str, Sampling], list[ResponseRequest]] = {}
        for response, node in placed:
            if response.node is not None:
                self.stop(response)
                response.transition(ResponseState.QUEUED)
                self.counters.migrations += 1
                self.counters.responses_moved += 1
            key = (node.name, response.group.sampling)
            sent.setdefault(key, []).append(self._place(response, node))
        version = self._fleet.published.policy_version if self._fleet.published is not None else 0
        for (name, sampling), requests in sent.items():
            for order in orders(version, sampling, requests):
                self._outbox.send(name, order)

    def _place(self, response: Response, node: Node) -> ResponseRequest:
        """Begin a new attempt of a response at a node; return the request."""
        self.run(response, node, response.attempt + 1)
        return ResponseRequest(
            response=response.id,
            attempt=response.attempt,
            seed=response.seed,
            prompt=response.group.prompt.tokens,
            prefix=encode(response.tokens),
            max_new_tokens=response.max_new_tokens,
            turn_start=response.turns[-1].end if response.turns else 0,
        )

    def run(self, response: Response, node: Node, attempt: int) -> None:
        """Mark a queued response as running at a node, where it may have begun earlier."""
        response.transition(ResponseState.RUNNING, node)
        response.attempt = attempt
        response.came_back = is_home(response, node)
        response.since = self._fleet.now
        node.running[response.id] = response
        node.context += response.context
        self.num_running += 1

    def stop(self, response: Response) -> None:
        """Abort a response at its node and free its slot."""
        self.abort(response)
        self.release(response)

    def abort(self, response: Response) -> None:
        """Send the node of a response an Abort."""
        assert response.node is not None
        self._outbox.send(response.node.name, Abort(((response.id, response.attempt),)))

    def release(self, response: Response) -> None:
        """Free the slot of a response, if it has one."""
        node = response.node
        if node is not None:
            del node.running[response.id]
            response.last_node = node.name if response.turns else ""
            node.context -= response.context
            self.num_running -= 1
            self._freed[node.name] = node
            if not node.running:
                node.chunk_at = None

    def reconcile(self, node: Node, claims: dict[str, int], is_ready: bool) -> int:
        """Compare with the attempts by response that a reconnected node reports; return how many
        responses were taken back.

        Responses missing from `claims` are queued; the node must abort unwanted ones.
        """
        for response in list(node.running.values()):
            if claims.get(response.id) != response.attempt:
                self.abort(response)  # if the order was only late
                self.counters.responses_moved += 1
                self.requeue(response)
        num_before = len(node.running)
        unwanted: list[tuple[str, int]] = []
        for name, attempt in claims.items():
            response = self.responses.get(name)
            if response is not None and response.node is node:
                continue
            fits = is_ready and node.free > 0
            waits = fits and response is not None and response.state is ResponseState.QUEUED
            is_begun = self.settings.episodes is None or (response is not None and response.turns)
            if response and waits and is_begun and is_current(response, attempt):
                self.run(response, node, attempt)
            else:
                unwanted.append((name, attempt))
        if unwanted:
            self._outbox.send(node.name, Abort(tuple(unwanted)))
        return len(node.running) - num_before


MAX_ORDER_BYTES = 8 << 20  # of tokens in one message
OF_REQUEST = 512  # bytes of a request without its tokens, at most


def orders(
    version: int, sampling: Sampling, requests: Iterable[ResponseRequest]
) -> Iterator[Generate]:
    """Split requests, in order, into messages. A request larger than the limit gets its own."""
    part: list[ResponseRequest] = []
    size = 0
    for request in requests:
        num_bytes = len(request.prompt) + len(request.prefix) + OF_REQUEST
        if part and size + num_bytes > MAX_ORDER_BYTES:
            yield Generate(version, sampling, tuple(part))
            part, size = [], 0
        part.append(request)
        size += num_bytes
    if part:
        yield Generate(version, sampling, tuple(part))


MAX_UNRECORDED = 1024  # placements of a response, in a row, without a token


def can_exist(response: Response, attempt: int) -> bool:
    """Return whether an attempt with this number can have been placed.

    The number that a reconnected node reports is adopted, so a node with invented numbers could
    exhaust them: no message can carry a number above 2**31 - 1. Placements are not in the journal,
    so a restored core may have placed up to MAX_UNRECORDED more than it has stored.
    """
    return attempt <= response.attempt + MAX_UNRECORDED


def is_current(response: Response, attempt: int) -> bool:
    """Return whether an attempt belongs to this round, not to one that deferred the prompt."""
    is_newest = attempt >= response.attempt and attempt > response.group.attempts
    return is_newest and can_exist(response, attempt)
