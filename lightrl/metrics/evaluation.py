"""Figures of an evaluation, `eval/<set>/...`: which response is correct, avg@k and pass@k. Pure;
used by runs and by `lightrl eval`."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

# A response with a reward of 1 or more is correct: what `exact_match`, `math` and `code`, and the
# functions of verl and lighteval return. A sum of weighted parts may be a little less.
CORRECT = 1.0 - 1e-6
Scores: TypeAlias = dict[str, float]  # of each set its avg@k
MAX_SOURCES = 100  # of one set; more are ids, not sources


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One response of an evaluation.

    Example: Evaluated("math", "math/17", "aime24", reward=1.0, num_tokens=812, is_clipped=False)
    """

    # name of its set
    set: str
    # its id, unique over all sets
    prompt: str
    # `data_source` of its row; "" = none
    source: str
    # None = no score
    reward: float | None
    num_tokens: int
    # cut at the set's max_response_length
    is_clipped: bool


def eval_figures(responses: Iterable[Evaluated]) -> dict[str, float]:
    """Return the figures of each set, and of its sources if it has several.

    A response without a score counts as 0, and in `failures`. Raise ValueError if prompts of a set
    have different numbers of responses. Example: {"eval/math/avg@4": 0.5, ...}
    """
    figures: dict[str, float] = {}
    for name, of_set in _by_set(responses).items():
        figures |= _figures(f"eval/{name}", of_set)
        sources = {r.source: source_name(r.source) for r in of_set if r.source}
        if 1 < len(sources) <= MAX_SOURCES:
            for source in sorted(set(sources.values())):
                some = [r for r in of_set if sources.get(r.source) == source]
                figures |= _figures(f"eval/{name}/{source}", some)
    return figures


def eval_scores(responses: Iterable[Evaluated]) -> Scores:
    """Return the mean reward of each set, its avg@k. Example: {"math": 0.5, "code": 0.25}"""
    return {name: _average(of_set) for name, of_set in _by_set(responses).items()}


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
    2107.03374, section 2.1), in exact integers. Raise ValueError unless 1 <= k <= num and
    0 <= num_correct <= num. Example: pass_at_k(4, 1, 2) == 0.5
    """
    if not 1 <= k <= num or not 0 <= num_correct <= num:
        raise ValueError(f"pass@{k} of {num} responses, {num_correct} of them correct")
    return 1.0 - math.comb(num - num_correct, k) / math.comb(num, k)


def ks_of(samples: int) -> list[int]:
    """Return the k of pass@k: powers of 2, and `samples`. Example: [1, 2, 4, 6]"""
    return [*(1 << i for i in range((samples - 1).bit_length())), samples]


def source_name(source: str) -> str:
    """Return a part of a figure's name. Example: source_name("openai/gsm8k") == "openai-gsm8k"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", source)


def _by_set(responses: Iterable[Evaluated]) -> dict[str, list[Evaluated]]:
    sets: dict[str, list[Evaluated]] = {}
    for r in responses:
        sets.setdefault(r.set, []).append(r)
    return sets


def _figures(prefix: str, responses: Sequence[Evaluated]) -> dict[str, float]:
    num = Counter(r.prompt for r in responses)
    correct = Counter(r.prompt for r in responses if (r.reward or 0.0) >= CORRECT)
    samples = max(num.values())
    if min(num.values()) < samples:
        raise ValueError(f"{prefix}: prompts have {min(num.values())} to {samples} responses")
    return {
        f"{prefix}/avg@{samples}": _average(responses),
        **dict(_passes(prefix, samples, [correct[prompt] for prompt in num])),
        f"{prefix}/length": fmean(r.num_tokens for r in responses),
        f"{prefix}/clip_ratio": fmean(r.is_clipped for r in responses),
        f"{prefix}/failures": float(sum(r.reward is None for r in responses)),
    }


def _passes(prefix: str, samples: int, correct: Sequence[int]) -> Iterator[tuple[str, float]]:
    """`correct`: the number of correct responses of each prompt."""
    of_count = Counter(correct)
    for k in ks_of(samples):
        passed = math.fsum(n * pass_at_k(samples, c, k) for c, n in of_count.items())
        yield f"{prefix}/pass@{k}", passed / len(correct)


def _average(responses: Sequence[Evaluated]) -> float:
    return fmean(r.reward or 0.0 for r in responses)
