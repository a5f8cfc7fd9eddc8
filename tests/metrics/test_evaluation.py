"""avg@k and pass@k are what counting all draws gives, by set and by source."""

import random
from array import array
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import pytest

from lightrl.core.state import DrawnPrompt, Group, Response, Round
from lightrl.messages.responses import FinishReason, Sampling
from lightrl.metrics.evaluation import (
    CORRECT,
    MAX_SOURCES,
    eval_figures,
    eval_scores,
    ks_of,
    pass_at_k,
)
from tests.support.metric_names import described

# reward, tokens, whether it was cut
Answer = tuple[float | None, int, bool]


def group(prompt: str, answers: Sequence[Answer]) -> Group:
    round = Round("eval", 0, 1, 1, 0.0)
    made = Group(prompt, DrawnPrompt(prompt, 0, b""), round, 0, len(answers), Sampling(), 99)
    for i, (reward, num_tokens, is_cut) in enumerate(answers):
        why: FinishReason = "length" if is_cut else "stop"
        tokens = array("i", [7] * num_tokens)
        one = Response(f"{prompt}#{i}", made, i, 0, tokens=tokens, finish_reason=why, reward=reward)
        made.responses.append(one)
    return made


def source_of(prompt: str) -> str:
    """As `group` and `answered` name prompts: SET/SOURCE#NUMBER."""
    return prompt.partition("/")[2].rpartition("#")[0]


def figures_of(groups: list[Group]) -> dict[str, float]:
    return eval_figures(groups, source_of)


def answered(name: str, *rewards_GR: list[float | None], source: str = "") -> list[Group]:
    """The prompts of a set, with the rewards of their responses."""
    return [
        group(f"{name}/{source}#{i}", [(reward, 3, reward == 0.0) for reward in rewards])
        for i, rewards in enumerate(rewards_GR)
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


@pytest.mark.parametrize(
    ("samples", "ks"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])],
)
def test_k_are_powers_of_two_and_all_samples(samples, ks):
    assert ks_of(samples) == ks


def brute_force(groups: list[Group], prefix: str) -> dict[str, float]:
    """From the definitions, draw by draw."""
    responses, n = [r for g in groups for r in g.responses], len(groups[0].responses)
    found = {
        f"{prefix}/avg@{n}": sum(r.reward or 0.0 for r in responses) / len(responses),
        f"{prefix}/length": sum(len(r.tokens) for r in responses) / len(responses),
        f"{prefix}/clip_ratio": sum(r.finish_reason == "length" for r in responses)
        / len(responses),
        f"{prefix}/failures": float(len([r for r in responses if r.reward is None])),
    }
    for k in ks_of(n):
        shares = [
            fmean(
                any(r.reward is not None and r.reward >= CORRECT for r in draw)
                for draw in combinations(of_prompt.responses, k)
            )
            for of_prompt in groups
        ]
        found[f"{prefix}/pass@{k}"] = sum(shares) / len(shares)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_figures_equal_a_direct_computation(seed):
    rng = random.Random(seed)
    groups: list[Group] = []
    expected: dict[str, float] = {}
    rewards = [None, -1.0, 0.0, 0.25, 0.7 + 0.2 + 0.1, 1.0, 1.5]
    for name in ("a", "b", "c")[: rng.randint(1, 3)]:
        samples, sources = rng.randint(1, 7), rng.choice([[""], ["x"], ["x", "y", "z"]])
        of_set = [
            group(
                f"{name}/{source}#{i}",
                [
                    (rng.choice(rewards), rng.randint(1, 99), rng.random() < 0.3)
                    for _ in range(samples)
                ],
            )
            for source in sources
            for i in range(rng.randint(1, 5))
        ]
        rng.shuffle(of_set)
        expected |= brute_force(of_set, f"eval/{name}")
        if len(sources) > 1:
            for source in sources:
                some = [g for g in of_set if source_of(g.prompt.id) == source]
                expected |= brute_force(some, f"eval/{name}/{source}")
        groups += of_set
    figures = figures_of(groups)
    assert figures == pytest.approx(expected, abs=1e-12)
    assert all(described(name) for name in figures)
    for name, score in eval_scores(groups).items():
        assert score in [v for k, v in figures.items() if k.startswith(f"eval/{name}/avg@")]


def test_a_weighted_sum_that_comes_to_one_is_correct_and_less_is_not():
    figures = figures_of(answered("s", [0.7 + 0.2 + 0.1], [0.99]))
    assert figures["eval/s/pass@1"] == 0.5


def test_sources_are_told_apart_only_where_a_set_has_several():
    one = answered("s", [1.0, 0.0], source="openai/gsm8k")
    assert not any("gsm8k" in name for name in figures_of(one))
    figures = figures_of([*one, *answered("s", [1.0, 1.0], [0.0, 0.0], source="aime")])
    assert figures["eval/s/avg@2"] == 0.5
    assert figures["eval/s/openai-gsm8k/pass@1"] == figures["eval/s/aime/pass@1"] == 0.5
    assert figures["eval/s/openai-gsm8k/pass@2"] == 1.0
    many = [r for i in range(MAX_SOURCES + 1) for r in answered("s", [1.0], source=f"row{i}")]
    assert [name for name in figures_of(many) if "row" in name] == []


def test_without_responses_there_are_no_figures():
    assert figures_of([]) == eval_scores([]) == {}
