"""Copies of this rank's weights and optimizer state at the beginning of a step of several updates.

The weights' copies are float32 and lie where the weights do, 4 bytes a parameter: old logprobs are
computed from them as from the weights themselves. The optimizer's lie on the host, and are used
only when the step is reset.
"""

import contextlib
from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.trainer.learner.host_memory import HostMemory, local_part, reshard


class StepStart:
    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        host: HostMemory | None = None,
    ) -> None:
        """`parameters`: those of `module` that are trained. Any tensor may be on the `host`."""
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._host = host
        self.weights: list[Tensor] = []  # as `parameters`
        self._state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def hold(self) -> None:
        """Copy, before the first update of the step. No collective."""
        if not self.weights:
            self.weights = [torch.empty_like(local_part(p)) for p in self._parameters]
        for held, parameter in zip(self.weights, self._parameters, strict=True):
            held.copy_(local_part(parameter))
        for parameter, values in self._optimizer.state.items():
            held = self._state.setdefault(parameter, {})
            for name, value in values.items():
                if name in held:
                    held[name].copy_(self._at_hand(value))
                else:
                    held[name] = self._at_hand(value).to("cpu", copy=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the updates of the step. No collective."""
        for held, parameter in zip(self.weights, self._parameters, strict=True):
            self._at_hand(parameter.detach()).copy_(self._at_hand(held))
        for parameter in list(self._optimizer.state):
            if parameter not in self._state:  # its first update
                values = self._optimizer.state.pop(parameter).values()
                if self._host is not None:
                    self._host.drop(value for value in values if isinstance(value, Tensor))
        for parameter, values in self._state.items():
            for name, held in values.items():
                self._at_hand(self._optimizer.state[parameter][name]).copy_(held)
        reshard(self._module)

    @contextlib.contextmanager
    def in_place(self) -> Generator[None]:
        """Run passes without gradients on the weights of the step's beginning."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _at_hand(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that this rank holds, on the device or on the host."""
        return local_part(tensor if self._host is None else self._host.view(tensor))

    @torch.no_grad()
    def _exchange(self) -> None:
        for held, parameter in zip(self.weights, self._parameters, strict=True):
            local = local_part(parameter)
            now = local.clone()
            local.copy_(held)
            held.copy_(now)
        reshard(self._module)
