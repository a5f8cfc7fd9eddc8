"""The leader's view of the nodes that follow it: what ends the life of all ranks, and what of
another life is dropped."""

import asyncio
from dataclasses import replace

import pytest

from lightrl.config.run_file import parse_config
from lightrl.messages.trainers import TrainerRelay
from lightrl.trainer.nodes import node
from lightrl.trainer.nodes.followers import FRAMES, Followers, RankFrame, RanksLost
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    Done,
    LeaveBroadcast,
    RankFailed,
    StartRank,
)
from lightrl.trainer.rank_processes import Place
from tests.support.trainer_coordinator import turns, until

MEMBERS = (("u", 1), ("v", 2))
STARTS = [StartRank("{}", "m", rank, 3, "r", "w", "runs") for rank in (1, 2)]


class Led:
    """A leader of two nodes with a rank each; `sent` is what it sent to them."""

    def __init__(self):
        self.sent = []
        self.followers = Followers(2, self.sent.append)
        self.followers.set_members(MEMBERS)
        self.ranks = self.followers.start(STARTS, 1)
        self.life = self.frames[0][1].life

    def receive(self, node, rank, event, life=None):
        frame = RankFrame(life or self.life, rank, RANK_EVENTS.encode(event))
        self.followers.receive(TrainerRelay(node, FRAMES.encode(frame)))

    @property
    def frames(self):
        return [(relay.node, FRAMES.decode(relay.frame)) for relay in self.sent]

    async def ends(self):
        """Why."""
        async with asyncio.timeout(90):
            await self.followers.watch()


def test_each_node_starts_its_ranks_and_events_of_this_life_are_received():
    async def scenario():
        led = Led()
        assert [(n, RANK_COMMANDS.decode(m.frame)) for n, m in led.frames] == [
            ("u", STARTS[0]),
            ("v", STARTS[1]),
        ]
        led.receive("v", 2, Done(3), "another life")
        led.receive("u", 2, Done(3))  # not its own
        led.receive("v", 2, Done(4))
        led.receive("v", 2, RankFailed("x"))
        assert await led.ranks[1].receive() == Done(4)
        assert await led.ranks[1].receive() == RankFailed("x")
        led.followers.end()
        assert led.frames[2:] == [(n, RankFrame(led.life, 0)) for n in ("u", "v")]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (lambda led: led.followers.set_members(()), "trainer node u, v lost"),
        (lambda led: led.followers.set_members((("u", 1), ("v", 3))), "trainer node v lost"),
        (lambda led: led.followers.disconnect(), "connection to the other trainer nodes"),
    ],
)
def test_what_ends_a_life(happens, why):
    async def scenario():
        led = Led()
        happens(led)
        with pytest.raises(RanksLost, match=why):
            await led.ends()

    asyncio.run(scenario())


def test_what_ends_no_life():
    async def scenario():
        led = Led()
        led.followers.set_members(MEMBERS)
        led.followers.receive(TrainerRelay("u", b"of another release"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await led.followers.watch()

    asyncio.run(scenario())


def test_a_follower_carries_out_an_end_while_it_looks_for_the_folder(tmp_path, monkeypatch):
    config = parse_config(
        {
            "model": {"path": str(tmp_path)},
            "data": {"path": "unused"},
            "rollout": {"engine": "emulated"},
            "train": {"engine": "emulated", "nodes": 2, "ranks": 2},
        }
    )
    missing = str(tmp_path / "missing")
    sent = asyncio.Queue()

    async def scenario():
        follower = node.FollowerNode(config, Place(tmp_path, tmp_path), sent.put_nowait)
        running = asyncio.create_task(follower.run())

        def send(life, rank, frame=b""):
            frame = FRAMES.encode(RankFrame(life, rank, frame))
            follower.receive(TrainerRelay("leader", frame))

        def start(life):
            for command in STARTS:
                start = replace(command, rendezvous=missing)
                send(life, command.rank, RANK_COMMANDS.encode(start))

        monkeypatch.setattr(node, "SEEN_S", 3600.0)
        start("one")
        send("one", 1, RANK_COMMANDS.encode(LeaveBroadcast()))
        await until(lambda: follower._life == "one")
        await turns()
        send("one", 0)
        await until(lambda: not follower._life)
        assert sent.empty()
        monkeypatch.setattr(node, "SEEN_S", 0.0)
        start("two")
        for rank in (1, 2):
            relay = await sent.get()
            frame = FRAMES.decode(relay.frame)
            event = RANK_EVENTS.decode(frame.frame)
            assert (relay.node, frame.life, frame.rank) == ("leader", "two", rank)
            assert event.is_final
            assert "does not see" in event.reason
        follower.stop()
        send("two", 0)
        await running

    asyncio.run(asyncio.wait_for(scenario(), 60))
