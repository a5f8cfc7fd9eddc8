"""Gradients that are summed over the ranks once an update, not with each micro-batch.

With `train.sync = "last"` (on CPUs "auto") each rank holds the gradients of the whole model until
the update, in float32; on a processor also the weights, as gloo gathers them while nothing is
computed. Replicas (`train.replicas`) always sum at the update; with `"each"` the ranks of one
replica sum with each micro-batch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightrl.trainer.model.collate import collate
from lightrl.trainer.model.policy import Policy, response_logprobs


class LateSums:
    """Delays sums over ranks: from `begin` to `reduce` this rank, or replica, holds gradients."""

    def __init__(self, policy: Policy, is_last: bool, replicas: int = 1) -> None:
        """`is_last`: ranks of one replica do not sum up before the end, either."""
        self._policy = policy
        self._is_last = is_last
        self._replicas = replicas
        self._is_due = False

    def begin(self) -> None:
        """Prepare a micro-batch; call it before each one."""
        module = self._policy.module
        if self._is_due or not isinstance(module, FSDPModule):
            return
        self._is_due = True
        if not self._is_last:
            module.set_requires_all_reduce(False)
            return
        module.set_requires_gradient_sync(False)
        if self._keeps_weights:
            module.set_reshard_after_forward(False)
            module.set_reshard_after_backward(False)

    def reduce(self) -> None:
        """Sum in one more pass, over nothing: which micro-batch is the last is known too late. A
        collective, also of replicas without micro-batches."""
        policy = self._policy
        if not isinstance(policy.module, FSDPModule) or not self._is_due_anywhere():
            return
        self._is_due = False
        policy.module.set_requires_gradient_sync(True)
        policy.module.set_reshard_after_backward(True)
        empty = collate([], policy.device, policy.vocabulary, policy.way.packed)
        with torch.enable_grad():
            (0 * response_logprobs(policy, empty)[0].sum()).backward()
        self._reset_forward(policy.module)

    def drop(self) -> None:
        """Forget the gradients. No collective."""
        module = self._policy.module
        if not self._is_due or not isinstance(module, FSDPModule):
            return
        self._is_due = False
        for group in _groups(module):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
            group.reshard()
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)
        self._reset_forward(module)

    def gradients(self) -> Iterator[Tensor]:
        """Yield gradients that are not summed yet."""
        module = self._policy.module
        if not self._is_due or not isinstance(module, FSDPModule):
            return
        for group in _groups(module):
            if group._partial_reduce_output is not None:
                yield group._partial_reduce_output
            for parameter in group.fsdp_params:
                if parameter.unsharded_accumulated_grad is not None:
                    yield parameter.unsharded_accumulated_grad
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None and unsharded.grad is not None:
                    yield unsharded.grad

    def _reset_forward(self, module: FSDPModule) -> None:
        if self._keeps_weights:  # as `shard` does
            module.set_reshard_after_forward(True)
            module.set_reshard_after_forward(False, recurse=False)

    def _is_due_anywhere(self) -> bool:
        """Return whether any replica has gradients: they differ in micro-batches."""
        if self._replicas == 1:
            return self._is_due
        due = torch.tensor(float(self._is_due), device=self._policy.device)
        dist.all_reduce(due, dist.ReduceOp.MAX)
        return bool(due.item())

    @property
    def _keeps_weights(self) -> bool:
        return self._is_last and self._policy.device.type == "cpu"


def _groups(module: Any) -> Iterator[Any]:
    """FSDP's groups of parameters; it has no public name for gradients that it has not summed."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            # before torch 2.13 a module had at most one
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            yield from filter(None, groups)
