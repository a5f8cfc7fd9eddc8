"""Logprobs and entropies by tiles of the vocabulary, against the same from whole logits."""

import pytest
import torch
import torch.nn.functional as F

from lightrl.trainer.model import logprobs as module
from lightrl.trainer.model.logprobs import Projection, token_logprobs

VOCABULARY = 1000


def whole(hidden, weight, bias, targets, projection):
    logits = F.linear(hidden, weight, bias) * projection.scale
    if cap := projection.softcap:
        logits = cap * torch.tanh(logits / cap)
    every = (logits / projection.temperature).log_softmax(-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def inputs(seed=0, tokens=37):
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, 16, dtype=torch.float64).float()
    weight, bias = torch.randn(VOCABULARY, 16), torch.randn(VOCABULARY)
    targets = torch.randint(VOCABULARY, (tokens,))
    targets[:4] = torch.tensor([0, VOCABULARY - 1, 255, 256])  # at the borders of tiles
    return hidden, weight, bias, targets


def values_and_gradients(function, projection, has_bias, factors):
    hidden, weight, bias, targets = inputs()
    leaves = [hidden, weight, *([bias] if has_bias else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    logprobs, entropy = function(hidden, weight, bias if has_bias else None, targets, projection)
    (logprobs * factors[0] + entropy * factors[1]).sum().backward()
    return [logprobs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(
    "projection",
    [
        Projection(),
        Projection(temperature=0.7),
        Projection(scale=0.25),
        Projection(softcap=5.0, temperature=1.3),
        Projection(scale=1.5, softcap=3.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_tiles_give_what_whole_logits_give(monkeypatch, projection, has_bias):
    monkeypatch.setitem(module.TILE_VALUES, "cpu", 1)  # tiles of 256, the last one of 232
    factors = torch.randn(2, 37)

    def by_tiles(*args):
        return token_logprobs(*args, is_entropy_trained=True)

    found = values_and_gradients(by_tiles, projection, has_bias, factors)
    expected = values_and_gradients(whole, projection, has_bias, factors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_an_entropy_has_no_gradient_unless_asked():
    hidden, weight, _, targets = inputs()
    weight.requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, None, targets, Projection())
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_logits_far_apart_and_far_from_zero():
    """A sum over tiles must neither overflow nor lose what a later tile makes small."""
    hidden, weight, _, targets = inputs()
    weight[700] += 300 * hidden[0]
    bias = torch.full((VOCABULARY,), -1e4)
    found = token_logprobs(hidden, weight, bias, targets, Projection())
    expected = whole(hidden.double(), weight.double(), bias.double(), targets, Projection())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=2e-3)  # -1e4 in float32


def test_bfloat16_is_rounded_before_the_softmax_only():
    hidden, weight, _, targets = inputs()
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, None, targets, Projection())
    logprobs.sum().backward()
    gradients = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    every = F.linear(hidden, weight).float().log_softmax(-1)
    expected = every.gather(1, targets[:, None])[:, 0]
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    expected.sum().backward()
    for found, leaf in zip(gradients, (hidden, weight), strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, leaf.grad, rtol=2e-2, atol=2e-2)


def test_frozen_weights_get_no_gradient():
    hidden, weight, _, targets = inputs()
    hidden.requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight, None, targets, Projection())
    logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_a_single_tile_is_all_that_there_is_of_the_logits(monkeypatch):
    """Peak of what is allocated, by hooks on every tensor that torch makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor) and t.shape[:1] == (37,):
                    largest = max(largest, t.numel())
            return out

    monkeypatch.setitem(module.TILE_VALUES, "cpu", 1)
    hidden, weight, _, targets = inputs()
    weight.requires_grad_()
    hidden.requires_grad_()
    with Watch():
        logprobs, _ = token_logprobs(hidden, weight, None, targets, Projection())
        logprobs.sum().backward()
    assert largest == 37 * 256
