"""Steps in their order: versions, shards, evaluations, the end."""

import pytest

from lightrl.core.commands import CloseRound, CloseStep, DrawPrompts, Finish, Report
from lightrl.core.events import DrainRequested, MessageArrived, NodeLeft, NodeLost
from lightrl.core.rounds import rounds
from lightrl.core.rounds.backlog import Backlog, Deferred
from lightrl.core.settings import Tail
from lightrl.core.state import DrawnPrompt, RoundState
from lightrl.messages.nodes import Drain
from lightrl.messages.responses import Generate
from lightrl.messages.training import StepDone, TrainShard
from lightrl.messages.weights import PublishWeights, WeightsFailed
from tests.core.conftest import Driver, held_out, ids, of_kind, sent


def test_nothing_is_generated_before_a_digest_is_confirmed(driver: Driver):
    driver.join("t", "trainer")
    driver.join("a")
    assert sent(driver.publish(0), Generate) == []
    assert [n for n, _ in sent(driver.confirm("a", 0, digest="other"), PublishWeights)] == ["a"]
    assert sent(driver.confirm("a", 0), Generate) != []


def test_node_that_cannot_load_a_version_is_asked_to_leave(driver: Driver):
    driver.join("t", "trainer")
    driver.join("a")
    driver.publish(0)
    failed = MessageArrived("a", WeightsFailed(0, "no space left"))
    assert sent(driver.feed(failed), PublishWeights) != []
    assert sent(driver.feed(failed), PublishWeights) != []
    [(name, drain)] = sent(driver.feed(failed), Drain)
    assert (name, drain.reason) == ("a", "cannot load version 0")
    assert driver.core.fleet.num_weights_failed == 3
    assert driver.core.table.counters.engines_lost == 0


def refuses(driver: Driver, *names: str) -> list[Finish]:
    """These refuse version 0 for good, and leave as they are asked to; the others after them, if
    the run has ended for that."""
    failed = WeightsFailed(0, "the canary differs")
    for name in names:
        for _ in range(3):
            driver.feed(MessageArrived(name, failed))
        driver.feed(NodeLeft(name, "cannot load version 0", True))
    if driver.core.shutdown.has_begun:
        return of_kind(driver.feed(NodeLeft("t", "run failed", True)), Finish)
    return []


def test_a_run_ends_when_all_its_rollout_nodes_have_refused_a_version():
    driver = Driver(num_rollouts=2)
    for name, role in (("t", "trainer"), ("a", "rollout"), ("b", "rollout")):
        driver.join(name, role)
    driver.publish(0)
    assert refuses(driver, "b") == []
    [finish] = refuses(driver, "a")
    why = "no rollout node is left: b: cannot load version 0: the canary differs"
    assert (finish.state, finish.reason) == ("failed", why)


def test_a_run_ends_when_the_engines_of_all_its_rollout_nodes_have_failed():
    driver = Driver(num_rollouts=1)
    driver.start("a")
    driver.feed(NodeLeft("a", "the engine died 6 times", False))
    assert driver.core.shutdown.has_begun
    [finish] = of_kind(driver.feed(NodeLeft("t", "run failed", True)), Finish)
    assert finish.reason == "no rollout node is left: a: the engine died 6 times"


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({"num_rollouts": 0}, ()),  # all of them come from elsewhere
        ({"num_rollouts": 2}, ()),  # the second has not come yet
        ({"num_rollouts": 1, "scale_max": 4}, ()),  # more may be started
        ({"num_rollouts": 1}, ("lost",)),  # one that was lost may come back
        ({"num_rollouts": 1}, ("here",)),
    ],
)
def test_a_run_waits_for_rollout_nodes_that_may_come(settings, others):
    driver = Driver(**settings)
    for name, role in (("t", "trainer"), ("a", "rollout"), *((o, "rollout") for o in others)):
        driver.join(name, role)
    driver.publish(0)
    if "lost" in others:
        driver.feed(NodeLost("lost", "connection lost"))
    assert refuses(driver, "a") == []
    assert not driver.core.shutdown.has_begun


