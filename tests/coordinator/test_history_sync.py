"""What nodes are told of earlier responses, what they tell of speculation, and both over real
sockets."""

import asyncio
import contextlib
import json
import socket
import tracemalloc
from array import array
from pathlib import Path

import pytest

from lightrl.coordinator import history_sync
from lightrl.coordinator.history_sync import Histories
from lightrl.core.state import DrawnPrompt, Group, Response, Round, RoundKind
from lightrl.errors import ProtocolError
from lightrl.history.saved import FILE_NAME
from lightrl.history.store import History, answers
from lightrl.journal.disk import segments
from lightrl.messages.load import Drafting, Load
from lightrl.messages.nodes import PROTOCOL, Drain, Heartbeat, Hello
from lightrl.messages.responses import (
    Generate,
    PromptHistory,
    ResponseRequest,
    ResponseTokens,
    Sampling,
    TokenChunk,
)
from lightrl.messages.weights import PublishWeights, WeightsFailed, WeightsReady
from lightrl.metrics.totals import SpeculationMetrics
from lightrl.system.addresses import host_and_port
from lightrl.transport.link import Link
from lightrl.transport.validate import check_bounds
from lightrl.wire import MAX_FRAME_BYTES, MESSAGES, pack_f32, pack_i32
from tests.support.daemons import DEADLINE_S, QUICKSTART, Running, a_run
from tests.support.routers import until

HELLO = Hello("a", 1, ("rollout",), PROTOCOL, pid=1, host="h")


def opened(epoch: int, *prompts: str, kind: RoundKind = "plain", size: int = 2) -> Round:
    """A round in which nothing was sampled yet."""
    round = Round(kind, epoch, len(prompts), len(prompts), 0.0)
    for position, prompt in enumerate(prompts):
        label = f"eval{epoch}" if kind == "eval" else str(epoch)
        drawn = DrawnPrompt(prompt, 0 if kind == "eval" else epoch, b"")
        group = Group(f"{prompt}@{label}", drawn, round, position, size, Sampling(), 9)
        group.responses = [Response(f"{group.id}#{k}", group, k, 0) for k in range(size)]
        round.groups[group.id] = group
    return round


def finish(round: Round, response: str, tokens: list[int], reward: float | None = None) -> None:
    r = by_name(round)[response]
    r.tokens, r.finish_reason, r.reward = array("i", tokens), "stop", reward


def by_name(*rounds: Round) -> dict[str, Response]:
    return {r.id: r for round in rounds for group in round.groups.values() for r in group.responses}


def generate(*names: str) -> Generate:
    requests = tuple(ResponseRequest(name, 1, 0, b"", b"", 9) for name in names)
    return Generate(0, Sampling(), requests)


def knowing(*rounds: Round) -> History:
    history = History()
    for round in rounds:
        history.learn(answers(round))
    return history


def one_epoch(*prompts: str) -> Round:
    """Of each prompt the first response was 1 2 3 with a reward, the second was given up after
    4."""
    round = opened(0, *prompts)
    for prompt in prompts:
        finish(round, f"{prompt}@0#0", [1, 2, 3], 0.5)
        by_name(round)[f"{prompt}@0#1"].tokens = array("i", [4])
    return round


PAST = (pack_i32([4]), pack_i32([1, 2, 3]))  # what was given up is older than what was finished


def test_a_history_goes_along_once_for_each_node_and_group():
    h, now = Histories(knowing(one_epoch("p", "q"))), opened(1, "p", "q", "new")
    first = h.attach("a/1", generate("p@1#0", "p@1#1", "new@1#0"), by_name(now))
    assert first.requests == generate("p@1#0", "p@1#1", "new@1#0").requests
    assert first.histories == (PromptHistory("p@1", PAST, (None, 0.5)),)
    second = h.attach("a/1", generate("p@1#1", "q@1#0"), by_name(now))
    assert second.histories == (PromptHistory("q@1", PAST, (None, 0.5)),)
    other = h.attach("b/7", generate("p@1#1"), by_name(now))
    assert other.histories == first.histories


