"""One training rank on a GPU: its step and its checkpoints against those of a CPU, and the memory
it takes.

The same body runs on both devices in processes of their own, since a rank takes the GPU where there
is one.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_lib.shapes import SHAPES, make_model, num_parameters
from safetensors.torch import load_file

from lightrl.devices import memory
from lightrl.trainer.protocol import TrainSample
from lightrl.wire import pack_f32, pack_i32, to_json

LIMIT_S = 280
LEAST_COSINE = 0.999
LEAST_RATIO, MOST_RATIO = 0.6, 1.1  # of measured memory to the arithmetic, which is for planning

RANK = """
import json, sys
from pathlib import Path
import torch
from lightrl.trainer.rank.rank import Rank
from lightrl.trainer.protocol import Accumulate, Update, Save, StartRank, TrainSample
from lightrl.trainer.checkpoint.on_disk import checkpoint_path
from lightrl.wire import from_json
from safetensors.torch import save_file

job = json.loads(Path(sys.argv[1]).read_text())
samples = [from_json(line.encode(), TrainSample) for line in job["samples"]]
run = Path(job["run"])
weights = str(run / "weights")
start = StartRank(job["config"], job["model"], 0, 1, "", weights, str(run), job["first"])
rank = Rank(start, lambda event: None)
digests = [rank.started.published.file.digest]
said = {"device": str(rank.device), "digests": digests, "metrics": [], "dtypes": []}
tokens = sum(len(s.token_ids) // 4 for s in samples)
for step in range(job["first"], job["first"] + job["steps"]):
    size = job["batch"]
    if rank.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for i in range(0, len(samples), size):
        list(rank.perform(Accumulate(step, (tuple(samples[i : i + size]),))))
    [finished] = rank.perform(Update(step, len(samples), tokens, step + 1))
    said["digests"].append(finished.published.file.digest)
    said["metrics"].append(finished.metrics)
    if rank.device.type == "cuda":
        said["peak"] = torch.cuda.max_memory_allocated()
path = checkpoint_path(run / "checkpoints", job["first"] + job["steps"])
path.parent.mkdir(parents=True, exist_ok=True)
list(rank.perform(Save(job["first"] + job["steps"], str(path))))
rank.checkpoint_writer.wait()
said["master"] = sorted({str(p.dtype) for p in rank.learner.policy.module.parameters()})
named = rank.learner.policy.module.named_parameters()
masters = {n: getattr(p.detach(), "full_tensor", p.detach)().cpu().contiguous() for n, p in named}
save_file(masters, run / "masters")
(run / "said.json").write_text(json.dumps(said))
"""


def samples_of(vocabulary: int, num: int, num_tokens: int) -> list[TrainSample]:
    """Responses of up to `num_tokens`, to prompts of 8, with advantages of both signs."""
    rng = np.random.default_rng(5)
    made = []
    for i in range(num):
        length = num_tokens - (i % 4) * (num_tokens // 8)
        prompt, response = rng.integers(2, vocabulary, 8), rng.integers(2, vocabulary, length)
        logprobs = pack_f32((-math.log(vocabulary) * np.ones(length)).tolist())
        advantage = (1.0, -0.5, 0.25, -0.75)[i % 4]
        made.append(
            TrainSample(
                f"p{i}@0#0",
                pack_i32(prompt.tolist()),
                pack_i32(response.tolist()),
                logprobs,
                advantage,
            )
        )
    return made


def config_of(model: Path, **train: Any) -> str:
    from lightrl.config.run_file import parse_config

    sections = {
        "train": {"optim": {"lr": 1e-4}, **train},
        "algorithm": {"name": "dr_grpo", "loss_norm": 64},
    }
    return parse_config(
        {"model": {"path": str(model)}, "data": {"path": "unused"}, **sections}
    ).model_dump_json()


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`train("cuda", ...)`: what a rank there says, and its weights afterwards as "masters"."""

    def run(
        on: str, model: Path, samples: list[TrainSample], run_dir: Path, **fields: Any
    ) -> dict[str, Any]:
        run_dir.mkdir(parents=True, exist_ok=True)
        job = {"first": 0, "steps": 1, "batch": 4, "config": config_of(model), **fields}
        job |= {
            "model": str(model),
            "run": str(run_dir),
            "samples": [to_json(s).decode() for s in samples],
        }
        (run_dir / "job.json").write_text(json.dumps(job))
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if on == "cpu" else {})}
        command = [sys.executable, "-c", RANK, str(run_dir / "job.json")]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said = json.loads((run_dir / "said.json").read_text())
        assert said["device"].startswith(on)
        return said | {"masters": load_file(run_dir / "masters")}

    return run


