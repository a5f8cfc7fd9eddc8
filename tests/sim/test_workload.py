"""Lengths, reward times and workload files: what they are, and how a wrong one is refused."""

import json
from pathlib import Path
from statistics import correlation, quantiles

import pytest

from lightrl.errors import SimError
from lightrl.sim.inputs.files import find_scenario
from lightrl.sim.inputs.hardware import EngineProfile
from lightrl.sim.inputs.scenario import (
    PRESETS,
    QWEN2_5_7B,
    QWEN2_5_14B,
    QWEN2_5_32B,
    QWEN3_14B,
)
from lightrl.sim.inputs.workload import (
    SHORT_TAIL,
    Cursor,
    EmpiricalLengths,
    LengthModel,
    RewardClass,
    RewardTimes,
    complete_censored,
)


def test_the_fitted_model_has_the_published_quantiles():
    model = SHORT_TAIL
    lengths = [model.length(f"p{p}", 0, n, model.cap) for p in range(2500) for n in range(4)]
    cuts = quantiles(lengths, n=100)
    assert cuts[49] == pytest.approx(558, rel=0.1)
    assert cuts[89] == pytest.approx(4101, rel=0.12)
    assert max(lengths) == model.cap


def test_a_length_depends_on_prompt_epoch_and_noise_alone():
    model = LengthModel()
    assert model.length("p1", 3, 77, 8192) == LengthModel().length("p1", 3, 77, 8192)
    assert model.length("p1", 3, 77, 100) == min(100, model.length("p1", 3, 77, 8192))
    assert len({model.length("p1", 0, n, 8192) for n in range(50)}) > 40
    assert model.length("p1", 0, 5, 8192) != LengthModel(seed=1).length("p1", 0, 5, 8192)


def test_prompts_keep_their_difficulty_over_epochs():
    def means(epoch: int, drift: float = 0.2) -> list[float]:
        model = LengthModel(drift=drift)
        return [
            sum(model.length(f"p{p}", epoch, n, 8192) for n in range(24)) / 24 for p in range(150)
        ]

    assert correlation(means(0), means(1)) > 0.7
    assert correlation(means(0), means(4, drift=1.0)) < 0.4


def test_given_up_responses_count_as_at_least_as_long():
    seen = {"a": [(10, True), (50, False)], "b": [(80, True), (90, True), (200, False)]}
    lengths = complete_censored(seen, seed=0)
    assert lengths["a"][0] == 10
    assert lengths["a"][1] in {80, 90}
    assert lengths["b"] == [80, 90, 200]


def test_unknown_prompts_borrow_the_lengths_of_known_ones():
    lengths = EmpiricalLengths({"p0": [5], "p1": [7]})
    assert lengths.length("p1", 0, 3, 100) == 7
    assert {lengths.length(f"p{k}", 0, 0, 100) for k in range(2, 40)} == {5, 7}


def test_reward_times_follow_their_classes_and_limits():
    slow = RewardClass(share=0.5, median_s=1.0, sigma=1.0, hanging=0.2, limit_s=30.0)
    times = RewardTimes((slow, RewardClass(share=0.5, constant_s=0.25)))
    drawn = [times.seconds(f"p{p}", n) for p in range(200) for n in range(5)]
    assert 0.4 < drawn.count(0.25) / len(drawn) < 0.6
    assert 0.05 < drawn.count(30.0) / len(drawn) < 0.15
    adaptive = RewardTimes((slow, RewardClass(share=0.5, constant_s=0.25)), adaptive=True)
    assert max(adaptive.seconds(f"p{p}", n) for p in range(200) for n in range(5)) < 12


def test_an_epoch_holds_every_prompt_once():
    cursor = Cursor(10, seed=1)
    drawn = [cursor.draw() for _ in range(20)]
    assert sorted(p for p, e in drawn if e == 0) == sorted(p for p, e in drawn if e == 1)
    assert len({p for p, e in drawn if e == 0}) == 10
    assert [p for p, _ in drawn[:10]] != [p for p, _ in drawn[10:]]


def test_a_workload_file_changes_what_it_names(tmp_path: Path):
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps(
            {
                "lengths": {"a": [3, 4], "b": [9]},
                "engine": {"step_s": 0.5, "speculation": {"acceptance": 0.6}},
                "reward": {
                    "factor": 2.0,
                    "classes": [{"share": 1.0, "constant_s": 2, "workers": 3}],
                },
                "training": {"placement": "colocated"},
                "prices": {"node": 2.5},
            }
        )
    )
    scenario = find_scenario(str(file), 100, 0)
    assert scenario.engine == EngineProfile(step_s=0.5, speculation=scenario.engine.speculation)
    assert scenario.workload.num_prompts == 2
    assert scenario.workload.lengths.length("p1", 0, 0, 100) == 9
    assert scenario.workload.reward.classes[0].constant_s == 2
    assert (scenario.training.placement, scenario.prices.node) == ("colocated", 2.5)


