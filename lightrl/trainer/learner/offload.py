"""Move tensors of a rank to host memory: the optimizer's state (`train.offload = "optimizer"`), or
all tensors while engines use the device (`rollout.placement = "shared"`).

Results are identical bit for bit, whenever tensors move.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.trainer.learner.host_memory import HostMemory, local_part, reshard
from lightrl.trainer.learner.late_sums import LateSums
from lightrl.trainer.learner.step_start import StepStart

PART_VALUES = 1 << 26  # most parameters of a rank whose state is on the device at a time (512 MiB)


@dataclass(eq=False)
class HostedState:
    """Run the step of an optimizer on the device with its state on the host, for one part of the
    parameters at a time. `_host` is None on a CPU that is not shared: no tensor is moved."""

    _optimizer: Optimizer
    _parameters: Sequence[Tensor]
    _host: HostMemory | None

    def step(self) -> None:
        """Run `optimizer.step()` for one part after another, and release all gradients."""
        gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for part in self._parts():
            for i in part:
                self._parameters[i].grad, gradients[i] = gradients[i], None
            self._step(part)

    def expect(self) -> None:
        """Create the state that a checkpoint is loaded into, part by part; torch would create all
        of it on the device."""
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
            num = local_part(parameter).numel()
            if part and size + num > PART_VALUES:
                yield part
                part, size = [], 0
            part.append(i)
            size += num
        yield part


def moments(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of the optimizer's state except the step counts."""
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.ndim:
                yield value


@dataclass(eq=False)
class Parking:
    """Move all tensors of a rank to the host and back. The optimizer's state remains on the host
    while gradients are only accumulated.

    `_modules`: the policy, and the reference model of a run that has one; `_parameters`: the
    trained parameters."""

    _host: HostMemory
    _modules: Sequence[nn.Module]
    _parameters: Sequence[nn.Parameter]
    _optimizer: Optimizer
    _start: StepStart
    _late: LateSums | None
    is_parked: bool = False

    def park(self) -> int:
        """Move all tensors to the host between micro-batches; return their bytes. No collective."""
        for module in self._modules:
            reshard(module)
        self._host.put_away(self._tensors())
        torch.cuda.empty_cache()  # no effect on a CPU
        self.is_parked = True
        return self._host.bytes_of(self._tensors())

    def fetch(self) -> None:
        """Fetch the tensors that passes over micro-batches need."""
        if self.is_parked:
            self._host.fetch(self._of_passes())
            self.is_parked = False

    def fetch_state(self) -> None:
        """Fetch the optimizer's state for an update."""
        self._host.fetch(self._state())

    def put_state_away(self) -> None:
        """Move the optimizer's state to the host while gradients are only accumulated."""
        self._host.put_away(self._state())

    def drop_gradients(self) -> None:
        self._host.drop(self._gradients())

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._of_passes()
        yield from self._state()

    def _of_passes(self) -> Iterator[Tensor]:
        for module in self._modules:
            yield from module.parameters()
        yield from self._gradients()
        yield from self._start.weights

    def _gradients(self) -> Iterator[Tensor]:
        yield from (p.grad for p in self._parameters if p.grad is not None)
        if self._late is not None:
            yield from self._late.gradients()

    def _state(self) -> Iterator[Tensor]:
        return moments(self._optimizer, self._parameters)
