"""A finished run says how many drafted tokens were kept, and simulations of it believe it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightrl.cli import main
from lightrl.sim.engine_profile import SimSpeculation
from lightrl.sim.measured import chance
from lightrl.sim.scenario import Scenario, find_scenario

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "run.toml"
ASSUMED = SimSpeculation()


def write_run(folder: Path, epochs: list[set[int]], records: Sequence[object]) -> Path:
    """Rounds whose prompts are of these epochs, and the records of its steps as they stand in the
    file."""
    rounds: list[object] = []
    for step, mixed in enumerate(epochs):
        responses = [
            [f"p{i}", epoch, k, 60 + 9 * i, True]
            for epoch in mixed
            for i in range(8)
            for k in (0, 1)
        ]
        rounds.append({"step": step, "kind": "plain", "responses": responses})
        rounds.append({"step": step, "kind": "eval", "responses": [["e", 0, 0, 5, True]]})
    (folder / "lengths.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def record(step: int, acceptance: float, tokens_per_forward: float) -> dict[str, float]:
    """Of a step that is done: the first has number 1."""
    return {
        "step": float(step + 1),
        "speculation/acceptance": acceptance,
        "speculation/tokens_per_forward": tokens_per_forward,
        "speculation/draft_share": 0.03,
    }


def found(folder: Path) -> Scenario:
    return find_scenario(str(folder), 105, 0)


@pytest.mark.parametrize("acceptance", [0.3, 0.65, 0.9])
@pytest.mark.parametrize("window", [1, 2, 8, 16])
def test_the_chance_of_one_token_is_found_from_what_whole_windows_brought(
    acceptance: float, window: int
):
    tokens = SimSpeculation(acceptance=acceptance).tokens_per_forward(window)
    assert chance((tokens - 1) / window, tokens) == pytest.approx(acceptance, rel=1e-6)


@pytest.mark.parametrize(
    ("acceptance", "tokens"), [(0.0, 1.0), (1.0, 9.0), (1.0, 1.0), (0.2, 1.001)]
)
def test_the_chance_is_one_that_the_model_can_have(acceptance: float, tokens: float):
    assert acceptance - 0.02 <= SimSpeculation(acceptance=chance(acceptance, tokens)).acceptance < 1


def test_steps_of_the_first_epoch_and_later_ones_are_measured_apart(tmp_path: Path):
    first = SimSpeculation(acceptance=0.3).tokens_per_forward(4)
    later = SimSpeculation(acceptance=0.8).tokens_per_forward(8)
    records = [
        record(0, (first - 1) / 4, first),
        record(1, 0.99, 30.0),
        record(2, (later - 1) / 8, later),
    ]
    scenario = found(write_run(tmp_path, [{0}, {0, 1}, {1, 2}], records))
    assert scenario.has_speculated
    assert scenario.speculation.first_acceptance == pytest.approx(0.3)
    assert scenario.speculation.acceptance == pytest.approx(0.8)
    assert scenario.speculation.verify_cost == ASSUMED.verify_cost
    assert "how many drafted tokens are kept is measured" in scenario.workload.note


def test_steps_count_by_their_tokens(tmp_path: Path):
    write_run(tmp_path, [{1}, {1, 2, 3}], [record(0, 0.2, 1.1), record(1, 0.6, 1.3)])
    assert found(tmp_path).speculation.acceptance == pytest.approx(0.5)


def test_what_a_run_does_not_say_stays_assumed(tmp_path: Path):
    scenario = found(
        write_run(tmp_path, [{0}, {1}], [record(0, 0.5, 1.4), {"step": 2.0, "loss/policy": 0.1}])
    )
    assert scenario.speculation == SimSpeculation(first_acceptance=0.5)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 1.0, "loss/policy": 0.1}],
        [{"step": 1.0, "speculation/tokens_per_forward": 1.0}],
        ['{"step": 1.0, "speculation/acc', "[3]", "", "null"],
        [record(7, 0.5, 2.0)],
        [record(0, 1.5, 2.0), record(0, 0.5, 0.5), record(0, float("nan"), 2.0)],
    ],
    ids=["nothing", "other figures", "nothing drafted", "torn", "another step", "impossible"],
)
def test_a_run_that_says_nothing_of_it_is_simulated_as_before(
    tmp_path: Path, records: list[object]
):
    with_file = found(write_run(tmp_path, [{0}, {1}], records))
    (tmp_path / "metrics.jsonl").unlink()
    assert with_file == found(tmp_path)
    assert (with_file.speculation, with_file.has_speculated) == (ASSUMED, False)


def step_s(capsys: pytest.CaptureFixture[str], *arguments: object) -> float:
    words = [
        str(QUICKSTART),
        "train.prompts_per_step=8",
        "rollout.group_size=4",
        "--steps",
        "3",
        "--nodes",
        "2",
    ]
    with pytest.raises(SystemExit) as end:
        main(["simulate", *words, *map(str, arguments), "--json"])
    assert not end.value.code
    return json.loads(capsys.readouterr().out.splitlines()[-1])["as configured"]["step_s"]


def test_a_run_that_speculated_is_simulated_so_unless_the_config_has_it_off(tmp_path: Path, capsys):
    run = (
        "--workload",
        write_run(tmp_path, [{0}, {1}], [record(0, 0.7, 3.0), record(1, 0.9, 8.0)]),
    )
    on, off = step_s(capsys, *run), step_s(capsys, *run, "speculation.enabled=false")
    assert on < 0.9 * off
    (tmp_path / "metrics.jsonl").unlink()
    assert step_s(capsys, *run) == off
