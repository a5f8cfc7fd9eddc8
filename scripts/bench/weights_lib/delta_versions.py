"""Versions of a model that is really trained, and the differences between them: a process.

`python -m scripts.bench.weights_lib.delta_versions FOLDER MODEL DTYPE RATE UPDATES` writes version
after version to FOLDER, by the project's own publisher, and prints a JSON line for each: the
version, the difference that leads to it (if it pays), the seconds that this took, and by what the
difference is measured. MODEL is a directory, or "random:WIDTHxLAYERS". GRPO on random
responses with random advantages: Adam changes the weights, which determines the difference.
"""

import json
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightrl.config.algorithm import AlgorithmSection
from lightrl.trainer.algorithm.loss import losses
from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.policy import Policy, load_policy, response_logprobs, shards
from lightrl.trainer.protocol import TrainSample
from lightrl.weights.delta.file import header, open_packed
from lightrl.weights.publish.buffers import Buffers
from lightrl.weights.publish.publisher import Publisher
from lightrl.weights.version.manifest import VersionFile, manifest_path

RESPONSES, GROUP, PROMPT, LENGTH = 16, 8, 8, 56
VOCABULARY = 16_384


def random_model(kind: str, folder: Path) -> Path:
    width, layers = map(int, kind.removeprefix("random:").split("x"))
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=8, max_position_embeddings=128,
        tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    return folder / "model"


def update(policy: Policy, optimizer: torch.optim.Optimizer, random: np.random.Generator) -> None:
    rewards = random.integers(0, 2, RESPONSES).astype(np.float32).reshape(-1, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / (rewards.std() + 1e-4)).ravel()

    def tokens(count: int) -> bytes:
        return random.integers(0, policy.vocabulary, count).astype("<i4").tobytes()

    logprobs = np.full(LENGTH, -np.log(policy.vocabulary), "<f4").tobytes()
    prompts = [tokens(PROMPT) for _ in range(RESPONSES // GROUP)]
    samples = [
        TrainSample(str(i), prompts[i // GROUP], tokens(LENGTH), logprobs, float(advantages[i]))
        for i in range(RESPONSES)
    ]
    batch = collate(samples, policy.device, policy.vocabulary, policy.way.packed)
    found, _ = response_logprobs(policy, batch)
    optimizer.zero_grad()
    loss = losses(
        AlgorithmSection(name="grpo", tis_bounds="off"),
        found, found.detach(), batch.rollout_logprobs, None, batch.advantages, batch.mask,
    )  # fmt: skip
    (loss.total / RESPONSES).backward()
    torch.nn.utils.clip_grad_norm_(policy.module.parameters(), 1.0)
    optimizer.step()


def entropy(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """(share of elements that changed, bytes of the positions and of the values)."""
    changed = before != after
    count = int(changed.sum())
    _, values = np.unique(after[changed] - before[changed], return_counts=True)
    bits = len(after) * _bits(np.array([count, len(after) - count])) + count * _bits(values)
    return count / len(after), bits / 8


def _bits(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def kept(file: VersionFile, folder: Path, name: str) -> VersionFile:
    """A copy: the publisher uses its files in turn."""
    path = folder / f"{name}.bin"
    shutil.copy(file.path, path)
    shutil.copy(file.manifest_path, manifest_path(path))
    return replace(file, path=str(path), manifest_path=str(manifest_path(path)))


def main(folder: Path, model: str, dtype: str, rate: float, updates: int) -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    path = random_model(model, folder) if model.startswith("random:") else Path(model)
    policy = load_policy(path, torch.device("cpu"), served=dtype)
    optimizer = torch.optim.AdamW(policy.module.parameters(), lr=rate, betas=(0.9, 0.95))
    publisher = Publisher(Buffers(folder / "turns"))
    kind = "<u2" if dtype == "bfloat16" else "<u4"
    before: np.ndarray | None = None
    for number in range(updates + 1):
        if number:
            update(policy, optimizer, random)
        published = publisher.write(number + 1, shards(policy))
        assert published is not None
        publisher.allocate_second()
        begun = time.perf_counter()
        made = publisher.write_delta()
        seconds = time.perf_counter() - begun
        file = kept(published, folder, f"v{number}")
        reported: dict[str, Any] = {"version": asdict(file), "encode_s": seconds}
        after = np.frombuffer(Path(file.path).read_bytes(), kind)
        if before is not None:
            reported["changed"], reported["entropy_bytes"] = entropy(before, after)
        if made is not None:
            base, delta = made
            copy = kept(delta, folder, f"d{number}")
            manifest = open_packed(Path(copy.path), copy.num_bytes).manifest
            reported |= {"base": base.digest, "delta": asdict(copy)}
            reported["encoded_bytes"] = copy.num_bytes - len(header(manifest))
        before = after
        print(json.dumps(reported), flush=True)
    publisher.close()


if __name__ == "__main__":
    where, what, in_dtype, at_rate, count = sys.argv[1:]
    main(Path(where), what, in_dtype, float(at_rate), int(count))
