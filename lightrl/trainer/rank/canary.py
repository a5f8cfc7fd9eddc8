"""The trainer's side of the canary (weights/canary.py): a text as the model itself writes it, and
the logprobs that it gives it.

All ranks must do this at the same time: a sharded model computes together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightrl.adapters import is_adapter
from lightrl.messages.weights import Canary
from lightrl.trainer.model.policy import Policy
from lightrl.trainer.model.sharding import COMPUTED
from lightrl.weights.canary import NUM_TOKENS, noise
from lightrl.weights.version.tensors import dtype_name
from lightrl.wire import pack_f32, pack_i32


def drawn_text(policy: Policy, max_length: int) -> list[int]:
    """Token ids that follow from the weights at hand alone, no more than an engine takes.

    Drawn from the model at temperature 1: in a text of arbitrary tokens, what bfloat16 rounds hides
    a fault. With the quickstart's model after its training rounding made differences of 0.22 there
    and a layer 20 steps old 0.25; in one that is drawn, 0.04 and 0.27.
    """
    text = [int(noise(0) * policy.vocabulary)]
    while len(text) < min(NUM_TOKENS, max_length):
        # on the processor: sums on a GPU may be refused by run.deterministic
        chances = _logits(policy, text)[-1].cpu().double().softmax(-1).cumsum(-1)
        token = int((chances <= noise(len(text)) * chances[-1]).sum())
        text.append(min(token, policy.vocabulary - 1))
    return text


def score(policy: Policy, text: list[int]) -> Canary:
    """The text with the logprob of each token but the first, given those before."""
    every = _logits(policy, text[:-1]).log_softmax(-1)
    logprobs = every[torch.arange(len(text) - 1), text[1:]].tolist()
    return Canary(pack_i32(text), pack_f32(logprobs), dtype_name(_dtype(policy)))


@torch.no_grad()
def _logits(policy: Policy, text: list[int]) -> Tensor:
    """float32 [tokens, vocabulary], rounded as an engine does."""
    ids = torch.tensor([text], device=policy.device)
    with _rounded(policy.module, policy.served, is_cast=_dtype(policy) != policy.served):
        logits = policy.module(input_ids=ids, use_cache=False).logits[0].float()
    if isinstance(policy.module, FSDPModule):
        policy.module.reshard()  # no backward pass follows that would
    return logits


def _dtype(policy: Policy) -> torch.dtype:
    """In which it computes. Sharded on GPUs that is bfloat16 whatever is served: see `shard`."""
    is_sharded = isinstance(policy.module, FSDPModule)
    return COMPUTED.get(policy.device.type, policy.served) if is_sharded else policy.served


@contextmanager
def _rounded(module: nn.Module, served: torch.dtype, is_cast: bool) -> Iterator[None]:
    """Every parameter has the dtype that is served while its own layer computes. So there is never
    a second model in memory, and of a sharded one those are rounded that FSDP2 has gathered.
    Adapters are rounded to it, too, but stay in their own: by that peft casts what they are given;
    so do all parameters where FSDP2 casts to another dtype what goes from layer to layer.
    """
    if served is torch.float32:
        yield
        return
    masters: dict[int, list[tuple[Tensor, Tensor]]] = {}

    adapters = {id(part) for name, part in module.named_modules() if is_adapter(f"{name}.")}

    def round_all(layer: nn.Module, _: Any) -> None:
        masters[id(layer)] = [(p, p.data) for p in layer.parameters(recurse=False)]
        for p, data in masters[id(layer)]:
            rounded = data.to(served)
            p.data = rounded.to(data.dtype) if is_cast or id(layer) in adapters else rounded

    def restore(layer: nn.Module, _: Any, __: Any) -> None:
        for p, data in masters.pop(id(layer)):
            p.data = data

    layers = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    hooks = [m.register_forward_pre_hook(round_all) for m in layers]
    hooks += [m.register_forward_hook(restore) for m in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
