"""An optimizer whose state lies in the memory of the host (`train.offload = "optimizer"`).

Owns when it is there. The step is the optimizer's own, on the device, for a part of the parameters
at a time: the weights become the same bits as without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightrl.trainer.learner.host_memory import HostMemory

PART_VALUES = 1 << 26  # parameters of this rank whose state is on the device at once (512 MiB)


@dataclass(eq=False)
class HostedState:
    """All that steps the optimizer, and all that makes it state.

    Without a `host` nothing moves: on a processor that shares its memory with nobody.
    """

    _optimizer: torch.optim.Optimizer
    _parameters: Sequence[Tensor]
    _host: HostMemory | None

    def step(self) -> None:
        """As `optimizer.step()`; the gradients are gone afterwards."""
        gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for part in self._parts():
            for i in part:
                self._parameters[i].grad, gradients[i] = gradients[i], None
            self._step(part)

    def expect(self) -> None:
        """Makes the state that a checkpoint is read into; torch would make all of it at once, on
        the device."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        for part in self._parts():
            for i in part:
                self._parameters[i].grad = torch.zeros_like(self._parameters[i])
            self._step(part)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _step(self, part: list[int]) -> None:
        some = [self._parameters[i] for i in part]
        if self._host is not None:
            self._host.fetch(moments(self._optimizer, some))
        self._optimizer.step()
        for parameter in some:
            parameter.grad = None
        if self._host is not None:
            self._host.put_away(moments(self._optimizer, some))

    def _parts(self) -> Iterator[list[int]]:
        part: list[int] = []
        size = 0
        for i, parameter in enumerate(self._parameters):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if part and size + local.numel() > PART_VALUES:
                yield part
                part, size = [], 0
            part.append(i)
            size += local.numel()
        yield part


def moments(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """What of the state is worth moving: not the counts of steps."""
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.ndim:
                yield value
