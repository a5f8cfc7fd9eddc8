"""`lightrl eval`: what a run finds at a step is what its checkpoint is found to be; whatever ends
an evaluation leaves nothing."""

import itertools
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lightrl.cli import main
from lightrl.metrics import sinks
from tests.support.cli import (
    DEADLINE_S,
    EMULATED,
    QUICKSTART,
    all_end,
    arguments,
    descendants,
    linux_only,
    piped,
    running,
    summary,
    until,
)

pytestmark = pytest.mark.usefixtures("warm_runs")

STEPS, NUM_PROMPTS, SAMPLES = 2, 6, 4
# One response of seven has no score, one of two is right: so all figures differ from 0 and 1.
REWARD = """
def reward(sample):
    kind = (1 + sum(sample.response.encode())) % 7
    return None if not kind else {"reward": float(kind % 2), "kind": kind}
"""


@dataclass(frozen=True)
class Trained:
    """A run "one" that has ended, evaluated on two sets, one of them of two sources."""

    folder: Path

    @property
    def last(self) -> dict[str, float]:
        """What it found at its last step."""
        record = sinks.read(self.folder / "runs" / "one")[-1]
        return {n: v for n, v in record.items() if n.startswith("eval/") and n != "eval/seconds"}

    @property
    def samples(self) -> list[dict[str, Any]]:
        """That it has kept of this evaluation."""
        rows = lines(self.folder / "runs" / "one" / "samples.jsonl")
        return [row for row in rows if row["is_eval"] and row["step"] == STEPS]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def trained(folder: Path, *settings: str) -> Trained:
    rows = lines(QUICKSTART.parent / "eval.jsonl")
    (folder / "reward.py").write_text(REWARD)
    for name, first in (("greedy", 0), ("sampled", NUM_PROMPTS)):
        some = [
            {**row, "data_source": f"s/{k % 2}"} if name == "sampled" else row
            for k, row in enumerate(rows[first : first + NUM_PROMPTS])
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    sets = (
        f'[{{path="{folder}/greedy.jsonl"}}, '
        f'{{path="{folder}/sampled.jsonl", samples={SAMPLES}, temperature=1.0}}]'
    )
    ours = (f"eval.sets={sets}", f"reward.functions={folder}/reward.py:reward")
    with running(folder, *ours, f"train.steps={STEPS}", *settings) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    return Trained(folder)


@pytest.fixture(scope="module")
def torch_run(origin_of_runs: object, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="module")
def emulated_run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("emulated"), *EMULATED)


