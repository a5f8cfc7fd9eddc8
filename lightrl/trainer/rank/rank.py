"""One training rank: a process that accumulates gradients while a round runs, updates, publishes
and saves, as the daemon commands. The learner owns what is trained.
"""

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import assert_never

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from lightrl.config.schema import Config
from lightrl.devices.cuda import has_cuda
from lightrl.errors import TrainerError
from lightrl.model_files import weights_folder
from lightrl.trainer.checkpoint import contents as checkpoint
from lightrl.trainer.checkpoint.saved import CHECKPOINTS, SavedStep, restored_at
from lightrl.trainer.checkpoint.saver import Saver
from lightrl.trainer.group import join
from lightrl.trainer.learner import out_of_memory
from lightrl.trainer.learner.learner import Learner
from lightrl.trainer.model import attention
from lightrl.trainer.model.policy import shards
from lightrl.trainer.protocol import (
    Accumulate,
    Done,
    EncodeDelta,
    LeaveBroadcast,
    OpenGroup,
    Published,
    RankCommand,
    RankEvent,
    RankStarted,
    ResetStep,
    Save,
    Saved,
    SendWeights,
    StartRank,
    StepFinished,
    StillAlive,
    Suspend,
    Suspended,
    Update,
    VersionDelta,
)
from lightrl.trainer.rank import canary
from lightrl.trainer.rank.main import Report, finished, require_step, reuse_memory, serve
from lightrl.trainer.rank.sender import BroadcastSender
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.publish.buffers import Buffers
from lightrl.weights.publish.publisher import Publisher
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.tensors import dtype_name

BASE_FOLDER = "base"  # below that of the versions: files there are not used in turn


def main(sock: socket.socket) -> None:
    """Serve commands until the daemon closes the pipe."""
    reuse_memory()
    disable_progress_bar()  # a daemon shows the end of the log when a rank dies
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    ranks: list[Rank] = []

    def new_rank(start: StartRank, report: Report) -> Rank:
        ranks.append(Rank(start, report))
        return ranks[0]

    try:
        serve(sock, new_rank)
    except EOFError:
        if ranks and ranks[0].saver.is_busy:
            os._exit(1)  # else the ranks outlive their daemon
        if dist.is_initialized():
            dist.destroy_process_group()


