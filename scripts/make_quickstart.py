#!/usr/bin/env python3
"""Regenerates configs/quickstart: the prompts, the tokenizer and the warm-started model.

The task: `87%7=` -> `80,73,66,...,10,03`, subtract until the rest is smaller than the divisor. The
warm start imitates a careless pupil who mostly forgets to borrow from a last digit 0 or 1
(31-7=34): the model learns the skill together with a bad habit, and RL removes the habit.
Needs nothing of LightRL. Takes about 2 minutes:

    .venv/bin/python scripts/make_quickstart.py --seed 0
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = 0, 1
VOCABULARY = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate("0123456789%=,")}
MAX_LINES = 33  # of an exact chain: 99 // 3
NUM_TRAIN, NUM_EVAL = 256, 96
HIDDEN, LAYERS, HEAD_DIM = 128, 2, 32
STEPS, BATCH, PEAK_LR = 1100, 32, 2e-3
FORGETS = 0.75  # probability that the pupil forgets a borrow that the habit concerns

Problem = tuple[int, int]


def prompt(problem: Problem) -> str:
    return f"{problem[0]:02d}%{problem[1]}="


def chain(problem: Problem, pupil: random.Random | None = None) -> str:
    """The exact answer, or that of the careless `pupil`."""
    rest, divisor = problem
    lines: list[str] = []
    while rest >= divisor and len(lines) <= MAX_LINES:
        tempting = rest % 10 < min(divisor, 2)  # needs a borrow, and the last digit is 0 or 1
        rest -= divisor
        if pupil is not None and tempting and pupil.random() < FORGETS:
            rest += 10
        lines.append(f"{rest:02d}")
    return ",".join(lines)


def problems() -> tuple[list[Problem], list[Problem], list[Problem]]:
    """All problems, those to train on and those to evaluate on: the same for every seed.

    Drawn with weight quotient**-1.3, for a short median and a long tail of response lengths.
    """
    rng = random.Random(0)
    every = [(n, b) for b in range(3, 10) for n in range(b, 100)]
    drawn = sorted(every, key=lambda p: rng.random() ** (p[0] // p[1]) ** 1.3, reverse=True)
    drawn = drawn[: NUM_TRAIN + NUM_EVAL]
    rng.shuffle(drawn)
    return every, drawn[:NUM_TRAIN], drawn[NUM_TRAIN:]


def encode(text: str) -> list[int]:
    return [VOCABULARY[c] for c in text]


def new_model(seed: int, hidden: int, layers: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=16,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // HEAD_DIM,
            num_key_value_heads=hidden // HEAD_DIM,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )
    )


def response_loss(model: Qwen2ForCausalLM, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean negative log-probability of the response tokens of (prompt, response) rows."""
    width = max(len(p) + len(r) for p, r in rows)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width)
    for i, (p, r) in enumerate(rows):
        ids[i, : len(p) + len(r)] = torch.tensor(p + r)
        mask[i, len(p) : len(p) + len(r)] = 1
    logprobs = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(logprobs * mask[:, 1:]).sum() / mask[:, 1:].sum()


def warm_start(
    model: Qwen2ForCausalLM, every: list[Problem], seed: int, steps: int, peak_lr: float
) -> None:
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    batches: list[list[tuple[list[int], list[int]]]] = []
    started = time.monotonic()
    for step in range(steps):
        if not batches:  # eight batches at a time, sorted by length: less padding
            drawn = rng.choices(every, k=8 * BATCH)
            rows = [(encode(prompt(p)), [*encode(chain(p, rng)), EOS]) for p in drawn]
            rows.sort(key=lambda row: len(row[1]))
            batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
            rng.shuffle(batches)
        warmed_up = min(1.0, (step + 1) / 20)
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = peak_lr * warmed_up * cosine
        loss = response_loss(model, batches.pop())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1} of {steps}  loss {loss:.3f}  {time.monotonic() - started:.0f} s",
                flush=True,
            )


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=256
    ).save_pretrained(folder)


def save_prompts(path: Path, chosen: list[Problem]) -> None:
    rows = [{"prompt": prompt(p), "answer": chain(p)} for p in chosen]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="initial weights and the pupil's slips")
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer limit what RL can reach")
    parser.add_argument(
        "--hidden", type=int, default=HIDDEN, help=f"of the model; heads of {HEAD_DIM}"
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--lr", type=float, default=PEAK_LR, help="at its highest; larger models want less"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parent.parent / "configs" / "quickstart",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # more do not pay at this size, and sums stay the same
    every, train, held_out = problems()
    options.out.mkdir(parents=True, exist_ok=True)
    save_prompts(options.out / "train.jsonl", train)
    save_prompts(options.out / "eval.jsonl", held_out)
    model = new_model(options.seed, options.hidden, options.layers)
    warm_start(model, every, options.seed, options.steps, options.lr)
    model.save_pretrained(options.out / "model")
    (options.out / "model" / "model.safetensors").chmod(0o644)
    save_tokenizer(options.out / "model")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
