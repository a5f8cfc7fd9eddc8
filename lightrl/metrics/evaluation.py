"""Figures of an evaluation, `eval/<set>/...`: which response is correct, avg@k and pass@k. Pure;
used by runs and by `lightrl eval`."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TypeAlias

from lightrl.core.state import Group

# A response with a reward of 1 or more is correct: what `exact_match`, `math` and `code`, and the
# functions of verl and lighteval return. A sum of weighted parts may be a little less.
CORRECT = 1.0 - 1e-6
Scores: TypeAlias = dict[str, float]  # of each set its avg@k
MAX_SOURCES = 100  # of one set; more are ids, not sources


def eval_figures(groups: Iterable[Group], source_of: Callable[[str], str]) -> dict[str, float]:
    """Return the figures of each set, and of its sources if it has several.

    A response without a score counts as 0, and in `failures`. `source_of`: the `data_source` of a
    prompt, "" = none. Example: {"eval/math/avg@4": 0.5, ...}
    """
    figures: dict[str, float] = {}
    for name, of_set in _by_set(groups).items():
        figures |= _figures(f"eval/{name}", of_set)
        sources = {g.id: source for g in of_set if (source := source_of(g.prompt.id))}
        if 1 < len(set(sources.values())) <= MAX_SOURCES:
            named = {group: source_name(source) for group, source in sources.items()}
            for source in sorted(set(named.values())):
                some = [g for g in of_set if named.get(g.id) == source]
                figures |= _figures(f"eval/{name}/{source}", some)
    return figures


def eval_scores(groups: Iterable[Group]) -> Scores:
    """Return the mean reward of each set, its avg@k. Example: {"math": 0.5, "code": 0.25}"""
    return {name: _average(of_set) for name, of_set in _by_set(groups).items()}


def mean_score(scores: Scores) -> float:
    """Return the mean over sets, whatever their number of prompts."""
    return fmean(scores.values())


def scores_line(scores: Scores) -> str:
    """Return text for people. Examples: "0.292", "gsm8k 0.512, aime24 0.133"."""
    if len(scores) == 1:
        return f"{mean_score(scores):.3f}"
    return ", ".join(f"{name} {score:.3f}" for name, score in scores.items())


def pass_at_k(num: int, num_correct: int, k: int) -> float:
    """Return the probability that one of k responses, drawn from `num` without replacement, is
    correct.

    Unbiased for k independent samples: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv
    2107.03374, section 2.1), in exact integers. Example: pass_at_k(4, 1, 2) == 0.5
    """
    return 1.0 - math.comb(num - num_correct, k) / math.comb(num, k)


def ks_of(samples: int) -> list[int]:
    """Return the k of pass@k: powers of 2, and `samples`. Example: [1, 2, 4, 6]"""
    return [*(1 << i for i in range((samples - 1).bit_length())), samples]


def source_name(source: str) -> str:
    """Return a part of a figure's name. Example: source_name("openai/gsm8k") == "openai-gsm8k"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", source)


def _by_set(groups: Iterable[Group]) -> dict[str, list[Group]]:
    sets: dict[str, list[Group]] = {}
    for group in groups:
        sets.setdefault(group.set, []).append(group)
    return sets


def _figures(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    """`groups`: of one set, so with as many responses each."""
    samples = len(groups[0].responses)
    responses = [r for g in groups for r in g.responses]
    # number of correct responses -> prompts
    counts = Counter(sum((r.reward or 0.0) >= CORRECT for r in g.responses) for g in groups)
    figures = {f"{prefix}/avg@{samples}": _average(groups)}
    for k in ks_of(samples):
        passed = math.fsum(n * pass_at_k(samples, c, k) for c, n in counts.items())
        figures[f"{prefix}/pass@{k}"] = passed / len(groups)
    return figures | {
        f"{prefix}/length": fmean(r.num_sampled for r in responses),
        f"{prefix}/clip_ratio": fmean(r.finish_reason == "length" for r in responses),
        f"{prefix}/failures": float(sum(r.reward is None for r in responses)),
    }


def _average(groups: Iterable[Group]) -> float:
    return fmean(r.reward or 0.0 for g in groups for r in g.responses)
