"""Asynchronous checkpoints: the tensors are copied, and a thread writes them while the rank
continues.

A checkpoint appears whole or not at all (on_disk.py). The copy uses memory that is kept for the
next one: 12 bytes for each parameter of this rank's shards, pinned on CUDA.
"""

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from lightrl.config.sections import Checkpoint
from lightrl.system import files
from lightrl.trainer.checkpoint.checksums import with_checksums
from lightrl.trainer.checkpoint.contents import View, as_it_is, reason_of, state_of
from lightrl.trainer.checkpoint.export import export
from lightrl.trainer.checkpoint.layout import describe, write_description
from lightrl.trainer.checkpoint.on_disk import EXPORT, STATE, STEP_FILE, SavedStep, put_in_place
from lightrl.trainer.model.policy import Policy
from lightrl.trainer.process_group import COLLECTIVE_TIMEOUT_S
from lightrl.trainer.protocol import Saved
from lightrl.wire import to_json

logger = logging.getLogger(__name__)

MB = 1_000_000


class CheckpointWriter:
    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        model_dir: Path,
        settings: Checkpoint,
        report: Callable[[Saved], None],
        base: str = "",
        view: View = as_it_is,
    ) -> None:
        """A collective. On rank 0 `report` gets the results, in a thread. `base`: the model of
        `model_dir` for other machines, a path or a hub id. `view`: see `state_of`."""
        self._policy = policy
        self._optimizer = optimizer
        self._model_dir = model_dir
        self._layout = describe(policy, base)
        self._view = view
        self._settings = settings
        self._report = report
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._first = self._world == 1 or dist.get_rank() == 0
        # its own group: the ranks compute meanwhile, with other collectives
        limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        group = dist.new_group(backend="gloo", timeout=limit) if self._world > 1 else None
        assert not isinstance(group, int)  # of a rank that is not in it
        self._group = group
        self._stager = _Stager(policy.device)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._exporter = ThreadPoolExecutor(1, "export")
        self._work: Future[None] | None = None
        self._export_work: Future[None] | None = None
        self._is_unwanted = threading.Event()  # the export of the newest checkpoint

    @property
    def is_busy(self) -> bool:
        return any(work and not work.done() for work in (self._work, self._export_work))

    def wait(self) -> None:
        """Wait for a running save and its export."""
        self._wait_for_save()
        if self._export_work is not None:
            self._export_work.result()

    def _wait_for_save(self) -> None:
        if self._work is not None:
            self._work.result()

    def begin(self, path: Path, saved: SavedStep, has_export: bool) -> None:
        """Copy the state for the checkpoint `path` (.../step_N), and write it in the thread.

        A collective. Waits for the checkpoint before, and gives up its export unless that writes.
        """
        self._is_unwanted.set()
        self._wait_for_save()
        self._is_unwanted = threading.Event()
        draft = _draft(path)
        if self._first:
            shutil.rmtree(draft, ignore_errors=True)
            with contextlib.suppress(OSError):  # the writer reports it
                files.make_folder(path.parent)  # durably
        uploading = async_save(
            state_of(self._policy, self._optimizer, saved.has_optimizer, self._view),
            # put_in_place syncs what rank 0 can see
            storage_writer=FileSystemWriter(draft / STATE, sync_files=self._world > 1),
            process_group=self._group,
            async_stager=self._stager,
            no_dist=self._world == 1,
        )
        assert isinstance(uploading, Future)
        self._work = self._thread.submit(self._finish, uploading, path, saved, has_export)

    def _finish(
        self, uploading: Future[Any], path: Path, saved: SavedStep, has_export: bool
    ) -> None:
        """In the thread. When `uploading` is done on one rank, all have written their parts."""
        problem, draft, settings = "", _draft(path), self._settings
        try:
            uploading.result()
            if self._first:
                write_description(draft, self._layout, self._model_dir)
                (draft / STEP_FILE).write_bytes(to_json(with_checksums(saved, draft)))
                put_in_place(draft, path, settings.keep_last, settings.keep_every)
        except (Exception, CheckpointException) as e:
            problem = reason_of(e)
            logger.exception("%s was not saved", path)
        if not self._first:
            return
        with contextlib.suppress(EOFError):  # the daemon is gone
            if problem:
                shutil.rmtree(draft, ignore_errors=True)
            self._report(Saved(str(path), problem or None))
            if has_export and not problem:
                self._export_work = self._exporter.submit(self._export, path, self._is_unwanted)

    def _export(self, path: Path, is_unwanted: threading.Event) -> None:
        """Export from the disk, in a thread of its own, for which the next save does not wait."""
        problem, shard_bytes = None, self._settings.shard_mb * MB
        try:
            export(path, path / EXPORT, shard_bytes, lambda: not is_unwanted.is_set())
        except Exception as e:
            logger.exception("%s was not exported", path)
            problem = reason_of(e)
        with contextlib.suppress(EOFError):  # the daemon is gone
            self._report(Saved(str(path), problem, is_export=True))


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.draft")


class _Stager(DefaultStager):
    """Copies to the processor's memory."""

    _synchronize_after_execute = False  # `stage` does

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        super().__init__(
            StagingOptions(
                use_pinned_memory=self._is_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=self._is_cuda,
            )
        )

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Not by `super().stage`: in torch 2.11 and 2.12 it closes the stager after one copy."""
        copied = self._state_dict_stager.stage(state_dict, non_blocking=self._is_cuda)
        if self._is_cuda:
            torch.accelerator.synchronize()
        return copied
