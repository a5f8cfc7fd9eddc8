#!/usr/bin/env python3
"""Regenerates configs/guess: the tokenizer and the warm-started model of the guessing game.

The game: the environment says `?`, the model guesses a number of two digits, and the environment
says `>` (the number is larger) or `<`. The warm start imitates a timid player: it mostly counts,
from 01 on and then one up or down, and sometimes takes the middle of what is left. RL makes it take
the middle. Needs nothing of LightRL. Takes about a minute:

    .venv/bin/python scripts/make_guess.py --seed 0
"""

import argparse
import random
from pathlib import Path

import make_quickstart
import torch
from make_quickstart import EOS, PAD, PEAK_LR, new_model, save_tokenizer

NUMBERS = 25  # from 01 on; with halving five guesses find any
TURNS = 5
PLANS = 0.35  # probability that the player takes the middle
VOCABULARY = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate("0123456789?<>=")}
STEPS, BATCH = 1500, 64


def play(rng: random.Random, plans: float = PLANS) -> tuple[list[tuple[str, str]], bool]:
    """Return (what the environment says, guess) of each turn, and whether the number was found."""
    number, low, high, said, guess = rng.randint(1, NUMBERS), 1, NUMBERS, "?", 0
    turns: list[tuple[str, str]] = []
    for _ in range(TURNS):
        if rng.random() < plans:
            guess = (low + high) // 2
        else:
            guess = min(NUMBERS, max(1, guess - 1 if said == "<" else guess + 1))
        turns.append((said, f"{guess:02d}"))
        if guess == number:
            return turns, True
        said = ">" if number > guess else "<"
        if said == ">":
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return turns, False


def game(rng: random.Random) -> tuple[list[int], list[float]]:
    """Return the tokens of a game, and 1 for each that the player says."""
    tokens: list[int] = []
    mask: list[float] = []
    for said, guess in play(rng)[0]:
        tokens += [VOCABULARY[said], *(VOCABULARY[c] for c in guess), EOS]
        mask += [0.0, 1.0, 1.0, 1.0]
    return tokens, mask


def loss_of(model: torch.nn.Module, games: list[tuple[list[int], list[float]]]) -> torch.Tensor:
    """Mean negative log-probability of what the player says."""
    width = 4 * TURNS
    ids = torch.tensor([tokens + [PAD] * (width - len(tokens)) for tokens, _ in games])
    mask = torch.tensor([mask + [0.0] * (width - len(mask)) for _, mask in games])
    logprobs = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(logprobs * mask[:, 1:]).sum() / mask.sum()


def warm_start(model: torch.nn.Module, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1.0, (step + 1) / 20) * (1 - step / steps)
        loss = loss_of(model, [game(rng) for _ in range(BATCH)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {steps}  loss {loss:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    folder = Path(__file__).resolve().parent.parent / "configs" / "guess"
    parser.add_argument("--out", type=Path, default=folder)
    options = parser.parse_args()
    torch.set_num_threads(1)
    make_quickstart.VOCABULARY.clear()
    make_quickstart.VOCABULARY.update(VOCABULARY)
    model = new_model(options.seed, hidden=64, layers=3)
    warm_start(model, options.seed, options.steps)
    model.save_pretrained(options.out / "model")
    (options.out / "model" / "model.safetensors").chmod(0o644)
    save_tokenizer(options.out / "model")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