@pytest.mark.parametrize("news", [HELLO, WeightsFailed(3, "the engine died")])
def test_a_node_that_may_have_lost_them_gets_them_again(news):
    h, now = Histories(knowing(one_epoch("p"))), opened(1, "p")
    order = generate("p@1#0")
    sent = h.attach("a/1", order, by_name(now)).histories
    h.received("b/1", news)
    h.received("a/1", Heartbeat())
    assert h.attach("a/1", order, by_name(now)).histories == ()
    h.received("a/1", news)
    assert h.attach("a/1", order, by_name(now)).histories == sent


def test_finished_siblings_come_last_and_what_still_runs_is_left_out():
    h, now = Histories(knowing(one_epoch("p"))), opened(1, "p", size=4)
    by_name(now)["p@1#0"].tokens = array("i", [7, 7])  # this one goes on elsewhere
    finish(now, "p@1#2", [8, 8])
    finish(now, "p@1#3", [9], 1.0)
    [history] = h.attach("b/1", generate("p@1#0"), by_name(now)).histories
    assert history.responses == (*PAST, pack_i32([8, 8]), pack_i32([9]))
    assert history.rewards == (None, 0.5, None, 1.0)


def test_siblings_alone_are_worth_sending_and_nothing_is_not():
    h, now = Histories(History()), opened(0, "p")
    assert h.attach("a/1", generate("p@0#0"), by_name(now)).histories == ()
    finish(now, "p@0#1", [5])
    expected = (PromptHistory("p@0", (pack_i32([5]),), (None,)),)
    assert h.attach("a/1", generate("p@0#0"), by_name(now)).histories == expected
    assert h.attach("a/1", generate("p@0#0", "gone@0#0"), by_name(now)).histories == ()


def test_the_newest_sixteen_responses_within_a_mebibyte_are_sent(monkeypatch):
    past = opened(0, "p", size=20)
    for k in range(20):
        finish(past, f"p@0#{k}", [k] * 10)
    h, now = Histories(knowing(past)), opened(1, "p")
    finish(now, "p@1#1", [99])
    [history] = h.attach("a/1", generate("p@1#0"), by_name(now)).histories
    assert history.responses == (*(pack_i32([k] * 10) for k in range(5, 20)), pack_i32([99]))
    monkeypatch.setattr(history_sync, "MAX_PROMPT_BYTES", 4 * 21)
    [history] = h.attach("b/1", generate("p@1#0"), by_name(now)).histories
    assert history.responses == (pack_i32([18] * 10), pack_i32([19] * 10), pack_i32([99]))
    assert len(history.rewards) == 3


def test_a_message_stays_far_below_what_a_frame_may_have_and_the_rest_comes_with_the_next(
    monkeypatch,
):
    assert history_sync.MAX_MESSAGE_BYTES + history_sync.MAX_PROMPT_BYTES < MAX_FRAME_BYTES / 4
    monkeypatch.setattr(history_sync, "MAX_MESSAGE_BYTES", 2 * 16 + 15)
    h, now = Histories(knowing(one_epoch("p", "q", "r"))), opened(1, "p", "q", "r")
    order = generate("p@1#0", "q@1#0", "r@1#0")
    first = h.attach("a/1", order, by_name(now))
    assert [each.group for each in first.histories] == ["p@1", "q@1"]
    assert len(first.requests) == 3
    assert [each.group for each in h.attach("a/1", order, by_name(now)).histories] == ["r@1"]


def test_what_does_not_fit_into_a_message_is_not_copied_for_it(monkeypatch):
    """An order may be for a thousand groups, of which eight fit."""
    monkeypatch.setattr(history_sync, "MAX_MESSAGE_BYTES", 1 << 16)
    prompts = [f"p{k}" for k in range(256)]
    now = opened(0, *prompts)
    for prompt in prompts:
        finish(now, f"{prompt}@0#1", [7] * (1 << 14))
    h, order = Histories(History()), generate(*(f"{prompt}@0#0" for prompt in prompts))
    known = by_name(now)
    tracemalloc.start()
    try:
        assert len(h.attach("a/1", order, known).histories) == 1
        assert tracemalloc.get_traced_memory()[1] < 4 << 16
    finally:
        tracemalloc.stop()


