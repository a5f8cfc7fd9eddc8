"""A checkpoint that is written while the ranks go on: what it holds is copied first, all else is
done in a thread.

Owns one rank's part in it, that the checkpoint appears whole or not at all (see `saved`), and the
export after it. The copy is made in memory that is kept for the next one: 12 bytes for each
parameter of this rank's shards, pinned on CUDA.
"""

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
from lightrl.errors import TrainerError
from lightrl.system import files
from lightrl.trainer.checkpoint.contents import View, as_it_is, first_line, state_of, together
from lightrl.trainer.checkpoint.export import export
from lightrl.trainer.checkpoint.layout import Layout, describe, reverter, write_description
from lightrl.trainer.checkpoint.saved import EXPORT, STATE, STEP_FILE, SavedStep, put_in_place
from lightrl.trainer.checkpoint.seal import sealed
from lightrl.trainer.group import COLLECTIVE_TIMEOUT_S
from lightrl.trainer.model.policy import Policy
from lightrl.trainer.protocol import Exported, Saved, SaveEvent, SaveFailed
from lightrl.wire import to_json

logger = logging.getLogger(__name__)

MB = 1_000_000


@dataclass(frozen=True)
class _Job:
    """What is to become `path`, and then perhaps an export."""

    path: Path
    draft: Path
    saved: SavedStep
    layout: Layout
    has_export: bool


class Saver:
    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        model_dir: Path,
        settings: Checkpoint,
        report: Callable[[SaveEvent], None],
        base: str = "",
        view: View = as_it_is,
    ) -> None:
        """Make it on all ranks. On rank 0 `report` is given, in a thread, what comes of a save.
        `base`: what `model_dir` is to others, a path or a hub id. `view`: see `state_of`."""
        self._policy = policy
        self._optimizer = optimizer
        self._model_dir = model_dir
        self._base = base
        self._view = view
        self._settings = settings
        self._report = report
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._first = self._world == 1 or dist.get_rank() == 0
        # Of its own: the ranks compute meanwhile, with collectives that must not be mixed up.
        limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        group = dist.new_group(backend="gloo", timeout=limit) if self._world > 1 else None
        assert not isinstance(group, int)  # of a rank that is not in it
        self._group = group
        self._stager = _Stager(policy.device, self._world)
        self._thread = ThreadPoolExecutor(1, "saver")
        self._work: Future[None] | None = None
        self._is_export_unwanted = threading.Event()

    @property
    def is_busy(self) -> bool:
        return self._work is not None and not self._work.done()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._work is not None:
            self._work.result()

    def begin(self, path: Path, saved: SavedStep, has_export: bool) -> str:
        """Copies what the checkpoint `path` (.../step_N) is to hold, and has it written. Why that
        cannot be, in one line, on all ranks if on one of them; "" if it is under way.

        Call on all ranks. Waits for the checkpoint before, whose export is given up.
        """
        self._is_export_unwanted.set()
        self.wait()
        self._is_export_unwanted.clear()
        job = _Job(
            path,
            path.with_name(f".{path.name}.draft"),
            saved,
            describe(self._policy, self._base),
            has_export,
        )
        try:
            with together(self._world):
                if self._first:
                    files.make_folder(path.parent)
                    shutil.rmtree(job.draft, ignore_errors=True)
                    (job.draft / STATE).mkdir(parents=True)
            state = state_of(self._policy, self._optimizer, saved.has_optimizer, self._view)
            uploading = async_save(
                state,
                # put_in_place syncs what rank 0 can see
                storage_writer=FileSystemWriter(job.draft / STATE, sync_files=self._world > 1),
                process_group=self._group,
                async_stager=self._stager,
                no_dist=self._world == 1,
            )
        except TrainerError as e:
            if self._first:
                shutil.rmtree(job.draft, ignore_errors=True)
            return str(e)
        assert isinstance(uploading, Future)  # the stager has returned a copy, not a promise of it
        self._work = self._thread.submit(self._finish, uploading, job)
        return ""

    def _finish(self, uploading: Future[Any], job: _Job) -> None:
        """In the thread. All ranks have written what is theirs when `uploading` is done on one."""
        problem = ""
        try:
            uploading.result()
            if self._first:
                write_description(job.draft, job.layout, self._model_dir)
                (job.draft / STEP_FILE).write_bytes(to_json(sealed(job.saved, job.draft)))
                keep_last, keep_every = self._settings.keep_last, self._settings.keep_every
                put_in_place(job.draft, job.path, keep_last, keep_every)
        except (Exception, CheckpointException) as e:
            problem = first_line(e)
            logger.exception("%s was not saved", job.path)
        if not self._first:
            return
        with contextlib.suppress(EOFError):  # the daemon is gone: so are we, in a moment
            if problem:
                shutil.rmtree(job.draft, ignore_errors=True)
                self._report(SaveFailed(str(job.path), problem))
            else:
                self._report(Saved(str(job.path)))
                if job.has_export:
                    self._report(Exported(str(job.path), self._export(job) or None))

    def _export(self, job: _Job) -> str:
        """From the disk: no rank holds more of it than one file. Why not, in one line."""
        size = self._settings.shard_mb * MB
        try:
            revert = reverter(self._policy.module) if job.layout.conversions else None
            is_unwanted = self._is_export_unwanted.is_set
            export(job.path, job.path / EXPORT, size, revert, lambda: not is_unwanted())
        except Exception as e:
            logger.exception("%s was not exported", job.path)
            return first_line(e)
        return ""


class _Stager(DefaultStager):
    """Copies to the processor's memory; nothing is under way on any rank if one of them cannot."""

    _synchronize_after_execute = False  # it has

    def __init__(self, device: torch.device, world: int) -> None:
        is_cuda = device.type == "cuda"
        super().__init__(
            StagingOptions(
                use_pinned_memory=is_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=is_cuda,
            )
        )
        self._world = world

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        with together(self._world):
            return super().stage(state_dict, **kwargs)
