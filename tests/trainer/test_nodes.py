"""The leader's view of the nodes that follow it: what ends the life of all ranks, and what of
another life is dropped."""

import asyncio

import pytest

from lightrl.errors import TrainerError
from lightrl.messages.trainers import TrainerRelay
from lightrl.trainer.nodes.followers import Followers, RanksLost
from lightrl.trainer.nodes.protocol import (
    TO_FOLLOWER,
    TO_LEADER,
    EndRanks,
    RankFrame,
    RanksGone,
    StartRanks,
)
from lightrl.trainer.protocol import RANK_EVENTS, Done, StartRank

MEMBERS = (("u", 1), ("v", 2))


class Led:
    """A leader of two nodes with a rank each; `sent` is what it sent to them."""

    def __init__(self):
        self.sent = []
        self.followers = Followers(2, self.sent.append)
        self.followers.set_members(MEMBERS)
        self.life = self.followers.new_life()

    async def begin(self, folder):
        starts = [StartRank("{}", "m", rank, 3, "r", "w", "runs") for rank in (1, 2)]
        await self.life.begin(starts, 1, folder)

    def receive(self, node, message):
        self.followers.receive(TrainerRelay(node, TO_LEADER.encode(message)))

    @property
    def messages(self):
        return [(relay.node, TO_FOLLOWER.decode(relay.frame)) for relay in self.sent]

    async def ends(self):
        """Why."""
        async with asyncio.timeout(90):
            await self.life.watch()


def test_each_node_starts_its_ranks_and_what_they_say_is_heard_of_this_life_only(tmp_path):
    async def scenario():
        led = Led()
        await led.begin(tmp_path)
        assert [(n, m.starts[0].rank) for n, m in led.messages if isinstance(m, StartRanks)] == [
            ("u", 1),
            ("v", 2),
        ]
        proof = led.messages[0][1].proof
        [file] = tmp_path.iterdir()
        assert (str(file), file.read_text()) == (proof, led.life.name)
        frame = RANK_EVENTS.encode(Done(4))
        led.receive("v", RankFrame("another life", 2, RANK_EVENTS.encode(Done(3))))
        led.receive("u", RankFrame(led.life.name, 2, RANK_EVENTS.encode(Done(3))))  # not its own
        led.receive("v", RankFrame(led.life.name, 2, frame))
        assert await led.life.ranks[1].receive() == Done(4)
        await led.life.end(is_orderly=True)
        assert [m for _, m in led.messages[2:]] == [EndRanks(led.life.name, True)] * 2
        assert not list(tmp_path.iterdir())

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("happens", "kind", "why"),
    [
        (lambda led: led.followers.set_members(()), RanksLost, "trainer node u, v lost"),
        (
            lambda led: led.followers.set_members((("u", 1), ("v", 3))),
            RanksLost,
            "trainer node v lost",
        ),
        (lambda led: led.followers.disconnect(), RanksLost, "lost touch with the other"),
        (lambda led: led.receive("u", RanksGone(led.life.name, "x")), RanksLost, "^u: x$"),
        (lambda led: led.receive("u", RanksGone(led.life.name, "x", True)), TrainerError, "^u: x$"),
    ],
)
def test_what_ends_a_life(happens, kind, why):
    async def scenario():
        led = Led()
        happens(led)
        with pytest.raises(kind, match=why) as ended:
            await led.ends()
        assert type(ended.value) is kind

    asyncio.run(scenario())


def test_what_ends_no_life():
    async def scenario():
        led = Led()
        led.followers.set_members(MEMBERS)
        led.receive("u", RanksGone("another life", "x"))
        led.followers.receive(TrainerRelay("u", b"of another release"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await led.life.watch()

    asyncio.run(scenario())
