"""samples.jsonl: which responses are in it, and what a line says."""

import json

import pytest

from lightrl.coordinator.samples import FILE_NAME, SamplesLog, as_line
from lightrl.rewards.protocol import RewardResult
from tests.core.conftest import Driver, held_out


def scored(
    text: str,
    reward: float | None,
    failure: str = "",
    metrics: dict[str, float] | None = None,
    extras: dict[str, str] | None = None,
) -> RewardResult:
    return RewardResult("r", 0, reward, metrics or {}, text, 0.0, failure, extras or {})


@pytest.fixture
def responses():
    """Of three groups of two, some with tokens of two versions."""
    driver = Driver()
    driver.start("a")
    return [r for g in driver.round.groups.values() for r in g.responses]


def test_the_first_groups_of_a_step_are_written_whole(tmp_path, responses):
    log = SamplesLog(tmp_path, 3, [].append)
    assert [log.is_wanted(r) for r in responses] == [True] * 3 + [False] * (len(responses) - 3)
    assert all(SamplesLog(tmp_path, "all", [].append).is_wanted(r) for r in responses)
    assert not any(SamplesLog(tmp_path, 0, [].append).is_wanted(r) for r in responses)


def test_evaluations_are_written_whole(tmp_path):
    driver = Driver(eval_sets=held_out(2), eval_interval=1)
    driver.start("a")
    responses = [r for r in driver.core.table.responses.values() if r.group.round.is_eval]
    log = SamplesLog(tmp_path, 0, [].append)
    assert responses
    assert all(map(log.is_wanted, responses))


def test_a_line_has_text_reward_and_versions(tmp_path, responses):
    log = SamplesLog(tmp_path, 2, [].append)
    log.write(responses[0], "1+1=", scored("2 é", 1.0, "", {"digits": 1.0}, {"extracted": "2"}))
    log.write(responses[1], "1+1=", scored("", None, "timeout"))
    log.close()
    first, second = map(json.loads, (tmp_path / FILE_NAME).read_text().splitlines())
    assert (first["prompt"], first["text"], first["reward"]) == ("1+1=", "2 é", 1.0)
    assert (first["response"], first["parts"]) == (responses[0].id, {"digits": 1.0})
    assert (first["set"], "failure" in first) == (responses[0].group.prompt.id, False)
    assert first["extras"] == {"extracted": "2"}
    assert "failure" not in first
    assert "extras" not in second
    assert (second["reward"], second["failure"]) == (None, "timeout")


def test_versions_are_those_of_the_tokens(responses):
    response = responses[0]
    response.tokens.extend([5, 6, 7])
    response.starts.extend([(3, 0), (4, 2)])
    line = as_line(response, "", scored("", 0.0))
    assert (line["versions"], line["tokens"]) == ([[3, 2], [4, 1]], 3)
