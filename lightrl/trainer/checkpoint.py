"""Checkpoints of the trainer: weights and optimizer by torch.distributed.checkpoint, and the export
to HF.

Owns what is in one checkpoint directory and that it appears whole or not at all (see `saved` for
the names around it). Knows nothing of what a run resumes besides the trainer (data cursor,
journal).

    step_N/trainer.json SavedStep
    step_N/state/       DCP: master weights and optimizer state, readable by any number of ranks
    step_N/hf/          optional: safetensors, config and tokenizer
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from lightrl.errors import ProtocolError, TrainerError
from lightrl.system import files
from lightrl.trainer.export import PROBLEMS, export
from lightrl.trainer.model import Policy
from lightrl.trainer.saved import STEP_FILE, SavedStep, put_in_place
from lightrl.trainer.seal import EXPORT, sealed
from lightrl.wire import from_json, to_json


def save(
    path: Path,
    saved: SavedStep,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    export_from: Path | None,
    keep_last: int,
) -> None:
    """Writes the checkpoint `path` (.../step_N), makes it durable, removes all but the newest
    `keep_last` and what was set aside of earlier steps.

    Call on all ranks. `export_from`: also export to `path`/hf, with the small files of that model
    directory. Raises TrainerError, one line, on all ranks if one of them cannot; nothing has
    changed then.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    first = world == 1 or dist.get_rank() == 0
    draft = path.with_name(f".{path.name}.draft")
    try:
        with _together(world):
            if first:
                files.make_folder(path.parent)
                shutil.rmtree(draft, ignore_errors=True)
                (draft / "state").mkdir(parents=True)
        with _together(world):
            state = _state(policy, optimizer, saved.has_optimizer)
            # else put_in_place does it
            writer = FileSystemWriter(draft / "state", sync_files=world > 1)
            save_state(state, storage_writer=writer, no_dist=world == 1)
        with _together(world):
            if export_from is not None:
                export(draft / EXPORT, policy, export_from)
        with _together(world):
            if first:
                (draft / STEP_FILE).write_bytes(to_json(sealed(saved, draft)))
                put_in_place(draft, path, keep_last)
    except TrainerError:
        if first:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def restore(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> SavedStep:
    """Loads a checkpoint into a policy and its optimizer, on whatever number of ranks. Call on all
    ranks.

    Raises TrainerError if there is no complete checkpoint of this model at `path`.
    """
    try:
        saved = from_json((path / STEP_FILE).read_bytes(), SavedStep)
    except (OSError, ProtocolError) as e:
        raise TrainerError(f"{path}: no complete checkpoint: {e}") from None
    world = dist.get_world_size() if dist.is_initialized() else 1
    state = _state(policy, optimizer, saved.has_optimizer)
    try:
        load_state(state, checkpoint_id=path / "state", no_dist=world == 1)
    except (OSError, RuntimeError, ValueError, CheckpointException) as e:
        raise TrainerError(f"{path}: cannot be restored: {str(e).splitlines()[0]}") from e
    set_model_state_dict(policy.module, state["model"])
    if saved.has_optimizer:
        set_optimizer_state_dict(policy.module, optimizer, state["optimizer"])
    return saved


def _state(
    policy: Policy, optimizer: torch.optim.Optimizer, with_optimizer: bool
) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(policy.module)}
    if with_optimizer:
        state["optimizer"] = get_optimizer_state_dict(policy.module, optimizer)
    return state


@contextlib.contextmanager
def _together(world: int) -> Iterator[None]:
    """Waits for all ranks at the end. Raises TrainerError on each of them if what is inside failed
    on one."""
    problem = ""
    try:
        yield
    except CheckpointException as e:  # a BaseException
        problem = _first_line(next((error for error, _ in e.failures.values()), e))
    except PROBLEMS as e:
        problem = _first_line(e)
    failed = bool(problem)
    if world > 1:
        flag = torch.tensor(failed, dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        failed = bool(flag.item())
    if failed:
        raise TrainerError(problem or "another rank could not save")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
