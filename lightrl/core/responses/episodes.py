"""Episodes: responses that sample in turns, between which an environment inserts tokens.

Owns which environment node has an episode, and how many episodes are open. An episode is begun at
an environment node, which resets the environment and returns an observation; rollout nodes sample
a turn after each observation. An environment that is lost is begun again at another node, from the
recorded turns. `group_lifecycle` decides the outcome, `responses` owns the places.
"""

import math
from array import array
from dataclasses import replace

from lightrl.core.arrays import decode, encode
from lightrl.core.commands import Outbox
from lightrl.core.log_entries import ObservationTaken
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses import placement
from lightrl.core.responses.arrivals import append
from lightrl.core.responses.placement import is_home
from lightrl.core.responses.responses import MAX_UNRECORDED, MeanTime, ResponseTable
from lightrl.core.rounds import race
from lightrl.core.rounds.group_lifecycle import GroupLifecycle
from lightrl.core.rounds.rounds import sample_seed
from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState, Response, ResponseState, Turn
from lightrl.messages.episodes import (
    BeginEpisode,
    EndEpisode,
    EpisodeEnded,
    Observed,
    RecordedTurn,
    StepEpisode,
)

MARGIN = 1.25  # of open episodes beyond those that keep all slots busy on average
UNMEASURED = 2.0  # open episodes for each slot, until times are measured
UNSCORED = {"failed", "diverged"}  # endings
MIN_HIT_RATE = 0.5  # of the KV of turns, below which their node gets no preference
MIN_MEASURED = 16  # turns from which times are known