def test_what_was_sent_is_forgotten_when_its_round_closes():
    """A prompt that was put off comes again, under the same name."""
    h, now, other = Histories(knowing(one_epoch("p", "q"))), opened(1, "p"), opened(1, "q")
    known = by_name(now, other)
    assert h.attach("a/1", generate("p@1#0", "q@1#0"), known).histories
    h.learn(now)
    again = h.attach("a/1", generate("p@1#0", "q@1#0"), known).histories
    assert [each.group for each in again] == ["p@1"]
    h.learn(now)
    h.learn(other)
    assert not h._sent


def test_an_evaluation_is_helped_by_the_one_before_and_not_by_the_training_data():
    first, now = opened(0, "p", kind="eval"), opened(5, "p", "q", kind="eval")
    finish(first, "p@eval0#0", [6, 6], 1.0)
    h = Histories(knowing(one_epoch("p", "q"), first))
    [history] = h.attach("a/1", generate("p@eval5#0", "q@eval5#0"), by_name(now)).histories
    assert history == PromptHistory("p@eval5", (pack_i32([6, 6]),), (1.0,))


def test_without_speculation_nothing_is_kept_and_nothing_travels():
    h, past, now = Histories(None), one_epoch("p"), opened(1, "p")
    assert h.learn(past) == {}
    finish(now, "p@1#1", [5])
    order = generate("p@1#0")
    assert h.attach("a/1", order, by_name(now)) == order


def beat(*counts: float) -> Heartbeat:
    return Heartbeat(Load(drafting=Drafting(*counts)))  # pyright: ignore[reportArgumentType]


def test_speculation_of_a_step_is_summed_over_nodes():
    s = SpeculationMetrics()
    for name in ("a/1", "b/1"):
        s.received(name, Heartbeat())
    assert s.figures() == {}  # no engine has said anything yet
    s.received("a/1", beat(100, 60, 40, 100, 0.25, 8.0))
    s.received("b/1", beat(20, 0, 40, 40, 0.0, 2.0))
    assert s.figures() == {
        "speculation/drafted": 120.0,
        "speculation/forwards": 80.0,
        "speculation/acceptance": 0.5,
        "speculation/tokens_per_forward": 140 / 80,
        "speculation/draft_share": 0.025,
    }
    assert s.figures() == {}  # nothing was heard since
    s.received("a/1", beat(100, 60, 50, 110, 0.25, 9.0))
    assert s.figures() == {
        "speculation/drafted": 0.0,
        "speculation/forwards": 10.0,
        "speculation/tokens_per_forward": 1.0,
        "speculation/draft_share": 0.0,
    }


def test_speculation_of_a_run_is_that_of_its_steps():
    s = SpeculationMetrics()
    s.received("a/1", Heartbeat())
    assert s.figures() == s.whole() == {}
    s.received("a/1", beat(0, 0, 5, 5, 0.0, 1.0))
    s.figures()
    assert s.whole() == {"speculation/drafted": 0.0, "speculation/tokens_per_forward": 1.0}
    for counts in ((100, 60, 45, 105, 0.25, 8.0), (120, 70, 65, 135, 0.25, 9.0)):
        s.received("a/1", beat(*counts))
        s.figures()
    assert s.whole() == {
        "speculation/drafted": 120.0,
        "speculation/acceptance": 70 / 120,
        "speculation/tokens_per_forward": 135 / 65,
    }


def test_an_engine_that_starts_again_counts_from_zero_and_a_node_that_left_keeps_what_it_did():
    s = SpeculationMetrics()
    s.received("a/1", Heartbeat())
    s.received("a/1", beat(100, 50, 40, 90, 0.1, 8.0))
    s.received("a/1", beat(10, 6, 5, 11, 0.0, 1.0))  # another engine
    s.received("a/1", Heartbeat())  # the next one has not counted yet
    s.received("b/1", Heartbeat())
    s.received("b/1", beat(1, 1, 1, 2, 0.0, 0.5))
    s.received("b/2", Heartbeat())  # the same name, another process
    s.received("b/2", beat(3, 1, 2, 3, 0.0, 0.5))
    figures = s.figures()
    assert figures["speculation/drafted"] == 114.0
    assert figures["speculation/acceptance"] == 58 / 114
    assert figures["speculation/tokens_per_forward"] == 106 / 48


