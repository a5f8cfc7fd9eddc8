"""What is in one checkpoint, for torch.distributed.checkpoint (DCP): weights and optimizer, on
whatever number of ranks.

Owns the state that is saved and restored. How it is written is `saver`'s, the names around it are
`saved`'s. Knows nothing of what a run resumes besides the trainer (data cursor, journal).

    step_N/trainer.json SavedStep
    step_N/state/       DCP: master weights and optimizer state, readable by any number of ranks
    step_N/layout.json  Layout, and
    step_N/model/       the small files of the model directory: what an export needs besides
    step_N/hf/          optional: safetensors, config and tokenizer
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from lightrl.errors import ProtocolError, TrainerError
from lightrl.trainer.checkpoint.saved import STATE, SavedStep, read_step
from lightrl.trainer.model.policy import Policy

PROBLEMS = (OSError, RuntimeError, ValueError)  # of a disk, a file format, a lack of memory


View: TypeAlias = Callable[[Tensor], Tensor]


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def state_of(
    policy: Policy, optimizer: torch.optim.Optimizer, with_optimizer: bool, view: View = as_it_is
) -> dict[str, Any]:
    """The tensors themselves, not copies; of each what `view` makes of it. Call on all ranks."""
    model = get_model_state_dict(policy.module, options=_options(policy))
    state: dict[str, Any] = {"model": model}
    if with_optimizer:
        state["optimizer"] = get_optimizer_state_dict(policy.module, optimizer)
    return _viewed(state, view)


def _viewed(state: Any, view: View) -> Any:
    match state:
        case dict():
            return {name: _viewed(value, view) for name, value in state.items()}
        case Tensor():
            return view(state)
        case _:
            return state


def restore(
    path: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    expect: Callable[[], None] | None = None,
    view: View = as_it_is,
) -> SavedStep:
    """Loads a checkpoint into a policy and its optimizer, on whatever number of ranks. Call on all
    ranks. `expect` makes the optimizer's state that is read into, where torch is not to; a
    checkpoint from before the first update has none. `view`: as for `state_of`.

    Raises TrainerError if there is no complete checkpoint of this model at `path`.
    """
    try:
        saved = read_step(path)
    except (OSError, ProtocolError) as e:
        raise TrainerError(f"{path}: no complete checkpoint: {e}") from None
    world = dist.get_world_size() if dist.is_initialized() else 1
    if saved.has_optimizer and expect is not None:
        expect()
    state = state_of(policy, optimizer, saved.has_optimizer, view)
    try:
        load_state(state, checkpoint_id=path / STATE, no_dist=world == 1)
    except (*PROBLEMS, CheckpointException) as e:
        raise TrainerError(f"{path}: cannot be restored: {first_line(e)}") from e
    # Tensors were read into those of the module and the optimizer, wherever they lie; the rest of
    # an optimizer's state follows from the config.
    return saved


def _options(policy: Policy) -> StateDictOptions:
    """With adapters these alone: the model that they are beside is where it was."""
    return StateDictOptions(
        ignore_frozen_params=policy.has_adapters, strict=not policy.has_adapters
    )


@contextlib.contextmanager
def together(world: int) -> Iterator[None]:
    """Waits for all ranks at the end. Raises TrainerError on each of them if what is inside failed
    on one."""
    problem = ""
    try:
        yield
    except PROBLEMS as e:
        problem = first_line(e)
    failed = bool(problem)
    if world > 1:
        flag = torch.tensor(failed, dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        failed = bool(flag.item())
    if failed:
        raise TrainerError(problem or "another rank could not save")


def first_line(error: BaseException) -> str:
    """Of what a user is told; with several ranks, of what the first of them met."""
    if isinstance(error, CheckpointException):
        error = next((problem for problem, _ in error.failures.values()), error)
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
