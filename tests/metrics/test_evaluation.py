"""avg@k and pass@k are what counting all draws gives, by set and by source."""

import random
from itertools import combinations
from statistics import fmean

import pytest

from lightrl.metrics.evaluation import (
    CORRECT,
    MAX_SOURCES,
    Evaluated,
    eval_figures,
    eval_scores,
    ks_of,
    pass_at_k,
)
from tests.support.metric_names import described


def answered(
    name: str, *rewards_GR: list[float | None], source: str = "", tokens: int = 3
) -> list[Evaluated]:
    """Of each prompt of a set, its responses."""
    return [
        Evaluated(name, f"{name}/{source}{i}", source, reward, tokens, reward == 0.0)
        for i, rewards in enumerate(rewards_GR)
        for reward in rewards
    ]


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_all_draws_with_a_correct_response(n):
    for c in range(n + 1):
        flags = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = list(combinations(flags, k))
            assert pass_at_k(n, c, k) == pytest.approx(fmean(any(d) for d in draws), abs=1e-12)


def test_pass_at_k_is_exact_where_its_counts_are_huge():
    assert pass_at_k(4096, 1, 1024) == pytest.approx(0.25, abs=1e-12)
    assert pass_at_k(4096, 0, 4096) == 0.0
    assert pass_at_k(4096, 1, 4096) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_drawn_is_refused(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k} of {n}"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("samples", "ks"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])],
)
def test_k_are_powers_of_two_and_all_samples(samples, ks):
    assert ks_of(samples) == ks


def brute_force(responses: list[Evaluated], prefix: str) -> dict[str, float]:
    """From the definitions, draw by draw."""
    prompts = {r.prompt: [s for s in responses if s.prompt == r.prompt] for r in responses}
    n = len(next(iter(prompts.values())))
    found = {
        f"{prefix}/avg@{n}": sum(r.reward or 0.0 for r in responses) / len(responses),
        f"{prefix}/length": sum(r.num_tokens for r in responses) / len(responses),
        f"{prefix}/clip_ratio": len([r for r in responses if r.is_clipped]) / len(responses),
        f"{prefix}/failures": float(len([r for r in responses if r.reward is None])),
    }
    for k in ks_of(n):
        shares = [
            fmean(
                any(r.reward is not None and r.reward >= CORRECT for r in draw)
                for draw in combinations(of_prompt, k)
            )
            for of_prompt in prompts.values()
        ]
        found[f"{prefix}/pass@{k}"] = sum(shares) / len(shares)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_figures_equal_a_direct_computation(seed):
    rng = random.Random(seed)
    responses: list[Evaluated] = []
    expected: dict[str, float] = {}
    for name in ("a", "b", "c")[: rng.randint(1, 3)]:
        samples, sources = rng.randint(1, 7), rng.choice([[""], ["x"], ["x", "y", "z"]])
        of_set: list[Evaluated] = []
        for source in sources:
            for i in range(rng.randint(1, 5)):
                of_set += [
                    Evaluated(
                        name,
                        f"{name}/{source}{i}",
                        source,
                        rng.choice([None, -1.0, 0.0, 0.25, 0.7 + 0.2 + 0.1, 1.0, 1.5]),
                        rng.randint(1, 99),
                        rng.random() < 0.3,
                    )
                    for _ in range(samples)
                ]
        rng.shuffle(of_set)
        expected |= brute_force(of_set, f"eval/{name}")
        if len(sources) > 1:
            for source in sources:
                some = [r for r in of_set if r.source == source]
                expected |= brute_force(some, f"eval/{name}/{source}")
        responses += of_set
    figures = eval_figures(responses)
    assert figures == pytest.approx(expected, abs=1e-12)
    assert all(described(name) for name in figures)
    for name, score in eval_scores(responses).items():
        assert score in [v for k, v in figures.items() if k.startswith(f"eval/{name}/avg@")]


def test_a_weighted_sum_that_comes_to_one_is_correct_and_less_is_not():
    figures = eval_figures(answered("s", [0.7 + 0.2 + 0.1], [0.99]))
    assert figures["eval/s/pass@1"] == 0.5


def test_sources_are_told_apart_only_where_a_set_has_several():
    one = answered("s", [1.0, 0.0], source="openai/gsm8k")
    assert not any("gsm8k" in name for name in eval_figures(one))
    figures = eval_figures([*one, *answered("s", [1.0, 1.0], [0.0, 0.0], source="aime")])
    assert figures["eval/s/avg@2"] == 0.5
    assert figures["eval/s/openai-gsm8k/pass@1"] == figures["eval/s/aime/pass@1"] == 0.5
    assert figures["eval/s/openai-gsm8k/pass@2"] == 1.0
    many = [r for i in range(MAX_SOURCES + 1) for r in answered("s", [1.0], source=f"row{i}")]
    assert [name for name in eval_figures(many) if "row" in name] == []


def test_prompts_of_a_set_are_sampled_equally_often():
    with pytest.raises(ValueError, match="eval/s: prompts have 1 to 2 responses"):
        eval_figures(answered("s", [1.0, 0.0], [1.0]))
    assert eval_figures([]) == eval_scores([]) == {}
