"""The trainer node as the core sees it: where it stands, and which shards it gets next.

Owns what was sent to it since its last hello, and how much of it may be under way: a step may be
gigabytes, and neither a slow disk nor a slow trainer may pile them up. A trainer that comes back
begins where its checkpoint, or its memory, says; what it has trained before is sent again as it
was. Which groups belong to a step is decided in `race` and `steps`.
"""

from collections import deque
from itertools import islice

from lightrl.core.arrays import encode
from lightrl.core.commands import Outbox, ReplayShards
from lightrl.core.log_entries import ShardSent
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.state import Group, Round, RoundState
from lightrl.messages.sharing import AssignDevices
from lightrl.messages.training import TrainGroup, TrainResponse, TrainShard

MAX_SHARD_TOKENS = 1 << 18  # some 2 MiB with their logprobs
# shards on their way to the journal; the event loop waits while that many are made
MAX_UNWRITTEN = 2
MAX_UNTAKEN_TOKENS = 1 << 22  # some 32 MiB: what a trainer with many ranks has to spread


class Window:
    """The shards of a step that were sent and that the trainer has not taken. One that is larger
    than all of them may be goes alone.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._untaken: deque[tuple[int, int]] = deque()  # (index of a shard, its tokens)

    def has_room(self, num_tokens: int) -> bool:
        return not self.num_tokens or self.num_tokens + num_tokens <= MAX_UNTAKEN_TOKENS

    def add(self, index: int, num_tokens: int) -> None:
        self._untaken.append((index, num_tokens))
        self.num_tokens += num_tokens

    def acknowledge(self, index: int) -> None:
        """The trainer has taken this shard and those before it."""
        while self._untaken and self._untaken[0][0] <= index:
            self.num_tokens -= self._untaken.popleft()[1]


class TrainerFeed:
    def __init__(self, fleet: Fleet, outbox: Outbox) -> None:
        self.trained_step: int | None = (
            None  # it trains this step next; None: it has not said so yet
        )
        self.missing_since: float | None = None  # a node of it; None: all are here, or were never
        self.num_hellos = 0
        # nothing is left to do: its last checkpoint is durable, or it has left in order
        self.has_finished = False
        self.is_replaying = False  # the step it stands at is sent again
        self._leader: str | None = None  # that has said hello, as far as it is not lost
        self._fleet = fleet
        self._outbox = outbox
        self._window = Window()
        self._num_left = 0  # shards of the step it stands at that are durable and were sent
        self._owes_replay = False  # once the devices are free

    def joined(self, name: str) -> None:
        """A node of it has come, or come back."""
        trainers = self._fleet.trainers
        if trainers.leader is not None and (name == trainers.leader or self._leader is None):
            self._leader = trainers.leader
            self.hello()
        if trainers.are_complete:
            self.missing_since = None
        elif missing := trainers.missing_text():
            self._outbox.report(f"the run waits for {missing}")

    def hello(self) -> None:
        """It has come, or come back: what it held of a step that is not done, it holds no more."""
        self.num_hellos += 1
        self.trained_step = None
        self.is_replaying = self._owes_replay = False

    def lost(self, now: float) -> None:
        """One of its nodes: without the leader nobody knows where it stands."""
        if self._fleet.trainer is None:
            self.trained_step = self._leader = None
            self.is_replaying = self._owes_replay = False
        if self.missing_since is None or self._fleet.trainers.num_needed == 1:
            self.missing_since = now

    def feed(self, round: Round | None) -> None:
        """It stands at a new step: that step's shards, of this round or, if it was trained before,
        again."""
        published = self._fleet.published
        if self.trained_step is None or self._fleet.trainer is None or published is None:
            return
        self._window, self._num_left = Window(), 0
        self.is_replaying = False
        self._owes_replay = self.trained_step < published.policy_version
        if self._owes_replay:
            self._replay()
        elif round is not None and round.step == self.trained_step:
            round.num_sent = round.num_shards = 0
            round.is_handed_over = False
            self.send(round)

    def go_on(self, round: Round | None) -> None:
        """The devices are free: what it could not be sent before."""
        if self._owes_replay:
            self._replay()
        elif round is not None:
            self.send(round)

    def _replay(self) -> None:
        if self.trained_step is None or self._fleet.trainer is None or not self._may_train():
            return
        self._owes_replay, self.is_replaying = False, True
        self.give()
        self._outbox.add(ReplayShards(self._fleet.trainer, self.trained_step, self.num_hellos))
        self._fleet.devices.train()

    def give(self) -> None:
        """The trainer is told which parts of its devices it has, if it has got another one."""
        devices, trainer = self._fleet.devices, self._fleet.trainer
        if devices.are_whole or trainer is None or self.trained_step is None:
            return
        if not (free := devices.free) <= devices.given:
            devices.give(free)
            self._outbox.send(trainer, AssignDevices(self.trained_step, tuple(sorted(free))))

    def _may_train(self) -> bool:
        return self._fleet.devices.may_train

    @property
    def is_behind(self) -> bool:
        """It has to train steps again that are done."""
        published = self._fleet.published
        return (
            published is not None
            and self.trained_step is not None
            and self.trained_step < published.policy_version
        )

    def has_left(self, round: Round) -> bool:
        """All shards that were made of this round are on their way."""
        return round.step != self.trained_step or round.num_shards <= self._num_left

    def on_shards_taken(self, round: Round | None, step: int, index: int) -> None:
        """It has this shard and those before it: there is room for more."""
        if round is not None and step == round.step == self.trained_step:
            self._window.acknowledge(index)
            self.send(round)

    def left(self, round: Round | None, step: int, index: int) -> None:
        """This shard is durable and was sent: another one may be made."""
        if round is not None and step == round.step == self.trained_step:
            self._num_left = max(self._num_left, index + 1)
            self.send(round)

    def is_owed(self, round: Round) -> bool:
        """Whether it stands at this step and lacks some; what was trained before is replayed."""
        published = self._fleet.published
        is_new = published is None or published.policy_version <= round.step
        return is_new and self.trained_step == round.step and not round.is_handed_over

    def send(self, round: Round) -> None:
        """What it lacks of the round it is at, as far as it may; the last shard closes the step."""
        last = round.state is RoundState.CLOSED
        if self._fleet.trainer is None or not self.is_owed(round):
            return
        while not round.is_handed_over and ((groups := _next_groups(round)) or last):
            num_tokens = sum(map(_num_tokens, groups))
            is_held_up = round.num_shards - self._num_left >= MAX_UNWRITTEN
            if is_held_up or not self._window.has_room(num_tokens) or not self._may_train():
                return
            is_last = last and round.num_sent + len(groups) == len(round.accepted)
            shard = TrainShard(
                step=round.step,
                index=round.num_shards,
                policy_version=round.step,
                groups=tuple(_train_group(g, round.step) for g in groups),
                last=is_last,
                num_groups=len(round.accepted),
            )
            self.give()
            self._window.add(round.num_shards, num_tokens)
            round.num_sent += len(groups)
            round.num_shards += 1
            round.is_handed_over = is_last
            self._outbox.record(ShardSent(shard))
            self._outbox.send(self._fleet.trainer, shard)
            self._fleet.devices.train()


def _next_groups(round: Round) -> list[Group]:
    """As many as one message should carry: a whole step may be due at once."""
    groups: list[Group] = []
    num_tokens = 0
    for group in islice(round.in_turn, round.num_sent, None):
        num_tokens += _num_tokens(group)
        if groups and num_tokens > MAX_SHARD_TOKENS:
            break
        groups.append(group)
    return groups


def _num_tokens(group: Group) -> int:
    return sum(len(r.tokens) for r in group.kept)


def _train_group(group: Group, policy_version: int) -> TrainGroup:
    responses: list[TrainResponse] = []
    for r in group.kept:
        assert r.reward is not None
        assert r.finish_reason is not None
        stale = sum(tokens for version, tokens in r.spans if version < policy_version)
        responses.append(
            TrainResponse(
                r.id,
                encode(r.tokens),
                encode(r.logprobs),
                r.reward,
                r.finish_reason,
                num_stale=stale,
            )
        )
    return TrainGroup(group.id, group.prompt.tokens, tuple(responses), group.mini_batch or 0)
