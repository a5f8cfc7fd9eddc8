"""The section `environment` of a config: what follows from it, and one line for what cannot act."""

from pathlib import Path
from typing import Any

import pytest

from lightrl.config.run_file import load_config, parse_config, to_toml
from lightrl.config.schema import Config
from lightrl.core.settings import EpisodeSettings
from lightrl.core_settings import settings_of
from lightrl.errors import ConfigError
from lightrl.launch.checks.plan import count_prompts, describe

CLASS = {"source": "guess.py:Guess"}
DATA = {"path": "org/data"}


def config(**sections: dict[str, Any]) -> Config:
    return parse_config({"model": {"path": "org/model"}, **sections})


def complaint(**sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        config(**sections)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_data_rows_are_made_to_train_and_to_evaluate_on():
    made = config(environment=CLASS | {"tasks": 8, "eval_tasks": 3})
    assert [one.path for one in (*made.data.all_sets, *made.eval_sets)] == [
        "tasks:0-7",
        "tasks:8-10",
    ]
    assert [one.name for one in made.eval_sets] == ["tasks"]
    assert count_prompts(made.data.all_sets) == 8
    assert any("tasks:0-7 (8 prompts)" in line for line in describe(made))
    assert not config(environment=CLASS).eval_sets
    assert config(environment=CLASS, data=DATA).data.path == "org/data"


def test_the_environment_gives_the_reward_unless_there_are_functions():
    assert config(environment=CLASS).reward.functions == ()
    assert config(environment=CLASS, reward={"functions": "math"}).reward.functions == ("math",)
    assert config(environment=CLASS, reward={"workers": 2}).reward_functions == set()
    assert config(data=DATA).reward.functions == ("exact_match",)


def test_a_config_with_an_environment_is_read_back_from_its_file(tmp_path):
    made = config(
        environment=CLASS
        | {"eval_tasks": 4, "mcp": [{"command": ["serve", "-v"]}], "args": {"n": 1}}
    )
    (tmp_path / "run.toml").write_text(to_toml(made))
    again = load_config(tmp_path / "run.toml")
    assert again.environment.source == f"{tmp_path}/guess.py:Guess"
    assert again.environment.model_copy(update={"source": CLASS["source"]}) == made.environment
    assert (again.data, again.eval, again.reward) == (made.data, made.eval, made.reward)
    assert Config.model_validate_json(made.model_dump_json()) == made
    fewer = load_config(tmp_path / "run.toml", ["environment.tasks=5", "environment.eval_tasks=0"])
    assert (fewer.data.path, fewer.eval.path) == ("tasks:0-4", "")


def test_files_of_environments_lie_beside_the_config(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "org/model"\n[data]\npath = "org/data"\n'
        '[environment]\nsource = "trl:envs/game.py:Env"\ntools = ["tools.py:search", "pkg.mod:f"]\n'
    )
    made = load_config(tmp_path / "run.toml").environment
    assert made.source == f"trl:{tmp_path}/envs/game.py:Env"
    assert made.tools == (f"{tmp_path}/tools.py:search", "pkg.mod:f")
    override = load_config(tmp_path / "run.toml", ["environment.source=skyrl:pkg.mod:Env"])
    assert override.environment.source == "skyrl:pkg.mod:Env"
    override = load_config(tmp_path / "run.toml", ["environment.source=other.py:Env"])
    assert override.environment.source == f"{Path.cwd()}/other.py:Env"


def test_an_evaluation_alone_makes_no_rows_to_train_on():
    made = config(environment=CLASS | {"eval_tasks": 2}, eval={"checkpoint": "c"})
    assert not made.data.all_sets
    assert [one.path for one in made.eval_sets] == ["tasks:1000-1001"]


def test_the_core_learns_of_episodes_only_with_an_environment():
    given = CLASS | {"episodes": 9, "resume": "once"}
    assert settings_of(config(environment=given), 4).episodes == EpisodeSettings(9, "once")
    assert settings_of(config(data=DATA), 4).episodes is None


def test_the_length_of_an_episode_is_its_own_or_that_of_prompt_and_response():
    lengths = {"data": {"max_prompt_length": 50}, "rollout": {"max_response_length": 100}}
    assert config(environment=CLASS, **lengths).max_model_length == 150
    limited = config(environment=CLASS | {"max_length": 120}, **lengths)
    assert (limited.max_trained_length, limited.max_model_length) == (120, 120)


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"data": DATA, "environment": {"timeout_s": 3}},
            "environment.timeout_s = 3: cannot act without environment.source, program or tools",
        ),
        (
            {"environment": {"tools": ["tools.py:search"]}},
            "data.path: is required, or at least one [[data.sets]]",
        ),
        (
            {"environment": {"source": "guess.py"}},
            "environment.source = 'guess.py': 'guess.py' must look like FILE.py:NAME or "
            "package.module:NAME",
        ),
        (
            {"data": DATA, "environment": {"tools": ["tools.py:"]}},
            "environment.tools = ['tools.py:']: 'tools.py:' must look like FILE.py:NAME or "
            "package.module:NAME",
        ),
        (
            {"data": DATA, "environment": {"tools": ["tools.py:f"], "args": {"n": 1}}},
            "environment.args: are those of a class, and there is no environment.source",
        ),
        (
            {"data": DATA, "environment": {"mcp": [{"command": ["a"], "url": "http://a"}]}},
            "environment.mcp: each table needs either a command or a url",
        ),
        (
            {"data": DATA, "environment": {"mcp": [{}]}},
            "environment.mcp: each table needs either a command or a url",
        ),
        (
            {"environment": CLASS | {"max_turn_length": 99}, "rollout": {"max_response_length": 9}},
            "environment.max_turn_length = 99: is more than rollout.max_response_length = 9, which "
            "all turns share",
        ),
        (
            {"environment": CLASS | {"max_length": 9}, "rollout": {"max_response_length": 9}},
            "environment.max_length = 9: leaves no room for observations beside "
            "rollout.max_response_length = 9; raise it",
        ),
        (
            {"environment": CLASS | {"max_length": 90000}, "train": {"max_tokens_per_gpu": 80000}},
            "train.max_tokens_per_gpu = 80000: is less than one episode, environment.max_length = "
            "90000",
        ),
        (
            {"data": DATA, "environment": CLASS | {"tasks": 5}},
            "environment.tasks = 5: rows are made for a class or a program only, and beside no "
            "other data; leave it out",
        ),
        (
            {"eval": {"path": "org/test"}, "environment": CLASS | {"eval_tasks": 5}},
            "environment.eval_tasks = 5: rows are made for a class or a program only, and beside "
            "no other data; leave it out",
        ),
        (
            {"data": {"system_prompt": "Hi"}, "environment": CLASS},
            "data.system_prompt = 'Hi': cannot act: the environment makes the first messages",
        ),
        (
            {"data": {"too_long": "drop"}, "environment": CLASS},
            "data.too_long = 'drop': cannot act: the environment makes the first messages",
        ),
        ({"environment": {"program": " "}}, "environment.program = ' ': names no program"),
        ({"environment": {"source": 3}}, "environment.source = 3: input should be a valid string"),
        ({"environment": CLASS | {"tasks": 0}}, "environment.tasks = 0: input should be greater"),
    ],
)
def test_what_contradicts_an_environment_is_one_line(sections, line):
    assert complaint(**sections).startswith(line)