def test_the_lengths_of_a_run_are_a_workload(tmp_path: Path):
    rows = [
        {"step": 0, "kind": "eval", "responses": [["e", 0, 0, 1, True]]},
        {"step": 0, "kind": "short", "responses": [["x", 0, 0, 12, True], ["y", 0, 0, 5, False]]},
    ]
    file = tmp_path / "lengths.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    scenario = find_scenario(str(file), 100, 0)
    assert scenario.workload.num_prompts == 2
    # at least 5, and 12 is the only longer one
    assert scenario.workload.lengths.length("p1", 0, 0, 100) == 12


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_built_and_move_real_weights(name: str):
    scenario = find_scenario(name, 8192, 0)
    transfer = scenario.transfer
    assert scenario.workload.name == name
    assert transfer.num_bytes > 15e9
    assert transfer.publishing_s > 0.5
    assert transfer.loading_s > 2


@pytest.mark.parametrize(
    ("num_bytes", "hidden", "layers", "heads", "kv_heads", "inner", "vocabulary", "is_qwen3"),
    [
        (QWEN2_5_7B, 3584, 28, 28, 4, 18944, 152_064, False),
        (QWEN2_5_14B, 5120, 48, 40, 8, 13824, 152_064, False),
        (QWEN2_5_32B, 5120, 64, 40, 8, 27648, 152_064, False),
        (QWEN3_14B, 5120, 40, 40, 8, 17408, 151_936, True),
    ],
)
def test_models_are_as_large_as_their_published_shapes(
    num_bytes: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    vocabulary: int,
    is_qwen3: bool,
):
    """From config.json of each; heads have 128 dimensions, embeddings are not shared."""
    q, kv = 128 * heads, 128 * kv_heads
    # Qwen3 norms queries and keys, Qwen2.5 has biases.
    extra = 2 * 128 if is_qwen3 else q + 2 * kv
    layer = 2 * hidden * (q + kv) + extra + 3 * hidden * inner + 2 * hidden
    assert num_bytes == 2 * (2 * vocabulary * hidden + layers * layer + hidden)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"lengths": {"a": [0]}}', "lengths.a.0 = 0: input should be greater than 0"),
        ('{"lengths": {"a": []}}', "lengths.a = []: list should have at least 1 item"),
        ('{"engine": {"step": 1}}', "engine.step: unknown key"),
        (
            '{"engine": {"step_s": "fast"}}',
            "engine.step_s = 'fast': input should be a",
        ),
        ('{"engine": {"step_s": -1}}', "engine.step_s = -1: input should be greater than 0"),
        ('{"engine": {"speculation": {"acceptance": 1}}}', "acceptance = 1: input should be less"),
        ('{"reward": {"classes": [{"share": 0.5}]}}', "shares of the classes sum to 0.5"),
        ('{"reward": {"classes": [{"shar": 1}]}}', "reward.classes.0.shar: unknown key"),
        (
            '{"training": {"placement": "moon"}}',
            "training.placement = 'moon': input should be",
        ),
        ('{"transfer": {"delta_ratio": 0}}', "transfer.delta_ratio = 0: input should be greater"),
        ('{"transfer": {"form_s": -1}}', "transfer.form_s = -1: input should be greater"),
        (
            '{"length_model": {"rho": 2}}',
            "length_model.rho = 2: input should be less",
        ),
        ('{"speed": 1}', "speed: unknown key"),
        ('{"num_prompts": 1.5}', "num_prompts = 1.5: input should be a valid integer"),
        ('{"engine": 3}', "engine = 3: input should be an object"),
        ("{\n oops", "not valid JSON: key must be a string at line 2 column 2"),
        ("[]", "is not a JSON object"),
    ],
)
def test_an_impossible_workload_is_one_clear_line(tmp_path: Path, text: str, complaint: str):
    file = tmp_path / "w.json"
    file.write_text(text)
    with pytest.raises(SimError) as error:
        find_scenario(str(file), 100, 0)
    assert complaint in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a", "lengths": [-3]}', ":2: lengths.0 = -3: input should be greater"),
        ('{"lengths": [3]}', ":2: a line needs a prompt and lengths, or responses"),
        ("[1]", ":2: is not a JSON object"),
        ("{", ":2: not valid JSON"),
    ],
)
def test_an_impossible_line_of_lengths_is_named(tmp_path: Path, line: str, complaint: str):
    file = tmp_path / "w.jsonl"
    file.write_text('{"prompt": "a", "lengths": [3]}\n' + line)
    with pytest.raises(SimError) as error:
        find_scenario(str(file), 100, 0)
    assert complaint in str(error.value)


def test_what_is_neither_file_nor_preset_is_said(tmp_path: Path):
    with pytest.raises(SimError, match="is not a file, a run or a preset"):
        find_scenario("nowhere", 100, 0)
