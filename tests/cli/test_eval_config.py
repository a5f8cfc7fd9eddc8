"""`lightrl eval` before and after its run: which config it has, and what is said of the result.
Pure, but for small files."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.run_file import load_config, parse_config, to_toml
from lightrl.config.schema import Config
from lightrl.devices.assign import assign
from lightrl.devices.driver import Gpu, Machine
from lightrl.devices.memory import GIB
from lightrl.devices.plan import wanted
from lightrl.launch.evaluation.config import evaluation
from lightrl.launch.evaluation.report import EvalResult, as_json, result_of, table
from lightrl.launch.evaluation.target import EvalTarget, find_target

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLES = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.toml"))
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def of(
    file: Path, *overrides: str, names: tuple[str, ...] = (), target: EvalTarget | None = None
) -> Config:
    model = target or EvalTarget("/models/m", model="/models/m")
    return evaluation(model, file, overrides, names, Path("/tmp/x"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_can_be_evaluated_by(name: str, tmp_path: Path):
    """Whatever its keys of training, nodes and trackers are; and daemons read the same config."""
    file = CONFIGS / name
    config, own = of(file), load_config(file)
    assert [one.name for one in config.eval_sets] == [one.name for one in own.eval_sets]
    assert [config.eval_sampling(one) for one in config.eval_sets] == [
        own.eval_sampling(one) for one in own.eval_sets
    ]
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "config.toml") == config
    assert (config.data.all_sets, config.journal.enabled, config.model.lora.rank) == ((), False, 0)
    assert (config.rollout.placement, config.train.world, config.scale.command) == ("own", 1, "")


def test_engines_have_the_gpus_of_the_ranks():
    config = of(CONFIGS / "gsm8k-0.5b.toml")
    gpus = Machine((Gpu(0, "GPU-0", "GPU", 80 * GIB, 79 * GIB),), "580.95.05")
    found = assign(gpus, {}, wanted(config, config.train.world, config.rollout.nodes))
    assert (found.ranks, [part.tokens for part in found.engines]) == ((), [("0",)])


def test_a_section_of_a_reward_goes_with_the_sets_that_use_it(tmp_path: Path):
    file = tmp_path / "run.toml"
    sets = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl", "reward": ["judge"]}]
    shown = ", ".join(
        "{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in s.items()) + "}" for s in sets
    )
    file.write_text(
        f'model.path = "m"\neval.sets = [{shown}]\nreward.functions = "exact_match"\n'
        'reward.judge = { url = "http://127.0.0.1:1/v1", model = "j" }\n'
    )
    assert of(file).reward.judge.model == "j"
    assert of(file, names=("a",)).reward.judge.model == ""
    assert [one.name for one in of(file, names=("b",)).eval_sets] == ["b"]


def test_what_own_functions_get_goes_with_the_sets_that_use_them(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        'model.path = "m"\ndata.path = "t.jsonl"\n'
        'eval.sets = [{path = "a.jsonl", reward = "exact_match"}]\n'
        'reward = { functions = "reward.py:f", kwargs = { a = 1 }, form = "verl" }\n'
    )
    assert of(file).reward.kwargs == {}
    file.write_text(file.read_text().replace('"exact_match"', '"other.py:f"'))
    assert of(file).reward.kwargs == {"a": 1}


def test_a_checkpoint_may_have_any_name(tmp_path: Path):
    for path in ("/m\N{GRINNING FACE}", '/"quoted" \x7f'):
        config = of(CONFIGS / "gsm8k-0.5b.toml", target=EvalTarget(path, model="/m"))
        assert config.eval.checkpoint == path


def target_of(folder: Path, **says: Any) -> EvalTarget:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(LORA | says))
    return find_target(str(folder))


def test_adapters_are_of_the_size_that_they_say(tmp_path: Path):
    target = target_of(tmp_path / "own", base_model_name_or_path="org/other")
    config = of(CONFIGS / "lora-3b-24gb.toml", target=target)
    lora = config.model.lora
    assert (lora.rank, lora.alpha, lora.targets) == (8, 16.0, ("q_proj",))
    assert config.model.path == load_config(CONFIGS / "lora-3b-24gb.toml").model.path
    every = target_of(tmp_path / "every", target_modules="all-linear")
    assert of(CONFIGS / "lora-3b-24gb.toml", target=every).model.lora.targets == ()


def test_weights_are_served_as_their_run_served_them():
    target = EvalTarget(
        "/r/checkpoints/step_4", 4, model="/r/checkpoints/step_4/model", dtype="bfloat16"
    )
    config = of(CONFIGS / "gsm8k-0.5b.toml", "model.dtype=auto", target=target)
    assert (config.model.path, config.model.dtype) == (target.model, "bfloat16")
    assert (config.eval.step, config.eval.checkpoint) == (4, target.path)
    assert (
        of(CONFIGS / "gsm8k-0.5b.toml", "model.dtype=float32", target=target).model.dtype
        == "float32"
    )


def test_a_name_may_be_that_of_a_folder_on_the_hub():
    assert find_target("org/name") == EvalTarget("org/name", model="org/name")


def result(**figures: float) -> EvalResult:
    tree = {
        "model": {"path": "m"},
        "eval": {"checkpoint": "m", "path": "a/math.jsonl", "samples": 2},
    }
    tree["eval"]["temperature"] = 1.0  # type: ignore[index]
    summary = {"total_wall_s": 2.0, "eval_tokens": 90, "weights_digest": "5f0c"}
    return EvalResult(EvalTarget("m"), parse_config(tree), figures, {"math": 3}, 1.5, summary)


def test_prompts_are_counted_by_the_run_and_not_by_what_was_written_of_them(tmp_path: Path):
    """The disk had no room for samples.jsonl."""
    (tmp_path / "metrics.jsonl").write_text('{"step":0,"eval/math/avg@2":0.5,"eval/seconds":1.5}\n')
    summary = {"eval_tokens": 9, "eval_prompts": {"math": 3}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    found = result_of(EvalTarget("m"), result().config, tmp_path)
    assert (found.num_prompts, found.num_responses) == ({"math": 3}, 6)
    assert (found.figures, found.seconds) == ({"eval/math/avg@2": 0.5}, 1.5)


def test_a_table_has_a_line_for_each_source_below_its_set():
    def some(prefix: str, score: float) -> dict[str, float]:
        names = ("avg@2", "pass@1", "pass@2", "length", "clip_ratio", "failures")
        values = (score, score / 2, score, 1234.56, 0.25, 2.0)
        return {f"eval/math/{prefix}{n}": v for n, v in zip(names, values, strict=True)}

    found = result(**some("", 0.5), **some("aime-24/", 0.25), **some("aime-25/", 0.75))
    assert table(found) == [
        "SET        PROMPTS  SAMPLES  AVG@K  PASS@1  PASS@K  LENGTH  CLIP_RATIO  FAILURES",
        "math             3        2  0.500   0.250   0.500  1234.6       0.250         2",
        "  aime-24                    0.250   0.125   0.250  1234.6       0.250         2",
        "  aime-25                    0.750   0.375   0.750  1234.6       0.250         2",
    ]
    told = json.loads(as_json(found, None))
    assert told["figures"] == found.figures
    assert told["sets"]["math"] == {
        "path": found.config.eval_sets[0].path,
        "prompts": 3,
        "samples": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_response_length": 1024,
    }
