"""`lightrl up` with models of real shapes on one GPU, random weights: engine and trainer agree,
runs learn through kills and a resume, LoRA of 3B fits on a card of 24 GB."""

import contextlib
import gc
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_lib.shapes import CALM, make_model

from lightrl.metrics import sinks
from tests.gpu.test_loop import (  # noqa: F401 - fixtures
    QUICK,
    ended,
    engine,
    kill_child,
    last_step,
    patience,
    rewards,
    running,
)
from tests.support.cli import Victims, all_end, descendants, summary, until, wait_for_step

# A share of token ids: raised by moving every token's probability a little, whatever the model.
REWARD = (
    "def reward(sample):\n    return sum(t % 2 for t in sample.response_ids) / "
    "len(sample.response_ids)\n"
)
STEPS = 20
MOST_GAP, MOST_KL = 0.02, 1e-3  # of bfloat16, in each of the steps
FEW = 5  # steps, over which rewards are averaged: on an H200 they rose by 0.01 to 0.016
GIB = 1 << 30
CARD_BYTES = 23 * GIB  # that a card of 24 GB has for its processes
POLL_S = 0.02
LORA_TOKENS = 8192  # of a micro-batch


def shape_on(device: str, name: str) -> str:
    return name if device == "cuda" else "small"


def settings(tmp_path: Path, device: str, shape: str) -> list[str]:
    """A model of this shape and a reward for odd token ids; on a CPU few and short responses."""
    model = make_model(tmp_path / "model", shape, device, deviation=CALM)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # of this process, beside the run
    (tmp_path / "odd.py").write_text(REWARD)
    return [
        f"model.path={model}",
        f"reward.functions={tmp_path / 'odd.py'}:reward",
        "checkpoint.export=never",
        *(QUICK if device == "cpu" else ()),
    ]


@pytest.fixture(params=["torch", "vllm"])
def kind(device: str, request: pytest.FixtureRequest) -> str:
    """Of the engine; skips vLLM where there is none."""
    if request.param == "vllm":
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed")
        request.getfixturevalue("vllm")
    return request.param


def test_engine_and_trainer_agree_while_the_reward_rises(device, kind, tmp_path, figure):
    """A 0.5B shape. On a CPU both compute in float32."""
    shape = shape_on(device, "0.5b")
    overrides = [
        *settings(tmp_path, device, shape),
        "train.optim.lr=1e-4",
        "rollout.max_response_length=32",
        "train.max_tokens_per_gpu=4096",  # else a rank needs 50 GiB
        f"rollout.engine={kind}",
        f"model.dtype={'bfloat16' if device == 'cuda' else 'float32'}",
        f"train.steps={STEPS if device == 'cuda' else 3}",
    ]
    with running(tmp_path, *overrides) as process:
        ended(process, tmp_path)
    steps = [r for r in sinks.read(tmp_path / "runs" / "one") if "mismatch_kl/mean" in r]
    gap = max(r["train_rollout_logprob_abs_diff"] for r in steps)
    kl = max(r["mismatch_kl/mean"] for r in steps)
    label, found = f"{shape} with random weights, {kind} engine", rewards(tmp_path)
    figure(f"{label}: train_rollout_logprob_abs_diff, largest of {len(steps)} steps", gap)
    figure(f"{label}: mismatch_kl/mean, largest of {len(steps)} steps", kl)
    figure(f"{label}: reward of step 1", found[0])
    figure(f"{label}: reward of step {len(found)}", found[-1])
    assert gap <= (MOST_GAP if device == "cuda" else 1e-4)
    assert kl <= (MOST_KL if device == "cuda" else 1e-6)
    assert device == "cpu" or sum(found[-FEW:]) > sum(found[:FEW])


