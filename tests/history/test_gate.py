"""The gate in made-up worlds: what a pass costs, how much of a draft is kept, how the load
changes."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from lightrl.history.gate import WIDTHS, Gate

Cost = Callable[[int, int], float]  # of responses and tokens in a pass; milliseconds
ACCEPTANCES = (0.0, 0.3, 0.6, 0.9, 0.97)
MAX_WIDTH = 16


def flat(batch: int, num_tokens: int) -> float:
    """Bound by memory: the weights are read once, whatever is computed with them."""
    return 5.0


def linear(batch: int, num_tokens: int) -> float:
    """Bound by arithmetic."""
    return 0.1 * num_tokens


def knee(batch: int, num_tokens: int) -> float:
    """One after the other."""
    return 5.0 * max(1.0, num_tokens / 64)


def affine(batch: int, num_tokens: int) -> float:
    """A small model on a CPU: half of a step of 16 responses is overhead; keys and values count,
    too."""
    return 1.0 + 0.04 * num_tokens + 0.02 * batch


COSTS = (flat, linear, knee, affine)


@dataclass
class World:
    """An engine of which only the times are real."""

    cost: Cost
    acceptance: float
    gate: Gate
    seed: int = 0
    jitter: float = 0.0
    # share of steps that take ten times as long
    outliers: float = 0.0
    # of responses for which there is a draft
    share: float = 1.0
    tokens: int = 0
    seconds: float = 0.0
    # the same tokens would have taken without speculation
    plain_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.draws = np.random.default_rng(self.seed)

    def step(self, batch: int) -> int:
        width = self.gate.width(batch)
        num_drafts = int(self.draws.binomial(batch, self.share)) if width else 0
        if width:
            self.gate.drafted(batch, num_drafts)
        kept = self.draws.geometric(1 - self.acceptance, num_drafts) - 1
        self.gate.verified(int(kept.clip(max=width).sum()), int((kept < width).sum()))
        emitted = batch + int(kept.clip(max=width).sum())
        widened = batch if self.gate.is_padded and num_drafts else num_drafts
        num_tokens = batch + widened * width
        noise = (
            10.0 if self.rng.random() < self.outliers else 1 + self.rng.uniform(-1, 1) * self.jitter
        )
        self.gate.observe(batch, num_tokens, self.cost(batch, num_tokens) * noise / 1e3)
        # Noise counts for the gate only: a slow step is as slow with drafts as without.
        self.seconds += self.cost(batch, num_tokens)
        self.plain_seconds += self.cost(batch, batch) * emitted / batch
        self.tokens += emitted
        return width

    @property
    def gain(self) -> float:
        """Throughput against that without speculation."""
        return self.plain_seconds / self.seconds

    def gain_of(self, batch: int, width: int) -> float:
        """Expected, if every step drafted `width` tokens for each response that may have a
        draft."""
        kept = sum(self.acceptance**k for k in range(1, width + 1))
        widened = batch if self.gate.is_padded else batch * self.share
        ratio = self.cost(batch, batch) / self.cost(batch, round(batch + widened * width))
        return (1 + self.share * kept) * ratio

    def best_gain(self, batch: int) -> float:
        return max(self.gain_of(batch, w) for w in (0, *WIDTHS) if w <= self.gate.max_width)


def world(
    cost: Cost, acceptance: float, seed: int = 0, is_padded: bool = False, **more: float
) -> World:
    return World(cost, acceptance, Gate(MAX_WIDTH, is_padded), seed, **more)


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param({}, marks=pytest.mark.e2e, id="quiet"),
        pytest.param({"jitter": 0.1, "outliers": 0.01}, id="noisy"),
    ],
)
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("batch", [1, pytest.param(32, marks=pytest.mark.e2e), 256])
@pytest.mark.parametrize("cost", COSTS)
def test_it_loses_nothing_and_finds_about_the_best_width(
    cost: Cost, batch: int, acceptance: float, noise: dict[str, float]
) -> None:
    w = world(cost, acceptance, **noise)
    widths = [w.step(batch) for _ in range(1000)]
    assert w.gain > 0.97
    settled = sum(w.gain_of(batch, width) for width in widths[500:]) / 500
    assert settled > 0.9 * w.best_gain(batch)


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("is_padded", [False, pytest.param(True, marks=pytest.mark.e2e)])
def test_a_load_that_shrinks_from_128_to_1_is_followed(
    cost: Cost, acceptance: float, is_padded: bool
) -> None:
    """As at the end of every round."""
    w = world(cost, acceptance, is_padded=is_padded, jitter=0.1, outliers=0.01)
    best = 0.0
    for step in range(1280):
        batch = 128 - step // 10
        w.step(batch)
        best += w.best_gain(batch) * w.cost(batch, batch)
    assert w.gain > 0.97
    assert w.gain > 0.8 * best / sum(w.cost(128 - k // 10, 128 - k // 10) for k in range(1280))


def loads(rng: random.Random) -> Iterator[int]:
    """Sudden changes, up and down."""
    while True:
        batch = rng.choice((1, 2, 5, 16, 64, 128, 200))
        yield from [batch] * rng.randrange(5, 150)


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("cost", COSTS)
def test_a_load_that_jumps_costs_nothing(cost: Cost, acceptance: float) -> None:
    for seed in range(2):
        w = world(cost, acceptance, seed, jitter=0.1, outliers=0.01, share=0.7)
        for _, batch in zip(range(1000), loads(w.rng), strict=False):
            w.step(batch)
        assert w.gain > 0.97


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_it_opens_again_when_more_is_accepted(batch: int) -> None:
    w = world(knee, 0.0, jitter=0.1)
    widths = [w.step(batch) for _ in range(1000)]
    assert sum(map(bool, widths[500:])) <= 10, "what keeps losing is tried rarely"
    w.acceptance = 0.9
    widths = [w.step(batch) for _ in range(1500)]
    settled = sum(w.gain_of(batch, width) for width in widths[1000:]) / 500
    assert settled > 0.9 * w.best_gain(batch)


def test_it_closes_when_less_is_accepted() -> None:
    w = world(affine, 0.97)
    assert any(w.step(64) for _ in range(200))
    w.acceptance = 0.1
    assert sum(bool(w.step(64)) for _ in range(200)) < 40


def test_it_opens_where_a_verified_token_is_cheap_and_closes_where_it_is_not() -> None:
    def share_open(cost: Cost, batch: int) -> float:
        w = world(cost, 0.9)
        return sum(bool(w.step(batch)) for _ in range(500)) / 500

    assert all(share_open(flat, batch) > 0.9 for batch in (1, 16, 256))
    assert all(share_open(linear, batch) < 0.05 for batch in (1, 16, 256))
    assert [share_open(knee, batch) > 0.9 for batch in (1, 32, 128)] == [True, True, False]


def test_a_slow_start_is_forgotten() -> None:
    """First steps warm up an engine; they must not make all later ones look cheap."""
    w = world(linear, 0.97)
    for _ in range(20):
        w.gate.observe(32, 32, 1.0)
    for _ in range(1000):
        w.step(32)
    assert w.gain > 0.97


def test_where_nobody_has_a_draft_the_gate_stays_as_it_is() -> None:
    w = world(flat, 0.9, share=0.0)
    assert sum(bool(w.step(8)) for _ in range(300)) > 250
    w.share = 1.0
    assert sum(w.step(8) > 4 for _ in range(100)) > 80


def test_a_gate_is_no_wider_than_it_may_be() -> None:
    w = World(flat, 0.97, Gate(3))
    assert max(w.step(4) for _ in range(300)) == 2
