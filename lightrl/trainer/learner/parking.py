"""What of a rank is on its devices, where these are shared with engines (`rollout.placement`).

Owns which tensors go and when they come back: all of them are away while engines sample; while
gradients are only added up the optimizer's state still is. How they move is in `host_memory`. What
is computed with them is the same, bit for bit, wherever the rank parks.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightrl.trainer.learner.host_memory import HostMemory
from lightrl.trainer.learner.late_sums import LateSums
from lightrl.trainer.learner.offload import moments
from lightrl.trainer.learner.step_start import StepStart


class Parking:
    def __init__(
        self,
        host: HostMemory,
        modules: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        start: StepStart,
        late: LateSums | None,
    ) -> None:
        """`modules`: the policy, and its reference if there is one; `parameters`: those that are
        trained."""
        self._host = host
        self._modules = modules
        self._parameters = parameters
        self._optimizer = optimizer
        self._start = start
        self._late = late
        self.is_parked = False

    def park(self) -> int:
        """Nothing is on the devices between micro-batches but what is counted in kilobytes. Returns
        bytes that are on the host for it. No collective."""
        self._drop_gathered()
        self._host.put_away(self._tensors())
        self._host.give_back()
        self.is_parked = True
        return self._host.bytes_of(self._tensors())

    def fetch(self) -> None:
        """What passes over micro-batches need."""
        if self.is_parked:
            self._host.fetch(self._of_passes())
            self.is_parked = False

    def begin_fetching_state(self) -> None:
        """The optimizer's, beside a pass."""
        self._host.fetch(self._state(), beside=True)

    def fetch_state(self) -> None:
        """The update follows."""
        self._host.fetch(self._state(), beside=True)
        self._host.wait()

    def put_state_away(self) -> None:
        """Gradients are only added up."""
        self._host.put_away(self._state())

    def drop_gradients(self) -> None:
        """They are of a mini-batch that is over."""
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

    def _drop_gathered(self) -> None:
        """What FSDP keeps of the whole model from pass to pass."""
        for module in self._modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
