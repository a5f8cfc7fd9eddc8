"""A fleet that behaves badly, in seeded worlds, and a memory of what reached the trainer."""

import random
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from lightrl.core.commands import CloseRound, Command, Finish, ReplayShards
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import (
    DrainRequested,
    Event,
    MessageArrived,
    NodeDraining,
    NodeLeft,
    NodeLost,
    ResponseScored,
    TimerFired,
)
from lightrl.core.log_entries import ShardSent, SnapshotEnded
from lightrl.core.rounds.rounds import staleness
from lightrl.core.state import Node, Response, Round
from lightrl.core.training import trainer_feed
from lightrl.core.weights.weight_sources import MAX_PEERS
from lightrl.messages.broadcasts import BroadcastStatus
from lightrl.messages.nodes import Drain
from lightrl.messages.responses import ResponseTokens, TokenChunk
from lightrl.messages.sharing import DevicesReleased
from lightrl.messages.training import ShardsTaken, StepDone, TrainGroup, TrainShard
from lightrl.messages.weights import PublishWeights, WeightsEndpoint, WeightsFailed
from lightrl.tickets import pull_ticket
from tests.core.conftest import Driver, ids, logprobs, of_kind, sent
from tests.core.world_broadcasts import WorldBroadcasts
from tests.core.world_sharing import WorldSharing

NAMES = "abcde"
MAX_TOKENS = 12


