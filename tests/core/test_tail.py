"""Tail batching: which rounds follow each other, what is put off, and until when."""

import random
from collections import Counter, deque
from dataclasses import replace

import pytest

from lightrl.core.commands import CloseRound, ScoreResponse
from lightrl.core.coordinator import Coordinator
from lightrl.core.log_entries import Counters, SnapshotBegan, SnapshotEnded
from lightrl.core.recovery import recover
from lightrl.core.rounds.backlog import Backlog, Deferred
from lightrl.core.rounds.rounds import sample_seed
from lightrl.core.settings import Tail
from lightrl.core.state import DrawnPrompt
from lightrl.errors import InvariantViolation
from lightrl.messages.training import TrainShard
from tests.core.conftest import Driver, held_out, ids, of_kind, sent
from tests.support.tiers import e2e


def length(name: str) -> int:
    return 1 + random.Random(name).randrange(9)


def tail(
    eta_prompts: float, eta_responses: float = 1.0, fresh_noise: bool = False, **changes: object
) -> Driver:
    settings = {
        "prompts_per_step": 4,
        "group_size": 2,
        "num_steps": 12,
        "slots": 99,
        "foresight": False,
    }
    d = Driver(tail=Tail(eta_prompts, eta_responses, fresh_noise=fresh_noise), **settings | changes)
    d.start("a")
    return d


def kinds(d: Driver, rounds: int) -> str:
    """First letters of the kinds of rounds."""
    return "".join(r.kind[0] for r in d.play(length, rounds=rounds))


def queue(d: Driver) -> list[str]:
    return [p.prompt.id for p in d.core.backlog.deferred]


@pytest.mark.parametrize(
    ("eta", "prompts", "pattern"),
    [
        (1.25, 4, "ssssl" * 3),
        (1.125, 8, "ssssssssl" * 2),
        (1.5, 4, "ssl" * 4),
        (2.0, 4, "sl" * 4),
        (1.0, 4, "pppp"),
    ],
)
def test_long_rounds_come_when_as_many_are_put_off_as_a_step_holds(
    eta: float, prompts: int, pattern: str
):
    d = tail(eta, prompts_per_step=prompts, num_steps=20)
    assert kinds(d, len(pattern)) == pattern


@pytest.mark.parametrize(
    ("etas", "launched"),
    [((1.0, 1.0), (4, 4)), ((1.25, 1.0), (5, 4)), ((1.25, 1.25), (5, 5)), ((1.5, 2.0), (6, 8))],
)
def test_short_round_launches_its_surplus_and_keeps_a_step(
    etas: tuple[float, float], launched: tuple[int, int]
):
    d = tail(*etas, group_size=4)
    assert (len(d.round.groups), {len(g.responses) for g in d.round.groups.values()}) == (
        launched[0],
        {launched[1]},
    )
    [closed] = d.play(length)
    assert len(closed.accepted) == 4
    assert {len(g.kept) for g in closed.accepted} == {4}


def test_long_round_runs_the_prompts_put_off_in_their_order_without_surplus():
    d = tail(1.25, 1.5)
    d.play(length, rounds=4)
    assert d.round.kind == "long"
    assert [g.id for g in d.round.groups.values()] == [f"{p}@0" for p in put_off_in(d, 4)]
    assert {len(g.responses) for g in d.round.groups.values()} == {2}
    assert queue(d) == []


def put_off_in(d: Driver, rounds: int) -> list[str]:
    """What a run like this has put off, in order."""
    again = Driver(shuffled=d.shuffled)
    again.core = Coordinator(d.core.settings, now=0.0)
    again.start("a")
    closed = again.play(length, rounds=rounds)
    return [g.prompt.id for r in closed for g in r.groups.values() if g.state == "deferred"]


def test_queue_is_first_in_first_out_over_many_steps():
    d = tail(1.5, num_steps=9)
    closed = d.play(length, rounds=9)
    put_off = [g.prompt.id for r in closed for g in r.groups.values() if g.state == "deferred"]
    taken = [g.prompt.id for r in closed if r.kind == "long" for g in r.groups.values()]
    assert taken == put_off[: len(taken)]
    assert len(taken) == 12


@pytest.mark.parametrize("eta", [1.25, *e2e([1.125, 1.5, 2.0])])
def test_nobody_waits_longer_than_a_period_of_rounds(eta: float):
    prompts = 8
    d = tail(
        eta, group_size=1, prompts_per_step=prompts, num_steps=30, num_prompts=100, shuffled=True
    )
    since: dict[str, int] = {}
    for r in d.play(length, rounds=30):
        for g in r.groups.values():
            if g.state == "deferred":
                since[g.id] = r.step
            elif g.id in since:
                period = prompts // (round(eta * prompts) - prompts)
                assert r.step - since.pop(g.id) <= period + 1


