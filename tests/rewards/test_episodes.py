"""What reward functions see of an episode, in each of the signatures."""

import asyncio
import json
from array import array
from dataclasses import replace
from typing import Any

from lightrl.config import schema
from lightrl.rewards.base import Columns, Sample
from lightrl.rewards.episodes import EpisodeRecord, SampledTurn, chat_text
from lightrl.rewards.protocol import RewardJob, RewardSet, WorkerSetup
from lightrl.rewards.runner import RewardPool
from tests.rewards.test_base import SAMPLE, call
from tests.support.reward_pool import job, run_jobs

ASK = {"role": "user", "content": "say abc"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "b"}}}
SAID = {"role": "assistant", "content": "b", "tool_calls": [CALL]}
FOUND = {"role": "tool", "content": "j"}
END = {"role": "assistant", "content": "abc"}
RECORD = EpisodeRecord(
    # two inserted tokens, "b" and its end, one inserted, "abc" and its end
    ((2, 4), (5, 9)),
    (json.dumps([ASK]), json.dumps([SAID, FOUND]), json.dumps([END])),
    (0.25, None),
    0.75,
)
EPISODE = array("i", [3, 4, 2, 0, 10, 1, 2, 3, 0])
SHOW = """
def reward(sample):
    return {"score": 1.0, "seen": (
        sample.prompt, sample.response, sample.response_ids, sample.environment_reward,
        [(t.text, t.reward, [c["function"]["name"] for c in t.tool_calls]) for t in sample.turns],
        [m["role"] for m in sample.messages],
    )}
"""


def episode(name: str, record: EpisodeRecord = RECORD) -> RewardJob:
    return RewardJob(name, 1, "", {"n": 1}, EPISODE, "stop", episode=record)


def seen(results: dict[str, Any], name: str) -> str:
    assert not results[name].failure
    return results[name].extras["seen"]


def test_a_worker_decodes_each_turn_of_an_episode(model_files, tmp_path):
    """One response is an episode, one an episode whose last turn its environment did not see."""
    unseen = replace(RECORD, records=(*RECORD.records[:2], ""))
    jobs = [episode("whole"), episode("unseen", unseen), job("single", "abc", prompt=[ASK])]
    results = run_jobs(SHOW, jobs, model_files, tmp_path)
    turns = "[('b', 0.25, ['look']), ('abc', None, [])]"
    ids = EPISODE[2:].tolist()
    roles = "['user', 'assistant', 'tool', 'assistant']"
    assert seen(results, "whole") == f"('cd', 'abc', {ids}, 0.75, {turns}, {roles})"
    assert seen(results, "unseen") == seen(results, "whole")
    assert seen(results, "single") == (
        "('say abc', 'abc', [1, 2, 3, 0], None, [('abc', None, [])], ['user', 'assistant'])"
    )


def test_an_episode_without_a_turn_is_scored_too(model_files, tmp_path):
    record = EpisodeRecord((), (json.dumps([ASK]),), (), 1.0)
    results = run_jobs(SHOW, [episode("e", record)], model_files, tmp_path)
    assert seen(results, "e").startswith("('cdb")


def test_a_record_that_is_no_list_of_messages_costs_its_score(model_files, tmp_path):
    record = replace(RECORD, records=("7", *RECORD.records[1:]))
    results = run_jobs(SHOW, [episode("e", record), episode("f")], model_files, tmp_path)
    assert results["e"].failure.startswith("ProtocolError: undecodable JSON")
    assert results["f"].reward == 1.0


TURNS = [SampledTurn("b", SAID, 0.25, [FOUND]), SampledTurn("abc", END)]
OF_EPISODE = replace(SAMPLE, messages=[ASK, SAID, FOUND, END], turns=TURNS, environment_reward=1.0)


def test_verl_counts_turns_of_both_sides():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        assert solution_str == SAMPLE.response
        return extra_info["num_turns"]

    assert call(compute_score, OF_EPISODE) == 4
    assert call(compute_score) == 2


def test_trl_gets_prompt_and_completion_as_messages():
    def reward(prompts, completions, **columns):
        assert prompts == [[ASK]]
        assert completions == [[SAID, FOUND, END]]
        return [1.0]

    assert call(reward, OF_EPISODE) == 1.0


def test_rubrics_get_the_conversation_and_a_trajectory():
    def reward(prompt, completion, answer, state):
        assert (prompt, completion) == ([ASK], [SAID, FOUND, END])
        assert [len(step["prompt"]) for step in state["trajectory"]] == [1, 3]
        assert [step["completion"] for step in state["trajectory"]] == [[SAID], [END]]
        return 1.0

    assert call(reward, OF_EPISODE) == 1.0


def test_a_pool_without_functions_starts_no_worker(model_files, tmp_path):
    async def scenario() -> RewardPool:
        sets = (RewardSet((), (), "prompt", "answer", (), have_answers=False),) * 2
        setup = WorkerSetup(schema.Reward(functions=()).model_dump_json(), sets, str(model_files))
        pool = RewardPool(schema.Reward(functions=()), setup, tmp_path, print, print)
        await pool.start()
        await pool.run()
        await pool.stop()
        return pool

    assert asyncio.run(scenario()).by_group == (False, False)
    assert not list(tmp_path.iterdir())


def test_messages_are_shown_by_role():
    assert chat_text([ASK, {"role": "assistant", "content": None}, FOUND]) == (
        "[user] say abc\n[assistant]\n[tool] j"
    )
    assert chat_text([SAID]).startswith("[assistant] b [{'id': '1'")


def test_a_sample_made_by_hand_has_neither_messages_nor_turns():
    made = Sample("a", "b", None, {}, [1], "stop")
    assert (made.messages, made.turns, made.environment_reward) == ([], [], None)
    assert str(Columns(frozenset({"n"}))) == "the columns are n"
