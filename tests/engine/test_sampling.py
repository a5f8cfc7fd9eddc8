"""The definition of coupled sampling: the noise, and the distribution that is drawn from."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from lightrl.engine.sampling import sample, uniform, uniforms


def draw(logits, noise, temperature=1.0, top_p=1.0, top_k=0):
    """The same parameters for every row; one row of logits may stand for all."""
    noise = np.atleast_1d(np.asarray(noise, np.float64))
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


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.5, 1.0, 6)]
)
def test_draws_from_the_distribution_whose_logprobs_it_returns(temperature, top_p, top_k):
    logits = torch.linspace(-2, 2, 16)[
        torch.randperm(16, generator=torch.Generator().manual_seed(0))
    ]
    ids, logprobs = draw(
        logits, uniforms(np.arange(20_000), np.full(20_000, 3)), temperature, top_p, top_k
    )
    p = torch.softmax(logits / temperature, -1)
    order = p.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    q = p[kept] / p[kept].sum()
    kept = kept[: int((q.cumsum(0) - q < top_p).sum())]
    expected = torch.zeros(16)
    expected[kept] = p[kept] / p[kept].sum()
    counts = np.bincount(ids, minlength=16)
    support = expected.numpy() > 0
    assert counts[~support].sum() == 0
    assert chi_square_per_degree(counts[support], expected.numpy()[support] * 20_000) < 3.5
    assert logprobs == pytest.approx(expected.log()[ids].tolist(), abs=1e-5)


def test_the_token_is_the_first_whose_cumulative_probability_exceeds_the_noise():
    logits = torch.log(torch.tensor([0.25, 0.0, 0.5, 0.25]))
    assert draw(logits, [0.0, 0.2499, 0.2501, 0.7499, 0.7501])[0] == [0, 0, 2, 2, 3]


def test_noise_next_to_one_draws_the_last_possible_token():
    logits = torch.log(torch.tensor([0.3, 0.7, 0.0, 0.0]))
    assert draw(logits, [1 - 2.0**-53])[0] == [1]


def test_every_token_of_a_large_vocabulary_can_be_drawn():
    size = 150_000
    ids, _ = draw(torch.zeros(size), (np.arange(0, size, 10_007) + 0.5) / size)
    assert ids == list(range(0, size, 10_007))


def test_temperature_zero_takes_the_likeliest_token_with_its_plain_logprob():
    logits = torch.tensor([0.5, 2.0, -1.0])
    expected = float(logits.log_softmax(-1)[1])
    assert draw(logits, [0.99], temperature=0.0, top_p=0.1, top_k=1) == (
        [1],
        [pytest.approx(expected)],
    )


def test_rows_of_one_batch_may_be_sampled_differently():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    noise = np.array([0.1, 0.4, 0.6, 0.9])
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
    at_once = sample(logits, uniforms(np.arange(7), np.arange(7)), *controls)
    monkeypatch.setattr("lightrl.engine.sampling.MAX_VALUES", 3 * 50 + 1)
    in_pieces = sample(logits, uniforms(np.arange(7), np.arange(7)), *controls)
    assert all(torch.equal(a, b) for a, b in zip(at_once, in_pieces, strict=True))


def test_noise_and_the_emulated_engine_need_no_torch():
    code = (
        "import sys, lightrl.engine.emulated, lightrl.engine.process; print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "False"
