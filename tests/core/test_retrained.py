"""Versions that a trainer trained again after a restart, and that came out with other bits."""

import math
from array import array
from dataclasses import replace

import pytest

from lightrl.core.commands import Command, Record, Report
from lightrl.core.events import MessageArrived, NodeLost
from lightrl.core.log_entries import VersionPublished, VersionRetrained
from lightrl.messages.nodes import Drain
from lightrl.messages.responses import Generate, ResponseTokens, TokenChunk
from lightrl.messages.weights import Canary, DeltaOffer, PublishWeights, WeightsReady
from tests.core.conftest import Driver, ids, logprobs, of_kind, publication, sent
from tests.core.test_worlds import NUM_EVENTS, check_against_oracle, check_end, settings
from tests.core.world import World
from tests.support.tiers import e2e

TOLERANCES = {"float32": 1e-3, "bfloat16": 1.0}


def canary(*values: float, text: tuple[int, ...] = (), dtype: str = "float32") -> Canary:
    text = text or tuple(range(len(values) + 1))
    return Canary(ids(*text), array("f", values).tobytes(), dtype)


OLD, NEAR, FAR = canary(-1.0, -2.0), canary(-1.0, -2.0005), canary(-1.0, -2.5)


def run_of(steps: int, known: Canary | None = OLD, **changes: object) -> Driver:
    """So many steps of a run with nodes "a" and "b", whose trainer is then lost."""
    d = Driver(**{"num_steps": 9, "canary_tolerances": TOLERANCES, **changes})
    d.start("a", "b", slots=int(str(changes.get("slots", 9))))
    for step in range(steps):
        while running := d.running():
            d.finish(running[0])
        d.feed(MessageArrived("t", replace(publication(step + 1), canary=known)))
        d.train(step)
        d.confirm("a", step + 1)
        d.confirm("b", step + 1)
    d.feed(NodeLost("t", "gone"))
    return d


def come_back(d: Driver, version: int) -> list[Command]:
    return [*d.join("t", "trainer", incarnation=2), *d.publish(version)]


def again(d: Driver, version: int, canary: Canary | None = NEAR, **fields: object) -> list[Command]:
    message = replace(publication(version), digest=f"other-{version}", canary=canary, **fields)
    return d.feed(MessageArrived("t", message))


def entries(commands: list[Command]) -> list[VersionRetrained]:
    made = [c.entry for c in of_kind(commands, Record)]
    assert not [e for e in made if isinstance(e, VersionPublished)]
    return [e for e in made if isinstance(e, VersionRetrained)]


def failures(commands: list[Command]) -> set[str]:
    return {m.reason for _, m in sent(commands, Drain)}


def test_nodes_load_it_and_the_journal_says_how_far_it_is_from_the_one_before():
    d = run_of(2)
    come_back(d, 1)
    commands = again(d, 2)
    [entry] = entries(commands)
    assert (entry.version, entry.replaced, entry.digest) == (2, "digest-2", "other-2")
    assert entry.largest == pytest.approx(5e-4, rel=1e-3)
    assert entry.mean == pytest.approx(2.5e-4, rel=1e-3)
    [warning] = [c.text for c in of_kind(commands, Report) if c.is_warning]
    assert warning == (
        "version 2 was trained again and came out different: logprobs of the canary differ by up "
        "to 0.0005, by 0.00025 on average; nodes load it instead of the one before"
    )
    told = dict(sent(commands, PublishWeights))
    found = {n: (m.digest, m.canary) for n, m in told.items()}
    assert found == dict.fromkeys("ab", ("other-2", NEAR))
    # Nodes that hold the old one are no sources of the new one, before they have it.
    for name in "ab":
        assert "t" in [s.node for s in told[name].sources]
    assert list(d.core.fleet.sources.complete) == []
    d.confirm("a", 2, "other-2")
    assert d.core.fleet.ready.keys() == {"a"}
    assert list(d.core.fleet.sources.complete) == ["a"]