def test_what_was_counted_for_an_earlier_coordinator_is_not_counted_again():
    s = SpeculationMetrics()
    s.received("a/1", beat(1000, 500, 400, 900, 1.0, 80.0))
    assert s.figures() == {}
    s.received("a/1", beat(1010, 510, 410, 920, 1.0, 81.0))
    assert s.figures()["speculation/tokens_per_forward"] == 2.0


# Over real sockets

PROMPTS = 4
CHANGES = {
    "rollout": {"slots": 64, "group_size": 2, "max_response_length": 8},
    "train": {"steps": 3, "prompts_per_step": PROMPTS},
    "round": {"tail_batching": "off"},
}


def few_prompts(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Data of which every step is an epoch."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join((QUICKSTART / "train.jsonl").read_text().splitlines(True)[:PROMPTS]))
    return {"data": {"path": str(data)}}


class ScriptedNode:
    """A rollout node without an engine: what it answers tells the version of the policy."""

    def __init__(self, until: int, dies_at: int = -1) -> None:
        """Requests of policy version `until` are kept, but not answered. At the first of version
        `dies_at` its engine is said to have died, and to have started again."""
        self.orders: list[Generate] = []
        self.is_asked = asyncio.Event()  # for a version that it does not answer
        self._until = until
        self._dies_at = dies_at
        self._drafted = 0

    async def run(self, address: str, key: str) -> None:
        link = await Link.connect(address, "scripted", key)
        link.send(Hello("scripted", 1, ("rollout",), PROTOCOL, pid=0, host="test", slots=64))
        beating = asyncio.create_task(self._beat(link))
        digests: dict[int, str] = {}
        try:
            while True:
                for message in await link.receive():
                    match message:
                        case PublishWeights(version, digest):
                            digests[version] = digest
                            link.send(WeightsReady(version, digest))
                        case Generate(version):
                            self.orders.append(message)
                            if version == self._dies_at:
                                self._dies_at = -1
                                link.send(WeightsFailed(version, "the engine died"))
                            elif version < self._until:
                                items = tuple(_answer(r, version) for r in message.requests)
                                self._count(link)
                                link.send(TokenChunk(version, digests[version], items))
                            else:
                                self.is_asked.set()
                        case Drain():
                            return
                        case _:
                            pass
        finally:
            beating.cancel()
            link.close()

    async def _beat(self, link: Link) -> None:
        link.send(Heartbeat())
        while True:
            await asyncio.sleep(0.05)
            self._count(link)

    def _count(self, link: Link) -> None:
        self._drafted += 8
        n = self._drafted
        link.send(beat(n, n // 2, n // 4, n, n / 1000, n / 10))


def words(response: str, version: int) -> bytes:
    return pack_i32([3 + version, *(2 + ord(c) % 8 for c in response[-3:]), 1])


def _answer(r: ResponseRequest, version: int) -> ResponseTokens:
    tokens = words(r.response, version)
    return ResponseTokens(
        r.response, r.attempt, 0, tokens, pack_f32([-1.0] * (len(tokens) // 4)), "stop"
    )


def require_history(node: ScriptedNode, version: int, times: int = 1) -> None:
    """Every group of the version came with all that its prompt was answered under the version
    before."""
    orders = [o for o in node.orders if o.policy_version == version]
    groups = {r.response.rpartition("#")[0] for o in orders for r in o.requests}
    sent = [each for o in orders for each in o.histories]
    assert len(groups) == PROMPTS
    assert sorted(each.group for each in sent) == sorted([*groups] * times)
    for each in sent:
        prompt = each.group.rpartition("@")[0]
        before = tuple(words(f"{prompt}@{version - 1}#{k}", version - 1) for k in range(2))
        assert each.responses == before
        assert None not in each.rewards


async def serve(run: Running, node: ScriptedNode, is_over: asyncio.Event | None) -> None:
    """Until the event, or the end of the run."""
    serving = asyncio.create_task(node.run(run.head.address, run.key))
    try:
        if is_over is None:
            await run.until_finished()
            assert run.head.succeeded
        else:
            await asyncio.wait_for(is_over.wait(), DEADLINE_S)
            journal = run.config.run_dir / "journal"
            await until(
                lambda: any(s.step == 1 for s in segments(journal))
            )  # else a resume closes it once more
            await run.silence()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def until_free(address: str) -> None:
    """The port of a coordinator that vanished is set free by a thread of ZeroMQ."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(host_and_port(address))
                return
            await asyncio.sleep(0)


def test_the_next_epoch_travels_with_what_the_last_one_brought_also_after_a_resume(tmp_path: Path):
    changes = {**CHANGES, **few_prompts(tmp_path)}

    async def scenario():
        async with a_run(tmp_path, **changes) as run:
            before = ScriptedNode(until=1)
            await serve(run, before, before.is_asked)
        assert all(o.histories == () for o in before.orders if o.policy_version == 0)
        require_history(before, 1)
        await until_free(run.head.address)
        async with a_run(tmp_path, resume=True, **changes) as run:
            run.trainer.begins_at = 1
            after = ScriptedNode(until=3)
            await serve(run, after, None)
        require_history(after, 1)  # from the file
        require_history(after, 2)

    asyncio.run(scenario())
    records = [
        json.loads(line) for line in (tmp_path / "test" / "metrics.jsonl").read_text().splitlines()
    ]
    hits = {r["step"]: r["history/hit_rate"] for r in records if "history/hit_rate" in r}
    assert (hits[1], hits[2], hits[3]) == (0.0, 1.0, 1.0)
    told = {r["step"]: r for r in records if "speculation/drafted" in r}
    assert sorted(told) == [1, 2, 3]
    assert {r["speculation/acceptance"] for r in told.values()} == {0.5}
    assert {r["speculation/tokens_per_forward"] for r in told.values()} == {4.0}
    assert [r["speculation/draft_share"] for r in told.values()] == pytest.approx([0.01] * 3)


def test_a_node_whose_engine_died_is_sent_the_histories_again(tmp_path: Path):
    changes = {
        **CHANGES,
        **few_prompts(tmp_path),
        "train": {"steps": 2, "prompts_per_step": PROMPTS},
    }

    async def scenario():
        async with a_run(tmp_path, **changes) as run:
            node = ScriptedNode(until=2, dies_at=1)
            await serve(run, node, None)
        require_history(node, 1, times=2)

    asyncio.run(scenario())


def test_without_speculation_a_run_keeps_and_sends_nothing(tmp_path: Path):
    off = {"speculation": {"enabled": False}, "train": {"steps": 2, "prompts_per_step": PROMPTS}}

    async def scenario():
        async with a_run(tmp_path, **{**CHANGES, **few_prompts(tmp_path), **off}) as run:
            node = ScriptedNode(until=2)
            await serve(run, node, None)
        assert len(node.orders) >= 2
        assert all(order.histories == () for order in node.orders)

    asyncio.run(scenario())
    assert not (tmp_path / "test" / FILE_NAME).exists()
    assert "history/" not in (tmp_path / "test" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    "counts",
    [
        Drafting(drafted=-1),
        Drafting(accepted=1 << 53),
        Drafting(forwards=-(1 << 40)),
        Drafting(emitted=1 << 60),
        Drafting(draft_s=float("nan")),
        Drafting(engine_s=float("inf")),
        Drafting(engine_s=-0.1),
    ],
)
def test_what_no_engine_counts_is_refused(counts):
    check_bounds(Heartbeat(Load(drafting=Drafting(9, 8, 7, 15, 0.1, 2.0))))
    with pytest.raises(ProtocolError):
        check_bounds(MESSAGES.decode(MESSAGES.encode(Heartbeat(Load(drafting=counts)))))


def test_the_longest_message_with_histories_is_one_that_a_link_takes():
    most = history_sync.MAX_MESSAGE_BYTES // history_sync.MAX_PROMPT_BYTES
    each = bytes(history_sync.MAX_PROMPT_BYTES)
    sent = tuple(PromptHistory(f"p{k}@1", (each,), (None,)) for k in range(most))
    frame = MESSAGES.encode(Generate(0, Sampling(), (), sent))
    assert len(MESSAGES.decode(frame).histories) == most  # pyright: ignore[reportAttributeAccessIssue]