class Rank:
    """One rank of a run, from its first published version on."""

    def __init__(self, start: StartRank, report: Callable[[Saved | StillAlive], None]) -> None:
        """`report` sends events beside the answers, those of checkpoints from another thread."""
        began = time.monotonic()
        self.config = Config.model_validate_json(start.config_json)
        self.start = start
        self.step = start.start_step
        self._staging_s = 0.0  # of a checkpoint, since the last step was finished
        self.device = _device(start)
        self._sender = BroadcastSender(self.device)
        torch.set_num_threads(self.config.train.threads)
        _order_sums(self.config, self.device)
        # Before the ranks wait for each other: it may take as long as a download.
        self.model_dir = weights_folder(start.model_dir)
        if start.world > 1 or self.device.type == "cuda":
            join(start, self.device)
        self._publisher = self._new_publisher(Path(start.publish_dir))
        self.file: VersionFile | None = None  # published last, on rank 0
        with out_of_memory.final(self.config, "when it started"):
            self.learner = Learner(
                self.config,
                self.model_dir,
                self.device,
                start.world,
                lambda: report(StillAlive(self.step)),
            )
            self.saver = Saver(
                self.learner.policy,
                self.learner.optimizer,
                self.model_dir,
                self.config.checkpoint,
                report,
                self._name_of_model(),
                self.learner.view,
            )
            # Before a checkpoint is restored: the same for the whole run.
            self._text = self._canary_text()
            self._base = self._publish_base()
            saved = self._restore()
            self._publish(start.start_step)
        if saved and self.file:
            policy = self.learner.policy
            dtype = dtype_name(policy.served)
            saved.require_digest(self.file.digest, dtype, policy.has_adapters)
        self._publisher.allocate_second()
        published, suspended = self._published(), self._suspend()
        way, took_s = self.learner.policy.way, time.monotonic() - began
        self.started = RankStarted(
            str(self.device), took_s, published, way.packed, way.notes, suspended
        )

    def perform(
        self, command: RankCommand, is_unwanted: IsUnwanted | None = None
    ) -> Iterator[RankEvent]:
        """Run a command, and yield its events as they occur: see `AnyRank.perform`."""
        with out_of_memory.final(self.config, f"in {type(command).__name__}"):
            yield from self._perform(command, is_unwanted)

    def _perform(self, command: RankCommand, is_unwanted: IsUnwanted | None) -> Iterator[RankEvent]:
        require_step(self.step, command)
        match command:
            case Accumulate(step, batches):
                self.learner.accumulate(batches)
                yield Done(step)
            case Update(step, policy_version=None):
                self.learner.update(command)
                yield Done(step)
            case Update():
                yield self._finish(command, command.policy_version or 0)
            case ResetStep(step):
                self.learner.reset()
                yield Done(step)
            case Suspend():
                yield Done(self.step, suspended=self._suspend())
            case EncodeDelta(step):
                yield Done(step, delta=self._publish_delta())
            case Save(step, path, export):
                began = time.monotonic()
                self.saver.begin(Path(path), self._saved(), export)
                self._staging_s += time.monotonic() - began
                yield Done(step)
            case OpenGroup() | SendWeights():
                yield self._sender.perform(self.step, command, is_unwanted)
            case LeaveBroadcast():
                self._sender.leave("the trainer has left it")
            case StartRank():
                raise TrainerError("StartRank, but the rank has started")
            case _:
                assert_never(command)

    def _finish(self, update: Update, policy_version: int) -> StepFinished:
        metrics = self.learner.finish(update)
        began = time.monotonic()
        self._publish(policy_version)
        published, publish_s = self._published(), time.monotonic() - began
        metrics["timing_s/stage"], self._staging_s = self._staging_s, 0.0
        suspended = self._suspend()  # before the version is announced, for which engines wake
        self.step += 1
        return finished(update.step, metrics, publish_s, published, suspended)

    def _publish(self, policy_version: int) -> None:
        """Write this rank's shards; on rank 0 the file appears when all ranks have."""
        self.policy_version = policy_version
        base = self._base.digest if self._base else ""
        self.file = self._publisher.publish(policy_version, shards(self.learner.policy), base)

    def _suspend(self) -> Suspended | None:
        """Free the device, if it is shared."""
        if self.learner.parking is None:
            return None
        began = time.monotonic()
        num_bytes = self.learner.parking.park()
        return Suspended(num_bytes, time.monotonic() - began)

    def _name_of_model(self) -> str:
        """Return the model's absolute path, or its name on the hub."""
        path = Path(self.start.model_dir)
        return str(path.resolve()) if path.is_dir() else self.start.model_dir

    def _publish_base(self) -> VersionFile | None:
        """Publish the model beside adapters, once. Return its file on rank 0."""
        if not self.learner.policy.has_adapters:
            return None
        folder = Path(self.start.publish_dir) / BASE_FOLDER
        publisher = self._new_publisher(folder)
        try:
            return publisher.publish(0, shards(self.learner.policy, of_base=True))
        finally:
            publisher.close()

    def _publish_delta(self) -> VersionDelta | None:
        made = self._publisher.publish_delta()
        if made is None or self.file is None:
            return None
        base, delta = made
        return VersionDelta(base.digest, self.file.digest, delta)

    def _new_publisher(self, folder: Path) -> Publisher:
        """Ranks of other nodes send their rows to those of the first."""
        num_local = self.config.train.ranks if self.start.host else None
        return Publisher(Buffers(folder), self.start.rank, self.start.world, num_local)

    def _canary_text(self) -> list[int]:
        """Empty for engines that run no model."""
        if self.config.weights.canary == 0 or self.config.rollout.engine == "emulated":
            return []
        return canary.drawn_text(self.learner.policy, self.config.max_trained_length)

    def _published(self) -> Published | None:
        """The version with its canary, on rank 0. A collective."""
        known = canary.score(self.learner.policy, self._text) if self._text else None
        return Published(self.file, known, self._base) if self.file else None

    def _restore(self) -> SavedStep | None:
        """Restore all that the next steps depend on: no random number is drawn, and learning rates
        follow from the step. None if the run begins with the model."""
        checkpoints = Path(self.start.run_dir) / CHECKPOINTS
        path = restored_at(checkpoints, self.start.start_step, self.config.checkpoint)
        if path is None:
            return None
        hosted = self.learner.hosted
        expect = hosted.expect if hosted is not None else None
        policy, optimizer = self.learner.policy, self.learner.optimizer
        saved = checkpoint.restore(path, policy, optimizer, expect, self.learner.view)
        self.learner.steps_before = saved.steps_before
        if (token_mean := self.learner.token_mean) is not None:
            token_mean.restore(saved.token_sums)
        return saved

    def _saved(self) -> SavedStep:
        token_mean = self.learner.token_mean
        return SavedStep(
            step=self.step,
            policy_version=self.policy_version,
            digest=self.file.digest if self.file else "",
            dtype=dtype_name(self.learner.policy.served),
            has_optimizer=bool(self.learner.optimizer.state),
            steps_before=self.learner.steps_before,
            optimizer=self.config.train.optim.name,
            token_sums=token_mean.sums if token_mean is not None else (0.0, 0.0),
        )


def _device(start: StartRank) -> torch.device:
    if has_cuda():
        return torch.device("cuda", start.rank % torch.cuda.device_count())
    return torch.device("cpu")


def _order_sums(config: Config, device: torch.device) -> None:
    """Replace CUDA kernels that sum by atomics.

    With `run.deterministic` the daemon sends the same micro-batches in the same order, and here all
    such kernels are replaced, or fail. With `train.deterministic` alone only the backward pass of
    attention is: nothing else of a step sums by atomics.
    """
    deterministic = config.run.deterministic
    is_attention = config.orders_attention and device.type == "cuda" and not deterministic
    if deterministic or is_attention:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    attention.order_backward(is_attention)
    torch.use_deterministic_algorithms(deterministic)
    # on by default with the above; it costs time
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - pyright does not have it
