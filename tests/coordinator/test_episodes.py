"""Episodes in the coordinator: rows for their environments, their scores, their samples."""

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.schema import Config
from lightrl.coordinator.journaling import new_records
from lightrl.coordinator.prompts import Prompts
from lightrl.coordinator.samples import FILE_NAME, as_line
from lightrl.coordinator.scoring import NO_REWARD, ResponseScoring, environment_result, record_of
from lightrl.core.commands import ScoreResponse
from lightrl.core.events import ResponseScored
from lightrl.core.state import DrawnPrompt, Response, Turn
from lightrl.messages.episodes import EpisodeEnded
from lightrl.rewards.protocol import RewardResult
from tests.core.conftest import Driver, ids, of_kind
from tests.support.daemons import DEADLINE_S, QUICKSTART, make_config

ASK = {"role": "user", "content": "1+1?"}
TRY = {"role": "assistant", "content": "3"}
NO = {"role": "user", "content": "no"}
END = {"role": "assistant", "content": "2"}
GAME = {"environment": {"source": "game.py:Game", "tasks": 40, "eval_tasks": 3}}


def config_of(folder: Path, functions: list[str] | None = None, **changes: Any) -> Config:
    """Without functions unless some are given."""
    sections = {"data": {"path": ""}, "reward": {"functions": functions or []}}
    return make_config(folder, **sections | GAME | changes)


def give_turns(r: Response, outcome: EpisodeEnded) -> None:
    """Two turns: two inserted tokens, two sampled ones, one inserted, one sampled."""
    r.tokens, r.logprobs = array("i", [9] * 6), array("f", [0.0] * 6)
    r.turns[:] = [
        Turn(0, 2, 9, record=json.dumps([ASK])),
        Turn(4, 1, 9, record=json.dumps([TRY, NO]), reward=0.5, num_tool_calls=2),
    ]
    r.num_inserted, r.outcome = 3, outcome


def outcome(**fields: Any) -> EpisodeEnded:
    return EpisodeEnded(
        "r", 1, 2, **{"stop": "done", "reward": 1.0, "record": json.dumps([END])} | fields
    )


class Tasks(Driver):
    """Groups of two, of rows that are made."""

    def draw(self, count: int) -> tuple[DrawnPrompt, ...]:
        first, self.drawn = self.drawn, self.drawn + count
        return tuple(DrawnPrompt(f"tasks/{k}", 0, ids(1)) for k in range(first, first + count))


@pytest.fixture
def driver() -> Tasks:
    made = Tasks(num_prompts=40)
    made.start("a")
    return made


def test_prompts_of_an_environment_have_no_tokens_and_their_rows_are_found(tmp_path):
    prompts = Prompts(config_of(tmp_path))
    prompts.start()
    drawn = asyncio.run(prompts.draw("train", 40))
    assert sorted(p.id for p in drawn) == sorted(f"tasks/{k}" for k in range(40))
    assert {p.tokens for p in drawn} == {b""}
    index = int(drawn[7].id.partition("/")[2])
    assert json.loads(prompts.row_json(drawn[7].id, is_eval=False) or "") == {"index": index}
    assert asyncio.run(prompts.read_row(drawn[7].id, is_eval=False)) == f'{{"index":{index}}}'
    evaluated = asyncio.run(prompts.draw("eval", 1))
    assert [(p.id, p.tokens) for p in evaluated] == [(f"tasks/{k}", b"") for k in (40, 41, 42)]
    assert prompts.row_json("tasks/41", is_eval=True) == '{"index":41}'
    assert asyncio.run(prompts.first_rows()) == []
    assert prompts.settings.episodes is not None
    later = Prompts(config_of(tmp_path))
    later.require_same(prompts.digests)
    later.go_on_from(40)
    assert later.row_json(drawn[7].id, is_eval=False) is None
    assert asyncio.run(later.read_row(drawn[7].id, is_eval=False)) == f'{{"index":{index}}}'
    prompts.close()
    later.close()


def finished(driver: Driver, *outcomes: EpisodeEnded) -> list[ScoreResponse]:
    """The end of the first responses, in order, with these outcomes."""
    commands = []
    names = [r.id for g in driver.round.groups.values() for r in g.responses]
    for name, each in zip(names, outcomes, strict=False):
        [command] = of_kind(driver.tokens(name, 9, finish="stop"), ScoreResponse)
        give_turns(command.response, each)
        commands.append(command)
    return commands


