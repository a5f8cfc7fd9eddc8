"""Gradients that are summed over the ranks once a step (`train.sync = "last"`, on CPUs "auto").

Owns when they are: until then each rank holds those of the whole model, in float32. On a processor
it holds the weights of the whole model as long: gloo gathers them, and FSDP copies them, while
nothing is computed. NCCL gathers meanwhile, and there memory is scarce.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.policy import Policy, response_logprobs


class LateSums:
    """From `begin` to `reduce` there are gradients that only this rank has."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._is_due = False

    def begin(self) -> None:
        """Before each micro-batch."""
        module = self._policy.module
        if self._is_due or not isinstance(module, FSDPModule):
            return
        self._is_due = True
        module.set_requires_gradient_sync(False)
        if self._keeps_weights:
            module.set_reshard_after_forward(False)
            module.set_reshard_after_backward(False)

    def reduce(self) -> None:
        """A collective, if it is due on one rank and so on all. Which micro-batch is the last is
        known when it has been computed: FSDP sums up in one more pass, over nothing."""
        policy = self._policy
        if not self._is_due or not isinstance(policy.module, FSDPModule):
            return
        self._is_due = False
        policy.module.set_requires_gradient_sync(True)
        policy.module.set_reshard_after_backward(True)
        empty = collate([], policy.device, policy.vocabulary, policy.way.packed)
        with torch.enable_grad():
            (0 * response_logprobs(policy, empty)[0].sum()).backward()
        self._reset_forward(policy.module)

    def drop(self) -> None:
        """There are none, and there never were. No collective, and nothing is computed."""
        module = self._policy.module
        if not self._is_due or not isinstance(module, FSDPModule):
            return
        self._is_due = False
        for parameter in _of_fsdp(module):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)
        self._reset_forward(module)

    def gradients(self) -> Iterator[Tensor]:
        """Those that only this rank has, of the whole model."""
        module = self._policy.module
        if self._is_due and isinstance(module, FSDPModule):
            for parameter in _of_fsdp(module):
                if parameter.unsharded_accumulated_grad is not None:
                    yield parameter.unsharded_accumulated_grad
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None and unsharded.grad is not None:
                    yield unsharded.grad

    def _reset_forward(self, module: FSDPModule) -> None:
        if self._keeps_weights:  # as `shard` has left it
            module.set_reshard_after_forward(True)
            module.set_reshard_after_forward(False, recurse=False)

    @property
    def _keeps_weights(self) -> bool:
        return self._policy.device.type == "cpu"


def _of_fsdp(module: Any) -> Iterator[Any]:
    """What FSDP holds of each parameter: it has no public name for gradients that it has not summed
    up yet."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            # before torch 2.13 a module had at most one
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in filter(None, groups):
                yield from group.fsdp_params
