"""`lightrl up --from`: which checkpoint it means, what must fit, in one line if it does not; a run
that begins with another one's, and outlives it."""

import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest

from lightrl.cli import main
from lightrl.config.run_file import CONFIG_FILE, load_config
from lightrl.launch.checks.initial import KEY, begun_from, settled
from lightrl.launch.resume import has_journal
from lightrl.trainer.checkpoint.on_disk import SavedStep, point
from lightrl.wire import to_json
from tests.cli.test_refusals import lightrl, refusal
from tests.support.cli import (
    DEADLINE_S,
    EMULATED,
    QUICKSTART,
    SMALL,
    Victims,
    all_end,
    descendants,
    linux_only,
    piped,
    running,
    summary,
    until,
)

pytestmark = pytest.mark.usefixtures("warm_runs")
ADAPTER = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8.0,
    "target_modules": ["model.layers.0.self_attn.q_proj"],
}


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def checkpoint(step: int = 2, adapter: object = None, **saved: object) -> Path:
    """Of the quickstart's model, in runs/other, as far as is looked at before a start."""
    path = Path("runs", "other", "checkpoints", f"step_{step}").absolute()
    (path / "model").mkdir(parents=True)
    shutil.copy(QUICKSTART.parent / "model" / "config.json", path / "model")
    layout = {"dtypes": {}, "adapter": json.dumps(adapter) if adapter else ""}
    (path / "layout.json").write_text(json.dumps(layout))
    (path / "trainer.json").write_bytes(to_json(SavedStep(step, step, "", **saved)))  # pyright: ignore[reportArgumentType]
    point(path.parent, path)
    (path.parents[1] / CONFIG_FILE).touch()
    return path


def test_a_run_means_its_newest_checkpoint_and_a_checkpoint_itself():
    first, second = checkpoint(2), checkpoint(4)
    config = load_config(QUICKSTART)
    for target, path in (
        ("other", second),
        ("runs/other", second),
        (str(second.parents[1]), second),
        (str(first), first),
        ("runs/other/checkpoints/step_2", first),
        ("other/checkpoints/step_2", first),
        ("other/checkpoints", second),
    ):
        begun = begun_from(config, target)
        assert settled(begun).checkpoint.initial_load_path == str(path)
    # Named in the file of the run, it is looked for beside that.
    Path("below").mkdir()
    Path("below", "run.toml").write_text(
        'model.path = "m"\ndata.path = "d.jsonl"\ncheckpoint.initial_load_path = "../runs/other"\n'
    )
    found = load_config(Path("below", "run.toml")).checkpoint.initial_load_path
    assert found == str(second.parents[1])


def test_a_dry_run_says_what_a_run_would_begin_with(capsys, tmp_path):
    checkpoint(2, steps_before=3)
    options = ("train.steps=10", "algorithm.kl_coef=0.1", "--from", "other")
    assert lightrl("up", QUICKSTART, "--dry-run", *options) == 0
    said = capsys.readouterr().out.splitlines()
    begins = next(i for i, line in enumerate(said) if line.startswith("begins with"))
    assert [line[12:] for line in said[begins : begins + 3]] == [
        "runs/other/checkpoints/step_2: its weights and optimizer's state; steps, data and seed "
        "are this run's own",
        "the schedule continues after 5 steps, of 15",
        "algorithm.kl_coef compares with model.path, not with the checkpoint",
    ]
    assert f'initial_load_path = "{tmp_path}/runs/other/checkpoints/step_2"' in said


def test_what_is_no_checkpoint(capsys):
    path = checkpoint()
    assert lightrl("up", QUICKSTART, "--dry-run", "--from", "none") == 1
    assert capsys.readouterr().err == "lightrl: --from none: no such run or checkpoint\n"
    key = f"{KEY}={path}"
    (path / "trainer.json").write_text("{")
    assert refusal(key) == f"{KEY} = {path}: trainer.json: damaged"
    (path / "trainer.json").unlink()
    assert refusal(key) == f"{KEY} = {path}: is neither a run nor a complete checkpoint"
    run = path.parents[1]
    assert refusal(f"{KEY}={run}") == (f"{KEY} = {run}: this run has no complete checkpoint yet")
    gone = run / "gone"
    assert refusal(f"{KEY}={gone}") == f"{KEY} = {gone}: no such directory on this machine"


