"""The state of the trainer node in the core: the step it trains, and the shards to send it next.

Owns the shards sent since the trainer's last Hello, and limits how many are under way: a step may
be gigabytes, and a slow disk or a slow trainer must not make them pile up. A trainer that
reconnects continues from its checkpoint or its memory; shards of steps that are trained again are
sent unchanged. `race` and `round_scheduler` decide which groups belong to a step.
"""

from collections import deque
from itertools import islice

from lightrl.core.arrays import encode, pack_mask
from lightrl.core.commands import Outbox, ReplayShards
from lightrl.core.log_entries import ShardSent
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.state import Group, Round, RoundState
from lightrl.messages.sharing import SetDevices
from lightrl.messages.training import TrainGroup, TrainResponse, TrainShard

MAX_SHARD_TOKENS = 1 << 18  # about 2 MiB with their logprobs
# shards that wait for the journal; making this many blocks the event loop
MAX_UNWRITTEN = 2
MAX_UNTAKEN_TOKENS = 1 << 22  # about 32 MiB, enough for a trainer with many ranks


class UntakenShards:
    """The shards of a step that were sent and that the trainer has not taken.

    A shard larger than MAX_UNTAKEN_TOKENS is sent alone."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._untaken: deque[tuple[int, int]] = deque()  # (index of a shard, its tokens)

    def has_room(self, num_tokens: int) -> bool:
        return not self.num_tokens or self.num_tokens + num_tokens <= MAX_UNTAKEN_TOKENS

    def add(self, index: int, num_tokens: int) -> None:
        self._untaken.append((index, num_tokens))
        self.num_tokens += num_tokens

    def acknowledge(self, index: int) -> None:
        """Remove the shards up to this one, which the trainer has taken."""
        while self._untaken and self._untaken[0][0] <= index:
            self.num_tokens -= self._untaken.popleft()[1]


class TrainerFeed:
    """Sends the trainer the shards of the step that it trains. Owns the shards under way; decides
    when the next one is sent, and which step is sent again after a Hello."""

    def __init__(self, fleet: Fleet, table: ResponseTable, outbox: Outbox) -> None:
        # the step that the trainer trains next; None: not reported yet
        self.trained_step: int | None = None
        self.missing_since: float | None = None  # when a node was lost; None: no lost node
        self.num_hellos = 0
        # nothing is left to train: the last checkpoint is durable, or the trainer left in order
        self.has_finished = False
        self.is_replaying = False  # `trained_step` is sent again
        self._leader: str | None = None  # that sent the last Hello; None if lost
        self._fleet = fleet
        self._table = table
        self._outbox = outbox
        self._window = UntakenShards()
        self._num_left = 0  # shards of `trained_step` that are durable and were sent
        self._owes_replay = False  # due once the devices are free

    def joined(self, name: str) -> None:
        """Handle a trainer node that has joined or reconnected."""
        trainers = self._fleet.trainers
        if trainers.leader is not None and (name == trainers.leader or self._leader is None):
            self._leader = trainers.leader
            self.hello()
        if trainers.are_complete:
            self.missing_since = None
        elif missing := trainers.missing_text():
            self._outbox.report(f"the run waits for {missing}")

    def hello(self) -> None:
        """Reset the state: a trainer that (re)connects has no shards of the unfinished step."""
        self.num_hellos += 1
        self.trained_step = None
        self.is_replaying = self._owes_replay = False

    def lost(self, now: float) -> None:
        """Handle the loss of a trainer node; without the leader `trained_step` is unknown."""
        if self._fleet.trainer is None:
            self.trained_step = self._leader = None
            self.is_replaying = self._owes_replay = False
        if self.missing_since is None or self._fleet.trainers.num_needed == 1:
            self.missing_since = now

    def feed(self) -> None:
        """Begin to send the shards of `trained_step`: those of the round in training, or the stored
        ones if the step was trained before."""
        round = self._table.training
        if self.trained_step is None or self._fleet.trainer is None:
            return
        self._window, self._num_left = UntakenShards(), 0
        self.is_replaying = False
        self._owes_replay = self.is_behind
        if self._owes_replay:
            self._replay()
        elif round is not None and round.step == self.trained_step:
            round.num_sent = round.num_shards = 0
            round.is_handed_over = False
            self.send()

    def resume(self) -> None:
        """Send the shards that waited for the devices, which are free now."""
        if self._owes_replay:
            self._replay()
        else:
            self.send()

    def _replay(self) -> None:
        devices, trainer = self._fleet.devices, self._fleet.trainer
        if self.trained_step is None or trainer is None or not devices.may_train:
            return
        self._owes_replay, self.is_replaying = False, True
        self.give()
        self._outbox.add(ReplayShards(trainer, self.trained_step, self.num_hellos))
        devices.train()

    def give(self) -> None:
        """Send the trainer the numbers of its free device parts, if another one is free."""
        devices, trainer = self._fleet.devices, self._fleet.trainer
        if devices.are_whole or trainer is None or self.trained_step is None:
            return
        if not (free := devices.free) <= devices.given:
            devices.give(free)
            self._outbox.send(
                trainer, SetDevices("trainer", self.trained_step, True, tuple(sorted(free)))
            )

    @property
    def is_behind(self) -> bool:
        """Return whether the trainer has to repeat steps whose versions were published."""
        published = self._fleet.published
        return (
            published is not None
            and self.trained_step is not None
            and self.trained_step < published.policy_version
        )

    def has_left(self, round: Round) -> bool:
        """Return whether all shards made of this round were sent."""
        return round.step != self.trained_step or round.num_shards <= self._num_left

    def on_shards_taken(self, step: int, index: int) -> None:
        """Handle the acknowledgement of the shards up to this one, and send more."""
        if self._is_current(step):
            self._window.acknowledge(index)
            self.send()

    def on_shard_left(self, step: int, index: int) -> None:
        """Count a shard that is durable and was sent, and make more."""
        if self._is_current(step):
            self._num_left = max(self._num_left, index + 1)
            self.send()

    def _is_current(self, step: int) -> bool:
        round = self._table.training
        return round is not None and step == round.step == self.trained_step

    def is_owed(self, round: Round) -> bool:
        """Return whether shards of this new step are still to be sent; old steps are replayed."""
        published = self._fleet.published
        is_new = published is None or published.policy_version <= round.step
        return is_new and self.trained_step == round.step and not round.is_handed_over

    def send(self) -> None:
        """Send shards of the round in training within the limits; the last one closes the step."""
        round, devices, trainer = self._table.training, self._fleet.devices, self._fleet.trainer
        if round is None or trainer is None or not self.is_owed(round):
            return
        last = round.state is RoundState.CLOSED
        while not round.is_handed_over and ((groups := _next_groups(round)) or last):
            num_tokens = sum(map(_num_tokens, groups))
            is_held_up = round.num_shards - self._num_left >= MAX_UNWRITTEN
            if is_held_up or not self._window.has_room(num_tokens) or not devices.may_train:
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
            self._outbox.send(trainer, shard)
            devices.train()


def _next_groups(round: Round) -> list[Group]:
    """Return the next groups to send, at most MAX_SHARD_TOKENS or one group."""
    groups: list[Group] = []
    num_tokens = 0
    for group in islice(round.in_turn, round.num_sent, None):
        num_tokens += _num_tokens(group)
        if groups and num_tokens > MAX_SHARD_TOKENS:
            break
        groups.append(group)
    return groups


def _num_tokens(group: Group) -> int:
    """Return the tokens to send, inserted ones included."""
    return sum(len(r.tokens) for r in group.kept)


def _train_group(group: Group, policy_version: int) -> TrainGroup:
    responses: list[TrainResponse] = []
    for r in group.kept:
        assert r.reward is not None
        assert r.finish_reason is not None
        stale = sum(tokens for version, tokens in r.spans if version < policy_version)
        if r.turns:
            stale = r.num_before(policy_version)
        responses.append(
            TrainResponse(
                r.id,
                encode(r.tokens),
                encode(r.logprobs),
                r.reward,
                r.finish_reason,
                pack_mask(len(r.tokens), [(t.start, t.end) for t in r.turns]) if r.turns else b"",
                num_stale=stale,
            )
        )
    return TrainGroup(group.id, group.prompt.tokens, tuple(responses), group.mini_batch or 0)
