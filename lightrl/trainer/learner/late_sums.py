"""Gradients that are summed over the ranks once a step (`train.sync = "last"`, on CPUs "auto").

Owns when they are: until then each rank holds those of the whole model, in float32. On a processor
it holds the weights of the whole model as long: gloo gathers them, and FSDP copies them, while
nothing is computed. NCCL gathers meanwhile, and there memory is scarce.
"""

import torch
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
        if self._keeps_weights:  # as `shard` has left it
            policy.module.set_reshard_after_forward(True)
            policy.module.set_reshard_after_forward(False, recurse=False)

    @property
    def _keeps_weights(self) -> bool:
        return self._policy.device.type == "cpu"
