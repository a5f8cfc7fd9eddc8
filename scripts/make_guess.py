#!/usr/bin/env python3
"""Regenerates configs/guess: the tokenizer and the warm-started model of the guessing game.

The game: the environment says `?`, the model guesses a number of two digits, and the environment
says `>` (the number is larger) or `<`. The warm start imitates a player who knows the rules and
guesses without a plan: half of the time it takes the middle of what is left, else any number. RL
makes it take the middle. Needs nothing of LightRL. Takes about 2 minutes:

    .venv/bin/python scripts/make_guess.py --seed 0
"""

import argparse
import random
from pathlib import Path

import make_quickstart
import torch
from make_quickstart import BATCH, EOS, PAD, PEAK_LR, new_model, response_loss, save_tokenizer

NUMBERS = 25  # from 01 on; with halving five guesses find any
TURNS = 5
PLANS = 0.45  # probability that the player takes the middle
VOCABULARY = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate("0123456789?<>=")}
STEPS = 1500


def play(rng: random.Random, plans: float = PLANS) -> tuple[list[tuple[str, str]], bool]:
    """Return (what the environment says, guess) of each turn, and whether the number was found."""
    number, low, high, said = rng.randint(1, NUMBERS), 1, NUMBERS, "?"
    turns: list[tuple[str, str]] = []
    for _ in range(TURNS):
        guess = (low + high) // 2 if rng.random() < plans else rng.randint(1, NUMBERS)
        turns.append((said, f"{guess:02d}"))
        if guess == number:
            return turns, True
        said = ">" if number > guess else "<"
        if said == ">":
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return turns, False


def rows(rng: random.Random) -> list[tuple[list[int], list[int]]]:
    """Return (tokens before, guess) of each turn of a game."""
    held: list[int] = []
    found: list[tuple[list[int], list[int]]] = []
    for said, guess in play(rng)[0]:
        held = [*held, VOCABULARY[said]]
        sampled = [*(VOCABULARY[c] for c in guess), EOS]
        found.append((held, sampled))
        held = held + sampled
    return found


def warm_start(model: torch.nn.Module, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1.0, (step + 1) / 20) * (1 - step / steps)
        batch = [row for _ in range(BATCH) for row in rows(rng)]
        loss = response_loss(model, batch)  # type: ignore[arg-type]
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
