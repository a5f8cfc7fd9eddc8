"""What `train.deterministic` costs: steps of 8 x 4,096 tokens with a fixed order in the backward
pass of attention, against steps without.

    python -m gpu_lib.speed_deterministic 0.5b
"""

import random
import sys
import tempfile
from pathlib import Path

from gpu_lib.notes import figure
from gpu_lib.shapes import SHAPES, make_model, on_device, shape_for
from gpu_lib.speed_engine import free_memory, memory_folder
from gpu_lib.speed_step import IS_GPU, median_of

RESPONSES, BATCH = 8, 4
RESPONSE_TOKENS = 4096 if IS_GPU else 24
PROMPT_TOKENS = 8


def main() -> None:
    shape = shape_for(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="lightrl-gpu-", dir=memory_folder()) as scratch:
        model = make_model(Path(scratch) / "model", shape, on_device())
        seconds: dict[bool, float] = {}
        for ordered in (False, True):
            free_memory()
            seconds[ordered], gib = steps(model, shape, Path(scratch) / str(ordered), ordered)
            about = f"{shape}, {RESPONSES} x {RESPONSE_TOKENS} tokens, deterministic = {ordered}"
            figure(f"{about}: s/step", round(seconds[ordered], 4))
            figure(f"{about}: peak, GiB", round(gib, 2))
    ratio = seconds[True] / seconds[False]
    figure(f"{shape}, deterministic attention: times the seconds of a step", round(ratio, 3))


def steps(model: Path, shape: str, scratch: Path, ordered: bool) -> tuple[float, float]:
    """Seconds of a step, versions included, and the peak of memory in GiB."""
    import torch

    from lightrl.config.run_file import parse_config
    from lightrl.trainer.protocol import Accumulate, StartRank, TrainSample, Update
    from lightrl.trainer.rank.rank import Rank
    from lightrl.wire import pack_f32, pack_i32

    config = parse_config(
        {
            "model": {"path": str(model)},
            "data": {"path": "unused"},
            "algorithm": {"name": "dr_grpo", "loss_norm": RESPONSE_TOKENS},
            "train": {"deterministic": ordered},
            "weights": {"canary": 0},
        }
    )
    scratch.mkdir()
    where = str(scratch / "weights"), str(scratch)
    start = StartRank(config.model_dump_json(), str(model), 0, 1, "", *where)
    rank = Rank(start, lambda event: None)
    rng, size = random.Random(3), SHAPES[shape]["vocab_size"]

    def tokens(n: int) -> bytes:
        return pack_i32([rng.randrange(2, size) for _ in range(n)])

    logprobs = pack_f32([-9.0] * RESPONSE_TOKENS)
    samples = [
        TrainSample(
            f"p{i}@0#0",
            tokens(PROMPT_TOKENS),
            tokens(RESPONSE_TOKENS),
            logprobs,
            (1.0, -1.0)[i % 2],
        )
        for i in range(RESPONSES)
    ]
    batches = tuple(tuple(samples[i : i + BATCH]) for i in range(0, RESPONSES, BATCH))
    if IS_GPU:
        torch.cuda.reset_peak_memory_stats()

    def step(number: int) -> None:
        list(rank.perform(Accumulate(number, batches)))
        finish = Update(number, RESPONSES, RESPONSES * RESPONSE_TOKENS, number + 1)
        list(rank.perform(finish))

    seconds = median_of(step)
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if IS_GPU else 0.0


if __name__ == "__main__":
    main()