def scores(
    config: Config, folder: Path, driver: Driver, commands: list[ScoreResponse]
) -> dict[str, ResponseScored]:
    """What is fed to the core, when all commands were submitted in one turn of the loop."""
    fed: dict[str, ResponseScored] = {}
    logs = folder / "run" / "logs"
    logs.mkdir(parents=True)

    async def scenario() -> None:
        done, prompts = asyncio.Event(), Prompts(config)
        prompts.go_on_from(40)
        prompts.start()

        def feed(event: ResponseScored) -> None:
            fed[event.response] = event
            driver.feed(event)
            if len(fed) == len(commands):
                done.set()

        parts = prompts, driver.core, new_records(config, logs.parent, "head")
        scoring = ResponseScoring(QUICKSTART / "model", logs, *parts, feed, print)

        async def announce() -> None:
            for command in commands:
                scoring.submit(command)
            assert not fed  # the core is not called while it carries out an event

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(scoring.serve(announce, tries_rows=True))
            await done.wait()
            serving.cancel()
        await scoring.pool.stop()
        scoring.samples.close()
        prompts.close()

    asyncio.run(scenario())
    return fed


def test_without_functions_the_environment_gives_the_score(tmp_path, driver):
    commands = finished(
        driver,
        outcome(reward=0.25, metrics={"moves": 3.0}),
        outcome(reward=None),
        outcome(failure="task 1: reset raised KeyError: 'n'", reward=0.0),
        outcome(reward=float("nan")),
    )
    fed = scores(config_of(tmp_path), tmp_path, driver, commands)
    found = [(fed[c.response.id].reward, fed[c.response.id].failure) for c in commands]
    assert found == [
        (0.25, ""),
        (None, NO_REWARD),
        (None, "task 1: reset raised KeyError: 'n'"),
        (None, "the environment's reward is nan, which is not finite"),
    ]
    assert not list((tmp_path / "run" / "logs").glob("reward-*"))
    lines = list(map(json.loads, (tmp_path / "run" / FILE_NAME).read_text().splitlines()))
    assert [line["failure"] for line in lines if "failure" in line] == [f for _, f in found[1:]]
    assert lines[0]["messages"] == [ASK, TRY, NO, END]


COMPARE = """
def reward(samples):
    return [s.environment_reward + len(samples) + s.turns[0].reward for s in samples]
"""


def test_functions_that_compare_get_the_episodes_of_a_group_but_failed_ones(tmp_path, driver):
    """A group does not wait for the score of one that failed, whichever ends last."""
    (tmp_path / "rewards.py").write_text(COMPARE)
    commands = finished(
        driver,
        outcome(failure="lost"),
        outcome(reward=0.25),
        outcome(reward=0.125),
        outcome(failure="lost"),
    )
    config = config_of(tmp_path, [f"{tmp_path}/rewards.py:reward"])
    fed = scores(config, tmp_path, driver, commands)
    found = [(fed[c.response.id].reward, fed[c.response.id].failure) for c in commands]
    assert found == [(None, "lost"), (1.75, ""), (1.625, ""), (None, "lost")]


def test_a_record_has_the_sampled_tokens_of_each_turn(driver):
    [command] = finished(driver, outcome(turn_reward=2.0))
    record = record_of(command.response)
    assert record is not None
    assert record.spans == ((2, 4), (5, 6))
    assert (record.rewards, record.reward) == ((0.5, 2.0), 1.0)
    assert [json.loads(r) for r in record.records] == [[ASK], [TRY, NO], [END]]
    assert environment_result(command.response, has_functions=True) is None
    command.response.turns.clear()  # it ended with its reset
    record = record_of(command.response)
    assert record is not None
    assert (record.spans, record.rewards, len(record.records)) == ((), (), 1)
    command.response.outcome = None  # a single turn
    assert record_of(command.response) is None
    assert environment_result(command.response, has_functions=False) is None


def line_of(response: Response) -> dict[str, Any]:
    return as_line(response, "", RewardResult("r", 0, 1.0, {}, "last turn", 0.0, ""))


def test_a_sample_of_an_episode_has_its_messages_turns_and_end(driver):
    [command] = finished(driver, outcome(stop="turns", num_tool_calls=1))
    line = line_of(command.response)
    assert (line["prompt"], line["text"]) == (
        "[user] 1+1?",
        "[assistant] 3\n[user] no\n[assistant] 2",
    )
    assert line["messages"] == [ASK, TRY, NO, END]
    assert (line["stop"], line["turns"], line["tool_calls"], line["tokens"]) == ("turns", 2, 3, 3)
    assert (line["environment_reward"], line["turn_rewards"]) == (1.0, [0.5, None])
    command.response.turns[1] = Turn(4, 1, 9, record="no JSON")
    assert line_of(command.response)["messages"] == []
