"""Which responses are scored in one call, where functions compare those of a prompt."""

import pytest

from lightrl.config.run_file import parse_config
from lightrl.coordinator.scoring import GatheredGroups, require_whole_groups
from lightrl.core.commands import Command, ScoreResponse
from lightrl.errors import RewardError
from tests.core.conftest import Driver, of_kind


class Gathering:
    """A run of groups of two, and what is handed to the reward functions together."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.driver.start("a")
        self.groups = GatheredGroups()

    def take(self, commands: list[Command]) -> list[list[str]]:
        """The groups that these commands complete."""
        return [
            [r.id for r in command.response.group.responses]
            for command in of_kind(commands, ScoreResponse)
            if self.groups.add(command.response)
        ]

    def finish(self, name: str) -> list[list[str]]:
        return self.take(self.driver.tokens(name, 9, finish="stop"))


def test_a_group_is_scored_when_its_last_response_has_finished():
    run = Gathering()
    assert run.finish("p0@0#1") == []
    assert run.finish("p1@0#0") == []
    assert run.finish("p0@0#0") == [["p0@0#0", "p0@0#1"]]
    assert run.finish("p1@0#1") == [["p1@0#0", "p1@0#1"]]


def test_after_a_restart_a_group_waits_for_none_that_was_scored_before():
    run = Gathering()
    run.finish("p0@0#0")
    run.finish("p0@0#1")
    run.driver.score("p0@0#0")
    run.groups = GatheredGroups()
    again = run.driver.restart()
    assert run.take(again) == [["p0@0#0", "p0@0#1"]]


def test_what_waits_in_a_round_that_has_closed_is_forgotten():
    run = Gathering()
    run.finish("p0@0#0")
    run.driver.finish("p1@0#0", None)  # its group is out: it is not gathered any more
    run.driver.finish("p0@0#1", None)
    run.driver.next_step()
    first, *_ = run.driver.running()
    run.finish(first)
    assert list(run.groups._waiting) == [run.driver.round]


@pytest.mark.parametrize(("batching", "is_refused"), [("both", True), ("prompts", False)])
def test_responses_that_race_each_other_cannot_be_compared(batching, is_refused):
    config = parse_config(
        {
            "model": {"path": "m"},
            "data": {"path": "d.jsonl"},
            "round": {"tail_batching": batching, "eta": 1.5},
        }
    )
    require_whole_groups(config, (False,))
    if is_refused:
        with pytest.raises(RewardError, match=r"set reward\.batch = 'response', or round.tail_b"):
            require_whole_groups(config, (False, True))
    else:
        require_whole_groups(config, (False, True))
