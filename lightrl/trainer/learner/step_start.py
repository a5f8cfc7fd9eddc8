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
from torch.optim import Optimizer

from lightrl.trainer.learner.host_memory import HostMemory, local_part


class StepStart:
    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        host: HostMemory | None = None,
    ) -> None:
        """`parameters`: those of `module` that are trained. Any of all this may be on the `host`
        when it is held or restored."""
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._host = host
        self.weights: list[Tensor] = []  # as `parameters`
        self._state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def hold(self) -> None:
        """The step is about to move the weights. No collective."""
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
        """The step begins anew: all is as it was held. No collective."""
        for held, parameter in zip(self.weights, self._parameters, strict=True):
            self._at_hand(parameter.detach()).copy_(self._at_hand(held))
        for parameter in list(self._optimizer.state):
            if parameter not in self._state:  # moved for the first time
                values = self._optimizer.state.pop(parameter).values()
                if self._host is not None:
                    self._host.drop(value for value in values if isinstance(value, Tensor))
        for parameter, values in self._state.items():
            for name, held in values.items():
                self._at_hand(self._optimizer.state[parameter][name]).copy_(held)
        self._drop_gathered()

    @contextlib.contextmanager
    def in_place(self) -> Generator[None]:
        """The module has the weights of the step's begin, for passes without gradients."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _at_hand(self, tensor: Tensor) -> Tensor:
        """What this rank has of it, wherever it is."""
        return local_part(tensor if self._host is None else self._host.view(tensor))

    @torch.no_grad()
    def _exchange(self) -> None:
        for held, parameter in zip(self.weights, self._parameters, strict=True):
            local = local_part(parameter)
            now = local.clone()
            local.copy_(held)
            held.copy_(now)
        self._drop_gathered()

    def _drop_gathered(self) -> None:
        """FSDP keeps what it gathered for the last forward pass until a backward pass."""
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
