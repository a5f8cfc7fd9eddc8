"""Coupled sampling on a real device: one engine's responses in other company, with drafts, after a
move.

Says how many tokens were drawn otherwise and proves that it was rounding (`boundary`). Not a test
itself.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gpu.boundary import compare, explain
from tests.gpu.driver import Asked, Outcome, nearly

FEW = 14  # responses at a time


def requests(vocabulary: int, num_groups: int, group: int, num_tokens: int) -> list[Asked]:
    """Groups of responses to prompts of 5 to 60 tokens; of different lengths: batches shrink as
    they run."""
    rng = np.random.default_rng(1)
    prompts = [
        tuple(rng.integers(2, vocabulary, 5 + 55 * g // num_groups).tolist())
        for g in range(num_groups)
    ]
    return [
        Asked(f"p{g}#{i}", prompts[g], 100 * g + i, num_tokens - 2 * (i % 8))
        for g in range(num_groups)
        for i in range(group)
    ]


def moved(engine: Any, asked: list[Asked], wanted: Any) -> Outcome:
    """Interrupted after 20 steps, then resumed from what there was, a few at a time."""
    begun = engine.run(asked, stop_after=20, wanted=wanted)
    rest = [
        Asked(a.name, a.prompt, a.seed, a.num_tokens, tuple(begun.tokens[a.name]))
        for a in asked
        if len(begun.tokens[a.name]) < a.num_tokens
    ]
    ended = engine.run(rest, at_once=FEW, wanted=wanted)
    ended.tokens = {**begun.tokens, **ended.tokens}
    ended.draws = {**begun.draws, **ended.draws}
    return ended


def check(
    engine: Any,
    shape: dict[str, Any],
    dtype: str,
    asked: list[Asked],
    label: str,
    figure: Callable[..., None],
) -> dict[str, int]:
    """How many responses each way of running them changed. Fails if anything but rounding has
    changed one."""
    vocabulary = shape["vocab_size"]
    expected = engine.run(asked)
    epochs = itertools.count()  # a group's responses become history themselves

    def speculated(wanted: Any) -> Outcome:
        renamed, histories = nearly(expected, str(next(epochs)), asked, vocabulary)
        got = engine.run(renamed, histories=histories, drafts="all", wanted=wanted)
        assert got.accepted > len(asked)
        got.tokens = {a.name: got.tokens[new.name] for a, new in zip(asked, renamed, strict=True)}
        return got

    def add_figure(text: str, value: float) -> None:
        figure(f"{label}, {dtype}, {len(asked)} responses; {text}", round(value, 6))

    add_figure(
        "mean logprob", float(np.mean([x for row in expected.logprobs.values() for x in row]))
    )
    ways: dict[str, Callable[[Any], Outcome]] = {
        f"{FEW} at a time": lambda wanted: engine.run(asked, at_once=FEW, wanted=wanted),
        "speculation": speculated,
        "a move": lambda wanted: moved(engine, asked, wanted),
    }
    changed = {}
    for way, again in ways.items():
        found = compare(asked, expected.tokens, again(frozenset()).tokens)
        for what, share in found.shares().items():
            add_figure(f"{way}: share {what} drawn otherwise", share)
        if found.differences:
            repeated = engine.run(asked, wanted=found.wanted), again(found.wanted)
            worst = explain(
                found, *repeated, dtype, shape["num_hidden_layers"], shape["intermediate_size"]
            )
            add_figure(f"{way}: largest difference of logits / what rounding explains", worst)
        changed[way] = len(found.differences)
    return changed
