"""Test the config: accepted values, the round trip through its file, and one line for every
error."""

import math
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.algorithm import ALGORITHMS
from lightrl.config.reference import allowed
from lightrl.config.run_file import OTHER_NAMES, load_config, parse_config, to_toml
from lightrl.config.schema import Config, keys
from lightrl.core_settings import settings_of
from lightrl.errors import ConfigError
from lightrl.rollout.agent import STOP_S

MINIMAL = {"model": {"path": "org/model"}, "data": {"path": "org/data"}}
TOML = '[model]\npath = "org/model"\n[data]\npath = "org/data"\n'


def config(**sections: dict[str, Any]) -> Config:
    return parse_config({**MINIMAL, **sections})


def complaint(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(tree)
    assert "\n" not in str(error.value)
    return str(error.value)


def load(tmp_path: Path, *overrides: str, toml: str = TOML) -> Config:
    (tmp_path / "run.toml").write_text(toml)
    return load_config(tmp_path / "run.toml", overrides)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("rollout.group_size", "integer > 0"),
        ("run.seed", "integer >= 0 and < 4294967296"),
        ("rollout.top_p", "number > 0 and <= 1"),
        ("rollout.temperature", "number > 0"),
        ("data.path", "text"),
        ("data.shuffle", "true | false"),
        ("run.name", "text that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$"),
        ("rollout.placement", "own | shared"),
        ("train.optim.betas", "[number >= 0 and < 1, number >= 0 and < 1]"),
        ("async.max_staleness", "integer >= 0"),
        ("algorithm.clip_low", "number >= 0"),
        ("algorithm.loss_norm", "token | sequence | constant | integer > 0"),
        ("round.eta", "number | [number, number]"),
        ("rollout.engine_args", "table"),
        ("reward.functions", "list of text"),
        ("logging.backends", "list of (jsonl | tensorboard | wandb | mlflow)"),
        ("logging.samples", "integer >= 0 | all"),
        ("data.sets[].weight", "number > 0"),
        ("data.too_long", "error | drop"),
    ],
)
def test_the_reference_states_the_allowed_values_of_a_key(key, values):
    assert allowed(key) == values


def test_the_reference_describes_every_key():
    assert [key for key, _, text in keys() if not text or "anything" in allowed(key)] == []


def test_number_of_keys_stays_small():
    # 7 keys are prices and scale, since only the user knows the cost of nodes; 8 describe a set of
    # prompts, of which a config may have several; 13 belong to the rewards "code" and "judge";
    # 14 describe an evaluation set and the settings that such sets share; 21 belong to episodes
    assert len(list(keys())) <= 202


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {
            "gpu_memory_utilization": 0.85,
            "enforce_eager": True,
            "max_num_seqs": 2**40,
            "tiny": 1e-300,
        },
        {
            "a dotted.key": "x",
            "": 1,
            "é": "ü",
            'quo"te': "\\",
            "-_": "tab\tnew\nline \x00\x1b\x7f 漢",
        },
        {"deep": {"er": {"est": [1, [2, []], {}]}, "empty": {}}},
        {"tables": [{"a": 1, "b c": {"d": [True]}}, {"a": 2}], "mixed": [1, "two", 3.0, {"f": 4}]},
    ],
)
def test_a_written_config_is_read_back_unchanged(tmp_path, engine_args):
    (tmp_path / "data.jsonl").touch()
    before = config(
        data={"path": str(tmp_path / "data.jsonl"), "system_prompt": 'Say "hi"\\\n\x7f漢字'},
        rollout={"engine_args": engine_args},
        train={"optim": {"lr": 3.3e-7, "betas": [0, 0.999]}},
        round={"tail_batching": "both", "eta": [1.25, 1.5], "race": "clock"},
        reward={"functions": ["exact_match", "math"], "weights": [1, 0.5], "on_failure": -1.0},
        logging={"backends": []},
    )
    again = load(tmp_path, toml=to_toml(before))
    assert again == before
    assert again.rollout.engine_args == engine_args


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"train": {"stepz": 3}}, "train.stepz: unknown key; did you mean train.steps?"),
        (
            {"train": {"optim": {"lrr": 1}}},
            "train.optim.lrr: unknown key; did you mean train.optim.lr?",
        ),
        ({"train": {"lr": 1}}, "train.lr: unknown key; did you mean train.optim.lr?"),
        ({"run": {"str": 1}}, "run.str: unknown key; keys are run.name, run.dir, "),
        ({"run": {"logger": 1}}, "run.logger: unknown key; keys are run.name, run.dir, "),
        ({"train": {"seed": 1}}, "train.seed: unknown key; did you mean run.seed?"),
        ({"lora": {"rank": 8}}, "lora: unknown key; did you mean [model.lora]?"),
        ({"optimizer": {"lr": 1}}, "optimizer: unknown key; did you mean [train.optim]?"),
        (
            {"model": {"path": "m", "lora": 8}},
            "model.lora = 8: is a section; its keys are model.lora.rank, model.lora.alpha, ",
        ),
        (
            {"model": {"path": "m", "lora_rank": 8}},
            "model.lora_rank: unknown key; did you mean model.lora.rank?",
        ),
        (
            {"model": {"path": "m", "name": "x"}},
            "model.name: unknown key; did you mean model.path?",
        ),
        ({"rollout": {"n": 8}}, "rollout.n: unknown key; did you mean rollout.group_size?"),
        (
            {"rollout": {"tensor_parallel_size": 2}},
            "rollout.tensor_parallel_size: unknown key; did you mean "
            "rollout.engine_args.tensor_parallel_size?",
        ),
        (
            {"train": {"learning_rate": 1}},
            "train.learning_rate: unknown key; did you mean train.optim.lr?",
        ),
        ({"trian": {"steps": 3}}, "trian: unknown key; did you mean [train]?"),
        ({"steps": 3}, "steps: unknown key; did you mean train.steps?"),
        ({"zzz": 3}, "zzz: unknown key; sections are run, model, "),
    ],
)
def test_unknown_keys_suggest_the_nearest_name(tree, text):
    assert complaint({**MINIMAL, **tree}).startswith(text)