def evaluated(folder: Path, *words: str | Path, status: int = 0) -> tuple[str, str]:
    """stdout and stderr; nothing is left of it."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        arguments("eval", *map(str, words)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "TMPDIR": str(temporary)},
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert list(temporary.glob("lightrl-*eval*")) == []
    return done.stdout, done.stderr


def by_response(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["response"]: row for row in rows}


@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.e2e), "emulated"])
def test_a_checkpoint_is_found_to_be_what_its_run_found(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
):
    run = request.getfixturevalue(f"{kind}_run")
    file = tmp_path / "samples.jsonl"
    out, err = evaluated(run.folder, "one", "--json", "--samples", file)
    result = json.loads(out)
    assert result["figures"] == run.last
    assert result["weights_digest"] == summary(run.folder)["weights_digest"]
    assert result["checkpoint"] == str(run.folder / "runs" / "one" / "checkpoints" / "step_2")
    assert (result["step"], result["samples"]) == (STEPS, str(file))
    assert by_response(lines(file)) == by_response(run.samples)
    assert "evaluating runs/one/checkpoints/step_2, step 2, on greedy, sampled" in err


@pytest.mark.e2e
def test_its_figures_are_those_of_its_samples(torch_run: Trained, tmp_path: Path):
    """pass@k by its definition: the mean over all ways to choose k of the samples."""
    file = tmp_path / "samples.jsonl"
    evaluated(torch_run.folder, "one", "--samples", file, "--set", "sampled")
    rows = lines(file)
    assert len(rows) == NUM_PROMPTS * SAMPLES
    of_prompt: dict[str, list[float]] = {}
    for row in rows:
        of_prompt.setdefault(row["response"].rpartition("#")[0], []).append(row["reward"] or 0.0)
    figures = torch_run.last
    assert figures["eval/sampled/avg@4"] == pytest.approx(fmean(r["reward"] or 0 for r in rows))
    for k in (1, 2, 4):
        chosen = [
            fmean(max(some) >= 1 for some in itertools.combinations(rewards, k))
            for rewards in of_prompt.values()
        ]
        assert figures[f"eval/sampled/pass@{k}"] == pytest.approx(fmean(chosen))
    assert figures["eval/sampled/failures"] == sum(row["reward"] is None for row in rows)
    assert figures["eval/sampled/length"] == pytest.approx(fmean(r["tokens"] for r in rows))
    clipped = fmean(row["finish_reason"] == "length" for row in rows)
    assert figures["eval/sampled/clip_ratio"] == pytest.approx(clipped)


@pytest.mark.e2e
def test_an_export_answers_greedily_as_the_checkpoint_does(torch_run: Trained, tmp_path: Path):
    """And what a person sees: a table with a line for each set."""
    run_dir = torch_run.folder / "runs" / "one"
    file, config = tmp_path / "samples.jsonl", run_dir / "config.toml"
    model = run_dir / "checkpoints" / "step_2" / "hf"
    words = (model, config, "--samples", file, "--set", "greedy", "rollout.nodes=2")
    out, _ = evaluated(torch_run.folder, *words)
    own = {r["prompt"]: r["text"] for r in torch_run.samples if r["response"].startswith("greedy")}
    assert {row["prompt"]: row["text"] for row in lines(file)} == own
    header, greedy, _, what, took, where = out.splitlines()[-6:]
    names = "SET PROMPTS SAMPLES AVG@K PASS@1 PASS@K LENGTH CLIP_RATIO FAILURES"
    assert header.split() == names.split()
    figures = torch_run.last
    assert greedy.split()[:4] == ["greedy", "6", "1", f"{figures['eval/greedy/avg@1']:.3f}"]
    assert what.startswith(f"{model}, step 0, weights ")
    assert "tokens in" in took
    assert where == f"responses: {file}"


@pytest.mark.e2e
def test_values_can_be_overridden(emulated_run: Trained):
    out, _ = evaluated(
        emulated_run.folder,
        "one",
        "--json",
        "--set",
        "greedy",
        "eval.samples=3",
        "eval.temperature=1",
    )
    result = json.loads(out)
    assert set(result["sets"]) == {"greedy"}
    assert result["sets"]["greedy"]["samples"] == 3
    assert result["sets"]["greedy"]["temperature"] == 1.0
    assert "eval/greedy/avg@3" in result["figures"]


@pytest.mark.e2e
def test_data_to_train_on_is_not_read(emulated_run: Trained):
    out, _ = evaluated(emulated_run.folder, "one", "--json", "data.path=/nowhere/train.jsonl")
    assert json.loads(out)["figures"] == emulated_run.last


@pytest.mark.e2e
def test_adapters_are_evaluated_too(tmp_path: Path):
    run = trained(tmp_path, "model.lora.rank=4", "train.steps=1", "checkpoint.export=last")
    checkpoint = tmp_path / "runs" / "one" / "checkpoints" / "step_1"
    out, _ = evaluated(tmp_path, checkpoint, QUICKSTART, "--json", *_as_there(tmp_path))
    assert json.loads(out)["figures"] == run.last
    words = (checkpoint / "hf", QUICKSTART, "--json", "--set", "greedy")
    out, _ = evaluated(tmp_path, *words, *_as_there(tmp_path))
    found = json.loads(out)["figures"]
    assert found == {name: v for name, v in run.last.items() if name.startswith("eval/greedy/")}


def _as_there(folder: Path) -> list[str]:
    """The settings of its run, which trains with adapters, without those."""
    config = (folder / "runs" / "one" / "config.toml").read_text()
    [sets] = [
        line for line in config.splitlines() if line.startswith("sets = [{") and "greedy" in line
    ]
    return [
        f"eval.{sets.replace(' = ', '=', 1)}",
        "eval.path=",
        f"reward.functions={folder}/reward.py:reward",
        *("rollout.engine=torch", "rollout.nodes=1", "rollout.max_response_length=16"),
    ]


@pytest.mark.e2e
@linux_only
def test_ctrl_c_leaves_nothing(emulated_run: Trained, tmp_path: Path):
    slow = "rollout.engine_args={t0_ms = 200}"
    words = ("eval", str(emulated_run.folder / "runs" / "one"), slow, "--samples", "s.jsonl")
    with piped(tmp_path, *words, TMPDIR=str(tmp_path)) as process:
        until(process, " of 30 responses")
        below = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE_S)
        assert all_end(below)
    assert process.returncode == 1
    last = out.splitlines()[-1]
    assert last == "interrupted; nothing is left of it"
    assert list(tmp_path.glob("lightrl-*")) == []
    assert not (tmp_path / "s.jsonl").exists()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ("False", "none.py:reward: a response to "),
        ("sample.response == sample.answer", "evaluation at step 2: none of 30 responses has a"),
    ],
)
def test_a_reward_that_scores_nothing(
    emulated_run: Trained, tmp_path: Path, scores: str, reason: str
):
    (tmp_path / "none.py").write_text(
        f"def reward(sample):\n    if {scores}:\n        return 1.0\n"
        "    raise ValueError('not today')\n"
    )
    out, err = evaluated(
        emulated_run.folder, "one", f"reward.functions={tmp_path}/none.py:reward", status=1
    )
    [line] = err.splitlines()
    assert line.removeprefix(f"lightrl: {tmp_path}/").removeprefix("lightrl: ").startswith(reason)
    assert line.rstrip(")").endswith("ValueError: not today")
    assert "AVG@K" not in out


@pytest.mark.e2e
def test_weights_that_fit_no_model(torch_run: Trained, tmp_path: Path):
    model = QUICKSTART.parent / "model"
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = other / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 64}))
    _, err = evaluated(torch_run.folder, other, torch_run.folder / "runs/one/config.toml", status=1)
    [line] = err.splitlines()
    assert f": {other}: " in line
    assert "its config.json says" in line


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line that it ends with, before anything is started."""
    with pytest.raises(SystemExit) as end:
        main(["eval", *map(str, words)])
    assert end.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    return line.removeprefix("lightrl: ")


