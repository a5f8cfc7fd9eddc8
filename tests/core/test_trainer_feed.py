"""A trainer that was lost: the run waits, and it trains again exactly what it trained before."""

import pytest

from lightrl.core.commands import Finish, Record, ReplayShards, Report
from lightrl.core.events import (
    CheckpointWritten,
    DrainRequested,
    Event,
    MessageArrived,
    NodeJoined,
    NodeLeft,
    NodeLost,
    ShardLeft,
    ShellFailed,
)
from lightrl.core.log_entries import ShardSent, VersionPublished
from lightrl.core.training import trainer_feed as trainer_feed
from lightrl.messages.nodes import PROTOCOL, Drain, Hello, Welcome
from lightrl.messages.training import ShardsTaken, StepDone, TrainShard
from lightrl.messages.weights import PublishWeights
from tests.core.conftest import Driver, of_kind, sent


def trained(steps: int, **changes: object) -> Driver:
    """A run with so many steps behind it, and a round that is open."""
    d = Driver(**{"num_steps": 9, **changes})
    d.start("a", slots=9)
    d.play(lambda name: 2, rounds=steps)
    return d


def come_back(d: Driver, version: int, incarnation: int = 2) -> list[object]:
    return [*d.join("t", "trainer", incarnation=incarnation), *d.publish(version)]