def test_a_run_whose_engine_and_rank_are_killed_is_resumed_and_learns(
    device,
    engine,  # noqa: F811
    tmp_path,
    figure,
):
    """20 steps of a 0.5B shape: the engine is killed, then the rank, then all; resumed to the
    end."""
    shape = shape_on(device, "0.5b")
    overrides = [
        *settings(tmp_path, device, shape),
        "train.optim.lr=1e-4",
        "rollout.max_response_length=32",
        "train.max_tokens_per_gpu=4096",
        f"rollout.engine={engine}",
        "checkpoint.interval=3",
        "train.steps=1000",
    ]
    with running(tmp_path, *overrides) as process:
        until(process, " reward ")
        for daemon, word in (("rollout-0", "engine"), ("trainer-0", "rank")):
            done = last_step(tmp_path)
            kill_child(Victims(process).pid(daemon), word)
            wait_for_step(tmp_path, done + 4)
        below = descendants(process.pid)
        process.kill()
        assert all_end(below)
    done = last_step(tmp_path)
    steps = max(STEPS if device == "cuda" else 0, done + 2)
    with running(tmp_path, f"train.steps={steps}", resume=True) as process:
        ended(process, tmp_path)
    found, result = rewards(tmp_path), summary(tmp_path)
    assert result["steps"] == steps
    # none twice, none lost
    assert result["trained_responses"] == (256 if device == "cuda" else 32) * steps
    label = f"{shape}, {engine} engine, killed and resumed"
    figure(f"{label}: steps done when all was killed", done)
    figure(f"{label}: reward of step 1", found[0])
    figure(f"{label}: reward of step {steps}", found[-1])
    assert device == "cpu" or sum(found[-FEW:]) > sum(found[:FEW])


class Watched:
    """The memory of the GPU that others took meanwhile, at most."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._before = torch.cuda.mem_get_info()[0]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            taken = self._before - torch.cuda.mem_get_info()[0]
            self.most_bytes = max(self.most_bytes, taken)

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@contextlib.contextmanager
def small_card(device: str) -> Iterator[Watched | None]:
    """No more of the GPU is free than a card of 24 GB has."""
    if device == "cpu":
        yield None
        return
    torch.cuda.init()
    surplus = torch.cuda.mem_get_info()[0] - CARD_BYTES
    if surplus < 0:
        pytest.skip(f"{CARD_BYTES // GIB} GiB are not free")
    ballast = torch.empty(surplus, dtype=torch.uint8, device=device)
    with Watched() as watched:
        yield watched
    del ballast
    torch.cuda.empty_cache()


def test_lora_of_a_real_shape_fits_beside_its_engine(device, kind, tmp_path, figure):
    """3B, rank 16, micro-batches of 8k tokens: trainer and engine together."""
    shape = shape_on(device, "3b")
    overrides = [
        *settings(tmp_path, device, shape),
        "model.lora.rank=16",
        "model.lora.alpha=32",
        "train.optim.lr=1e-4",
        f"train.max_tokens_per_gpu={LORA_TOKENS}",
        f"model.dtype={'bfloat16' if device == 'cuda' else 'float32'}",
        f"rollout.engine={kind}",
        "train.steps=2",
    ]
    if device == "cuda":
        overrides += ["rollout.slots=64", "rollout.max_response_length=500"]
        overrides += ["train.prompts_per_step=8"]  # 64 responses: four micro-batches
    with small_card(device) as watched, running(tmp_path, *overrides) as process:
        ended(process, tmp_path)
    steps = [r for r in sinks.read(tmp_path / "runs" / "one") if "timing_s/step" in r]
    label = f"LoRA of {shape}, rank 16, {kind} engine"
    figure(f"{label}: s/step, the last", steps[-1]["timing_s/step"])
    figure(f"{label}: tokens of a step", steps[-1]["num_tokens"])
    figure(f"{label}: micro-batches of a step", steps[-1]["perf/micro_batches"])
    gap = max(r["train_rollout_logprob_abs_diff"] for r in steps)
    figure(f"{label}: train_rollout_logprob_abs_diff, largest of {len(steps)} steps", gap)
    assert len(steps) == 2
    assert all(r["grad_norm"] > 0 for r in steps)
    assert gap <= (0.03 if device == "cuda" else 1e-4)
    if watched is not None:
        assert max(r["num_tokens"] / r["perf/micro_batches"] for r in steps) > LORA_TOKENS / 2
        figure(f"{label}: trainer and engine together, GiB", watched.most_bytes / GIB)
        assert watched.most_bytes <= CARD_BYTES