def test_names_of_other_libraries_map_to_existing_keys():
    known = {key for key, _, _ in keys()}
    arguments = "rollout.engine_args."
    missing = {k for k in OTHER_NAMES.values() if not k.startswith(arguments)} - known
    assert missing == set()
    # a key of LightRL is never mapped to another one
    assert [n for n in OTHER_NAMES if n in known or f"train.{n}" in known] == []


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"train": {"steps": "many"}}, ("train.steps = 'many'", "integer")),
        ({"train": {"steps": 0}}, ("train.steps = 0", "greater than 0")),
        ({"train": {"steps": 1.5}}, ("train.steps = 1.5", "integer")),
        ({"train": {"optim": {"lr": float("nan")}}}, ("train.optim.lr = nan", "finite")),
        ({"train": {"optim": {"lr": float("inf")}}}, ("train.optim.lr = inf", "finite")),
        (
            {"train": {"optim": {"betas": [0.9, float("inf")]}}},
            ("train.optim.betas = inf", "finite"),
        ),
        ({"train": {"optim": {"betas": [0.9, 1.0]}}}, ("train.optim.betas = 1.0", "less than 1")),
        (
            {"train": {"optim": {"betas": [-0.1, 0.9]}}},
            ("train.optim.betas = -0.1", "greater than or equal"),
        ),
        ({"train": {"optim": {"betas": [0.9]}}}, ("train.optim.betas",)),
        ({"train": {"optim": {"eps": 0}}}, ("train.optim.eps = 0", "greater than 0")),
        ({"train": {"optim": {"schedule": "step"}}}, ("train.optim.schedule = 'step'", "'cosine'")),
        (
            {"train": {"optim": {"min_lr_ratio": 2}}},
            ("train.optim.min_lr_ratio = 2", "less than or equal to 1"),
        ),
        ({"train": {"optim": {"name": "sgd"}}}, ("train.optim.name = 'sgd'", "'adamw8bit'")),
        (
            {"train": {"max_tokens_per_gpu": 2047}},
            (
                "train.max_tokens_per_gpu = 2047",
                "data.max_prompt_length + rollout.max_response_length = 1024 + 1024",
            ),
        ),
        ({"train": {"optim": 3}}, ("train.optim = 3", "is a section")),
        ({"train": 3}, ("train = 3", "is a section")),
        ({"model": {}}, ("model.path: is required",)),
        ({"rollout": {"engine": "sglang"}}, ("rollout.engine = 'sglang'", "'vllm'")),
        ({"train": {"engine": "vllm"}}, ("train.engine = 'vllm'", "'torch'", "'emulated'")),
        (
            {"weights": {"broadcast": "always"}, "rollout": {"engine": "emulated"}},
            ("weights.broadcast = 'always'", "rollout.engine = 'emulated'"),
        ),
        (
            {"train": {"engine": "emulated"}},
            ("rollout.engine = 'auto'", "train.engine = 'emulated'", "no model"),
        ),
        (
            {"prices": {"reserved_per_hour": -1}},
            ("prices.reserved_per_hour = -1", "greater than or equal to 0"),
        ),
        ({"prices": {"preemptible_per_hour": float("nan")}}, ("preemptible_per_hour = nan",)),
        (
            {"prices": {"reserved_per_hour": 2}},
            ("prices.reserved_per_hour = 2: no cost", "without prices.preemptible_per_hour"),
        ),
        ({"scale": {"command": "x"}}, ("scale.command = 'x'", "scale.max = 0")),
        (
            {"rollout": {"placement": "shared"}, "async": {"max_staleness": 2}},
            ("rollout.placement = 'shared'", "async.max_staleness = 2", "leave one of them out"),
        ),
        (
            {"offload": {"rule": "window"}},
            ("offload.rule = 'window'", "rollout.placement = 'shared'"),
        ),
        ({"scale": {"drain": True}}, ("scale.drain = true", "scale.max = 0")),
        ({"scale": {"max": 3}}, ("scale.max = 3", "without scale.command or scale.drain")),
        ({"scale": {"max": 5000, "drain": True}}, ("scale.max = 5000", "equal to 4096")),
        ({"scale": {"max": 3, "command": "a 'b"}}, ('scale.command = "a \'b"', "no closing")),
        ({"scale": {"max": 3, "command": " "}}, ("scale.command = ' '", "names no program")),
        (
            {"scale": {"max": 3, "drain": True, "timeout_s": 5}},
            ("scale.timeout_s = 5: there is no scale.command",),
        ),
        ({"scale": {"max": 3, "command": "x", "every_s": 0}}, ("scale.every_s = 0", "greater")),
        ({"algorithm": {"loss_norm": "mean"}}, ("algorithm.loss_norm = 'mean'", "'constant'")),
        ({"algorithm": {"loss_norm": -1}}, ("algorithm.loss_norm = -1",)),
        (
            {"rollout": {"engine_args": {"a": [{"b": float("inf")}]}}},
            ("rollout.engine_args", "inf"),
        ),
        ({"rollout": {"engine_args": {"a": object}}}, ("rollout.engine_args", "type")),
        ({"reward": {"on_failure": "ignore"}}, ("reward.on_failure = 'ignore'",)),
        ({"reward": {"on_failure": float("nan")}}, ("reward.on_failure = nan",)),
        ({"reward": {"weights": [1, 2]}}, ("reward.weights", "2 weights for 1")),
        ({"reward": {"weights": [float("nan")]}}, ("reward.weights = nan", "finite")),
        ({"reward": {"functions": []}}, ("reward.functions", "at least one")),
        ({"logging": {"backends": "neptune"}}, ("logging.backends = 'neptune'", "'wandb'")),
        ({"node": {"lease_s": 0.6}}, ("node.lease_s = 0.6", "node.heartbeat_s = 0.5")),
        ({"round": {"eta": 0.9}}, ("round.eta = 0.9", "from 1 to 4")),
        ({"round": {"eta": 4.5}}, ("round.eta = 4.5", "from 1 to 4")),
        ({"round": {"eta": True}}, ("round.eta = True", "from 1 to 4")),
        ({"round": {"eta": float("nan")}}, ("round.eta = nan", "from 1 to 4")),
        ({"round": {"eta": [1.25, 0.5]}}, ("round.eta = [1.25, 0.5]", "[prompts, responses]")),
        ({"round": {"eta": [1.25]}}, ("round.eta = [1.25]", "[prompts, responses]")),
        ({"round": {"eta": "much"}}, ("round.eta = 'much'", "expected a number")),
        ({"round": {"race": "fair"}}, ("round.race = 'fair'", "'clock'")),
        ({"round": {"tail_batching": "all"}}, ("round.tail_batching = 'all'", "'prompts'")),
        (
            {"round": {"tail_batching": "prompts", "eta": 1.01}},
            ("round.eta = 1.01", "over-provisions nothing: ", "32 prompts x 8 responses"),
        ),
        (
            {"checkpoint": {"interval": 4, "keep_every": 10}},
            ("checkpoint.keep_every = 10", "checkpoint.interval = 4", "a multiple"),
        ),
        (
            {"round": {"tail_batching": "prompts", "eta": [1, 2]}},
            ("round.eta = [1.0, 2.0]", "nothing"),
        ),
        ({"train": {"devices": [0, 0], "ranks": 2}}, ("train.devices = [0, 0]", "GPU 0 twice")),
        ({"rollout": {"devices": [2, 1, 2]}}, ("rollout.devices = [2, 1, 2]", "GPU 2 twice")),
        *(
            ({"rollout": {"engine": "emulated", "nodes": 4, "slots": 8} | changes}, lines)
            for changes, lines in (
                ({"parallel": [2]}, ("rollout.parallel = [2]", "one size takes no turns")),
                ({"parallel": [1, 3]}, ("rollout.parallel = [1, 3]", "powers of two")),
                ({"parallel": [2, 1]}, ("rollout.parallel = [2, 1]", "larger than the one before")),
                ({"parallel": [1, 8]}, ("rollout.nodes = 4, the engines of 1", "multiple of 8")),
                ({"parallel": [1, 2], "nodes": 0}, ("rollout.nodes = 0", "multiple of 2")),
                ({"parallel": [1, 2], "engine": "torch"}, ("'vllm' or 'emulated'", "not 'torch'")),
                ({"parallel": [1, 2], "engine": "auto"}, ("'vllm' or 'emulated'", "not 'auto'")),
                ({"parallel": [1, 4], "slots": 20000}, ("4 times rollout.slots = 20000", "65536")),
                ({"parallel": [1, 2], "devices": [0, 1]}, ("take 4 GPUs", "names 2")),
                (
                    {"parallel": [1, 2], "engine_args": {"tensor_parallel_size": 2}},
                    ("in conflict with tensor_parallel_size of rollout.engine_args",),
                ),
                (
                    {"parallel": [1, 2], "placement": "shared"},
                    ("no turns with the trainer; leave out rollout.placement = 'shared'",),
                ),
            )
        ),
        (
            {"rollout": {"engine": "emulated", "parallel": [1, 2], "nodes": 2}}
            | {"async": {"max_staleness": 1}},
            ("rollout.parallel = [1, 2]", "leave out async.max_staleness = 1"),
        ),
        (
            {"rollout": {"engine": "vllm", "parallel": [1, 2], "nodes": 2}}
            | {"run": {"deterministic": True}},
            ("rollout.parallel = [1, 2]", "leave out run.deterministic"),
        ),
        (
            {"rollout": {"placement": "shared", "nodes": 0}},
            ("rollout.placement = 'shared'", "rollout.nodes = 0"),
        ),
        ({"train": {"devices": [0], "ranks": 2}}, ("train.devices = [0]", "train.ranks = 2")),
        ({"train": {"ranks": 4, "replicas": 3}}, ("train.replicas = 3", "train.ranks = 4")),
        (
            {"train": {"ranks": 4, "replicas": 4, "prompts_per_step": 6, "mini_batches": 2}},
            ("train.replicas = 4", "whole groups", "= 3 of them"),
        ),
        ({"train": {"devices": [0, 1]}}, ("train.devices = [0, 1]", "train.ranks = 1")),
        (
            {"rollout": {"devices": [0, 1, 2], "engine_args": {"tensor_parallel_size": 2}}},
            ("rollout.devices = [0, 1, 2]", "takes 2 GPUs", "multiple"),
        ),
        ({"async": {"max_staleness": -1}}, ("async.max_staleness = -1", "greater than or equal")),
        ({"async": {"max_staleness": "x"}}, ("async.max_staleness = 'x'", "integer")),
        ({"async": 1}, ("async = 1", "is a section")),
        ({"async": {"staleness": 1}}, ("async.staleness: unknown key", "async.max_staleness")),
        ({"async_": {"max_staleness": 1}}, ("async_: unknown key", "[async]")),
        (
            {"round": {"tail_batching": "prompts"}, "algorithm": {"tis_bounds": "off"}},
            ("algorithm.tis_bounds = 'off'", "biased", "round.deferred = 'restart'"),
        ),
        (
            {"async": {"max_staleness": 2}, "algorithm": {"tis_bounds": "off"}},
            ("algorithm.tis_bounds = 'off'", "async.max_staleness = 2", "biased"),
        ),
        (
            {
                "algorithm": {"dynamic_sampling": True, "name": "reinforce++"},
                "rollout": {"group_size": 1},
            },
            ("algorithm.dynamic_sampling = true", "rollout.group_size = 1"),
        ),
        (
            {"rollout": {"temperature": 0}},
            ("rollout.temperature = 0", "greedy ones", "all the same", "eval.temperature"),
        ),
        ({"rollout": {"temperature": -1}}, ("rollout.temperature = -1", "greater than 0")),
        ({"train": {"optim": {"lr": 1000}}}, ("train.optim.lr = 1000", "less than or equal to 1")),
        ({"algorithm": {"name": "ppo"}}, ("algorithm.name = 'ppo'", "'reinforce++-baseline'")),
        ({"algorithm": {"clip_low": -0.1}}, ("algorithm.clip_low = -0.1", "greater than or")),
        ({"algorithm": {"clip_high": "x"}}, ("algorithm.clip_high = 'x'", "number")),
        ({"algorithm": {"tis_bounds": 0.5}}, ("tis_bounds = 0.5", "[low, high]", "off")),
        ({"algorithm": {"tis_bounds": [-1, 2]}}, ("tis_bounds = [-1, 2]", "[low, high]")),
        ({"algorithm": {"tis_bounds": [0, 0.5]}}, ("tis_bounds = [0, 0.5]", "low <= 1 <= high")),
        ({"algorithm": {"tis_bounds": [0, "x"]}}, ("tis_bounds = [0, 'x']", "[low, high]")),
        ({"algorithm": {"tis_bounds": "on"}}, ("tis_bounds = 'on'", "off")),
        ({"algorithm": {"tis_bounds": -2}}, ("tis_bounds = -2", "[low, high]")),
        ({"train": {"tis_cap": 2}}, ("train.tis_cap: unknown", "algorithm.tis_bounds")),
        ({"algorithm": {"clip_ratio_c": 3}}, ("clip_ratio_c: unknown", "algorithm.clip_dual")),
        ({"algorithm": {"clip_dual": 0.5}}, ("algorithm.clip_dual = 0.5", "greater than 1")),
        (
            {"train": {"prompts_per_step": 32, "mini_batches": 3}},
            ("train.mini_batches = 3", "divide train.prompts_per_step = 32"),
        ),
        (
            {"algorithm": {"old_logprobs": "rollout", "tis_bounds": [0, 2]}},
            ("algorithm.tis_bounds = [0.0, 2.0]", "old_logprobs = 'rollout'", "leave it out"),
        ),
        (
            {"algorithm": {"old_logprobs": "rollout", "tis_level": "sequence"}},
            ("algorithm.tis_level = 'sequence'", "old_logprobs = 'rollout'"),
        ),
        ({"algorithm": {"tis_mode": "drop"}}, ("algorithm.tis_mode = 'drop'", "'mask'")),
        ({"algorithm": {"tis_level": "group"}}, ("algorithm.tis_level = 'group'", "'sequence'")),
        (
            {"algorithm": {"tis_bounds": "off", "tis_mode": "mask"}},
            ("algorithm.tis_mode = 'mask'", "algorithm.tis_bounds = 'off'"),
        ),
        (
            {"algorithm": {"tis_bounds": "off", "tis_level": "sequence"}},
            ("algorithm.tis_level = 'sequence'", "algorithm.tis_bounds = 'off'"),
        ),
        (
            {"algorithm": {"name": "rloo", "loss_norm": "token"}},
            ("algorithm.loss_norm = 'token'", "rloo"),
        ),
        ({"algorithm": {"entropy_coef": -0.1}}, ("algorithm.entropy_coef = -0.1", "greater")),
        ({"algorithm": {"mask_truncated": "x"}}, ("algorithm.mask_truncated = 'x'", "boolean")),
        ({"algorithm": {"overlong_penalty": -1}}, ("algorithm.overlong_penalty = -1", "greater")),
        (
            {"algorithm": {"overlong_penalty": 0.5}},
            ("algorithm.overlong_penalty = 0.5", "algorithm.overlong_buffer = 0"),
        ),
        ({"run": {"name": "a/b"}}, ("run.name = 'a/b'",)),
        ({"run": {"name": "x\n"}}, ("run.name = 'x\\n'",)),
        ({"run": {"name": "latest"}}, ("run.name = 'latest'", "link")),
        ({"run": {"name": list(range(1000))}}, ("run.name = [0, 1, ", "...")),
        ({"logging": {"samples": -1}}, ("logging.samples = -1:", "equal to 0 or 'all'")),
        ({"logging": {"samples": "x"}}, ("logging.samples = 'x':", "valid integer or 'all'")),
        ({"reward": {"on_failure": "0x"}}, ("on_failure = '0x':", "number or 'skip' or 'drop'")),
        ({"eval": {"path": "e", "interval": "x"}}, ("eval.interval = 'x':", "valid integer")),
    ],
)
def test_wrong_values_raise_one_line_with_key_and_value(tree, parts):
    line = complaint({**MINIMAL, **tree})
    assert all(part in line for part in parts), line
    assert len(line) < 300


