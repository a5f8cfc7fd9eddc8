"""A 7B shape on one GPU with the optimizer's state on the host: seconds and gigabytes of loading,
of a step, and of staging a checkpoint.

What is staged is never written to its end: the process leaves. Where the host lacks the memory for
the optimizer's state twice, the weights alone are staged, with a note.

    python -m gpu_lib.speed_large 7b
"""

import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as ranks have it

import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_lib.notes import figure
from gpu_lib.shapes import SHAPES, make_model, on_device, shape_for
from gpu_lib.speed_engine import free_memory

IS_GPU = on_device() == "cuda"
TOKENS, SEQUENCES = (8192, 8) if IS_GPU else (256, 4)  # of a micro-batch
MICRO_BATCHES = 2
PROMPT_TOKENS = 16
GIB = 1 << 30
STATE, STAGED_WEIGHTS = 8, 4  # bytes a parameter: AdamW's moments; float32
SPARE = 12 * GIB  # of the host, for all else


def main() -> None:
    shape = shape_for(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="lightrl-gpu-") as scratch:
        model = make_model(Path(scratch) / "model", shape, on_device())
        free_memory()
        learner = loaded(model, shape)
        steps(learner, shape)
        stage(learner, model, shape, Path(scratch))


def loaded(model: Path, shape: str) -> Any:
    import torch

    from lightrl.config.run_file import parse_config
    from lightrl.trainer.learner.learner import Learner

    config = parse_config(
        {
            "model": {"path": str(model)},
            "data": {"path": "unused", "max_prompt_length": PROMPT_TOKENS},
            "rollout": {"max_response_length": TOKENS // SEQUENCES - PROMPT_TOKENS},
            "algorithm": {"name": "dr_grpo", "loss_norm": TOKENS},
            "train": {
                "offload": "optimizer",
                "max_tokens_per_gpu": TOKENS,
                "activation_checkpointing": True,
            },
        }
    )
    begun = clock(reset=True)
    learner = Learner(config, model, torch.device(on_device()), 1, lambda: None)
    add_figures(f"{shape}, loaded", begun)
    figure(f"{shape}: parameters", sum(p.numel() for p in learner.parameters))
    return learner


def steps(learner: Any, shape: str) -> None:
    """The first makes the optimizer's state, the second is what a step takes."""
    from lightrl.trainer.protocol import Update

    batches = tuple(micro_batch(shape, seed) for seed in range(MICRO_BATCHES))
    responses = sum(len(batch) for batch in batches)
    tokens = sum(len(s.token_ids) // 4 for batch in batches for s in batch)
    for number, word in enumerate(("the first step", "a step")):
        begun = clock(reset=True)
        learner.accumulate(batches)
        metrics = learner.finish(Update(number, responses, tokens, number + 1))
        add_figures(f"{shape}, {word} of {MICRO_BATCHES} x {TOKENS:,} tokens", begun)
        for key in ("timing_s/forward_backward", "timing_s/optimizer"):
            figure(f"{shape}, {word}: {key}", round(metrics[key], 3))
        assert metrics["grad_norm"] > 0
        assert metrics["train/skipped_nonfinite"] == 0


def micro_batch(shape: str, seed: int) -> Any:
    from lightrl.trainer.protocol import TrainSample
    from lightrl.wire import pack_f32, pack_i32

    rng = random.Random(seed)
    num, size = TOKENS // SEQUENCES, SHAPES[shape]["vocab_size"]
    made = []
    for i in range(SEQUENCES):
        ids = [rng.randrange(2, size) for _ in range(num)]
        prompt, response = pack_i32(ids[:PROMPT_TOKENS]), pack_i32(ids[PROMPT_TOKENS:])
        logprobs = pack_f32([-5.0] * (num - PROMPT_TOKENS))
        made.append(TrainSample(f"p{seed}@0#{i}", prompt, response, logprobs, (1.0, -1.0)[i % 2]))
    return tuple(made)


def stage(learner: Any, model: Path, shape: str, scratch: Path) -> None:
    from lightrl.trainer.checkpoint.on_disk import SavedStep
    from lightrl.trainer.checkpoint.writer import CheckpointWriter
    from lightrl.weights.machine.scratch import available_memory

    num = sum(p.numel() for p in learner.parameters)
    free = available_memory()
    has_optimizer = free > (STATE + STAGED_WEIGHTS) * num + SPARE
    figure(f"{shape}: GiB that the host had left to stage", round(free / GIB, 1))
    figure(f"{shape}: staged with the optimizer's state", has_optimizer)
    reported: list[Any] = []
    policy, optimizer = learner.policy, learner.optimizer
    writer = CheckpointWriter(policy, optimizer, model, learner.config.checkpoint, reported.append)
    saved = SavedStep(2, 2, digest="", dtype="bfloat16", has_optimizer=has_optimizer)
    begun = clock(reset=True)
    writer.begin(scratch / "checkpoints" / "step_2", saved, has_export=False)
    add_figures(f"{shape}, a checkpoint staged for the first time", begun)
    staged = num * (STAGED_WEIGHTS + (STATE if has_optimizer else 0))
    figure(f"{shape}: GiB staged", round(staged / GIB, 2))
    if IS_GPU:
        leave(scratch)
    writer.wait()
    assert type(reported[-1]).__name__ == "Saved", reported


def leave(scratch: Path) -> None:
    """Without waiting for the disk."""
    import shutil

    sys.stdout.flush()
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def clock(reset: bool = False) -> float:
    """Once the device is done; peaks count from here on."""
    import torch

    if IS_GPU:
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
    return time.perf_counter()


def add_figures(what: str, begun: float) -> None:
    import torch

    figure(f"{what}: s", round(clock() - begun, 2))
    if IS_GPU:
        figure(f"{what}: GiB on the GPU", round(torch.cuda.max_memory_allocated() / GIB, 2))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figure(f"{what}: GiB on the host at most so far", round(resident / GIB, 2))


if __name__ == "__main__":
    main()
