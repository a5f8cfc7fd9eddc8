"""`lightrl up` with engine and trainer on one GPU: it learns, survives what is killed, and repeats
itself."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lightrl.metrics import sinks
from tests.support import cli as harness
from tests.support.cli import (
    QUICKSTART,
    Victims,
    all_end,
    descendants,
    piped,
    summary,
    until,
    wait_for_step,
)

STEPS = 20
DEADLINE_S = 170
SETTINGS = (
    "run.name=one",
    "run.bind=tcp://127.0.0.1:*",
    "rollout.nodes=1",
    "rollout.slots=256",
    "node.grace_s=10",
    "eval.path=",
)
QUICK = ("rollout.group_size=4", "train.prompts_per_step=8", "rollout.max_response_length=48")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM compiles the model whenever an engine starts, which takes longer than a test on a CPU
    waits."""
    monkeypatch.setattr(harness, "DEADLINE_S", DEADLINE_S)


@pytest.fixture(scope="session")
def engine(device: str) -> str:
    """vLLM where it is installed and is for this device, else the torch engine."""
    if device == "cuda" and importlib.util.find_spec("vllm") is not None:
        import torch

        with contextlib.suppress(ImportError, OSError, RuntimeError):
            import vllm

            if "cpu" not in vllm.__version__ and torch.version.cuda:
                return "vllm"
    return "torch"


def running(
    tmp_path: Path, *overrides: str, resume: bool = False
) -> "contextlib.AbstractContextManager[subprocess.Popen[str]]":
    first = ("resume", "one") if resume else ("up", str(QUICKSTART), *SETTINGS)
    return piped(tmp_path, *first, *overrides, "--no-tui")


def ended(process: "subprocess.Popen[str]", tmp_path: Path) -> str:
    """What it printed; fails with the ends of all logs if the run did not finish."""
    out, _ = process.communicate(timeout=DEADLINE_S)
    if process.returncode:
        logs = [
            f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}"
            for log in sorted((tmp_path / "runs" / "one" / "logs").glob("*.log"))
        ]
        pytest.fail("\n".join([out, *logs]))
    return out


def rewards(tmp_path: Path) -> list[float]:
    return [r["reward/mean"] for r in sinks.read(tmp_path / "runs" / "one") if "reward/mean" in r]


def test_the_reward_of_the_quickstart_rises(device, engine, tmp_path, figure):
    quick = QUICK if device == "cpu" else ()  # on a CPU: that it runs
    with running(tmp_path, *quick, f"rollout.engine={engine}", f"train.steps={STEPS}") as process:
        ended(process, tmp_path)
    found = rewards(tmp_path)
    assert len(found) == STEPS
    first, last = sum(found[:5]) / 5, sum(found[-5:]) / 5
    figure(f"quickstart, {engine} engine: reward of steps 1-5", first)
    figure(f"quickstart, {engine} engine: reward of the last 5 of {STEPS}", last)
    assert device == "cpu" or last > first + 0.03
    steps = [r for r in sinks.read(tmp_path / "runs" / "one") if "timing_s/step" in r]
    figure(
        f"quickstart, {engine} engine: s/step, median",
        sorted(r["timing_s/step"] for r in steps)[len(steps) // 2],
    )
    gaps = [r["train_rollout_logprob_abs_diff"] for r in steps]
    figure(
        f"quickstart, {engine} engine: train_rollout_logprob_abs_diff, largest of {STEPS} steps",
        max(gaps),
    )
    assert max(gaps) < (0.03 if device == "cuda" else 1e-4)


def test_a_run_whose_engine_and_rank_are_killed_goes_on_and_is_resumed(device, engine, tmp_path):
    overrides = (*QUICK, f"rollout.engine={engine}", "checkpoint.interval=2", "train.steps=1000")
    with running(tmp_path, *overrides) as process:
        until(process, " reward ")
        for daemon, word in (("rollout-0", "engine"), ("trainer-0", "rank")):
            done = last_step(tmp_path)
            kill_child(Victims(process).pid(daemon), word)
            wait_for_step(tmp_path, done + 3)
        below = descendants(process.pid)
        process.kill()
        assert all_end(below)
    done = last_step(tmp_path)
    with running(tmp_path, f"train.steps={done + 4}", resume=True) as process:
        ended(process, tmp_path)
    assert summary(tmp_path)["steps"] == done + 4
    assert summary(tmp_path)["trained_responses"] == 32 * (done + 4)  # none twice, none lost


def last_step(tmp_path: Path) -> int:
    return int(sinks.read(tmp_path / "runs" / "one")[-1]["step"])


def kill_child(daemon: int, word: str) -> None:
    """SIGKILL to the child of a daemon whose command line has the word."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split():
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    raise AssertionError(f"daemon {daemon} has no {word}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_run_repeats(device, engine, dtype, tmp_path, figure):
    """Equal digests where the engine is batch-invariant; for the torch engine in bfloat16 it is a
    figure."""
    overrides = (*QUICK, f"rollout.engine={engine}", "train.steps=6", "run.deterministic=true")
    digests = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with running(tmp_path / name, *overrides, f"model.dtype={dtype}") as process:
            ended(process, tmp_path / name)
        result = summary(tmp_path / name)
        digests.append((result["responses_digest"], result["weights_digest"]))
    figure(
        f"deterministic, {engine} engine, {dtype}: the same digests twice", digests[0] == digests[1]
    )
    if dtype == "float32" or engine == "vllm":
        assert digests[0] == digests[1]
