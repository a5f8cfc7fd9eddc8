"""An optimizer whose state lies in the memory of the host (`train.offload = "optimizer"`).

Owns where the state is. The step is the optimizer's own, on the device, for a part of the
parameters at a time: the weights become the same bits as without. On a processor nothing moves.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PART_VALUES = 1 << 26  # parameters of this rank whose state is on the device at once (512 MiB)
HOST = torch.device("cpu")


class HostedState:
    """All that steps the optimizer, and all that makes it state."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        # by parameter: where its state lies between steps, kept so that no memory is made anew
        self._places: dict[Tensor, dict[str, Tensor]] = {}

    def step(self) -> None:
        """As `optimizer.step()`; the gradients are gone afterwards."""
        gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for part in self._parts():
            for i in part:
                parameter = self._parameters[i]
                parameter.grad, gradients[i] = gradients[i], None
                self._fetch(parameter)
            self._optimizer.step()
            for i in part:
                self._parameters[i].grad = None
                self._put_away(self._parameters[i])

    def expect(self) -> None:
        """Makes the state that a checkpoint is read into; torch would make all of it at once, on
        the device."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        for part in self._parts():
            for i in part:
                self._parameters[i].grad = torch.zeros_like(self._parameters[i])
            self._optimizer.step()
            for i in part:
                self._parameters[i].grad = None
                self._put_away(self._parameters[i])
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

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

    def _fetch(self, parameter: Tensor) -> None:
        state = self._optimizer.state.get(parameter, {})
        for name, value in _moved(state, parameter):
            state[name] = value.to(parameter.device)

    def _put_away(self, parameter: Tensor) -> None:
        state = self._optimizer.state.get(parameter, {})
        places = self._places.setdefault(parameter, {})
        for name, value in _moved(state, parameter):
            if name in places:
                places[name].copy_(value)
            else:
                places[name] = value.to(HOST)
            state[name] = places[name]


def _moved(state: dict[str, Any], parameter: Tensor) -> list[tuple[str, Tensor]]:
    """What is worth it: not the count of steps."""
    some = [(name, value) for name, value in state.items() if isinstance(value, Tensor)]
    return [(name, value) for name, value in some if value.ndim and parameter.device != HOST]
