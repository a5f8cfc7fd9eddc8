"""Collect the weights and optimizer state that a checkpoint holds, in the format of
torch.distributed.checkpoint (DCP), which any number of ranks can read.

    step_N/trainer.json SavedStep
    step_N/state/       DCP: master weights and optimizer state
    step_N/layout.json  Layout, and
    step_N/model/       the small files of the model directory: for an export
    step_N/hf/          optional: safetensors, config and tokenizer
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, PreTrainedModel

from lightrl.adapters import public_name
from lightrl.errors import ProtocolError, TrainerError, first_line
from lightrl.trainer.checkpoint.layout import Layout
from lightrl.trainer.checkpoint.saved import MODEL, STATE, SavedStep, read_step
from lightrl.trainer.model.loading import build
from lightrl.trainer.model.policy import Policy

PROBLEMS = (OSError, RuntimeError, ValueError)  # of a disk, a file format, a lack of memory


View: TypeAlias = Callable[[Tensor], Tensor]


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def state_of(
    policy: Policy, optimizer: torch.optim.Optimizer, with_optimizer: bool, view: View = as_it_is
) -> dict[str, Any]:
    """Return the tensors themselves, each as `view` returns it. A collective."""
    model = get_model_state_dict(policy.module, options=_options(policy))
    state: dict[str, Any] = {"model": model}
    if with_optimizer:
        state["optimizer"] = get_optimizer_state_dict(policy.module, optimizer)
    return tree_map_only(Tensor, view, state)


def restore(
    path: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    expect: Callable[[], None] | None = None,
    view: View = as_it_is,
) -> SavedStep:
    """Load a checkpoint into a policy and its optimizer. A collective. `expect` creates the
    optimizer's state instead of torch. `view`: as for `state_of`.

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
        raise TrainerError(f"{path}: cannot be restored: {reason_of(e)}") from e
    # tensors were read in place; the rest of an optimizer's state follows from the config
    return saved


def _options(policy: Policy) -> StateDictOptions:
    """Return the options of DCP; with adapters only these are stored."""
    return StateDictOptions(
        ignore_frozen_params=policy.has_adapters, strict=not policy.has_adapters
    )


def read_model(checkpoint: Path, cast: Callable[[PreTrainedModel], None]) -> PreTrainedModel:
    """Read the whole model of a checkpoint, after `cast` on the meta device, on the processor.
    Raises TrainerError, one line."""
    try:
        module = build(AutoConfig.from_pretrained(checkpoint / MODEL, local_files_only=True))
        cast(module)
        module.to_empty(device="cpu")
        module.tie_weights()
        load_state({"model": module.state_dict()}, checkpoint_id=checkpoint / STATE, no_dist=True)
    except (Exception, CheckpointException) as e:
        raise TrainerError(f"{checkpoint}: cannot be read: {reason_of(e)}") from e
    return module


def read_adapters(checkpoint: Path, layout: Layout) -> dict[str, Tensor]:
    """Read all adapters, under peft's names. Raises TrainerError, one line."""
    reader = FileSystemReader(checkpoint / STATE)
    try:
        known: Any = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(known[f"model.{name}"].size, dtype=getattr(torch, dtype))
            for name, dtype in layout.dtypes.items()
        }
        load_state({"model": state}, storage_reader=reader, no_dist=True)
    except (*PROBLEMS, EOFError, KeyError, CheckpointException) as e:
        raise TrainerError(f"{checkpoint}: cannot be read: {reason_of(e)}") from e
    return {public_name(name): tensor for name, tensor in state.items()}


def reason_of(error: BaseException) -> str:
    """First line of its message; with several ranks, of the first error."""
    if isinstance(error, CheckpointException):
        error = next((problem for problem, _ in error.failures.values()), error)
    return first_line(error)