@pytest.mark.parametrize(
    ("eta", "num_steps", "pattern"),
    [
        (1.5, 1, "f"),  # nothing could train what a race would put off
        (1.5, 2, "sf"),
        (1.5, 4, "sslf"),
        (1.5, 5, "sslsf"),
        (1.25, 7, "sssslsf"),
        (1.25, 5, "ssssl"),
        (2.0, 4, "slsl"),
        (3.0, 4, "sllf"),
        (4.0, 3, "fff"),  # a race would put three steps off, and two are left
    ],
)
def test_the_last_rounds_of_a_run_train_what_was_put_off(eta: float, num_steps: int, pattern: str):
    d = tail(eta, num_steps=num_steps)
    closed = d.play(length, rounds=num_steps)
    assert "".join(r.kind[0] for r in closed) == pattern
    assert queue(d) == []
    trained = [g.id for r in closed for g in r.accepted]
    assert len(trained) == len(set(trained)) == 4 * num_steps


def test_rounds_that_only_race_responses_put_nothing_off_until_the_end():
    assert kinds(tail(1.0, 1.5, num_steps=3), 3) == "sss"


def test_a_run_that_is_extended_was_flushed_where_it_had_ended():
    d = tail(1.5, num_steps=1)
    assert d.round.kind == "flush"
    longer = Coordinator(replace(d.core.settings, num_steps=4), d.now)
    recover(longer, d.segment, d.now)
    assert [r.kind for r in longer.table.rounds] == ["flush"]
    other = Coordinator(replace(d.core.settings, tail=Tail()), d.now)
    with pytest.raises(InvariantViolation, match="was flush, and now would be plain"):
        recover(other, d.segment, d.now)


def test_rest_of_an_epoch_is_flushed_also_when_nobody_waits():
    d = tail(1.5, num_prompts=14)
    assert kinds(d, 3) == "ssl"
    # the last two of the epoch, and two of the next: a race would mix epochs
    assert d.round.kind == "flush"
    assert [g.id.split("@")[1] for g in d.round.groups.values()] == ["0", "0", "1", "1"]


def test_flush_takes_the_queue_then_the_epoch_and_then_the_next_one():
    d = tail(1.5, num_prompts=7)
    d.play(length, rounds=1)
    held = put_off_in(d, 1)
    assert d.round.kind == "flush"
    [left] = {f"p{i}" for i in range(7)} - {f"p{i}" for i in range(6)}
    first = next(f"p{i}" for i in range(7) if f"p{i}" not in held)
    assert [g.id for g in d.round.groups.values()] == [
        f"{held[0]}@0",
        f"{held[1]}@0",
        f"{left}@0",
        f"{first}@1",
    ]
    assert queue(d) == []


def test_prompt_of_the_next_epoch_is_held_back_while_it_waits_from_the_last_one():
    d = tail(1.5, num_prompts=7)
    d.play(lambda name: 9 if name[:2] in {"p0", "p1"} else 1, rounds=1)
    flush = [g.id for g in d.round.groups.values()]
    assert flush == ["p0@0", "p1@0", "p6@0", "p2@1"]
    assert [(p.id, p.epoch) for p in d.core.backlog.held_back] == [("p0", 1), ("p1", 1)]
    d.play(length, rounds=1)
    assert [g.id for g in d.round.groups.values()][:2] == ["p0@1", "p1@1"]  # first, and not lost


@pytest.mark.parametrize("etas", [(1.0, 1.0), (1.25, 1.0), (1.5, 1.5)])
@pytest.mark.parametrize("num_prompts", [17, *e2e([12, 30])])
def test_every_prompt_is_trained_exactly_once_per_epoch(
    etas: tuple[float, float], num_prompts: int
):
    d = tail(*etas, num_prompts=num_prompts, num_steps=30, shuffled=True)
    closed = d.play(length, rounds=30)
    trained = Counter(g.id for r in closed for g in r.accepted)
    assert set(trained.values()) == {1}
    complete = 120 // num_prompts - 2  # the last epochs are still under way
    assert {f"p{i}@{e}" for e in range(complete) for i in range(num_prompts)} <= trained.keys()


def test_prompt_that_was_put_off_starts_again_with_the_noise_it_had():
    d = tail(2.0)
    first = {name: request.seed for name, (_, request) in d.requests.items()}
    d.play(length, rounds=1)
    assert d.round.kind == "long"
    for group in d.round.groups.values():
        for r in group.responses:
            assert first[r.id] == r.seed == d.requests[r.id][1].seed
            assert d.requests[r.id][1].prefix == b""


def test_fresh_noise_gives_another_seed():
    d = tail(2.0, fresh_noise=True)
    d.play(length, rounds=1)
    assert d.round.kind == "long"
    for group in d.round.groups.values():
        assert group.id == f"{group.prompt.id}@0'1"
        assert (
            group.responses[0].seed
            == sample_seed(0, f"{group.id}#0")
            != sample_seed(0, f"{group.prompt.id}@0#0")
        )


