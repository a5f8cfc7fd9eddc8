#!/usr/bin/env python3
"""The quickstart's training as one bare loop in one process: what LightRL's overhead is measured
against.

The same warm-started model, prompts, reward and settings as configs/quickstart/run.toml; nothing of
LightRL is imported. Generation is a batched transformers loop that drops finished rows. Prints a
table and, as its last line, one JSON object. Run: .venv/bin/python scripts/bench/bare_grpo.py
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

QUICKSTART = Path(__file__).resolve().parent.parent.parent / "configs" / "quickstart"
GROUP_SIZE = 8
PROMPTS_PER_STEP = 32
MAX_NEW_TOKENS = 105
LOSS_CONSTANT = 20  # tokens a response that the summed loss is divided by
MICRO_BATCH = 64  # responses


@dataclass
class Clock:
    """Seconds spent on each part."""

    generate_s: float = 0.0
    train_s: float = 0.0
    eval_s: float = 0.0


class Policy:
    """The model with its tokenizer; prompts of one batch must have the same length, as they have
    here."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.eos = int(self.tokenizer.eos_token_id)

    def reward(self, response: Sequence[int], answer: str) -> float:
        return float(response[-1] == self.eos and self.tokenizer.decode(response[:-1]) == answer)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], greedy: bool) -> list[list[int]]:
        tokens, cache = torch.tensor(prompts), DynamicCache()
        live = torch.arange(len(prompts))
        responses: list[list[int]] = [[] for _ in prompts]
        for _ in range(MAX_NEW_TOKENS):
            logits = self.model(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
            drawn = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
            for row, token in zip(live.tolist(), drawn.tolist(), strict=True):
                responses[row].append(token)
            unfinished = (drawn != self.eos).nonzero()[:, 0]
            if not len(unfinished):
                break
            if len(unfinished) < len(drawn):
                cache.batch_select_indices(unfinished)
            live, tokens = live[unfinished], drawn[unfinished, None]
        return responses

    def logprobs(
        self, rows: list[tuple[list[int], list[int]]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of all tokens but the first, and a mask of those of the responses."""
        width = max(len(p) + len(r) for p, r in rows)
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
        for i, (p, r) in enumerate(rows):
            ids[i, : len(p) + len(r)] = torch.tensor(p + r)
            mask[i, len(p) : len(p) + len(r)] = 1
        logits = self.model(ids[:, :-1]).logits
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0], mask[:, 1:]


def accumulate(
    policy: Policy, prompts: list[list[int]], responses: list[list[int]], rewards: torch.Tensor
) -> None:
    """Gradients of one step: advantage = reward - mean of its group; groups without signal cost
    nothing."""
    groups = rewards.view(-1, GROUP_SIZE)
    advantages = (groups - groups.mean(1, keepdim=True)).view(-1)
    rows = sorted(
        (i for i in range(len(prompts)) if advantages[i] != 0), key=lambda i: len(responses[i])
    )
    for start in range(0, len(rows), MICRO_BATCH):
        part = rows[start : start + MICRO_BATCH]
        logprobs, mask = policy.logprobs([(prompts[i], responses[i]) for i in part])
        weights = advantages[part, None] * mask / (len(prompts) * LOSS_CONSTANT)
        # On-policy: the ratio is 1, so there is nothing to clip.
        (-(logprobs - logprobs.detach()).exp() * weights).sum().backward()


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=QUICKSTART / "model")
    parser.add_argument("--data", type=Path, default=QUICKSTART / "train.jsonl")
    parser.add_argument("--eval", type=Path, default=QUICKSTART / "eval.jsonl")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--eval-every", type=int, default=10, help="steps; 0 = only before and after"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    policy = Policy(options.model)
    train, held_out = read(options.data), read(options.eval)
    encoded = {row["prompt"]: policy.tokenizer.encode(row["prompt"]) for row in train + held_out}
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    shuffled, order = random.Random(options.seed + 1), []
    clock, scores = Clock(), []

    def evaluate() -> float:
        started = time.monotonic()
        responses = policy.generate([encoded[row["prompt"]] for row in held_out], greedy=True)
        right = [
            policy.reward(r, row["answer"]) for r, row in zip(responses, held_out, strict=True)
        ]
        scores.append(sum(right) / len(right))
        clock.eval_s += time.monotonic() - started
        return scores[-1]

    print(
        f"{'step':>5} {'reward':>7} {'length':>7} {'greedy':>7} {'generate s':>11} {'train s':>8}"
    )
    began = time.monotonic()
    print(f"{0:5} {'':7} {'':7} {evaluate():7.3f}", flush=True)
    for step in range(1, options.steps + 1):
        if len(order) < PROMPTS_PER_STEP:
            order = shuffled.sample(train, len(train))
        batch, order = order[:PROMPTS_PER_STEP], order[PROMPTS_PER_STEP:]
        started = time.monotonic()
        rows = [row for row in batch for _ in range(GROUP_SIZE)]
        prompts = [encoded[row["prompt"]] for row in rows]
        responses = policy.generate(prompts, greedy=False)
        generated = time.monotonic()
        pairs = zip(responses, rows, strict=True)
        rewards = torch.tensor([policy.reward(r, row["answer"]) for r, row in pairs])
        accumulate(policy, prompts, responses, rewards)
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        trained = time.monotonic()
        clock.generate_s += generated - started
        clock.train_s += trained - generated
        if step == options.steps or (options.eval_every and step % options.eval_every == 0):
            length = sum(map(len, responses)) / len(responses)
            print(
                f"{step:5} {rewards.mean():7.3f} {length:7.1f} {evaluate():7.3f}"
                f" {generated - started:11.2f} {trained - generated:8.2f}",
                flush=True,
            )
    result = {
        "steps": options.steps,
        # as LightRL counts: no evaluations
        "rl_wall_s": round(time.monotonic() - began - clock.eval_s, 3),
        "generate_s": round(clock.generate_s, 3),
        "train_s": round(clock.train_s, 3),
        "eval_s": round(clock.eval_s, 3),
        "eval_start": scores[0],
        "eval_end": scores[-1],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
