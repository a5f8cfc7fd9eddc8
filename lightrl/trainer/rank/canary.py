"""The trainer's side of the canary (weights/canary.py): a text drawn from the model, and its
logprobs. Every function is a collective of the ranks.
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
    """Draw token ids from the model at temperature 1, by fixed noise, no more than an engine takes.

    In a text of arbitrary tokens rounding to bfloat16 hides a fault: with the quickstart's model it
    made differences of 0.22 and a layer 20 steps old 0.25; in a text that is drawn, 0.04 and 0.27.
    """
    text = [int(noise(0) * policy.vocabulary)]
    while len(text) < min(NUM_TOKENS, max_length):
        # on the processor: sums on a GPU may be refused by run.deterministic
        chances = _logits(policy, text)[-1].cpu().double().softmax(-1).cumsum(-1)
        token = int((chances <= noise(len(text)) * chances[-1]).sum())
        text.append(min(token, policy.vocabulary - 1))
    return text


def compute(policy: Policy, text: list[int]) -> Canary:
    """Compute the logprob of each token of the text but the first."""
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
    """Dtype of computing: sharded on GPUs it is bfloat16, see `shard`."""
    is_sharded = isinstance(policy.module, FSDPModule)
    return COMPUTED.get(policy.device.type, policy.served) if is_sharded else policy.served


@contextmanager
def _rounded(module: nn.Module, served: torch.dtype, is_cast: bool) -> Iterator[None]:
    """Round the parameters of each layer to the dtype that is served while it computes, so that
    there is no second model in memory, and of a sharded one the gathered parameters are rounded.
    Adapters are rounded but keep their dtype, to which peft casts inputs; so do all parameters
    where FSDP2 casts to another dtype what goes from layer to layer (`is_cast`).
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