class Episodes:
    """Begins, steps and ends episodes at environment nodes. Decides how many are open, and at which
    node each one is."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        table: ResponseTable,
        lifecycle: GroupLifecycle,
        outbox: Outbox,
    ) -> None:
        self.claims_until = 0.0  # of environments that were here before a restart
        self.step_s = MeanTime()  # of an observation, as the coordinator waits for it
        self._settings = settings
        self._fleet = fleet
        self._table = table
        self._lifecycle = lifecycle
        self._outbox = outbox

    # How many are open

    @property
    def num_wanted(self) -> int:
        """Return the number of episodes to have open, so that all slots of the engines are in use
        while other episodes wait for their environments."""
        of = self._settings.episodes
        if of is not None and of.max_open:
            return of.max_open
        slots = sum(node.slots for node in self._fleet.ready.values())
        engine, environment = self._table.turn_s, self.step_s
        if min(engine.num, environment.num) < MIN_MEASURED or engine.seconds <= 0:
            return math.ceil(UNMEASURED * slots)
        return math.ceil(MARGIN * slots * (1 + environment.seconds / engine.seconds))

    def dispatch(self) -> None:
        """Send the turns that wait for an environment, and begin episodes while there is room."""
        unplaced: list[Response] = []
        while self._table.to_step:
            _, response = self._table.to_step.popitem(last=False)
            is_lost = response.environment is None
            if is_lost and (self._may_claim(response) or not self._begin(response)):
                unplaced.append(response)
            elif response.turns and not response.was_stepped:
                self._step(response)
        self._table.to_step.update((r.id, r) for r in unplaced)
        if unplaced:
            return
        wanted = self.num_wanted - len(self._table.open_episodes)
        while wanted > 0 and self._node() is not None:
            if not (chosen := self._lifecycle.pop_waiting(1, self._table.unbegun)):
                return
            chosen[0].transition(ResponseState.WAITING)
            self._table.open_episodes.add(chosen[0].id)
            self._begin(chosen[0])
            wanted -= 1

    def send_home(self, nodes: list[Node], most: int) -> int:
        """Send up to `most` turns to the nodes that have their KV, and return their number; let
        others wait for any node, if there is more room. A node that mostly had dropped its KV gets
        no preference."""
        placed: list[tuple[Response, Node]] = []
        for node in nodes:
            if node.hit_rate >= MIN_HIT_RATE:
                num = min(node.free, most - len(placed))
                placed += [(r, node) for r in self._pop_home(node, num)]
        self._table.dispatch(placed)
        self._leave_homes(most - len(placed) - self._table.queue.num_homeless)
        return len(placed)

    def _pop_home(self, node: Node, most: int) -> list[Response]:
        """Remove and return up to `most` turns that wait for this node, while it may still have
        their KV."""
        taken: list[Response] = []
        while len(taken) < most and (response := self._table.queue.pop_home(node.name)) is not None:
            if race.has_lost(response):
                self._lifecycle.give_up(response)
            elif is_home(response, node):
                taken.append(response)
            else:
                response.last_node = ""
                self._table.queue.push(response, resumed=True)
        return taken

    def _leave_homes(self, most: int) -> None:
        """Let up to `most` turns that wait for the node that has their KV wait for any node, if
        they wait longer there than another node would prefill them."""
        queue, turn_s = self._table.queue, self._table.turn_s.seconds
        for name, num in queue.homes() if most > 0 else ():
            home = self._fleet.ready.get(name)
            if home is not None and home.hit_rate < MIN_HIT_RATE:
                home = None
            while most > 0 and (first := queue.first_home(name)) is not None:
                if home and not placement.leaves(first, home, num * turn_s / home.slots):
                    break
                queue.leave_home(name)
                num, most = num - 1, most - 1

    def _may_claim(self, response: Response) -> bool:
        """Return whether the node that had an episode before a restart of the coordinator may still
        return with its environment."""
        of = self._settings.episodes
        keeps = of is not None and of.resume != "replay" and bool(response.turns)
        return keeps and self._fleet.now < self.claims_until

    def _node(self) -> Node | None:
        """Return the node with most room, or None."""
        nodes = self._fleet.environments.values()
        free = [n for n in nodes if n.state is NodeState.READY and len(n.episodes) < n.slots]
        return max(free, key=lambda n: (n.slots - len(n.episodes), n.name), default=None)

    def _begin(self, response: Response) -> bool:
        """Begin an episode, or begin it again; return False if no node has room."""
        if (node := self._node()) is None:
            return False
        response.incarnation += 1
        self._bind(response, node)
        group, turns = response.group, response.turns
        # 32 bits, since numpy takes no more
        seed = sample_seed(self._settings.run_seed, f"environment {group.key}") >> 31
        self._outbox.send(
            node.name,
            BeginEpisode(
                response.id,
                response.incarnation,
                seed,
                group.max_response_tokens,
                turns=tuple(self._recorded(response, k) for k in range(len(turns))),
                repeats=response.was_stepped,
            ),
        )
        response.was_stepped = bool(turns)
        return True

    def _bind(self, response: Response, node: Node) -> None:
        response.environment = node
        node.episodes[response.id] = response
        response.since = self._fleet.now

    def _recorded(self, response: Response, number: int) -> RecordedTurn:
        turn, is_last = response.turns[number], number + 1 == len(response.turns)
        sampled, logprobs, version = self._sampled(response, number)
        return RecordedTurn(
            encode(response.tokens[turn.start : turn.end]),
            turn.digest,
            sampled,
            response.finishes[number],
            turn.reward,
            turn.state if is_last else b"",
            logprobs,
            version,
        )

    def _sampled(self, response: Response, number: int) -> tuple[bytes, bytes, int]:
        """Return tokens, logprobs if environments receive them, and version of a turn."""
        of, turns = self._settings.episodes, response.turns
        start, is_last = turns[number].end, number + 1 == len(turns)
        end = len(response.tokens) if is_last else turns[number + 1].start
        logprobs = response.logprobs[start:end] if of and of.has_logprobs else array("f")
        version = max((version for version, at in response.starts if at < end), default=0)
        return encode(response.tokens[start:end]), encode(logprobs), version

    def _step(self, response: Response) -> None:
        assert response.environment is not None
        number = len(response.turns) - 1
        sampled, logprobs, version = self._sampled(response, number)
        response.was_stepped, response.since = True, self._fleet.now
        step = StepEpisode(
            *(response.id, response.incarnation, number, sampled, response.finishes[-1]),
            logprobs=logprobs,
            policy_version=version,
        )
        self._outbox.send(response.environment.name, step)

    # From environment nodes

    def on_observed(self, node: Node, message: Observed) -> str | None:
        """Insert an observation; return the reason if its sender cannot be trusted."""
        response = self._awaited(node, message)
        if response is None or message.turn != len(response.turns):
            return None  # sent twice, or not wanted any more
        tokens = message.token_ids
        is_whole = tokens and len(tokens) % 4 == 0 and message.offset == len(response.tokens)
        left = response.group.max_response_tokens - response.num_sampled
        if not is_whole or message.max_new_tokens < 1 or left < 1:
            return "sent a malformed observation"
        if max(decode("I", tokens)) >= self._settings.vocabulary:
            return f"sent a token outside the vocabulary of {self._settings.vocabulary}"
        self._measure(response)
        turn = Turn(
            message.offset,
            len(tokens) // 4,
            message.max_new_tokens,
            message.digest,
            message.record,
            message.reward,
            message.state,
            message.seconds,
            message.num_tool_calls,
        )
        self._outbox.record(ObservationTaken(response.id, message.incarnation, turn, tokens))
        self._insert(response, turn, tokens)
        return None

    def on_ended(self, node: Node, message: EpisodeEnded) -> None:
        """End an episode; the node forgets it."""
        response = self._awaited(node, message)
        if response is None or message.turn != len(response.turns):
            return  # not wanted any more: an EndEpisode was sent
        self._measure(response)
        if message.stop in UNSCORED and not message.failure:
            message = replace(message, failure=message.stop)
        self._outbox.record(message)
        self._lifecycle.end_episode(response, message)

    def _measure(self, response: Response) -> None:
        waited_s = self._fleet.now - response.since
        response.waited_s += waited_s
        self.step_s.add(waited_s)

    def _awaited(self, node: Node, message: Observed | EpisodeEnded) -> Response | None:
        """Return the episode of a message of its environment, if it waits for one."""
        response = node.episodes.get(message.response)
        if response is None or response.incarnation != message.incarnation:
            return None
        return response if response.state is ResponseState.WAITING else None

    def _insert(self, response: Response, turn: Turn, token_ids: bytes) -> None:
        """Append an observation and queue its episode; every inserted token comes from here."""
        if response.turns and response.turns[-1].state:  # only the newest one is used
            response.turns[-1] = replace(response.turns[-1], state=b"")
        response.turns.append(turn)
        response.num_inserted += turn.num_inserted
        response.was_stepped = False
        append(response, None, token_ids, bytes(len(token_ids)))
        self._table.requeue(response, resumed=len(response.turns) > 1)

    # Membership

    def reconcile(self, node: Node, claims: dict[str, int]) -> None:
        """Compare with the incarnations by response that a reconnected node reports: begin again
        what it lacks, end what is not wanted, and send again what it may not have received."""
        keeps = self._settings.episodes is not None and self._settings.episodes.resume != "replay"
        for name, incarnation in claims.items():
            response = self._table.responses.get(name)
            if response is None or response.environment is not None or response.resolved:
                continue
            if incarnation > response.incarnation + MAX_UNRECORDED:
                continue  # invented: its successors must fit into messages
            # Of the process before, which may have begun it again since the journal's last entry:
            # if this one begins it, answers to that process must not count.
            is_newest = incarnation >= response.incarnation
            response.incarnation = max(response.incarnation, incarnation)
            if keeps and response.turns and is_newest:  # what it saw was durable
                self._bind(response, node)
                self._table.to_step.pop(name, None)
        for response in list(node.episodes.values()):
            if claims.get(response.id) != response.incarnation:
                self._lose(response)
            elif response.state is ResponseState.WAITING and response.turns:
                self._step(response)
        unwanted = [c for c in claims.items() if c[0] not in node.episodes]
        if unwanted:
            self._outbox.send(node.name, EndEpisode(tuple(unwanted)))

    def lost(self, node: Node) -> int:
        """Begin the episodes of a lost node again elsewhere; return their number."""
        lost = list(node.episodes.values())
        for response in lost:
            self._lose(response)
        return len(lost)

    def _lose(self, response: Response) -> None:
        assert response.environment is not None
        del response.environment.episodes[response.id]
        response.environment = None
        if response.state is ResponseState.WAITING:
            self._table.to_step[response.id] = response

    # From the journal

    def replay(self, entry: ObservationTaken | EpisodeEnded) -> None:
        """Apply an entry that was recorded before the coordinator was restarted."""
        response = self._table.responses.get(entry.response)
        if response is None or response.resolved:
            return
        response.incarnation = max(response.incarnation, entry.incarnation)
        if response.state is ResponseState.QUEUED:
            response.transition(ResponseState.WAITING)  # the journal does not store what was begun
            self._table.open_episodes.add(response.id)
        self._table.to_step.pop(response.id, None)
        if isinstance(entry, EpisodeEnded):
            self._lifecycle.end_episode(response, entry)
        elif len(response.turns) == 0 or entry.turn.start == len(response.tokens):
            self._insert(response, entry.turn, entry.token_ids)