def test_a_node_that_has_just_loaded_the_old_one_is_neither_ready_nor_blamed():
    d = run_of(2)
    d.join("late", slots=4)
    come_back(d, 1)
    again(d, 2)
    late = WeightsReady(2, "digest-2")
    for _ in range(4):
        assert failures(d.feed(MessageArrived("late", late))) == set()
    assert "late" not in d.core.fleet.ready
    d.confirm("late", 2, "other-2")
    assert "late" in d.core.fleet.ready


def test_tokens_of_the_old_one_are_kept_and_their_responses_go_on():
    d = run_of(2)
    come_back(d, 1)
    response = d.running()[0]
    node, request = d.requests[response]
    d.tokens(response, 5, 6)
    again(d, 2)
    for digest, offset, token in (("digest-2", 2, 7), ("other-2", 3, 8)):
        item = ResponseTokens(response, request.attempt, offset, ids(token), logprobs(1))
        d.feed(MessageArrived(node, TokenChunk(2, digest, (item,))))
    assert list(d.held(response).tokens) == [5, 6, 7, 8]
    assert d.held(response).starts == [(2, 0)]
    assert node in d.core.fleet.nodes
    item = ResponseTokens(response, request.attempt, 4, ids(9), logprobs(1))
    d.feed(MessageArrived(node, TokenChunk(2, "never heard of", (item,))))
    assert node not in d.core.fleet.nodes


def test_no_work_goes_to_a_node_before_it_has_the_new_one():
    d = run_of(2, slots=1)
    come_back(d, 1)
    again(d, 2)
    waiting = len(d.core.table.queue)
    assert waiting
    for response in d.running():
        assert sent(d.finish(response), Generate) == []
    [(node, _)] = sent(d.confirm("a", 2, "other-2"), Generate)
    assert (node, len(d.core.table.queue)) == ("a", waiting - 1)


def test_steps_in_between_are_journaled_and_only_the_newest_version_warns():
    d = run_of(4)
    come_back(d, 1)
    for version in (2, 3):
        commands = again(d, version)
        [entry] = entries(commands)
        assert (entry.version, entry.largest) == (version, pytest.approx(5e-4, rel=1e-3))
        assert not [c for c in of_kind(commands, Report) if c.is_warning and "different" in c.text]
        assert sent(commands, PublishWeights) == []
        assert d.core.fleet.ready.keys() == {"a", "b"}
    assert len(entries(again(d, 4))) == 1
    assert d.core.fleet.ready.keys() == set()


@pytest.mark.parametrize(
    "new",
    [
        pytest.param(FAR, id="too far"),
        pytest.param(canary(-1.0, math.nan), id="no number"),
        pytest.param(canary(-math.inf, -2.0), id="infinite"),
    ],
)
@pytest.mark.parametrize("version", [2, 3])
def test_a_difference_above_the_tolerance_fails_the_run(new: Canary, version: int):
    d = run_of(3)
    come_back(d, version - 1)
    commands = again(d, version, new)
    [reason] = failures(commands)
    assert f"run failed: version {version} was trained again and came out different: " in reason
    assert "more than 0.001 (weights.canary): lightrl resume --from-checkpoint" in reason
    assert entries(commands) == []
    assert sent(commands, PublishWeights) == []


def test_the_tolerance_is_that_of_the_dtype():
    known, new = (replace(c, dtype="bfloat16") for c in (OLD, FAR))
    d = run_of(2, known)
    come_back(d, 1)
    assert len(entries(again(d, 2, new))) == 1


def test_texts_are_compared_up_to_their_first_difference():
    d = run_of(2, canary(-1.0, -2.0, -3.0, text=(4, 5, 6, 7)))
    come_back(d, 1)
    [entry] = entries(again(d, 2, canary(-1.0005, -2.0, -9.0, text=(4, 5, 6, 8))))
    assert entry.largest == pytest.approx(5e-4, rel=1e-3)