def test_a_damaged_layout_is_one_line(capsys):
    path = checkpoint()
    (path / "layout.json").write_text(json.dumps({"dtypes": {}, "adapter": "{"}))
    assert "/layout.json: cannot be read: Expecting property name" in refusal(f"{KEY}={path}")
    assert lightrl("eval", path, QUICKSTART) == 1
    assert "/layout.json: cannot be read: Expecting property name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "overrides", "why"),
    [
        (
            {"optimizer": "adamw8bit"},
            ("train.optim.name=adamw",),
            "train.optim.name = 'adamw': the checkpoint PATH has the state of 'adamw8bit'; "
            "to begin without it: lightrl export PATH OUT, and model.path = "
            "OUT",
        ),
        (
            {},
            ("model.lora.rank=4",),
            "model.lora.rank = 4: the checkpoint PATH has no adapters; to add some: "
            "lightrl export PATH OUT, and model.path = OUT",
        ),
        (
            {"adapter": ADAPTER},
            (),
            "model.lora.rank = 0: the checkpoint PATH has adapters of rank 4; to train the whole "
            "model: lightrl export PATH OUT --merge, and model.path = OUT",
        ),
        (
            {"adapter": ADAPTER},
            ("model.lora.rank=8", "model.lora.alpha=8"),
            "model.lora.rank = 8: the checkpoint PATH has 4",
        ),
        (
            {"adapter": ADAPTER},
            ("model.lora.rank=4",),
            "model.lora.alpha = 32: the checkpoint PATH has 8",
        ),
        (
            {"adapter": ADAPTER},
            ("model.lora.rank=4", "model.lora.alpha=8", "model.lora.targets=k_proj"),
            "model.lora.targets = ['k_proj']: the checkpoint PATH has adapters of q_proj",
        ),
        (
            {},
            EMULATED,
            "train.engine = 'emulated': the checkpoint PATH is of a model",
        ),
    ],
)
def test_what_does_not_fit_is_refused(there, overrides, why):
    path = checkpoint(**there)
    line = refusal(f"{KEY}={path}", *overrides)
    assert line == why.replace("PATH", os.path.relpath(path))


def test_another_model_and_a_checkpoint_of_none():
    path = checkpoint()
    table = json.loads((path / "model" / "config.json").read_text())
    layers = table["num_hidden_layers"]
    table["num_hidden_layers"] = 99
    (path / "model" / "config.json").write_text(json.dumps(table))
    line = refusal(f"{KEY}={path}")
    assert line.startswith("model.path = ")
    where = os.path.relpath(path)
    assert line.endswith(
        f": the checkpoint {where} has num_hidden_layers 99, and the model {layers}"
    )
    (path / "layout.json").unlink()
    assert refusal(f"{KEY}={path}") == (
        f"train.engine = 'torch': the checkpoint {where} is of no model: it has no layout.json"
    )


def test_who_only_joins_begins_with_nothing(capsys):
    with pytest.raises(SystemExit) as end:
        main(["up", "--join", "tcp://127.0.0.1:1", "--from", "other"])
    assert end.value.code == 1
    line = "lightrl: --from other: is for a run that is started; name its CONFIG\n"
    assert capsys.readouterr().err == line


def test_slurm_asks_for_the_newest_checkpoint_when_the_job_begins(tmp_path, monkeypatch, capsys):
    path = checkpoint()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 7\n")
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    name = ("slurm", QUICKSTART, "run.name=one")
    assert lightrl(*name, "train.optim.name=adamw8bit", "--from", "runs") == 1
    assert "is neither a run nor a complete checkpoint" in capsys.readouterr().err
    assert lightrl(*name, "--from", "other") == 0
    submitted = load_config(Path("runs", "one", "slurm", "run.toml"))
    assert submitted.checkpoint.initial_load_path == str(path.parents[1])


@pytest.mark.e2e
@linux_only
def test_a_run_begins_with_another_one_and_goes_on_without_it(tmp_path):
    """On two trainer nodes, where that had one. Killed before its first checkpoint, and resumed
    when the other run is gone."""
    first = ("up", str(QUICKSTART), "run.name=first", *SMALL, *EMULATED, "train.steps=2")
    with piped(tmp_path, *first, "--no-tui") as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    run_dir, other = tmp_path / "runs" / "one", tmp_path / "runs" / "first"
    trained = json.loads((other / "summary.json").read_bytes())["weights_digest"]
    options = ("train.nodes=2", "train.steps=100000", "checkpoint.interval=0")
    with running(tmp_path, "--from", "first", *EMULATED, *options) as process:
        said = until(process, " reward ")
        below = descendants(process.pid)
        victims = Victims(process)
        names = ("head", "trainer-0", "trainer-1", "rollout-0")
        for pid in [process.pid, *map(victims.pid, names)]:
            os.kill(pid, signal.SIGKILL)
        assert all_end(below)
    assert any(line.startswith("begins with runs/first/checkpoints/step_2: ") for line in said)
    taken = json.loads((run_dir / "checkpoints" / "step_0" / "trainer.json").read_bytes())
    assert (taken["step"], taken["steps_before"], taken["digest"]) == (0, 2, trained)

    shutil.rmtree(other)
    done = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    with running(tmp_path, f"train.steps={done + 3}", resume=True) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out  # what was trained again came out as it was
    assert summary(tmp_path)["trained_responses"] == 4 * (done + 3)

    # Had it been killed before it had taken it over, there would be nothing to go on from.
    shutil.rmtree(run_dir / "checkpoints")
    with running(tmp_path, f"train.steps={done + 4}", resume=True) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    leader = out.splitlines()[-1].partition("trainer-")[2][:1]
    assert out.splitlines()[-1].startswith(
        f"lightrl: trainer-{leader} failed: {other}/checkpoints/step_2: is no complete checkpoint,"
    )
    assert has_journal(run_dir)
