"""Nodes that train together: one leads, and who is lost, comes back or says hello again."""

import pytest

from lightrl.core.commands import Admit, Finish, Report
from lightrl.core.events import DrainRequested, NodeLeft, NodeLost, TimerFired
from lightrl.messages.nodes import Drain, Welcome
from lightrl.messages.trainers import TrainerSet
from lightrl.messages.training import TrainShard
from tests.core.conftest import SETTINGS, Driver, of_kind, sent


@pytest.fixture
def driver():
    return Driver(num_trainers=2)


def told(commands):
    """The last set that each node was told."""
    return dict(sent(commands, TrainerSet))


def reports(commands):
    return [report.text for report in of_kind(commands, Report)]


def both(driver):
    driver.join("t", "trainer")
    return driver.join("u", "trainer")


def test_the_first_by_name_leads_once_all_are_there_and_the_run_says_for_how_many_it_waits(driver):
    first = driver.join("u", "trainer")
    assert told(first) == {"u": TrainerSet("")}
    assert reports(first)[-1] == "the run waits for 1 of 2 trainer nodes"
    assert driver.core.fleet.trainer is None
    second = driver.join("t", "trainer")
    now = TrainerSet("t", (("u", 1),))
    assert told(second) == {"t": now, "u": now}
    assert of_kind(second, Admit) == [Admit("t")]


def test_one_trainer_node_is_told_nothing():
    driver = Driver()
    assert told(driver.join("t", "trainer")) == {}
    assert driver.core.fleet.trainer == "t"


def test_more_than_all_are_refused(driver):
    both(driver)
    [(_, welcome)] = sent(driver.join("v", "trainer"), Welcome)
    assert welcome.refused == "this run has 2 trainer nodes already"


def test_a_lost_follower_ends_the_set_and_the_leader_is_still_heard(driver):
    both(driver)
    driver.publish(0)
    lost = driver.feed(NodeLost("u", "gone"), now=1.0)
    assert told(lost) == {"t": TrainerSet("t")}
    assert reports(lost)[-1] == "the run waits 60 s for 1 of 2 trainer nodes to come back"
    assert driver.core.trainer_feed.trained_step == 0
    back = driver.join("u", "trainer", incarnation=2)
    now = TrainerSet("t", (("u", 3),))
    assert told(back) == {"t": now, "u": now}
    assert driver.core.trainer_feed.missing_since is None


def test_a_run_does_not_wait_for_a_follower_for_ever(driver):
    both(driver)
    driver.feed(NodeLost("u", "gone"), now=1.0)
    driver.core.fleet.nodes["t"].heard_at = 1e9
    commands = driver.feed(TimerFired(), now=1.0 + SETTINGS.patience_s)
    assert "no trainer for 60 s" in reports(commands)


def test_a_follower_that_says_hello_again_has_another_number(driver):
    both(driver)
    now = TrainerSet("t", (("u", 3),))
    assert told(driver.join("u", "trainer")) == {"t": now, "u": now}


def test_a_leader_whose_ranks_were_started_again_goes_on_leading_and_followers_hear_nothing(driver):
    both(driver)
    driver.publish(0)
    again = driver.join("t", "trainer", incarnation=2, leads=True)
    assert told(again) == {"t": TrainerSet("t", (("u", 2),))}
    assert driver.core.trainer_feed.num_hellos == 2


def test_without_the_leader_followers_wait_and_the_one_that_has_led_leads_again(driver):
    driver.join("t", "trainer")
    driver.join("a", "trainer")  # before t by name
    assert driver.core.fleet.trainer == "a"
    assert told(driver.feed(NodeLost("a", "gone"))) == {"t": TrainerSet("")}
    back = driver.join("a", "trainer", incarnation=2)
    assert told(back)["t"].leader == "a"

    driver.restart()
    driver.join("a", "trainer")
    assert driver.core.fleet.trainer is None
    driver.join("t", "trainer", leads=True)  # as it was in the meantime
    assert driver.core.fleet.trainer == "t"


def test_what_a_follower_says_as_the_trainer_counts_for_nothing(driver):
    both(driver)
    driver.publish(0, trainer="u")
    assert driver.core.fleet.published is None


def test_only_the_leader_gets_shards_and_may_be_spoken_to_by_followers(driver):
    both(driver)
    driver.publish(0)
    driver.join("r")
    driver.confirm("r", 0)
    fed = [c for name in list(driver.running()) for c in driver.finish(name)]
    assert {node for node, _ in sent(fed, TrainShard)} == {"t"}
    trainers = driver.core.fleet.trainers
    assert trainers.may_relay("t", "u")
    assert trainers.may_relay("u", "t")
    assert not trainers.may_relay("r", "t")
    assert not trainers.may_relay("t", "r")
    driver.feed(NodeLost("t", "gone"))
    assert not trainers.may_relay("u", "t")


def test_followers_leave_after_the_leader_which_needs_them_for_its_last_checkpoint(driver):
    both(driver)
    driver.publish(0)
    ending = driver.feed(DrainRequested("*", "enough"))
    assert [node for node, _ in sent(ending, Drain)] == ["t"]
    left = driver.feed(NodeLeft("t", "enough", ok=True))
    assert [node for node, _ in sent(left, Drain)] == ["u"]
    assert of_kind(driver.feed(NodeLeft("u", "enough", ok=True)), Finish)


def test_a_follower_that_fails_ends_the_run(driver):
    both(driver)
    driver.publish(0)
    failed = driver.feed(NodeLeft("u", "no GPU", ok=False))
    assert "trainer node u: no GPU" in reports(failed)
    assert [node for node, _ in sent(failed, Drain)] == ["t"]
