"""AdamW whose two moments take eight bits a value, by torchao's quantisation.

torchao's own optimizer compiles a kernel for each shape, assumes that all ranks have as many rows,
and keeps tensors of a class that checkpoints cannot stage; here a state is plain tensors, divided
among ranks as the parameter is. torchao is optional: `optim` imports this file on demand.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit, get_qmap_signed, get_qmap_unsigned

from lightrl.trainer.learner.host_memory import local_part

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64
LEAST_VALUES = 4096  # smaller tensors stay in float32
UPDATED_VALUES = 1 << 22  # at a time: an update needs a dozen float32 copies of them
MOMENTS = ("exp_avg", "exp_avg_sq")


def block_size(shape: torch.Size) -> int:
    """Values that share a scale; 0 = in float32, as it is small, or its rows do not divide.

    Blocks lie within rows, and nothing depends on how many rows a rank has: a checkpoint of any
    number of ranks is read by any other. Examples: [152064, 896] -> 128, [4096] -> 0
    """
    block = math.gcd(math.prod(shape[1:]), LARGEST_BLOCK)
    is_whole = len(shape) < 2 or shape.numel() < LEAST_VALUES or block < SMALLEST_BLOCK
    return 0 if is_whole else block


class AdamW8bit(torch.optim.Optimizer):
    """Stores moments in eight bits. Of each parameter: step, exp_avg and exp_avg_sq; if these two
    are codes, uint8 in its shape, also a `_scale` of each, float32 [rows, blocks of a row]."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters; a closure is not supported."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(_new_state(parameter))
                    _update(parameter, state, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state unchanged: the base class would convert the codes to float32."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if key in state_dict["state"]:
                    self.state[parameter] = dict(state_dict["state"][key])


def _new_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    state = {"step": torch.tensor(0.0)}
    block = block_size(parameter.shape)
    for moment in MOMENTS:
        state[moment] = torch.zeros_like(parameter, dtype=torch.uint8 if block else None)
        if block:
            blocks = math.prod(parameter.shape[1:]) // block
            state[f"{moment}_scale"] = _like_rows(parameter, blocks)
    return state


def _like_rows(parameter: nn.Parameter, width: int) -> Tensor:
    """Zeros, float32 [rows of the parameter, width], divided as it is."""
    local = local_part(parameter)
    zeros = torch.zeros(len(local), width, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size((len(parameter), width)),
        stride=(width, 1),
    ).to(local.device)  # `from_local` moves it to that of the mesh


def _update(parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update a parameter, some rows at a time."""
    state["step"] += 1
    assert parameter.grad is not None
    values, gradient = local_part(parameter.detach()), local_part(parameter.grad)
    if values.dim() == 0:
        values, gradient = values.view(1), gradient.view(1)
    rows = max(1, UPDATED_VALUES // max(1, math.prod(values.shape[1:])))
    for first in range(0, len(values), rows):
        some = slice(first, first + rows)
        single_param_adam(
            values[some],
            gradient[some],
            state["step"],
            _moment(state, "exp_avg", some),
            _moment(state, "exp_avg_sq", some),
            max_exp_avg_sq=None,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            IS_ADAMW=True,
            BF16_STOCHASTIC_ROUND=False,
        )


def _moment(state: dict[str, Tensor], moment: str, some: slice) -> Tensor:
    """A view of these rows of it, which torchao reads and writes as if it were float32."""
    values = local_part(state[moment])
    if (scale := state.get(f"{moment}_scale")) is None:
        return (values if values.dim() else values.view(1))[some]
    signed = moment == "exp_avg"
    codes = values[some]
    return OptimState8bit(
        codes, local_part(scale)[some].view(-1), _map(signed, codes.device), signed, torch.float32
    )


@cache
def _map(signed: bool, device: torch.device) -> Tensor:
    """The float32 value of each of the 256 codes."""
    return torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned(), device=device)