def test_missing_sections_and_files(tmp_path):
    assert complaint({}) == "model.path: is required"
    for toml, part in (("a = ", "not valid TOML"), ("[model]\npath = 1", "model.path = 1")):
        with pytest.raises(ConfigError, match=part):
            load(tmp_path, toml=toml)
    for path, part in (
        (tmp_path / "none.toml", "no such config file"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=part):
            load_config(path)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.optim.lr=1e-5", "train.optim.lr", 1e-5),
        ("train.optim.betas=[0.8, 0.9]", "train.optim.betas", (0.8, 0.9)),
        ("train.activation_checkpointing=true", "train.activation_checkpointing", True),
        ("algorithm.name=reinforce++", "algorithm.name", "reinforce++"),
        ("algorithm.tis_cap=2", "algorithm.tis_bounds", (0.0, 2.0)),
        ("algorithm.tis_cap=0", "algorithm.tis_bounds", "off"),
        ("run.name=a-b.c_1", "run.name", "a-b.c_1"),
        ('run.name="quoted"', "run.name", "quoted"),
        ("run.name='2024'", "run.name", "2024"),
        ("run.bind=tcp://0.0.0.0:*", "run.bind", "tcp://0.0.0.0:*"),
        ("data.system_prompt=", "data.system_prompt", ""),
        ("data.system_prompt=two words, a=b", "data.system_prompt", "two words, a=b"),
        ('reward.functions=["exact_match", "math"]', "reward.functions", ("exact_match", "math")),
        ("reward.functions=math", "reward.functions", ("math",)),
        ("logging.backends=wandb", "logging.backends", ("wandb",)),
        ('logging.backends=["jsonl", "wandb"]', "logging.backends", ("jsonl", "wandb")),
        ("round.eta=1.5", "round.eta", 1.5),
        ("round.eta=[1.25, 1.5]", "round.eta", (1.25, 1.5)),
        ("rollout.engine_args.max_num_seqs=8", "rollout.engine_args", {"max_num_seqs": 8}),
        ('rollout.engine_args={a = {b = "c"}}', "rollout.engine_args", {"a": {"b": "c"}}),
    ],
)
def test_overrides(tmp_path, override, key, value):
    found: Any = load(tmp_path, override)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_tis_cap_sets_the_upper_bound_in_a_file_and_an_override_replaces_it(tmp_path):
    toml = TOML + "[algorithm]\ntis_cap = 2\n"
    assert load(tmp_path, toml=toml).algorithm.tis_bounds == (0.0, 2.0)
    of_a_run = to_toml(load(tmp_path, toml=toml))
    changed = load(tmp_path, "algorithm.tis_cap=3", toml=of_a_run)
    assert changed.algorithm.tis_bounds == (0.0, 3.0)


