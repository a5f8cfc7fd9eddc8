"""A training step of LightRL's rank against a bare PyTorch loop: same model, samples and
micro-batches.

The bare loop keeps float32 weights and steps with fused AdamW, as the rank does, and computes in
bfloat16 autocast; it writes no version. Two steps warm up, the median of the rest counts.

    python -m gpu_lib.speed_step 0.5b
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_lib.notes import figure
from gpu_lib.shapes import SHAPES, make_model, on_device, shape_for
from gpu_lib.speed_engine import free_memory, memory_folder

IS_GPU = on_device() == "cuda"
WARM, STEPS = (2, 5) if IS_GPU else (1, 2)
RESPONSES, BATCH = (64, 8) if IS_GPU else (8, 4)
PROMPT_TOKENS, RESPONSE_TOKENS = (128, 384) if IS_GPU else (8, 24)


def main() -> None:
    shape = shape_for(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="lightrl-gpu-", dir=memory_folder()) as scratch:
        model = make_model(Path(scratch) / "model", shape, on_device())
        free_memory()
        bare = bare_steps(model, shape)
        free_memory()
        ours, parts = rank_steps(model, shape, Path(scratch))
    tokens = RESPONSES * (PROMPT_TOKENS + RESPONSE_TOKENS)
    figure(f"{shape}, bare PyTorch loop: s/step", round(bare, 4))
    figure(f"{shape}, rank, without publishing: s/step", round(ours, 4))
    figure(f"{shape}, bare loop / rank (goal 0.95)", round(bare / ours, 3))
    figure(f"{shape}, rank: tokens/s", round(tokens / ours))
    for name, seconds in parts.items():
        figure(f"{shape}, rank: {name}", round(seconds, 4))


def synchronized() -> float:
    import torch

    if IS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def median_of(step: Callable[[int], None]) -> float:
    seconds = []
    for i in range(WARM + STEPS):
        started = synchronized()
        step(i)
        seconds.append(synchronized() - started)
    return statistics.median(seconds[WARM:])


def rows_of(shape: str) -> list[tuple[list[int], list[int], float]]:
    """(prompt, response, advantage)."""
    rng = random.Random(3)
    size = SHAPES[shape]["vocab_size"]

    def tokens(n: int) -> list[int]:
        return [rng.randrange(2, size) for _ in range(n)]

    return [
        (tokens(PROMPT_TOKENS), tokens(RESPONSE_TOKENS), (1.0, -1.0)[i % 2])
        for i in range(RESPONSES)
    ]


def bare_steps(model: Path, shape: str) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(on_device())
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    rows = rows_of(shape)

    def step(_: int) -> None:
        for first in range(0, RESPONSES, BATCH):
            part = rows[first : first + BATCH]
            ids = torch.tensor([p + r for p, r, _ in part], device=on_device())
            advantages = torch.tensor([a for _, _, a in part], device=on_device())[:, None]
            with torch.autocast(on_device(), torch.bfloat16, enabled=IS_GPU):
                logits = module(ids[:, :-1], use_cache=False, logits_to_keep=RESPONSE_TOKENS).logits
            logprobs = logits.float().log_softmax(-1)
            chosen = logprobs.gather(-1, ids[:, -RESPONSE_TOKENS:, None])[..., 0]
            loss = -((chosen - chosen.detach()).exp() * advantages).sum() / (
                RESPONSES * RESPONSE_TOKENS
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return median_of(step)


def rank_steps(model: Path, shape: str, scratch: Path) -> tuple[float, dict[str, float]]:
    """Seconds of a step without writing the version, and the rank's own figures of its parts."""
    from lightrl.config.run_file import parse_config
    from lightrl.trainer.protocol import Accumulate, StartRank, TrainSample, Update
    from lightrl.trainer.rank.rank import Rank
    from lightrl.wire import pack_f32, pack_i32

    algorithm = {"name": "dr_grpo", "loss_norm": RESPONSE_TOKENS}
    config = parse_config(
        {
            "model": {"path": str(model)},
            "data": {"path": "unused"},
            "algorithm": algorithm,
            "train": {"activation_checkpointing": False},  # nor does the bare loop
            "weights": {"canary": 0},
        }
    )
    publish = str(scratch / "weights")
    start = StartRank(config.model_dump_json(), str(model), 0, 1, "", publish, str(scratch))
    rank = Rank(start, lambda event: None)
    logprobs = pack_f32([-5.0] * RESPONSE_TOKENS)
    samples = [
        TrainSample(f"p{i}@0#0", pack_i32(p), pack_i32(r), logprobs, a)
        for i, (p, r, a) in enumerate(rows_of(shape))
    ]
    batches = tuple(tuple(samples[i : i + BATCH]) for i in range(0, RESPONSES, BATCH))
    reported: list[dict[str, float]] = []

    def step(number: int) -> None:
        list(rank.perform(Accumulate(number, batches)))
        [finished] = rank.perform(
            Update(number, RESPONSES, RESPONSES * RESPONSE_TOKENS, number + 1)
        )
        reported.append(finished.metrics)

    seconds = median_of(step)
    keys = ("timing_s/forward_backward", "timing_s/optimizer", "timing_s/publish")
    parts = {key: statistics.median(m[key] for m in reported[WARM:]) for key in keys}
    return seconds - parts["timing_s/publish"], parts


if __name__ == "__main__":
    main()