class World:
    """What happens next is drawn from the seed; what a response is, is a pure function of its
    name."""

    def __init__(
        self,
        seed: int,
        shares: bool = False,
        is_whim: bool = True,
        reads_slowly: bool = False,
        **changes: Any,
    ) -> None:
        """`shares`: some nodes use the trainer's devices, in turn with it; see `WorldSharing`.
        `reads_slowly`: anything may happen before the prompts of a round are there."""
        self.rng = random.Random(seed)
        self.salt = seed
        self.train_s = 0.0  # that the trainer says a step took it
        # share of rewards that cannot be computed
        self.fails = self.rng.choice([0.0, 0.0, 0.1, 0.3])
        self.driver = Driver(
            shuffled=True, max_response_tokens=MAX_TOKENS, **{"patience_s": 1e9, **changes}
        )
        self.driver.reads_slowly = reads_slowly
        self.num_late_draws = 0
        self.incarnation = 1
        self.past: list[Event] = []  # news that may come once more, much later
        self.has_trainer = True
        self.trained_step = 0  # the trainer trains this step next
        self.checkpoint = 0  # and may have to begin again from here
        self.forgets = False  # it seldom has a checkpoint
        self.to_train: deque[int] = deque()  # steps that the trainer has all of
        self.shards: dict[int, list[TrainShard]] = {}  # what the trainer got, and the journal holds
        self.untaken: deque[TrainShard] = deque()  # at the trainer, which has not begun with them
        self.num_held_back = 0  # shards that came only after others had been taken
        self.closed: dict[int, Round] = {}  # of training, by step
        self.num_restarts = 0
        self.num_continued = 0  # responses that were trained
        self.num_replays = 0
        self.finished: list[Finish] = []
        # every node says where it serves at once, or they do so late, if at all
        self.driver.opens_endpoints = self.rng.random() < 0.5
        # node -> version and sources that it was told of
        self.offered: dict[str, tuple[int, set[str]]] = {}
        self.num_told_again = 0
        self.num_without_trainer = 0  # nodes told of sources while the trainer was away
        self.num_late_endpoints = 0
        self.broadcasts = WorldBroadcasts(self)
        self.sharing = WorldSharing(self, shares, is_whim)
        self.feed(lambda: self.driver.join("t", "trainer"))
        self.sharing.park()
        self.feed(lambda: self.driver.publish(0))
        for name in self.rng.sample(NAMES, 2):
            slots = self.rng.randint(1, 4)
            self.feed(lambda name=name, slots=slots: self.greet(name, slots=slots))
            self.broadcasts.start_engine(name)
            self.sharing.obey_all()
            self.feed(lambda name=name: self.driver.confirm(name, 0))

    @property
    def core(self) -> Coordinator:
        return self.driver.core

    @property
    def rounds(self) -> list[Round]:
        """Of training, as they closed."""
        return [self.closed[step] for step in sorted(self.closed)]

    # What responses are

    def length_of(self, response: str) -> int:
        n = self.dice("length", response)
        length = 1 + (n % 4 if n % 7 else n // 7 % MAX_TOKENS)  # most are short
        sets, name = self.core.settings.eval_sets, response.partition("/")[0]
        return min([length, *(s.max_response_tokens for s in sets if s.name == name)])

    def reward_of(self, response: str) -> float | None:
        n = self.dice("reward", response) % 1000
        return None if n < 1000 * self.fails else float(n % 2)

    def token_of(self, response: str, position: int) -> int:
        """Coupled sampling in one line."""
        return self.dice(str(position), response) % 100

    def dice(self, kind: str, response: str) -> int:
        return int.from_bytes(
            blake2b(f"{self.salt} {kind} {response}".encode(), digest_size=4).digest()
        )

    # What it sees

    def feed(self, act: Callable[[], list[Command]]) -> None:
        commands = act()
        self.finished += of_kind(commands, Finish)
        self.broadcasts.hear(commands)
        self.sharing.hear(commands)
        for node, offer in sent(commands, PublishWeights):
            self.take_offer(node, offer)
        for closed in of_kind(commands, CloseRound):
            if not closed.round.is_eval:
                self.close(closed.round)
        for node, shard in sent(commands, TrainShard):
            assert node == "t"
            assert shard.step == shard.policy_version == self.trained_step
            if shard.index == 0:
                self.shards[shard.step] = []
            earlier = self.shards[shard.step]
            assert shard.index == len(earlier), "a shard twice, or in the wrong order"
            assert not any(s.last for s in earlier), "a shard after the last one"
            earlier.append(shard)
            self.untaken.append(shard)
            untaken = sum(map(num_tokens, self.untaken))
            assert untaken <= trainer_feed.MAX_UNTAKEN_TOKENS or untaken == num_tokens(shard)
            if shard.last:
                assert shard.num_groups == sum(len(s.groups) for s in earlier)
                assert len(self.to_train) == 0, "a step before the one at the trainer is done"
                self.to_train.append(shard.step)
        for again in of_kind(commands, ReplayShards):
            assert again.step == self.trained_step
            assert self.shards[again.step][-1].last, "a step that was never whole"
            self.to_train.append(again.step)
            self.num_replays += 1
        for node, drain in sent(commands, Drain):
            if node in self.rollouts() and self.rng.random() < 0.8:
                self.leave(node, drain.reason)

    def take_offer(self, node: str, offer: PublishWeights) -> None:
        """Tickets are good, and nobody is sent to itself."""
        names = [source.node for source in offer.sources]
        peers = [name for name in names if name != "t"]
        has_it = node in self.core.fleet.sources.complete  # its engine died, or it is told again
        assert names or has_it, f"{node} is to pull from nobody"
        assert len(set(names)) == len(names)
        assert names[: len(peers)] == peers, "the trainer comes last"
        assert len(peers) <= MAX_PEERS
        version = offer.policy_version
        assert node not in names
        for source in offer.sources:
            endpoint = self.core.fleet.sources.endpoints[source.node]
            assert source.addresses == endpoint.addresses
            assert source.ticket == pull_ticket(endpoint.secret, node, version)
        if offer.group:
            assert "t" in names
            return
        known, told = self.offered.get(node, (-1, set()))
        self.num_told_again += known == version
        self.num_without_trainer += "t" not in names
        self.offered[node] = version, (told if known == version else set()) | set(names)

    def can_load(self, name: str) -> bool:
        """Whether it was told of the version, and of a node that has it and is there."""
        sources, published = self.core.fleet.sources, self.core.fleet.published
        version, told = self.offered.get(name, (-1, set[str]()))
        if published is None or version != published.policy_version:
            return False
        has_trainer = "t" in told and sources.trainer == "t"
        return has_trainer or any(n in sources.complete for n in told) or name in sources.complete

    def loads(self, name: str) -> bool:
        """Whether it can say that it serves the published version."""
        node, published = self.core.fleet.nodes[name], self.core.fleet.published
        if node.state not in {"loading", "updating"} or published is None:
            return False
        if node.shares and name not in self.sharing.awake:
            return False  # nobody has told it to wake
        has_it = node.shares and node.policy_version == published.policy_version
        return bool(has_it) or self.can_load(name)

    def close(self, round: Round) -> None:
        self.closed[round.step] = round
        for group in round.accepted:
            for response in group.kept:
                oldest = staleness(response.spans, round.step).oldest_gap
                since = group.since if response.carried else round.step
                assert oldest <= round.step - since + self.core.settings.max_staleness, (
                    f"{response.id} is {oldest} versions old"
                )
                self.num_continued += response.carried > 0

    def rollouts(self) -> list[str]:
        return [n for n in self.core.fleet.nodes if n != "t"]

    def trained(self, step: int) -> list[tuple[str, list[str]]]:
        """(group, responses) in the order in which the trainer got them; checks every token."""
        groups = [g for s in self.shards[step] for g in s.groups]
        for group in groups:
            self.check_tokens(group)
        return [(g.group, [r.response for r in g.responses]) for g in groups]

    def check_tokens(self, group: TrainGroup) -> None:
        for r in group.responses:
            tokens = list(memoryview(r.token_ids).cast("i"))
            wanted = [self.token_of(r.response, i) for i in range(self.length_of(r.response))]
            assert tokens == wanted, r.response
            reward = self.reward_of(r.response)
            assert r.reward == (self.core.settings.reward_on_failure if reward is None else reward)

    # What the fleet does

    def join(self) -> None:
        self.incarnation += 1
        name = self.rng.choice(NAMES)
        slots = self.rng.randint(0, 4)
        is_spot = self.rng.random() < 0.1
        self.feed(
            lambda: self.greet(
                name, incarnation=self.incarnation, slots=slots, is_preemptible=is_spot
            )
        )
        self.broadcasts.start_engine(name)

    def greet(self, name: str, **fields: Any) -> list[Command]:
        """e lives on the trainer's machine. Offers are looked at before the endpoint changes."""
        driver, opens = self.driver, self.driver.opens_endpoints
        driver.opens_endpoints = False
        if "shares" not in fields:
            fields |= self.sharing.fields(name)
        self.feed(lambda: driver.join(name, host="h" if name == "e" else name, **fields))
        driver.opens_endpoints = opens
        return driver.open(name, fields.get("incarnation", 1)) if opens else []

    def open_endpoint(self) -> None:
        """A node says only now where it serves, or that it does so elsewhere."""
        if self.core.fleet.nodes:
            name = self.rng.choice(sorted(self.core.fleet.nodes))
            self.num_late_endpoints += name not in self.core.fleet.sources.endpoints
            secret = f"secret {self.rng.randint(0, 2)} of {name}"
            opened = MessageArrived(name, WeightsEndpoint((f"{name}:1",), secret))
            self.feed(lambda: self.driver.feed(opened))

    def report_source(self) -> None:
        """A node says that another one sent it wrong bytes: a liar, one of the two."""
        if names := self.rollouts():
            name = self.rng.choice(names)
            version, told = self.offered.get(name, (0, set[str]()))
            source = self.rng.choice(sorted(told) or names)
            if self.rng.random() < 0.1:
                source = self.rng.choice([*NAMES, "t"])
            report = WeightsFailed(version, "bucket 7: digest differs", source)
            self.feed(lambda: self.driver.feed(MessageArrived(name, report)))

    def lose(self) -> None:
        name = self.rng.choice(NAMES)
        self.sharing.lose(name)
        self.feed(lambda: self.driver.feed(NodeLost(name, "gone")))

    def drain(self) -> None:
        self.feed(lambda: self.driver.feed(DrainRequested(self.rng.choice(NAMES), "upkeep")))

    def leave(self, name: str, reason: str) -> None:
        """Its last tokens come between its good-byes, if they come."""
        self.feed(lambda: self.driver.feed(NodeDraining(name, reason)))
        if self.rng.random() < 0.5:
            self.give_up(name)
        self.sharing.lose(name)
        self.feed(lambda: self.driver.feed(NodeLeft(name, reason, ok=self.rng.random() < 0.9)))

    def load(self) -> None:
        """A node confirms a version, refuses it or confirms the wrong thing."""
        published = self.core.fleet.published
        loading = [n for n in self.rollouts() if self.loads(n)]
        if published is None or not loading:
            return
        name = self.rng.choice(loading)
        version = published.policy_version
        if self.rng.random() < 0.05:
            failed = WeightsFailed(version, "no space left")
            self.feed(lambda: self.driver.feed(MessageArrived(name, failed)))
            return
        digest = "wrong" if self.rng.random() < 0.05 else None
        self.load_newest(name, max(0, version - (self.rng.random() < 0.05)), digest)

    def kill_engine(self) -> None:
        """Of a node that serves: its daemon lives on."""
        if ready := [n for n in self.rollouts() if n in self.core.fleet.ready]:
            name, published = self.rng.choice(ready), self.core.fleet.published
            assert published is not None
            died = WeightsFailed(published.policy_version, "engine killed by SIGKILL")
            self.feed(lambda: self.driver.feed(MessageArrived(name, died)))

    def load_newest(self, name: str, version: int | None = None, digest: str | None = None) -> None:
        node, published = self.core.fleet.nodes[name], self.core.fleet.published
        assert published is not None
        if node.state == "updating":
            self.give_up(name)
        wanted = published.policy_version if version is None else version
        self.broadcasts.fed.pop(name, None)
        self.feed(lambda: self.driver.confirm(name, wanted, digest))

    def give_up(self, name: str) -> None:
        """A node flushes what it has: it loads a new version, or leaves."""
        node = self.core.fleet.nodes.get(name)
        if node is not None and node.running:
            items = [self.item(r, self.rng.randint(0, 2), "abort") for r in node.running.values()]
            self.feed_chunk(name, items)

    def item(
        self, r: Response, more: int, finish: str | None = None, offset: int | None = None
    ) -> ResponseTokens:
        """Up to `more` tokens of a response from `offset` on; with its last token it is
        finished."""
        start = len(r.tokens) if offset is None else offset
        stop = min(self.length_of(r.id), start + more)
        tokens = [self.token_of(r.id, i) for i in range(start, stop)]
        if start <= len(r.tokens) and stop == self.length_of(r.id):
            finish = "stop"
        return ResponseTokens(r.id, r.attempt, start, ids(*tokens), logprobs(len(tokens)), finish)  # type: ignore[arg-type]

    def feed_chunk(
        self, name: str, items: list[ResponseTokens], version: int | None = None
    ) -> None:
        version = self.driver.version_at(name) if version is None else version
        known = self.core.fleet.digests.get(version, (f"digest-{version}",))
        chunk = TokenChunk(version, known[len(items) % len(known)], tuple(items))
        self.remember(MessageArrived(name, chunk))

    def remember(self, event: Event) -> None:
        self.past.append(event)
        self.feed(lambda: self.driver.feed(event))

    def generate(self) -> None:
        """Next tokens of some responses of a node; sometimes again, with a hole, or given up."""
        working = [n for n in self.rollouts() if self.core.fleet.nodes[n].running]
        if not working:
            return
        name = self.rng.choice(working)
        running = list(self.core.fleet.nodes[name].running.values())
        items: list[ResponseTokens] = []
        for r in self.rng.sample(running, self.rng.randint(1, len(running))):
            offset = max(0, len(r.tokens) + self.rng.choice([0, 0, 0, 0, 0, -1, -2, 1]))
            finish = "abort" if self.rng.random() < 0.05 and offset <= len(r.tokens) else None
            items.append(self.item(r, self.rng.randint(1, 6), finish, offset))
        # a and b are slow
        self.driver.now += self.rng.choice([0.0, 0.02, 0.3 if name in "ab" else 0.02])
        self.feed_chunk(name, items)

    def score(self) -> None:
        """Of some that wait for it; sometimes of an attempt that was given up, or of any
        response."""
        waiting = [
            r for r in self.core.table.responses.values() if r.state == "done" and not r.scored
        ]
        if self.rng.random() < 0.05:
            waiting = list(self.core.table.responses.values())
        for r in self.rng.sample(waiting, self.rng.randint(min(1, len(waiting)), len(waiting))):
            attempt = r.attempt - (self.rng.random() < 0.1)
            self.remember(ResponseScored(r.id, attempt, self.reward_of(r.id), "no luck"))

    def train(self) -> None:
        """The trainer has done a step; the version comes first."""
        if self.to_train and self.sharing.may_finish:
            step = self.to_train.popleft()
            self.untaken.clear()
            self.trained_step = step + 1
            self.sharing.park()
            self.remember(MessageArrived("t", self.driver.publication(step + 1)))
            metrics = {"timing_s/forward_backward": self.train_s, "timing_s/optimizer": 0.0}
            self.remember(MessageArrived("t", StepDone(step, step + 1, metrics)))
            if self.rng.random() < 0.4 and not self.forgets:
                self.checkpoint = step + 1

    def take(self) -> None:
        """The trainer begins with some of the shards that wait there."""
        num_taken = self.rng.randint(0, len(self.untaken))
        if num_taken and self.has_trainer:
            taken = [self.untaken.popleft() for _ in range(num_taken)][-1]
            known = len(self.shards[taken.step])
            self.remember(MessageArrived("t", ShardsTaken(taken.step, taken.index)))
            self.num_held_back += len(self.shards[taken.step]) > known

    def lose_trainer(self) -> None:
        """It dies, or its connection breaks; or it leaves in order, with a checkpoint."""
        if self.has_trainer and self.core.state != "finishing":
            self.has_trainer = False
            self.broadcasts.forget("t")
            self.untaken.clear()
            self.to_train.clear()
            if self.rng.random() < 0.3:
                self.checkpoint = self.trained_step
                self.sharing.lose_devices()
                self.feed(lambda: self.driver.feed(NodeLeft("t", "preempted", ok=True)))
            else:
                self.feed(lambda: self.driver.feed(NodeLost("t", "gone")))

    def return_trainer(self) -> None:
        if not self.has_trainer:
            self.has_trainer = True
            if self.rng.random() < 0.5:
                self.incarnation += 1
                self.sharing.lose_devices()  # they start in the host's memory
            if self.rng.random() < 0.5 or self.forgets:
                self.trained_step = self.checkpoint
                self.round_otherwise()
            self.greet_trainer()

    def round_otherwise(self) -> None:
        """Half of the versions that the trainer trains again come out different."""
        published = self.core.fleet.published
        if published is not None and not self.core.settings.deterministic:
            for version in range(self.checkpoint + 1, published.policy_version + 1):
                if self.dice(f"round {self.num_replays}", str(version)) % 3:
                    self.driver.digests[version] = f"digest-{version}-{self.num_replays}"

    def greet_trainer(self) -> None:
        """What it held of a step it has forgotten; what it said last, it says again.

        Nothing of its earlier life follows: the shell hears but the process that said hello last.
        """
        self.to_train.clear()
        self.untaken.clear()
        self.broadcasts.forget("t")
        said = PublishWeights | StepDone | ShardsTaken | BroadcastStatus
        self.past = [e for e in self.past if not _is_message(e, said)]
        self.sharing.orders.pop("t", None)
        self.sharing.given = set()
        parked = {"is_released": not self.sharing.train} if self.sharing.is_on else {}
        self.feed(lambda: self.driver.join("t", "trainer", incarnation=self.incarnation, **parked))
        if self.rng.random() < 0.7 or not self.sharing.is_on:
            self.sharing.park()
        self.feed(lambda: self.driver.publish(self.trained_step))
        if self.trained_step and self.rng.random() < 0.7:
            done = StepDone(self.trained_step - 1, self.trained_step, {})
            self.feed(lambda: self.driver.feed(MessageArrived("t", done)))

    def restart_coordinator(self) -> None:
        """Killed at any moment: the newest facts may be lost, but not what was sent to the
        trainer. Nothing is sent before a segment has begun: then it is as if it died before."""
        if self.driver.is_step_over:
            return
        self.num_restarts += 1
        nodes = {n: self.core.fleet.nodes[n] for n in self.rollouts()}
        kept = 1 + max(
            i for i, f in enumerate(self.driver.segment) if isinstance(f, SnapshotEnded | ShardSent)
        )
        lost = self.rng.randint(0, len(self.driver.segment) - kept)
        self.sharing.orders.clear()
        self.past = [e for e in self.past if not _is_asleep(e)]
        self.feed(lambda: self.driver.restart(lost))
        self.sharing.adopt()
        if self.has_trainer:
            self.greet_trainer()
        for name, node in nodes.items():
            if self.rng.random() < 0.7 and node.state != "draining":
                running = {
                    r.id: r.attempt for r in node.running.values() if self.rng.random() < 0.9
                }
                if node.shares and name not in self.sharing.awake:
                    running = {}
                self.feed(
                    lambda name=name, node=node, running=running: self.return_node(
                        name, node, running
                    )
                )

    def return_node(self, name: str, node: Node, running: dict[str, int]) -> list[Command]:
        serves, incarnation, slots = node.policy_version, node.incarnation, node.slots
        if self.rng.random() < 0.7:
            self.broadcasts.forget(name)
        return self.greet(
            name,
            slots=slots,
            incarnation=incarnation,
            serves=serves,
            running=running,
            has_file=serves is None or self.broadcasts.fed.get(name) != serves,
            is_preemptible=node.is_preemptible,
            **self.sharing.fields(name, is_new=False),
        )

    def break_connection(self) -> None:
        """Of a node that goes on: what was under way in either direction may be lost."""
        names = [n for n in self.rollouts() if self.core.fleet.nodes[n].state != "draining"]
        if names:
            name = self.rng.choice(names)
            node = self.core.fleet.nodes[name]
            running = {r.id: r.attempt for r in node.running.values() if self.rng.random() < 0.8}
            if node.shares and name not in self.sharing.awake:
                running = {}
            if self.rng.random() < 0.5:
                self.sharing.lose(name, is_dead=False)
                self.feed(lambda: self.driver.feed(NodeLost(name, "silent")))
            self.feed(lambda: self.return_node(name, node, running))

    def repeat(self) -> None:
        """Something of long ago comes again."""
        if self.past:
            event = self.rng.choice(self.past)
            self.feed(lambda: self.driver.feed(event))

    def forge(self) -> None:
        """Tokens of a version that does not exist, or that is too old for the response; costs the
        node."""
        working = [n for n in self.rollouts() if self.core.fleet.nodes[n].running]
        if working:
            name = self.rng.choice(working)
            r = self.rng.choice(list(self.core.fleet.nodes[name].running.values()))
            item = ResponseTokens(r.id, r.attempt, len(r.tokens), ids(99), logprobs(1))
            late = r.group.round.step - self.core.settings.max_staleness - 1
            self.feed_chunk(name, [item], late if late >= 0 and self.rng.random() < 0.7 else 99)

    def publish_early(self) -> None:
        """A trainer says that it has trained what it has not been sent yet."""
        round, published = self.core.table.training, self.core.fleet.published
        is_open = round is not None and round.state != "closed"
        if is_open and round.step == self.core.trainer_feed.trained_step:
            self.feed(lambda: self.driver.publish(round.step + 1))
            assert self.core.fleet.published is published

    def read(self) -> None:
        """The prompts that were asked for first are there."""
        if self.driver.unanswered:
            self.num_late_draws += 1
            self.feed(self.driver.answer_draw)

    def wait(self) -> None:
        self.driver.now += self.rng.choice([0.6, 0.6, 0.6, 4.0])
        for name in list(self.core.fleet.nodes):
            late = self.driver.now - self.core.fleet.nodes[name].heard_at > 3.0
            if late and (name == "t" or self.rng.random() < 0.9):
                self.broadcasts.beat(name)
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.driver.now:
            self.feed(lambda: self.driver.feed(TimerFired()))

    def go_on(self, seconds: float = 0.3) -> None:
        """So much later everybody has done what they are told, but for a change of sides within a
        round: of those orders each turn carries one out."""
        self.broadcasts.finish()
        is_open = self.core.table.round is not None and self.core.table.round.state == "running"
        (self.sharing.obey if is_open else self.sharing.obey_all)()
        self.take()
        self.train()
        for name in self.rollouts():
            if self.loads(name):
                self.load_newest(name)
        for name in self.rollouts():
            if running := self.core.fleet.nodes[name].running.values():
                self.feed_chunk(name, [self.item(r, 2) for r in running])
        for r in list(self.core.table.responses.values()):
            if r.state == "done" and not r.scored:
                self.remember(ResponseScored(r.id, r.attempt, self.reward_of(r.id), "no luck"))
        self.driver.now += seconds
        for name in list(self.core.fleet.nodes):
            self.broadcasts.beat(name)
        self.feed(lambda: self.driver.feed(TimerFired()))

    def live(self, num_events: int, coordinator_lives: bool = False) -> "World":
        """Anything in any order, for a while."""
        acts = {
            self.join: 3,
            self.lose: 1,
            self.open_endpoint: 2,
            self.report_source: 1,
            self.drain: 0.3,
            self.load: 10,
            self.generate: 30,
            self.broadcasts.speak: 25,
            self.score: 20,
            self.train: 4,
            self.publish_early: 0.5,
            self.take: 6,
            self.lose_trainer: 0.5,
            self.return_trainer: 3,
            self.restart_coordinator: 0 if coordinator_lives else 1.5,
            self.break_connection: 1,
            self.kill_engine: 0.5,
            self.sharing.obey: 15 if self.sharing.is_on else 0,
            self.sharing.die_asleep: 0.5 if self.sharing.is_on else 0,
            self.repeat: 2,
            self.forge: 0.4,
            self.wait: 4,
            self.read: 6 if self.driver.reads_slowly else 0,
        }
        for act in self.rng.choices(list(acts), list(acts.values()), k=num_events):
            act()
        return self

    def settle(self) -> None:
        """With everybody doing what it was told, nobody waits for the newest version."""
        if self.core.state in {"finishing", "finished"} or self.core.fleet.published is None:
            return
        self.return_trainer()
        fleet, num_left = self.core.fleet, -1
        was_on, self.sharing.rule.is_on = self.sharing.rule.is_on, False
        if "t" not in fleet.sources.endpoints:
            self.feed(lambda: self.driver.open("t"))
        while num_left != fleet.devices.num_transitions:
            num_left = fleet.devices.num_transitions
            self.broadcasts.finish()
            self.sharing.obey_all()
            for name in self.rollouts():
                if self.loads(name):
                    self.load_newest(name)
        for name in self.rollouts():
            node = fleet.nodes[name]
            was_told_to_go = node.state == "draining" or node.weights_failures >= 3
            if name in fleet.devices.wanted:
                assert node.state in {"released", "draining"}, f"{name} does not train: {node}"
                continue
            if fleet.sources.trainer == "t" and not was_told_to_go:
                assert node.state == "ready", f"{name} waits: {node}"
        self.sharing.rule.is_on = was_on

    def heal(self) -> "World":
        """One good node does what is left to do, and everybody leaves."""
        self.driver.opens_endpoints = True
        self.sharing.rule.is_on = False
        self.return_trainer()
        self.settle()
        if "t" not in self.core.fleet.sources.endpoints:
            self.feed(lambda: self.driver.open("t"))
        self.incarnation += 1
        self.feed(lambda: self.greet("healer", incarnation=self.incarnation, slots=6))
        self.broadcasts.start_engine("healer")
        for name in self.rollouts():
            if name != "healer":
                self.sharing.lose(name)
                self.feed(lambda name=name: self.driver.feed(NodeLost(name, "gone")))
        for _ in range(600):
            self.read()
            self.take()
            self.train()
            if self.core.state in {"finishing", "finished"}:
                break
            self.broadcasts.finish()
            self.sharing.obey_all()
            node = self.core.fleet.nodes["healer"]
            is_due = self.loads("healer") if self.sharing.is_on else self.can_load("healer")
            if node.state != "ready" and is_due:
                self.load_newest("healer")
            if node.running:
                self.feed_chunk("healer", [self.item(r, MAX_TOKENS) for r in node.running.values()])
            for r in list(self.core.table.responses.values()):
                if r.state == "done" and not r.scored:
                    self.remember(ResponseScored(r.id, r.attempt, self.reward_of(r.id), "no luck"))
        else:
            raise AssertionError(f"stuck: {self.core.state} at step {self.core.step}")
        for name in list(self.core.fleet.nodes):
            self.feed(lambda name=name: self.driver.feed(NodeLeft(name, "drained", ok=True)))
        return self


def num_tokens(shard: TrainShard) -> int:
    return sum(len(r.token_ids) // 4 for group in shard.groups for r in group.responses)


def _is_message(event: Event, kinds: Any) -> bool:
    return isinstance(event, MessageArrived) and isinstance(event.message, kinds)


def _is_asleep(event: Event) -> bool:
    """Whether an engine reports that it sleeps."""
    match event:
        case MessageArrived(_, DevicesReleased("rollout")):
            return True
        case _:
            return False