def test_a_node_that_comes_back_has_not_failed_for_good():
    driver = Driver(num_rollouts=1)
    for name, role in (("t", "trainer"), ("a", "rollout"), ("b", "rollout")):
        driver.join(name, role)
    driver.publish(0)
    assert refuses(driver, "a") == []
    driver.join("a")
    assert refuses(driver, "b") == []
    driver.feed(NodeLost("a", "connection lost"))
    assert not driver.core.shutdown.has_begun


def test_an_engine_that_dies_while_it_serves_is_no_failure_of_the_weights(driver: Driver):
    driver.start("a")
    commands = driver.feed(MessageArrived("a", WeightsFailed(0, "torch-engine (pid 7) hangs")))
    assert [r.text for r in of_kind(commands, Report)] == ["a: torch-engine (pid 7) hangs"]
    assert [n for n, _ in sent(commands, PublishWeights)] == ["a"]
    assert driver.core.table.counters.engines_lost == 1
    assert driver.core.fleet.num_weights_failed == 0


def test_whole_groups_stream_to_the_trainer_while_others_still_generate(driver: Driver):
    driver.start("a")
    driver.finish("p0@0#0", 1.0, 5, 6)
    [(trainer, shard)] = sent(driver.finish("p0@0#1", 0.0), TrainShard)
    assert trainer == "t"
    assert (shard.step, shard.index, shard.policy_version, shard.last) == (0, 0, 0, False)
    [group] = shard.groups
    assert (group.group, group.prompt) == ("p0@0", ids(1, 2, 0))
    assert [(r.token_ids, r.reward) for r in group.responses] == [(ids(5, 6), 1.0), (ids(9), 0.0)]
    assert driver.core.table.responses["p1@0#0"].state == "running"


def test_step_opens_only_when_the_new_version_is_confirmed(driver: Driver):
    driver.start("a")
    driver.now = 1.0
    driver.finish_round()
    driver.now = 2.0
    trained = driver.train(0)
    assert of_kind(trained, DrawPrompts) == []
    driver.now = 5.0
    opened = driver.confirm("a", 1)
    [step] = of_kind(opened, CloseStep)
    assert (step.step, step.metrics) == (0, {"loss/policy": 0.5})
    assert (step.rollout_s, step.train_s, step.weights_s) == (1.0, 1.0, 3.0)
    [(_, generate)] = sent(opened, Generate)
    assert generate.policy_version == 1
    assert [r.response for r in generate.requests] == ["p2@0#0", "p2@0#1", "p3@0#0", "p3@0#1"]


def test_next_round_waits_for_the_end_of_the_step_even_if_its_version_is_served(driver: Driver):
    driver.start("a")
    driver.finish_round()
    assert of_kind(driver.publish(1) + driver.confirm("a", 1), DrawPrompts) == []
    [step] = of_kind(driver.feed(MessageArrived("t", StepDone(0, 1, {}))), CloseStep)
    assert (step.step, driver.round.step) == (0, 1)


def test_version_that_nobody_expects_is_ignored(driver: Driver):
    driver.start("a")
    driver.publish(5)
    assert driver.core.fleet.published is not None
    assert driver.core.fleet.published.policy_version == 0


def test_node_that_confirms_an_older_version_is_neither_ready_nor_at_fault(driver: Driver):
    driver.start("a")
    driver.finish_round()
    driver.train(0)
    assert driver.confirm("a", 0, digest="digest-1") == []  # equal weights have equal digests
    assert driver.core.fleet.nodes["a"].state == "updating"
    assert driver.core.fleet.num_weights_failed == 0


def test_run_ends_after_its_last_step_and_only_when_all_nodes_have_left(driver: Driver):
    driver.start("a")
    for step in range(2):
        driver.finish_round()
        commands = driver.train(step) + driver.confirm("a", step + 1)
    assert [n for n, _ in sent(commands, Drain)] == ["a", "t"]
    assert [c.step for c in of_kind(commands, CloseStep)] == [1]
    driver.feed(NodeLeft("a", "drained", ok=True))
    [finish] = of_kind(driver.feed(NodeLeft("t", "drained", ok=True)), Finish)
    assert str(finish.state) == "finished"
    assert driver.core.table.counters.trained_responses == 8


