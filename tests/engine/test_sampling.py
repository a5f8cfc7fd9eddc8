"""The definition of coupled sampling: the noise, and the distribution that is drawn from."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from lightrl.engine import sampling
from lightrl.engine.sampling import keys, sample, uniform, uniforms
from tests.support import race


def draw(logits, noise, temperature=1.0, top_p=1.0, top_k=0):
    """The same parameters for every row; one row of logits may stand for all."""
    noise = np.atleast_1d(np.asarray(noise, np.uint64))
    logits = torch.as_tensor(logits, dtype=torch.float32).expand(len(noise), -1)
    same = [np.full(len(noise), v) for v in (temperature, top_p)]
    ids, logprobs = sample(logits, noise, *same, np.full(len(noise), top_k, np.int64))
    return ids.tolist(), logprobs.tolist()


def test_noise_never_changes():
    """Nodes of different builds must draw the same tokens, and a resumed run those of the first."""
    assert uniform(0, 0) == 0.6524484863740322
    assert uniform(9, 5) == 0.887248699448076
    assert uniform(2**63 - 1, 2**20) == 0.9003090410126229


def test_array_noise_equals_scalar_noise():
    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(0, 2**63 - 1, 500), rng.integers(0, 2**20, 500)
    together = uniforms(seeds, positions)
    assert together.tolist() == [
        uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)
    ]
    assert together.min() >= 0
    assert together.max() < 1


def test_noise_is_uniform_and_neighbours_are_independent():
    seeds, positions = np.meshgrid(np.arange(200), np.arange(200))
    u = uniforms(seeds.ravel(), positions.ravel()).reshape(200, 200)
    counts = np.bincount((u.ravel() * 100).astype(int), minlength=100)
    assert chi_square_per_degree(counts, np.full(100, 400.0)) < 1.5
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.02


def chi_square_per_degree(counts, expected) -> float:
    return float(((counts - expected) ** 2 / expected).sum() / (len(expected) - 1))


def keys_of(num):
    """Of `num` responses at one position."""
    return keys(np.arange(num), np.full(num, 3))


@pytest.mark.parametrize("size", [16, 100])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.5, 1.0, 6)]
)
def test_draws_from_the_kept_part_and_returns_logprobs_of_the_whole(
    temperature, top_p, top_k, size
):
    logits = torch.linspace(-2, 2, size)[
        torch.randperm(size, generator=torch.Generator().manual_seed(0))
    ]
    ids, logprobs = draw(logits, keys_of(20_000), temperature, top_p, top_k)
    p = torch.softmax(logits / temperature, -1)
    order = p.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    q = p[kept] / p[kept].sum()
    kept = kept[: int((q.cumsum(0) - q < top_p).sum())]
    expected = torch.zeros(size)
    expected[kept] = p[kept] / p[kept].sum()
    counts = np.bincount(ids, minlength=size)
    support = expected.numpy() > 0
    assert counts[~support].sum() == 0
    assert chi_square_per_degree(counts[support], expected.numpy()[support] * 20_000) < 3.5
    assert logprobs == pytest.approx(p.log()[ids].tolist(), abs=1e-5)


@pytest.mark.parametrize("size", [2, 7, 40, 1000])
def test_the_token_is_that_of_the_reference(size):
    logits = np.random.default_rng(size).normal(0, 3, size).astype(np.float32)
    noise = keys_of(200)
    assert draw(torch.from_numpy(logits), noise)[0] == [race.winner(logits, int(k)) for k in noise]


def test_tensors_race_as_arrays_do():
    """The way of a GPU, on this machine."""
    chances = torch.rand(9, 16)
    noise, num = keys_of(9), 4 + 4
    waits = sampling._waits(noise, num, torch.device("cpu"))
    bits = noise.view(np.int64)
    mixed = sampling._mix_array(torch.from_numpy(bits))
    assert torch.equal(mixed, torch.from_numpy(sampling._mix_array(bits)))
    race_of = sampling._race
    assert (
        race_of(chances, torch.from_numpy(waits), 4).tolist()
        == race_of(chances.numpy(), waits, 4).tolist()
    )


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.full((1000,), -torch.inf)
    logits[[3, 640]] = 0.0
    ids, _ = draw(logits, keys_of(300))
    assert set(ids) == {3, 640}


def test_every_token_of_a_large_vocabulary_can_be_drawn():
    size = 150_000
    rare = torch.zeros(size)
    rare[size - 1] = 20.0
    assert draw(rare, keys_of(20))[0] == [size - 1] * 20
    ids, _ = draw(torch.zeros(size), keys_of(300))
    quarters = np.bincount(np.array(ids) * 4 // size, minlength=4)
    assert chi_square_per_degree(quarters, np.full(4, 75.0)) < 5.5


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_a_small_change_of_the_weights_rarely_changes_the_token(spread):
    """At most twice as often as under the best coupling, whatever the ids of the tokens are: an
    inverse CDF in the order of ids is 3 to 7 times worse."""
    rng = np.random.default_rng(7)
    before = rng.normal(0, spread, 1000)
    after = before + rng.normal(0, 0.1, 1000)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (before, after))
    distance, num = np.abs(p - q).sum() / 2, 8000
    one, other = (draw(torch.from_numpy(x), keys_of(num))[0] for x in (before, after))
    differing = np.mean(np.array(one) != np.array(other))
    assert 0.5 * distance < differing < 2 * distance


def test_temperature_zero_takes_the_likeliest_token_with_its_plain_logprob():
    logits = torch.tensor([0.5, 2.0, -1.0])
    expected = float(logits.log_softmax(-1)[1])
    assert draw(logits, [9], temperature=0.0, top_p=0.1, top_k=1) == (
        [1],
        [pytest.approx(expected)],
    )


def test_rows_of_one_batch_may_be_sampled_differently():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    noise = keys_of(4)
    rows = [(1.0, 1.0, 0), (0.0, 1.0, 0), (0.5, 0.8, 0), (2.0, 0.95, 7)]
    columns = [np.array(c) for c in zip(*rows, strict=True)]
    together = sample(logits, noise, *columns)
    for i, (temperature, top_p, top_k) in enumerate(rows):
        ids, logprobs = draw(logits[i], noise[i], temperature, top_p, top_k)
        assert [together[0][i].item()] == ids
        assert [together[1][i].item()] == pytest.approx(logprobs)


def test_rows_drawn_in_pieces_are_those_drawn_at_once(monkeypatch):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
    controls = np.linspace(0, 1.2, 7), np.linspace(0.5, 1, 7), np.arange(7)
    at_once = sample(logits, keys(np.arange(7), np.arange(7)), *controls)
    monkeypatch.setattr("lightrl.engine.sampling.MAX_VALUES", 3 * 50 + 1)
    in_pieces = sample(logits, keys(np.arange(7), np.arange(7)), *controls)
    assert all(torch.equal(a, b) for a, b in zip(at_once, in_pieces, strict=True))


def test_noise_and_the_emulated_engine_need_no_torch():
    code = (
        "import sys, lightrl.engine.emulated, lightrl.engine.process; print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "False"