def test_without_a_canary_the_warning_says_so():
    d = run_of(2, None)
    come_back(d, 1)
    commands = again(d, 2, None)
    [entry] = entries(commands)
    assert (entry.largest, entry.mean) == (None, None)
    [warning] = [c.text for c in of_kind(commands, Report) if c.is_warning]
    assert "came out different: there is no canary to compare; nodes load it" in warning


def test_what_was_loaded_and_not_trained_must_be_the_same():
    """The model that a run began with has changed: nothing rounds there."""
    d = run_of(1)
    d.join("t", "trainer", incarnation=2)
    [reason] = failures(again(d, 0))
    assert "version 0 was loaded again, and the model has changed (digest other-0, " in reason


def test_after_a_resume_it_is_the_version_and_tokens_of_both_are_taken():
    d = run_of(2)
    come_back(d, 1)
    response = d.running()[0]
    again(d, 2)
    d.tokens(response, 5)
    for _ in range(2):  # from the entry, then from a snapshot
        d.restart()
        published = d.core.fleet.published
        assert published is not None
        assert (published.digest, published.canary) == ("other-2", NEAR)
        assert d.core.fleet.digests[2] == ("digest-2", "other-2")
        assert d.core.fleet.canaries[2] == NEAR
    commands = d.join("a", slots=9, serves=2)  # it still has the old one
    assert "a" not in d.core.fleet.ready
    d.join("t", "trainer", incarnation=3)
    commands = again(d, 2)
    assert entries(commands) == []  # known
    assert [m.digest for n, m in sent(commands, PublishWeights) if n == "a"] == ["other-2"]


def test_what_was_journaled_of_steps_in_between_is_known_after_a_resume():
    d = run_of(3)
    come_back(d, 1)
    again(d, 2)
    d.restart()
    assert d.core.fleet.published is not None
    assert d.core.fleet.published.digest == "digest-3"
    d.join("t", "trainer", incarnation=2)
    assert entries(again(d, 2)) == []


def test_it_may_come_out_as_it_was_at_first():
    d = run_of(2)
    come_back(d, 1)
    again(d, 2)
    d.feed(NodeLost("t", "gone"))
    come_back(d, 1)
    [entry] = entries(d.feed(MessageArrived("t", replace(publication(2), canary=OLD))))
    assert (entry.replaced, entry.digest) == ("other-2", "digest-2")
    d.confirm("a", 2, "digest-2")
    assert "a" in d.core.fleet.ready


def test_no_delta_is_offered_that_begins_with_the_replaced_version():
    d = run_of(2)
    come_back(d, 1)
    delta = DeltaOffer("digest-1", "other-2", "delta", 10, 20)
    told = dict(sent(again(d, 2, deltas=(delta,)), PublishWeights))
    assert {n: m.deltas for n, m in told.items()} == {"a": (), "b": ()}
    d.confirm("a", 2, "other-2")  # "b" still has the old one
    while running := d.running():
        d.finish(running[0])
    delta = DeltaOffer("other-2", "digest-3", "delta", 10, 20)
    new = replace(publication(3), deltas=(delta,))
    told = dict(sent(d.feed(MessageArrived("t", new)), PublishWeights))
    assert {n: m.deltas for n, m in told.items()} == {"a": (delta,), "b": ()}


@pytest.mark.parametrize("seeds", [range(10), *e2e([range(10, 30)])])
def test_worlds_in_which_the_trainer_begins_again(seeds: range):
    """All that holds of other worlds, and what was trained is what it would have been."""
    num_replaced = 0
    for seed in seeds:
        world = World(seed, **settings(seed, deterministic=False, num_steps=6))
        world.forgets = True
        for _ in range(2):
            world.live(NUM_EVENTS)
            world.lose_trainer()
            world.return_trainer()
        world.live(NUM_EVENTS).heal()
        check_end(world)
        check_against_oracle(world)
        num_replaced += sum(len(known) - 1 for known in world.core.fleet.digests.values())
    assert num_replaced >= len(seeds) // 2