def test_late_chunk_of_a_short_round_does_not_count_in_the_long_one():
    d = tail(2.0)
    d.play(length, rounds=1)
    name = next(iter(d.round.groups.values())).responses[0].id
    old = d.requests[name][1].attempt - 1
    assert old >= 1
    d.tokens(name, 7, 7, attempt=old, offset=0, version=1)
    assert len(d.held(name).tokens) == 0
    assert d.core.table.counters.chunks_ignored == 1
    d.tokens(name, 8)
    assert list(d.held(name).tokens) == [8]


def test_late_score_of_a_short_round_does_not_count_in_the_long_one():
    d = tail(2.0, prompts_per_step=1, group_size=1)
    d.tokens("p1@0#0", 9, 9, 9, finish="stop")  # its score is late
    d.decode(lambda _: 1)
    d.next_step()
    assert (d.round.kind, d.held("p1@0#0").attempt) == ("long", 2)
    [score] = of_kind(d.tokens("p1@0#0", 9, 9, finish="stop"), ScoreResponse)
    assert score.response.attempt == 2
    d.score("p1@0#0", 0.0, attempt=1)
    assert (d.held("p1@0#0").scored, d.round.state) == (False, "running")
    [closed] = of_kind(d.score("p1@0#0", 1.0), CloseRound)
    assert closed.round.accepted[0].kept[0].reward == 1.0


def test_prompt_that_took_long_in_the_last_epoch_is_put_off_unseen():
    d = tail(1.5, foresight=True, num_prompts=12)
    closed = d.play(lambda name: 9 if name.startswith("p6@") else 2, rounds=6)
    rounds = [(r.kind, g.id) for r in closed for g in r.groups.values() if g.prompt.id == "p6"]
    assert rounds == [("short", "p6@0"), ("long", "p6@0"), ("long", "p6@1")]


def test_unseen_prompt_is_not_put_off_without_foresight():
    d = tail(1.5, foresight=False, num_prompts=12)
    closed = d.play(lambda name: 9 if name.startswith("p6@") else 2, rounds=6)
    assert [r.kind for r in closed for g in r.groups.values() if g.id == "p6@1"] == [
        "short",
        "long",
    ]


def test_at_most_half_of_the_surplus_is_put_off_unseen():
    d = tail(2.0, foresight=True, num_prompts=8, num_steps=20)
    for r in d.play(lambda name: 9 if int(name[1]) > 2 else 1, rounds=12):
        if r.kind == "short":
            assert len(r.groups) >= 4 + 2


def test_core_that_is_started_with_a_backlog_goes_on_as_one_that_was_never_interrupted():
    def run(d: Driver, rounds: int) -> list[list[str]]:
        return [[x.id for g in r.accepted for x in g.kept] for r in d.play(length, rounds=rounds)]

    whole = tail(1.5, num_prompts=17, num_steps=12, deterministic=True)
    expected = run(whole, 12)
    for stop in range(1, 12):
        first = tail(1.5, num_prompts=17, num_steps=12, deterministic=True)
        run(first, stop - 1)
        first.decode(length)
        first.train(stop - 1)  # no node serves the new version yet: no round is open
        second = Driver()
        second.core, second.segment = first.core, first.segment
        second.restart()
        second.join("t", "trainer")
        second.publish(stop)
        second.join("b", slots=99)
        second.confirm("b", stop)
        assert run(second, 12 - stop) == expected[stop:], f"resumed at step {stop}"


def test_evaluation_that_was_done_is_not_repeated_by_a_resumed_core():
    d = Driver(eval_sets=held_out(1), eval_interval=1)
    stood = SnapshotBegan(1, num_drawn=2, evaluated=1, counters=Counters(groups_trained=2))
    recover(d.core, [stood, SnapshotEnded()], 0.0)
    d.join("t", "trainer")
    d.publish(1)
    d.join("a")
    d.confirm("a", 1)
    assert (d.round.kind, d.round.step) == ("plain", 1)


def test_of_one_prompt_that_waits_twice_a_round_takes_the_older_epoch():
    held = [
        Deferred(DrawnPrompt(name, epoch, ids(1)), 1, 0)
        for name, epoch in [("a", 0), ("a", 1), ("b", 0)]
    ]
    backlog = Backlog(10, deferred=deque(held))
    assert backlog.pop_oldest(2) == [held[0], held[2]]
    assert list(backlog.deferred) == [held[1]]


def test_nothing_is_certain_while_some_of_a_rounds_prompts_are_yet_to_be_read():
    """One that was held back runs at once; those that are not there yet may all be shorter."""
    d = Driver(prompts_per_step=1, group_size=1, tail=Tail(2.0, 1.0), num_prompts=1000)
    d.reads_slowly = True
    d.core.backlog.held_back.append(DrawnPrompt("p999", 0, ids(1)))
    d.core.backlog.num_drawn = 1
    d.drawn = 1
    d.start("a")
    d.tokens("p999@0#0", 7, 7, 7)
    early = d.tokens("p999@0#0", 7, finish="stop") + d.score("p999@0#0")
    assert sent(early, TrainShard) == []
    d.answer_draw()
    [other] = d.running()
    shards = sent(d.finish(other), TrainShard)
    assert [g.group for _, shard in shards for g in shard.groups] == [other.partition("#")[0]]
