"""The config as the core sees it, and as an engine does."""

from pathlib import Path
from typing import Any

import pytest

from lightrl.coordinator.settings import core_settings, require_context
from lightrl.core.settings import EvalSet, Settings, Tail
from lightrl.devices.assign import Part
from lightrl.errors import ConfigError, DataError
from lightrl.messages.responses import Sampling
from lightrl.rollout.engine_spec import RolloutOptions, engine_spec
from tests.support.daemons import make_config


def settings(tmp_path: Path, num_prompts: int = 100, **changes: dict[str, Any]) -> Settings:
    config = make_config(tmp_path, **changes)
    return core_settings(
        config, vocabulary=50, stop_ids=(1,), sizes={"train": num_prompts}, eval_sizes={}
    )


@pytest.mark.parametrize(
    ("round", "tail"),
    [
        ({}, Tail(deferred="continue")),
        ({"tail_batching": "prompts", "eta": 1.5}, Tail(1.5, 1.0, deferred="continue")),
        (
            {"tail_batching": "both", "eta": [1.5, 1.25], "race": "clock", "deferred": "restart"},
            Tail(1.5, 1.25, "clock", "restart"),
        ),
    ],
)
def test_rounds_are_as_configured_and_launch_what_the_config_says(tmp_path, round, tail):
    mapped = settings(tmp_path, round=round)
    assert mapped.tail == tail
    assert (mapped.num_prompts, mapped.max_staleness, mapped.dynamic_sampling) == (100, 0, False)
    launched = make_config(tmp_path, round=round).launched
    assert (mapped.prompts_launched, mapped.responses_launched) == launched


def test_the_other_modes_reach_the_core(tmp_path):
    changes = {"async": {"max_staleness": 2}, "algorithm": {"dynamic_sampling": True}}
    mapped = settings(tmp_path, **changes, run={"deterministic": True})
    assert (mapped.max_staleness, mapped.dynamic_sampling, mapped.deterministic) == (2, True, True)


def test_the_data_must_hold_as_many_prompts_as_a_round_launches(tmp_path):
    short = {"tail_batching": "prompts", "eta": 1.5}
    assert settings(tmp_path, num_prompts=4).prompts_launched == 4
    assert settings(tmp_path, num_prompts=6, round=short).prompts_launched == 6
    with pytest.raises(DataError, match=r"3 prompts are fewer than train\.prompts_per_step = 4$"):
        settings(tmp_path, num_prompts=3)
    with pytest.raises(DataError) as error:
        settings(tmp_path, num_prompts=5, round=short)
    assert str(error.value).endswith(
        "train.jsonl: 5 prompts are fewer than train.prompts_per_step = 4 x round.eta = 1.5: "
        "a short round launches 6"
    )


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"speculation": {"max_window": 5}}, 5),
        ({"speculation": {"max_window": 5, "enabled": False}}, 0),
        ({"speculation": {"max_window": 5}, "run": {"deterministic": True}}, 0),
    ],
)
def test_an_engine_is_told_what_it_may_take_and_how_far_it_may_draft(tmp_path, changes, window):
    config = make_config(tmp_path, **changes)
    options = RolloutOptions("a", 3, tmp_path, "tcp://127.0.0.1:1", gpus=Part(("0",), 0.26))
    spec = engine_spec(config, "torch", options)
    assert (spec.slots, spec.gpu_memory, spec.max_window) == (3, 0.26, window)
    assert spec.is_deterministic == config.run.deterministic
    assert spec.max_model_length == config.max_model_length


def test_a_weight_that_asks_for_more_prompts_of_a_set_than_there_are_is_refused(tmp_path):
    sets = [{"path": "few.jsonl", "weight": 3}, {"path": "many.jsonl", "weight": 1}]
    config = make_config(tmp_path, data={"path": "", "sets": sets})
    for few, is_enough in ((3, True), (2, False)):
        sizes = {"few": few, "many": 100}
        if is_enough:
            core_settings(config, 50, (1,), sizes, {})
            continue
        with pytest.raises(
            DataError,
            match=r"^few.jsonl: 2 prompts are fewer than its weight of 3 in 4 .*: 3.0 of 4$",
        ):
            core_settings(config, 50, (1,), sizes, {})


def test_a_context_that_is_too_small_names_the_length_of_prompts(tmp_path):
    config = make_config(tmp_path, data={"max_prompt_length": 1024})
    files = {"config.json": b'{"vocab_size": 9, "max_position_embeddings": 128}'}
    with pytest.raises(
        ConfigError,
        match=r"^data.max_prompt_length = 1024 and rollout.max_response_length = \d+ add up to "
        r"1,\d+ tokens, but the model's context \(max_position_embeddings\) is 128; lower one "
        r"of them$",
    ):
        require_context(files, config)


def test_a_context_reaches_as_far_as_its_scaling(tmp_path):
    """YaRN as Qwen's model cards add it."""
    rope = b'{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}'
    text = b'{"vocab_size": 9, "max_position_embeddings": 256, "rope_scaling": ' + rope + b"}"
    longest = {"max_response_length": 512}
    config = make_config(tmp_path, data={"max_prompt_length": 512}, rollout=longest)
    require_context({"config.json": text}, config)
    config = make_config(tmp_path, data={"max_prompt_length": 513}, rollout=longest)
    said = r"context \(max_position_embeddings and its scaling\) is 1,024; lower one of them$"
    with pytest.raises(ConfigError, match=said):
        require_context({"config.json": text}, config)


def test_a_context_that_is_too_small_for_an_evaluation_names_its_set(tmp_path):
    sets = [{"path": "a.jsonl"}, {"path": "b.jsonl", "max_response_length": 4096}]
    config = make_config(tmp_path, eval={"sets": sets})
    files = {"config.json": b'{"vocab_size": 9, "max_position_embeddings": 512}'}
    with pytest.raises(
        ConfigError,
        match=r"^data.max_prompt_length = 8 and eval.sets\[1\].max_response_length = 4096 add up "
        r"to 4,104 tokens, but the model's context \(max_position_embeddings\) is 512; lower one",
    ):
        require_context(files, config)
    short = make_config(tmp_path, eval={"path": "a.jsonl", "max_response_length": 4096})
    with pytest.raises(ConfigError, match=r"and eval.max_response_length = 4096 add up to 4,104"):
        require_context(files, short)


def test_the_core_is_told_how_each_set_is_answered(tmp_path):
    sets = [
        {"path": "a.jsonl"},
        {"path": "b.jsonl", "samples": 4, "temperature": 0.6, "top_p": 0.9},
        {"path": "c.jsonl", "max_response_length": 90},
    ]
    config = make_config(tmp_path, eval={"interval": 3, "sets": sets})
    mapped = core_settings(config, 50, (1,), {"train": 100}, {"a": 5, "b": 6, "c": 7})
    assert mapped.eval_interval == 3
    assert mapped.eval_sets == (
        EvalSet("a", 5, 1, Sampling(0.0, stop_token_ids=(1,)), 60),
        EvalSet("b", 6, 4, Sampling(0.6, 0.9, stop_token_ids=(1,)), 60),
        EvalSet("c", 7, 1, Sampling(0.0, stop_token_ids=(1,)), 90),
    )
    assert mapped.num_eval_prompts == 18