def test_the_asynchronous_section_is_read_and_written_as_async(tmp_path):
    loaded = load(tmp_path, "async.max_staleness=2")
    assert loaded.async_.max_staleness == 2
    assert "[async]\nmax_staleness = 2\n" in to_toml(loaded)
    assert load(tmp_path, toml=to_toml(loaded)) == loaded
    assert Config.model_validate_json(loaded.model_dump_json()) == loaded
    assert ("async.max_staleness", "0") in {(key, default) for key, default, _ in keys()}


@pytest.mark.parametrize(
    ("sections", "exact", "rounded"),
    [
        ({}, None, (0, 2)),
        ({"async": {"max_staleness": 0}}, None, (0, 2)),
        ({"async": {"max_staleness": 1}}, (0, 2), (0, 2)),
        ({"round": {"tail_batching": "both"}}, (0, 2), (0, 2)),
        ({"round": {"tail_batching": "both", "deferred": "restart"}}, None, (0, 2)),
        ({"round": {"tail_batching": "both"}, "run": {"deterministic": True}}, None, (0, 2)),
        (
            {"async": {"max_staleness": 1}, "algorithm": {"tis_bounds": [0.5, 5]}},
            (0.5, 5),
            (0.5, 5),
        ),
        ({"algorithm": {"tis_bounds": "off"}}, None, None),
        ({"algorithm": {"old_logprobs": "rollout"}}, None, None),
        ({"rollout": {"engine_args": {"kv_cache_dtype": "fp8"}}}, (0, 2), (0, 2)),
    ],
)
def test_tokens_are_weighted_unless_sampled_with_the_trained_probabilities(
    sections, exact, rounded
):
    made = config(**sections)
    assert (made.tis_bounds(is_float32=True), made.tis_bounds(is_float32=False)) == (exact, rounded)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_that_compare_a_group_refuse_a_group_of_one(name):
    tree = {"algorithm": {"name": name}, "rollout": {"group_size": 1}}
    if name == "reinforce++":
        assert config(**tree).rollout.group_size == 1
        return
    line = complaint({**MINIMAL, **tree})
    assert line.startswith(f"rollout.group_size = 1: algorithm.name = '{name}' compares")
    assert line.endswith("or choose reinforce++")