@pytest.fixture(scope="session")
def model(device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 4 layers: a step on a CPU takes seconds. Its weights are the same for both devices."""
    return make_model(tmp_path_factory.mktemp("model"), "small", "cpu")


def update(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(after[n].double() - before[n].double()).flatten() for n in sorted(before)])


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


def test_a_step_in_bfloat16_goes_where_that_in_float32_goes(device, train, model, tmp_path, figure):
    """Adam's first update is little more than the signs of the gradient, many of which are about
    zero: what must agree is the gradient."""
    samples = samples_of(SHAPES["small"]["vocab_size"], 16, 48)
    on_cpu = train("cpu", model, samples, tmp_path / "cpu")
    on_device = train(device, model, samples, tmp_path / "device")
    assert on_device["master"] == ["torch.float32"]
    # what was published first: the stored weights
    assert on_device["digests"][0] == on_cpu["digests"][0]
    one, other = (gradient(tmp_path / name) for name in ("cpu", "device"))
    figure("a step on the GPU and on a CPU: cosine of the gradient", cosine(one, other))
    assert cosine(one, other) >= LEAST_COSINE
    start = load_file(model / "model.safetensors")
    moved = [update(start, said["masters"]) for said in (on_cpu, on_device)]
    figure("a step on the GPU and on a CPU: cosine of Adam's first update", cosine(*moved))
    by_device = [said["metrics"][0] for said in (on_cpu, on_device)]
    for key in ("grad_norm", "entropy", "train_rollout_logprob_abs_diff"):
        assert by_device[1][key] == pytest.approx(by_device[0][key], rel=0.02), key


def gradient(run_dir: Path) -> torch.Tensor:
    """Adam's first moment in the checkpoint after one step: 0.1 of the gradient, clipped."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = run_dir / "checkpoints" / "step_1" / "state"
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    names = sorted(name for name in metadata if name.endswith(".exp_avg"))
    state = {name: torch.empty(metadata[name].size) for name in names}
    load(state, checkpoint_id=folder, no_dist=True)
    return torch.cat([state[name].double().flatten() for name in names])


def test_a_checkpoint_goes_to_a_cpu_and_back(device, train, model, tmp_path):
    """Digests of restored weights are those of the saved ones on both ways, and the steps go on."""
    samples = samples_of(SHAPES["small"]["vocab_size"], 8, 32)
    run_dir = tmp_path / "run"
    first = train(device, model, samples, run_dir)
    second = train("cpu", model, samples, run_dir, first=1)
    assert second["digests"][0] == first["digests"][1]
    third = train(device, model, samples, run_dir, first=2)
    assert third["digests"][0] == second["digests"][1]
    assert third["digests"][1] != third["digests"][0]
    through = train(device, model, samples, tmp_path / "through", steps=3)
    # The step on the CPU was in float32: what is compared is where three steps lead.
    start = load_file(model / "model.safetensors")
    assert cosine(update(start, third["masters"]), update(start, through["masters"])) > 0.95


def test_peak_memory_is_what_the_dry_run_says(device, train, tmp_path, figure):
    """Of a 0.5B shape on a GPU, and two micro-batches of 4,096 tokens. On a CPU the body alone is
    tried."""
    name, length, batch = ("0.5b", 504, 8) if device == "cuda" else ("small", 56, 8)
    model = make_model(tmp_path / "model", name, device)
    samples = samples_of(SHAPES[name]["vocab_size"], 2 * batch, length)
    said = train(device, model, samples, tmp_path / "run", batch=batch, steps=2)
    shape = memory.shape_of_folder(model)
    assert shape.num_parameters == num_parameters(SHAPES[name])
    items = memory.trainer_items(
        shape, memory.Training(tokens=batch * (length + 8), checkpointing=True)
    )
    expected = sum(item.num_bytes for item in items if not item.what.startswith("CUDA"))
    if device == "cuda":
        figure(f"peak memory of a rank, {name}: GiB", said["peak"] / 2**30)
        figure(f"peak memory of a rank, {name}: measured / arithmetic", said["peak"] / expected)
        assert LEAST_RATIO < said["peak"] / expected < MOST_RATIO


def test_a_step_trained_twice_has_equal_bits(device, train, tmp_path, figure):
    """In the default mode, as after a restart: 8 responses of 4,096 tokens are longer than a block
    of keys, and without `train.deterministic` their gradients are added up in any order."""
    length = 4096 if device == "cuda" else 56
    name = "0.5b" if device == "cuda" else "small"
    model = make_model(tmp_path / "model", name, device)
    rng = np.random.default_rng(7)
    samples = [
        TrainSample(
            f"p{i}@0#0",
            pack_i32(rng.integers(2, SHAPES[name]["vocab_size"], 8).tolist()),
            pack_i32(rng.integers(2, SHAPES[name]["vocab_size"], length).tolist()),
            pack_f32([-9.0] * length),
            (1.0, -0.5)[i % 2],
        )
        for i in range(8)
    ]

    def digest(folder: str, **options: Any) -> str:
        config = config_of(model, **options)
        said = train(device, model, samples, tmp_path / folder, batch=4, config=config)
        return said["digests"][1]

    assert digest("one") == digest("two")
    if device == "cuda":
        others = {digest(f"loose{i}", deterministic=False) for i in range(2)}
        figure("8 x 4,096 tokens twice, train.deterministic = false: results", len(others))