def test_evaluations_come_first_last_and_every_interval():
    d = Driver(num_steps=5, eval_interval=2, eval_sets=held_out(1))
    closed: list[tuple[str, int]] = []
    commands = d.start("a")
    for _ in range(20):
        commands = d.finish_round()
        closed += [(c.round.kind, c.round.step) for c in of_kind(commands, CloseRound)]
        if (
            d.core.table.round is not None
            and d.core.table.round.state == "closed"
            and not d.core.table.round.is_eval
        ):
            step = d.core.table.round.step
            d.train(step)
            d.confirm("a", step + 1)
        if d.core.state == "finishing":
            break
    evals = [step for kind, step in closed if kind == "eval"]
    assert evals == [0, 2, 4, 5]
    assert [step for kind, step in closed if kind == "plain"] == [0, 1, 2, 3, 4]


def test_evaluation_is_greedy_never_trained_and_survives_unscored_responses():
    d = Driver(eval_sets=held_out(2), reward_on_failure=-1.0)
    [(_, generate)] = sent(d.start("a"), Generate)
    assert generate.sampling.temperature == 0.0
    assert [r.response for r in generate.requests] == ["e/0@eval0#0", "e/1@eval0#0"]
    d.finish("e/0@eval0#0", None)
    commands = d.finish("e/1@eval0#0", 1.0)
    [closed] = of_kind(commands, CloseRound)
    assert [r.reward for g in closed.round.groups.values() for r in g.responses] == [None, 1.0]
    assert sent(commands, TrainShard) == []
    assert d.core.table.round is not None
    assert d.core.table.round.kind == "plain"


def test_first_node_to_load_a_version_leaves_their_share_to_those_that_still_load(driver: Driver):
    driver.start("a", "b", slots=4)
    driver.finish_round()
    driver.train(0)
    [(node, generate)] = sent(driver.confirm("a", 1), Generate)
    assert (node, len(generate.requests)) == ("a", 2)
    [(node, generate)] = sent(driver.confirm("b", 1), Generate)
    assert (node, len(generate.requests)) == ("b", 2)


def test_share_of_a_node_that_never_loads_goes_to_the_others(driver: Driver):
    driver.start("a", "b", slots=4)
    driver.finish_round()
    driver.train(0)
    driver.confirm("a", 1)
    [(node, generate)] = sent(driver.feed(NodeLost("b", "gone")), Generate)
    assert (node, len(generate.requests)) == ("a", 2)


def test_idle_node_does_not_wait_for_one_that_is_slow_to_load(driver: Driver):
    driver.start("a", "b", slots=4)
    driver.finish_round()
    driver.train(0)
    driver.confirm("b", 1)  # and a never does
    for _ in range(4):
        running = driver.core.fleet.nodes["b"].running
        assert running
        driver.finish(next(iter(running)))
    assert driver.core.table.round is not None
    assert str(driver.core.table.round.state) == "closed"


def test_step_that_the_trainer_still_finishes_while_the_run_stops_is_counted():
    d = Driver()
    d.start("a")
    d.finish_round()
    d.feed(DrainRequested("*", "down"))
    [step] = of_kind(d.train(0), CloseStep)
    assert step.step == 0
    assert d.core.step == 1
    d.feed(NodeLeft("a", "drained", ok=True))
    [finish] = of_kind(d.feed(NodeLeft("t", "drained", ok=True)), Finish)
    assert str(finish.state) == "stopped"
    assert d.core.table.counters.trained_responses == 4


@pytest.mark.parametrize(
    ("is_closed", "num_waiting", "kind"),
    [(True, 1, "short"), (False, 0, "short"), (False, 1, "flush")],
)
def test_the_surplus_of_a_round_counts_once_at_the_end_of_a_run(
    is_closed: bool, num_waiting: int, kind: str
):
    """What a closed round put off is in the backlog, also while the round is trained."""
    settings = Driver(
        tail=Tail(1.5), prompts_per_step=2, num_steps=4, num_prompts=99, max_staleness=1
    ).core.settings
    backlog = Backlog(99, num_drawn=3)
    backlog.deferred.extend(Deferred(DrawnPrompt("p9", 0, b""), 0, 0) for _ in range(num_waiting))
    before = rounds.new_round(settings, "short", 0, 0.0)
    before.state = RoundState.CLOSED if is_closed else RoundState.RUNNING
    assert rounds.next_kind(settings, backlog, 1, [before]) == kind