def test_a_shard_is_recorded_before_it_is_sent(driver: Driver):
    driver.start("a", slots=4)
    commands = driver.finish_round()
    kinds = [
        type(c.entry if isinstance(c, Record) else c.message).__name__  # type: ignore[union-attr]
        for c in commands
        if (isinstance(c, Record) and isinstance(c.entry, ShardSent))
        or ("t", TrainShard) == kind_of(c)
    ]
    assert kinds == ["ShardSent", "TrainShard"] * (len(kinds) // 2)


def kind_of(command: object) -> tuple[str, type] | None:
    node, message = getattr(command, "node", ""), getattr(command, "message", None)
    return (node, type(message)) if message is not None else None


def test_rounds_go_on_without_the_trainer_and_wait_for_it(driver: Driver):
    driver.start("a", slots=4)
    driver.feed(NodeLost("t", "gone"))
    assert sent(driver.finish_round(), TrainShard) == []
    [(_, shard)] = sent(come_back(driver, 0), TrainShard)  # type: ignore[arg-type]
    assert (shard.index, shard.last) == (0, True)


def test_trainer_that_is_where_it_was_gets_its_step_from_the_start(driver: Driver):
    driver.start("a", slots=4)
    driver.finish("p0@0#0")
    assert [s.index for _, s in sent(driver.finish("p0@0#1"), TrainShard)] == [0]
    [(_, again)] = sent(come_back(driver, 0, incarnation=1), TrainShard)  # type: ignore[arg-type]
    assert (again.index, [g.group for g in again.groups]) == (0, ["p0@0"])
    driver.finish("p1@0#0")
    assert [s.index for _, s in sent(driver.finish("p1@0#1"), TrainShard)] == [1, 2]


def test_trainer_from_an_older_checkpoint_trains_every_step_again_one_at_a_time():
    d = trained(3)
    d.feed(NodeLost("t", "gone"))
    d.finish_round()  # of step 3, meanwhile
    assert of_kind(come_back(d, 1), ReplayShards) == [ReplayShards("t", 1, 2)]  # type: ignore[arg-type]
    assert d.feed(MessageArrived("t", StepDone(1, 2, {}))) == []  # known since long
    assert of_kind(d.publish(2), ReplayShards) == [ReplayShards("t", 2, 2)]
    commands = d.publish(3)
    assert of_kind(commands, ReplayShards) == []
    assert [(s.step, s.last) for _, s in sent(commands, TrainShard)] == [(3, True)]
    assert not [c for c in of_kind(commands, Record) if isinstance(c.entry, VersionPublished)]


def test_nodes_are_not_disturbed_by_versions_that_are_trained_again():
    d = trained(3)
    d.feed(NodeLost("t", "gone"))
    come_back(d, 1)
    assert sent(d.publish(2), PublishWeights) == []
    [(_, offer)] = sent(d.join("late"), PublishWeights)  # the others have what it has not
    assert [s.node for s in offer.sources] == ["a"]
    [(node, offer)] = sent(d.publish(3), PublishWeights)
    assert (node, [s.node for s in offer.sources]) == ("late", ["a", "t"])


def test_a_trainer_that_catches_up_is_reported_but_is_no_warning():
    """`up` repeats warnings at the end of a run, when nothing is waited for any more."""
    d = trained(3)
    lost = of_kind(d.feed(NodeLost("t", "gone")), Report)
    assert [c.text for c in lost if c.is_warning] == ["t lost (gone)"]
    behind = of_kind(come_back(d, 1), Report)
    assert [c.text for c in behind if "trained again" in c.text]
    assert not [c for c in behind if c.is_warning]


def test_version_that_comes_out_different_fails_a_deterministic_run_and_is_never_served():
    d = trained(2, deterministic=True)
    d.feed(NodeLost("t", "gone"))
    come_back(d, 1)
    other = PublishWeights(2, "digest-other", num_bytes=1000, manifest_bytes=10)
    commands = d.feed(MessageArrived("t", other))
    assert sent(commands, PublishWeights) == []
    [(_, drain)] = [(n, m) for n, m in sent(commands, Drain) if n == "a"]
    assert drain.reason.startswith(
        "run failed: version 2 was trained again and came out different (digest digest-other"
    )


def test_trainer_that_is_ahead_of_the_journal_fails_the_run():
    d = trained(1)
    d.feed(NodeLost("t", "gone"))
    commands = come_back(d, 5)
    reasons = {m.reason for _, m in sent(commands, Drain)}  # type: ignore[arg-type]
    assert reasons == {
        "run failed: the trainer is at step 5, the run at step 1: "
        "its checkpoints belong to another journal"
    }


def test_version_of_a_step_whose_end_nobody_heard_of_is_taken():
    """The trainer had all of the step; the coordinator died before the version came."""
    d = Driver()
    d.start("a", slots=4)
    d.finish_round()
    d.restart()
    d.join("a", slots=4, serves=0)
    commands = come_back(d, 1, incarnation=1)
    assert [n for n, _ in sent(commands, PublishWeights)] == ["a"]  # type: ignore[arg-type]
    d.confirm("a", 1)
    assert d.core.step == 1  # though no StepDone came


def test_run_that_has_done_all_steps_waits_for_the_checkpoint_of_the_last():
    d = Driver(num_steps=1)
    d.start("a", slots=4)
    d.finish_round()
    d.train(0)
    d.confirm("a", 1)
    assert d.core.state == "finishing"
    d.feed(NodeLost("t", "killed"))
    assert of_kind(d.feed(NodeLeft("a", "drained", ok=True)), Finish) == []
    [(_, refusal)] = sent(d.join("b"), Welcome)
    assert refusal.refused == "the run is ending"
    assert of_kind(come_back(d, 0), ReplayShards) == [ReplayShards("t", 0, 2)]  # type: ignore[arg-type]
    assert [n for n, _ in sent(d.publish(1), Drain)] == ["t"]
    [finish] = of_kind(d.feed(NodeLeft("t", "drained", ok=True)), Finish)
    assert str(finish.state) == "finished"


def test_run_whose_last_checkpoint_is_written_waits_for_no_last_word():
    """A trainer's good-bye can be lost with its connection: unread bytes make the kernel drop what
    it was yet to send."""
    d = Driver(num_steps=1)
    d.start("a", slots=4)
    d.finish_round()
    d.train(0)
    d.confirm("a", 1)
    d.feed(CheckpointWritten(0))  # an older one
    d.feed(NodeLeft("a", "drained", ok=True))
    assert of_kind(d.feed(CheckpointWritten(1)), Finish) == []  # it is still there
    [finish] = of_kind(d.feed(NodeLost("t", "connection lost")), Finish)
    assert str(finish.state) == "finished"


def test_trainer_that_stumbles_again_at_the_end_is_still_awaited():
    d = Driver(num_steps=2)
    d.start("a", slots=9)
    d.play(lambda name: 2, rounds=2)
    assert d.core.state == "finishing"
    d.feed(NodeLost("t", "killed"))
    come_back(d, 0)
    # a rank died
    assert of_kind(come_back(d, 0, incarnation=3), ReplayShards) == [ReplayShards("t", 0, 3)]
    d.publish(1)
    d.feed(NodeLeft("a", "drained", ok=True))
    assert of_kind(d.feed(NodeLeft("t", "preempted", ok=True)), Finish) == []  # in the middle of it
    come_back(d, 1, incarnation=4)
    d.publish(2)
    [finish] = of_kind(d.feed(NodeLeft("t", "drained", ok=True)), Finish)
    assert str(finish.state) == "finished"


def due_at_once(monkeypatch: pytest.MonkeyPatch) -> tuple[Driver, list[TrainShard]]:
    """A step of four groups of four tokens, of which one shard carries one; and what goes at
    once."""
    monkeypatch.setattr(trainer_feed, "MAX_SHARD_TOKENS", 5)
    monkeypatch.setattr(trainer_feed, "MAX_UNTAKEN_TOKENS", 8)
    d = Driver(prompts_per_step=4, group_size=2)
    d.start("a", slots=99)
    d.feed(NodeLost("t", "gone"))
    d.complete(lambda name: 2)
    return d, [s for _, s in sent(come_back(d, 0), TrainShard)]  # type: ignore[arg-type]


def take(d: Driver, step: int, index: int, node: str = "t") -> list[TrainShard]:
    return [s for _, s in sent(d.feed(MessageArrived(node, ShardsTaken(step, index))), TrainShard)]


def test_a_step_that_is_due_at_once_comes_as_the_trainer_takes_it(monkeypatch):
    d, shards = due_at_once(monkeypatch)
    assert len(shards) == 2
    assert take(d, 0, 0, node="a") == take(d, 1, 0) == []  # another node; another step
    for index in range(4):
        shards += take(d, 0, index)
        assert len(shards) == min(4, 3 + index)
    assert [(s.index, len(s.groups), s.last) for s in shards] == [
        (0, 1, False),
        (1, 1, False),
        (2, 1, False),
        (3, 1, True),
    ]
    assert {s.num_groups for s in shards} == {4}


def test_a_slow_disk_holds_shards_back_however_much_the_trainer_would_take(monkeypatch):
    monkeypatch.setattr(trainer_feed, "MAX_SHARD_TOKENS", 5)
    d = Driver(prompts_per_step=4, group_size=2)
    d.start("a", slots=99)
    d.disk_is_slow = True
    shards = [s for _, s in sent(d.complete(lambda name: 2), TrainShard)]
    assert [s.index for s in shards] == [0, 1]
    assert take(d, 0, 1) == []
    assert sent(d.feed(ShardLeft(1, 1)), TrainShard) == []  # of another step
    assert [s.index for _, s in sent(d.feed(ShardLeft(0, 0)), TrainShard)] == [2]
    assert sent(d.feed(ShardLeft(0, 0)), TrainShard) == []
    assert [(s.index, s.last) for _, s in sent(d.feed(ShardLeft(0, 2)), TrainShard)] == [(3, True)]


def test_what_was_taken_by_a_trainer_that_came_back_counts_no_more(monkeypatch):
    d, _ = due_at_once(monkeypatch)
    take(d, 0, 0)
    again = [s.index for _, s in sent(come_back(d, 0, incarnation=3), TrainShard)]  # type: ignore[arg-type]
    assert again == [0, 1]
    assert [s.index for s in take(d, 0, 1)] == [2, 3]


def test_a_group_that_is_more_than_all_that_may_be_untaken_goes_alone(monkeypatch):
    monkeypatch.setattr(trainer_feed, "MAX_UNTAKEN_TOKENS", 1)
    d = Driver(prompts_per_step=2, group_size=2)
    d.start("a", slots=99)
    shards = [s for _, s in sent(d.complete(lambda name: 2), TrainShard)]
    assert [s.index for s in shards] == [0]
    assert [(s.index, s.last) for s in take(d, 0, 0)] == [(1, True)]


def test_preempted_trainer_may_come_back():
    d = trained(1)
    d.feed(NodeLeft("t", "SIGTERM", ok=True))
    assert d.core.state == "running"
    assert [n for n, _ in sent(come_back(d, 1), TrainShard)] == []  # type: ignore[arg-type]
    assert [s.last for _, s in sent(d.finish_round(), TrainShard)][-1]


def test_shell_that_cannot_go_on_ends_the_run_in_order():
    d = trained(1)
    commands = d.feed(ShellFailed("no space left on device"))
    assert {n for n, _ in sent(commands, Drain)} == {"a", "t"}
    d.feed(NodeLeft("a", "drained", ok=True))
    [finish] = of_kind(d.feed(NodeLeft("t", "drained", ok=True)), Finish)
    assert (str(finish.state), finish.reason) == ("failed", "no space left on device")


def test_clock_that_jumps_back_does_not_lock_a_restarted_node_out(driver: Driver):
    driver.start("a", slots=2)
    restarted = Hello("a", -5, ("rollout",), PROTOCOL, pid=2, host="h", slots=2)
    driver.feed(NodeJoined(restarted))
    assert driver.core.fleet.nodes["a"].incarnation == -5
    assert len(sent(driver.join("a", incarnation=1), Welcome)) == 1  # the old process: refused
    assert driver.core.fleet.nodes["a"].incarnation == -5


def test_version_of_a_step_whose_round_is_open_is_ignored():
    """Whoever trains it cannot have all of it, whatever he says."""
    d = trained(1)
    published = d.core.fleet.published
    assert published is not None
    for finish in (d.running()[0], None):
        commands = [*d.publish(2), *d.feed(MessageArrived("t", StepDone(1, 2, {})))]
        assert d.core.fleet.published is published
        assert (d.core.step, d.core.trainer_feed.trained_step) == (1, 1)
        assert [c.text for c in of_kind(commands, Report)] == [
            "t published version 2, but the round of step 1 is still open: ignored"
        ]
        if finish is not None:
            d.finish(finish)
    d.finish_round()
    d.train(1)
    assert (d.core.fleet.published.policy_version, d.core.trainer_feed.trained_step) == (2, 2)  # type: ignore[union-attr]


def test_version_of_a_step_after_the_one_that_is_trained_is_ignored():
    """Its round has closed, too, where rounds overlap, but the trainer has nothing of it yet."""
    d = Driver(num_steps=9, max_staleness=2)
    d.start("a", slots=99)
    d.finish_round()
    assert len([r for r in d.core.table.rounds if r.state == "closed"]) > 1
    d.publish(1)
    d.publish(2)
    assert d.core.fleet.published is not None
    assert (d.core.fleet.published.policy_version, d.core.trainer_feed.trained_step) == (1, 1)


def test_trainer_that_trains_again_publishes_what_was_published_whatever_round_is_open():
    d = trained(2)
    come_back(d, 0)
    for version in (1, 2):
        d.publish(version)
    assert (d.core.step, d.core.trainer_feed.trained_step) == (2, 2)
    d.publish(3)
    assert d.core.trainer_feed.trained_step == 2


@pytest.mark.parametrize("news", [ShardLeft(0, 0), MessageArrived("t", ShardsTaken(0, 0))])
def test_news_of_a_shard_that_is_sent_again_sends_no_other(news: Event):
    """The coordinator died when the version was published, and the step not over."""
    d = Driver()
    d.start("a", slots=4)
    d.finish_round()
    d.publish(1)
    d.restart()
    d.join("t", "trainer", incarnation=2)
    assert of_kind(d.publish(0), ReplayShards) == [ReplayShards("t", 0, 1)]
    commands = d.feed(news)
    assert sent(commands, TrainShard) == []
    assert of_kind(commands, Record) == []


def test_a_run_that_is_stopped_still_hands_over_the_step_of_which_all_groups_are_known(monkeypatch):
    monkeypatch.setattr(trainer_feed, "MAX_SHARD_TOKENS", 1)
    d = Driver(prompts_per_step=4)
    d.disk_is_slow = True
    d.start("a", slots=8)
    d.finish_round()
    commands = d.feed(DrainRequested("*", "enough"))
    assert ("t", Drain("t", "run stopped: enough")) not in sent(commands, Drain)
    last: list[TrainShard] = []
    for index in range(8):
        commands = d.feed(ShardLeft(0, index))
        last += [s for _, s in sent(commands, TrainShard) if s.last]
        if last:
            break
    assert last
    assert ("t", Drain("t", "run stopped: enough")) in sent(commands, Drain)


def test_the_journal_says_which_replicas_have_accumulated_a_version():
    d = trained(1)
    d.finish_round()
    news = PublishWeights(2, "digest-2", 1, 1, portions=(1, 2), replicas=(1, 0))
    [entry] = [
        c.entry
        for c in of_kind(d.feed(MessageArrived("t", news)), Record)
        if isinstance(c.entry, VersionPublished)
    ]
    assert entry == VersionPublished(2, "digest-2", (1, 2), 1, 1, replicas=(1, 0))
