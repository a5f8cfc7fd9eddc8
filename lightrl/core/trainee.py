"""The trainer node as the core sees it: where it stands, and which shards it gets next.

Owns what was sent to it since its last hello. A trainer that comes back begins where its checkpoint, or
its memory, says; what it has trained before is sent again as it was. Which groups belong to a step is
decided in `race` and `steps`.
"""

from lightrl.core.arrays import encode
from lightrl.core.commands import Command, Record, ReplayShards, Send
from lightrl.core.facts import ShardSent
from lightrl.core.fleet import Fleet
from lightrl.core.state import Group, Round, RoundState
from lightrl.messages import TrainGroup, TrainResponse, TrainShard

MAX_SHARD_TOKENS = 1 << 21  # some 16 MiB with their logprobs


class Trainee:
    def __init__(self, fleet: Fleet) -> None:
        self.stands_at: int | None = None  # it trains this step next; None: it has not said so yet
        self.missing_since: float | None = None  # when it was lost; None: it is here, or was never
        self.num_hellos = 0
        self.has_left = False  # in order, with nothing left to do
        self._fleet = fleet

    def hello(self) -> None:
        """It has come, or come back: what it held of a step that is not done, it holds no more."""
        self.num_hellos += 1
        self.stands_at = None
        self.missing_since = None

    def lost(self, now: float) -> None:
        self.stands_at = None
        self.missing_since = now

    def feed(self, round: Round | None, out: list[Command]) -> None:
        """It stands at a new step: that step's shards, of this round or, if it was trained before, again."""
        published = self._fleet.published
        if self.stands_at is None or self._fleet.trainer is None or published is None:
            return
        if self.stands_at < published.policy_version:
            out.append(ReplayShards(self._fleet.trainer, self.stands_at, self.num_hellos))
        elif round is not None and round.step == self.stands_at:
            round.num_sent = round.num_shards = 0
            self.send(round, out)

    def send(self, round: Round, out: list[Command]) -> None:
        """What it has not had yet of the round it is at; the last shard closes the step."""
        last = round.state is RoundState.CLOSED
        if self._fleet.trainer is None or self.stands_at != round.step:
            return
        while (groups := _next_groups(round)) or last:
            round.num_sent += len(groups)
            is_last = last and round.num_sent == len(round.accepted)
            shard = TrainShard(
                step=round.step,
                index=round.num_shards,
                policy_version=round.step,
                groups=tuple(_train_group(g) for g in groups),
                last=is_last,
                num_groups=len(round.accepted),
            )
            round.num_shards += 1
            out += [Record(ShardSent(shard)), Send(self._fleet.trainer, shard)]
            if is_last:
                return


def _next_groups(round: Round) -> list[Group]:
    """As many as one message should carry: a frame has a limit, and a whole step may be due at once."""
    groups: list[Group] = []
    num_tokens = 0
    for group in round.accepted[round.num_sent :]:
        num_tokens += sum(len(r.tokens) for r in group.kept)
        if groups and num_tokens > MAX_SHARD_TOKENS:
            break
        groups.append(group)
    return groups


def _train_group(group: Group) -> TrainGroup:
    responses: list[TrainResponse] = []
    for r in group.kept:
        assert r.reward is not None
        assert r.finish_reason is not None
        responses.append(TrainResponse(r.id, encode(r.tokens), encode(r.logprobs), r.reward, r.finish_reason))
    return TrainGroup(group.id, group.prompt.tokens, tuple(responses))