@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [
        ({"name": "grpo"}, (0.2, 0.2)),
        ({"name": "dapo"}, (0.2, 0.28)),
        ({"name": "gspo"}, (3e-4, 4e-4)),
        ({"name": "cispo"}, (math.inf, 0.2)),
        ({"name": "reinforce++"}, (0.2, 0.2)),
        ({"name": "dapo", "clip_low": 0.1}, (0.1, 0.28)),
        ({"name": "cispo", "clip_low": 0.5, "clip_high": 4.0}, (0.5, 4.0)),
        ({"name": "gspo", "clip_high": 0}, (3e-4, 0)),
    ],
)
def test_default_clip_bounds_follow_from_the_algorithm(tmp_path, algorithm, clip):
    made = config(algorithm=algorithm, data={"path": str(tmp_path)})
    assert made.algorithm.clip == clip
    assert load(tmp_path, toml=to_toml(made)).algorithm == made.algorithm


@pytest.mark.parametrize(
    ("engine_args", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 4}, 4),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ({"tensor_parallel_size": "two"}, 1),  # vLLM reports the error
    ],
)
def test_the_number_of_gpus_per_engine(engine_args, gpus):
    assert config(rollout={"engine_args": engine_args}).gpus_per_engine == gpus


@pytest.mark.parametrize(
    ("round", "etas", "launched"),
    [
        ({}, (1.0, 1.0), (32, 8)),
        ({"tail_batching": "prompts"}, (1.25, 1.0), (40, 8)),
        ({"tail_batching": "both"}, (1.25, 1.25), (40, 10)),
        ({"tail_batching": "both", "eta": [1, 1.5]}, (1, 1.5), (32, 12)),
        ({"tail_batching": "prompts", "eta": [1.125, 1.5]}, (1.125, 1.0), (36, 8)),
    ],
)
def test_prompts_and_responses_launched_in_a_short_round(round, etas, launched):
    c = config(round=round)
    assert (c.round.etas, c.launched) == (etas, launched)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("steps=3", "'steps=3': an override looks like section.key=value"),
        ("train.steps", "'train.steps': an override looks like section.key=value"),
        ("model.path.x=3", "model.path.x: path is not a section"),
        ("train.steps=two", "train.steps = 'two': input should be a valid integer"),
        ("eval.sets=3", "eval.sets = 3: input should be a valid list"),
        ("train..steps=2", "train.: unknown key"),
        ("data.path=" + "x" * 400 + ".jsonl", "data.path = "),
        ("data.path=a\0.jsonl", "data.path = "),
    ],
)
def test_wrong_overrides_raise_one_line(tmp_path, override, text):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, override)
    assert str(error.value).startswith(text)
    assert len(str(error.value).splitlines()) == 1


