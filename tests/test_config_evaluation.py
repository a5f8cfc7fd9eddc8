"""Sets to evaluate on in the config: the short form, several of them, the defaults of their
keys, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from lightrl.config.evaluation import EvalSampling
from lightrl.config.run_file import load_config, parse_config, to_toml
from lightrl.config.schema import Config
from lightrl.errors import ConfigError

TRAIN = {"model": {"path": "org/model"}, "data": {"path": "train.jsonl", "answer_key": "a"}}


def parse(evaluation: dict[str, Any], **sections: Any) -> Config:
    return parse_config({**TRAIN, "eval": evaluation, **sections})


def complaint(evaluation: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(evaluation, **sections)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def samplings(config: Config) -> list[EvalSampling]:
    return [config.eval_sampling(one) for one in config.eval_sets]


def test_eval_path_is_short_for_one_set_answered_greedily_once():
    config = parse({"path": "held out.jsonl"}, rollout={"max_response_length": 7})
    [one] = config.eval_sets
    assert (one.name, one.path, one.answer_key, one.reward) == (
        *("held-out", "held out.jsonl", "a"),
        (),
    )
    assert samplings(config) == [EvalSampling(1, 0.0, 1.0, 7)]
    assert parse({}).eval_sets == parse({"interval": 3, "samples": 4}).eval_sets == ()


def test_a_set_has_what_the_section_says_where_it_says_nothing_itself():
    section = {"samples": 4, "temperature": 0.6, "top_p": 0.95, "max_response_length": 64}
    own = {"path": "b", "samples": 1, "temperature": 0, "top_p": 1, "max_response_length": 8}
    config = parse({**section, "sets": [{"path": "a"}, own, {"path": "c", "samples": 32}]})
    assert samplings(config) == [
        EvalSampling(4, 0.6, 0.95, 64),
        EvalSampling(1, 0.0, 1.0, 8),
        EvalSampling(32, 0.6, 0.95, 64),
    ]
    assert samplings(parse({**section, "path": "a"})) == [EvalSampling(4, 0.6, 0.95, 64)]


def test_sets_are_read_from_the_file_and_survive_being_written(tmp_path: Path):
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "org/model"\n[data]\npath = "org/data"\nprompt_key = "q"\n'
        "[eval]\ninterval = 5\ntemperature = 0.6\n"
        '[[eval.sets]]\npath = "math.jsonl"\nsamples = 8\nreward = "r.py:f"\n'
        '[[eval.sets]]\nname = "code"\npath = "org/code"\nsubset = "main"\nsplit = "test"\n'
        'prompt_key = "task"\nanswer_key = "tests"\ntop_p = 0.9\n'
    )
    config = load_config(tmp_path / "run.toml")
    math, code = config.eval_sets
    assert (math.name, math.path, math.prompt_key, math.reward) == (
        *("math", str(tmp_path / "math.jsonl"), "q"),
        (f"{tmp_path}/r.py:f",),
    )
    assert (code.name, code.subset, code.split) == ("code", "main", "test")
    assert (code.prompt_key, code.answer_key) == ("task", "tests")
    assert [s.samples for s in samplings(config)] == [8, 1]
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml") == config


def test_engines_have_room_for_the_longest_evaluation_and_training_is_what_it_was():
    lengths = {
        "data": {"path": "a", "max_prompt_length": 10},
        "rollout": {"max_response_length": 20},
    }
    short = parse_config({**TRAIN, **lengths, "eval": {"path": "e", "max_response_length": 5}})
    assert (short.max_trained_length, short.max_model_length) == (30, 30)
    sets = [{"path": "a"}, {"path": "b", "max_response_length": 100}]
    long = parse_config(
        {**TRAIN, **lengths, "eval": {"sets": sets}, "train": {"max_tokens_per_gpu": 30}}
    )
    assert (long.max_trained_length, long.max_model_length) == (30, 110)


@pytest.mark.parametrize(
    ("evaluation", "line"),
    [
        (
            {"path": "a", "sets": [{"path": "b"}]},
            "eval.path = 'a': is short for a single set, and there are [[eval.sets]]: give it to "
            "one of them",
        ),
        (
            {"sets": [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}, {"path": "c"}]},
            'eval.sets: 2 sets are called "x"; give each a name of its own',
        ),
        (
            {"path": "a", "samples": 4},
            "eval.samples = 4: at temperature 0 all responses to a prompt are the same; set a "
            "temperature (0.6 to 1 is usual), or leave samples at 1",
        ),
        (
            {"sets": [{"path": "a"}, {"path": "b", "samples": 2}]},
            "eval.sets[1].samples = 2: at temperature 0 all responses to a prompt are the same; "
            "set a temperature (0.6 to 1 is usual), or leave samples at 1",
        ),
        (
            {
                "samples": 4,
                "temperature": 1,
                "sets": [{"path": "a"}, {"path": "b", "temperature": 0}],
            },
            "eval.samples = 4: at temperature 0 (set b) all responses to a prompt are the same; "
            "set a temperature (0.6 to 1 is usual), or leave samples at 1",
        ),
        ({"path": "a", "top_p": 0}, "eval.top_p = 0: input should be greater than 0"),
        (
            {"sets": [{"path": "a", "top_p": 1.5}]},
            "eval.sets[0].top_p = 1.5: input should be less than or equal to 1",
        ),
        (
            {"sets": [{"path": "a", "temperature": -1}]},
            "eval.sets[0].temperature = -1: input should be greater than or equal to 0",
        ),
        (
            {"sets": [{"path": "a", "samples": 0}]},
            "eval.sets[0].samples = 0: input should be greater than 0",
        ),
        (
            {"sets": [{"path": "a", "max_response_length": 0}]},
            "eval.sets[0].max_response_length = 0: input should be greater than 0",
        ),
        (
            {"sets": [{"path": "a", "weight": 1}]},
            "eval.sets[0].weight: unknown key; did you mean data.sets[].weight?",
        ),
        (
            {"sets": [{"path": "a", "sample": 4}]},
            "eval.sets[0].sample: unknown key; did you mean eval.sets[].samples?",
        ),
        ({"sets": [{"name": "x"}]}, "eval.sets[0].path: is required"),
        ({"path": ["b", "c"]}, "eval.path = ['b', 'c']: is one path; several are [[eval.sets]]"),
        (
            {"sets": [{"path": "a", "reward": "regex"}]},
            "reward.regex: is needed for the reward 'regex', e.g. '#### (.+)': its first group is "
            "compared with the answer",
        ),
    ],
)
def test_what_is_wrong_with_sets_is_one_line(evaluation, line):
    assert complaint(evaluation) == line


def test_one_sample_at_any_temperature_and_rewards_of_evaluations_alone_are_fine():
    assert samplings(parse({"path": "a", "temperature": 0.6}))[0].samples == 1
    code = {"path": "a", "reward": "code"}
    config = parse({"sets": [code]}, reward={"timeout_s": 60, "code": {"partial": True}})
    assert config.eval_sets[0].reward == ("code",)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (EvalSampling(1, 0.0, 0.9, 1024), "x 1, greedy, at most 1,024 tokens"),
        (EvalSampling(8, 0.6, 1.0, 64), "x 8, temperature 0.6, at most 64 tokens"),
        (EvalSampling(8, 0.6, 0.95, 64), "x 8, temperature 0.6, top_p 0.95, at most 64 tokens"),
    ],
)
def test_how_a_set_is_answered_in_words(sampling, words):
    assert sampling.words == words
