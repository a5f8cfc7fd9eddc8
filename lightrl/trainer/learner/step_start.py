"""What a step of several updates found: the weights, and the state of the optimizer.

Owns copies of this rank's shards. Those of the weights are float32 and lie where the weights do: 4
bytes a parameter, divided as the weights are. Old logprobs are computed from them as from the
weights themselves, so that they are exactly those of the step's begin whatever the dtype of
computing. The optimizer's lie on the host, and are needed only when the step begins anew.
"""

import contextlib
from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class StepStart:
    def __init__(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], optimizer: Optimizer
    ) -> None:
        """`parameters`: those of `module` that are trained."""
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._weights: list[Tensor] = []  # as `parameters`
        self._state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def hold(self) -> None:
        """The step is about to move the weights. No collective."""
        if not self._weights:
            self._weights = [torch.empty_like(_local(p)) for p in self._parameters]
        for held, parameter in zip(self._weights, self._parameters, strict=True):
            held.copy_(_local(parameter))
        for parameter, values in self._optimizer.state.items():
            held = self._state.setdefault(parameter, {})
            for name, value in values.items():
                if name in held:
                    held[name].copy_(_local(value))
                else:
                    held[name] = _local(value).to("cpu", copy=True)

    @torch.no_grad()
    def restore(self) -> None:
        """The step begins anew: all is as it was held. No collective."""
        for held, parameter in zip(self._weights, self._parameters, strict=True):
            _local(parameter).copy_(held)
        for parameter in list(self._optimizer.state):
            if parameter not in self._state:  # moved for the first time
                del self._optimizer.state[parameter]
        for parameter, values in self._state.items():
            for name, held in values.items():
                _local(self._optimizer.state[parameter][name]).copy_(held)
        self._drop_gathered()

    @contextlib.contextmanager
    def in_place(self) -> Generator[None]:
        """The module has the weights of the step's begin, for passes without gradients."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for held, parameter in zip(self._weights, self._parameters, strict=True):
            local = _local(parameter)
            now = local.clone()
            local.copy_(held)
            held.copy_(now)
        self._drop_gathered()

    def _drop_gathered(self) -> None:
        """FSDP keeps what it gathered for the last forward pass until a backward pass."""
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