def test_paths_of_overrides_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "configs" / "run.toml").write_text(
        '[model]\npath = "org/model"\n[data]\npath = "a.jsonl"\n[reward]\nfunctions = "r.py:f"\n'
    )
    loaded = load_config(tmp_path / "configs" / "run.toml", ["eval.path=b.jsonl"])
    assert loaded.model.path == "org/model"
    assert loaded.data.path == str(tmp_path / "configs" / "a.jsonl")
    assert loaded.reward.functions == (f"{tmp_path}/configs/r.py:f",)
    assert loaded.eval.path == str(tmp_path / "elsewhere" / "b.jsonl")


@pytest.mark.parametrize(
    ("mode", "staleness", "acts"),
    [("auto", 0, "auto"), ("auto", 1, "off"), ("always", 1, "always"), ("off", 0, "off")],
)
def test_asynchronous_runs_broadcast_only_if_always_is_set(tmp_path: Path, mode, staleness, acts):
    config = load(tmp_path, f"weights.broadcast={mode}", f"async.max_staleness={staleness}")
    assert config.broadcast == acts
    assert settings_of(config, 1).broadcast == acts


@pytest.mark.parametrize("grace_s", [0.1, 20.0])
def test_a_node_counts_as_lost_only_after_it_has_killed_an_engine_that_keeps_its_devices(grace_s):
    kill_s = 2 * STOP_S  # once for the request to stop, once for the kill
    assert settings_of(config(node={"grace_s": grace_s}), 1).release_s > grace_s + kill_s