MODEL = QUICKSTART.parent / "model"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["nothing", QUICKSTART],
            "nothing: no such checkpoint; give RUN/checkpoints/step_N, a run's",
        ),
        (["x" * 300, QUICKSTART], f"{'x' * 300}: File name too long"),
        (["./nothing", QUICKSTART], "./nothing: no such checkpoint; give RUN/checkpoints/step_N"),
        (["empty", QUICKSTART], "empty: holds no checkpoint (trainer.json), no adapters ("),
        (["fresh", QUICKSTART], "fresh: this run has no checkpoint yet"),
        ([MODEL], f"{MODEL}: the config of its run is not here; give a CONFIG, too"),
        ([MODEL, "a.toml", "b.toml"], "one CONFIG is possible, not 2: a.toml b.toml"),
        ([MODEL, "a.toml"], "a.toml: no such config file"),
        ([MODEL, QUICKSTART, "eval.path="], f"{QUICKSTART}: has no set to evaluate; give eval."),
        (
            [MODEL, QUICKSTART, "--set", "x"],
            "--set x: no such set; there are eval",
        ),
        ([MODEL, QUICKSTART, "eval.pth=a"], "eval.pth: unknown key; did you mean eval.path?"),
        ([MODEL, QUICKSTART, "eval.path=a.jsonl"], "eval.sets.path = "),
        ([MODEL, QUICKSTART, "--samples", "taken"], "--samples taken: exists already; nothing is"),
        ([MODEL, QUICKSTART, "--samples", "a/b"], "--samples a/b: no such directory "),
        (
            ["adapters", QUICKSTART],
            "adapters/adapter_config.json: use_dora = True: only plain LoRA",
        ),
        (["torn", QUICKSTART], "torn: is no complete checkpoint: "),
        (["one/checkpoints/step_2"], "runs/one/checkpoints/step_2: is no complete checkpoint: "),
        (
            ["one/checkpoints/step_9"],
            "one/checkpoints/step_9: no such checkpoint; there are step_2, step_10",
        ),
    ],
)
def test_refusals(capsys, monkeypatch, tmp_path, words, reason):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "fresh/checkpoints", "adapters", "torn"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "taken").touch()
    (tmp_path / "torn" / "trainer.json").write_text("{")
    for step in (2, 10):
        (tmp_path / f"runs/one/checkpoints/step_{step}").mkdir(parents=True)
        (tmp_path / f"runs/one/checkpoints/step_{step}" / "trainer.json").write_text("{")
    adapters = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_dora": True}
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(adapters))
    assert refused(capsys, *words).startswith(reason)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            f"eval.checkpoint={MODEL}",
            "eval.checkpoint: is for lightrl eval CHECKPOINT CONFIG; leave",
        ),
        ("eval.step=3", "eval.step = 3: is that of eval.checkpoint; leave it out"),
    ],
)
def test_a_run_does_not_only_evaluate(capsys, monkeypatch, tmp_path, override, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["up", str(QUICKSTART), override, "--no-tui"])
    assert reason in capsys.readouterr().err