@pytest.mark.parametrize("rule", ["foreseen", "window", "off"])
def test_the_core_receives_the_offload_rule_of_shared_devices(rule: str):
    shared = config(rollout={"placement": "shared"}, offload={"rule": rule})
    assert settings_of(shared, 1).offload == rule


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"path": "m", "lora": {"alpha": 8}}}, "model.lora.alpha = 8: there are no"),
        ({"model": {"path": "m", "lora": {"targets": "q"}}}, "model.lora.targets = ['q']: there"),
        (
            {"model": {"path": "m", "lora": {"rank": 4}}, "weights": {"broadcast": "always"}},
            "weights.broadcast = 'always': with model.lora.rank = 4",
        ),
        (
            {"model": {"path": "m", "lora": {"rank": 4}}, "rollout": {"engine": "emulated"}},
            "model.lora.rank = 4: rollout.engine = 'emulated'",
        ),
    ],
)
def test_adapter_settings_without_effect_are_refused(sections, said):
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": {"path": "d"}, **sections})
    assert said in str(caught.value)


def test_adapters_are_neither_broadcast_nor_sent_as_differences():
    lora = parse_config({"data": {"path": "d"}, "model": {"path": "m", "lora": {"rank": 4}}})
    assert (lora.broadcast, lora.has_deltas) == ("off", False)


def test_reward_kwargs_and_form_require_functions_of_the_user(tmp_path):
    model = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}
    own = {"functions": "r.py:f", "form": "trl", "kwargs": {"scale": 2.0, "names": ["a"], "t": {}}}
    config = parse_config({**model, "reward": own})
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml").reward.kwargs == own["kwargs"]
    for key, value in (("kwargs", {"scale": 2}), ("form", "verl")):
        with pytest.raises(ConfigError, match=rf"reward\.{key}.*: is for functions of your own"):
            parse_config({**model, "reward": {key: value}})
    with pytest.raises(ConfigError, match=r"reward\.kwargs: .*cannot be sent to nodes"):
        parse_config({**model, "reward": {**own, "kwargs": {"limit": float("inf")}}})
