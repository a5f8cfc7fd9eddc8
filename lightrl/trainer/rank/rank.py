"""One training rank: a process that adds up gradients while a round runs, updates, and publishes.

Owns the order of what this rank does, what it publishes and what it saves; what is trained is the
learner's. Decides nothing: which samples, which micro-batches and when comes from the daemon.
"""

import os
import socket
import time
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
    Accumulated,
    Cleared,
    ClearStep,
    Computing,
    DeltaMade,
    EncodeDelta,
    FinishStep,
    LeaveGroup,
    OpenGroup,
    ParkRank,
    Published,
    RankCommand,
    RankEvent,
    RankParked,
    RankStarted,
    Save,
    SaveEvent,
    SendWeights,
    Staged,
    StartRank,
    Updated,
    UpdateWeights,
)
from lightrl.trainer.rank import canary
from lightrl.trainer.rank.main import Report, finished, require_step, reuse_memory, serve
from lightrl.trainer.rank.sender import Sender
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.publish.buffers import Buffers
from lightrl.weights.publish.publisher import Publisher
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.tensors import dtype_name

BASE_FOLDER = "base"  # below that of the versions: files there are not used in turn


def main(sock: socket.socket) -> None:
    """The child process: serves commands until the daemon closes the pipe."""
    reuse_memory()
    disable_progress_bar()  # the end of the log is shown when a rank dies
    ranks: list[Rank] = []

    def new_rank(start: StartRank, report: Report) -> Rank:
        ranks.append(Rank(start, report))
        return ranks[0]

    try:
        serve(sock, new_rank)
    except EOFError:
        if ranks and ranks[0].saver.is_busy:
            os._exit(1)  # nobody waits for it: the ranks would outlive their daemon
        if dist.is_initialized():
            dist.destroy_process_group()


class Rank:
    """One rank of a run, from its first published version on."""

    def __init__(self, start: StartRank, report: Callable[[SaveEvent | Computing], None]) -> None:
        """`report` is told what comes beside the answers, of checkpoints from another thread."""
        begun = time.monotonic()
        self.config = Config.model_validate_json(start.config_json)
        self.start = start
        self.step = start.start_step
        self._staging_s = 0.0  # of a checkpoint, since the last step was finished
        self.device = _device(start)
        self._sender = Sender(self.device)
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
                lambda: report(Computing(self.step)),
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
        published, parked = self._published(), self._parked()
        way, took_s = self.learner.policy.way, time.monotonic() - begun
        self.started = RankStarted(
            str(self.device), took_s, published, way.packed, way.notes, parked
        )

    def perform(
        self, command: RankCommand, is_unwanted: IsUnwanted | None = None
    ) -> Iterator[RankEvent]:
        with out_of_memory.final(self.config, f"in {type(command).__name__}"):
            yield from self._perform(command, is_unwanted)

    def _perform(self, command: RankCommand, is_unwanted: IsUnwanted | None) -> Iterator[RankEvent]:
        require_step(self.step, command)
        match command:
            case Accumulate(step, batches, is_last):
                self.learner.accumulate(batches, is_last)
                yield Accumulated(step)
            case UpdateWeights(step):
                self.learner.update(command)
                yield Updated(step)
            case ClearStep(step):
                self.learner.clear()
                yield Cleared(step)
            case FinishStep(step):
                metrics = self.learner.finish(command)
                begun = time.monotonic()
                self._publish(command.policy_version)
                published, publish_s = self._published(), time.monotonic() - begun
                metrics["timing_s/stage"], self._staging_s = self._staging_s, 0.0
                if parked := self._parked():  # before the version is said: engines wake for it
                    metrics["timing_s/park"] = parked.seconds
                    yield parked
                if published:  # rollout nodes wait for it
                    yield published
                self.step += 1
                yield finished(step, metrics, publish_s)
            case ParkRank():
                if parked := self._parked(is_asked=True):
                    yield parked
            case EncodeDelta(step):
                yield self._publish_delta()
            case Save(step, path, export):
                begun = time.monotonic()
                problem = self.saver.begin(Path(path), self._saved(), export)
                self._staging_s += time.monotonic() - begun
                yield Staged(path, problem or None)
            case OpenGroup() | SendWeights():
                yield self._sender.perform(command, is_unwanted)
            case LeaveGroup():
                self._sender.leave("the trainer has left it")
            case StartRank():
                raise TrainerError("StartRank, but the rank has started")
            case _:
                assert_never(command)

    def _publish(self, policy_version: int) -> None:
        """All ranks write their shards of it; on rank 0 the file appears when all have."""
        self.policy_version = policy_version
        base = self._base.digest if self._base else ""
        self.file = self._publisher.publish(policy_version, shards(self.learner.policy), base)

    def _parked(self, is_asked: bool = False) -> RankParked | None:
        """The device is given back, if it is shared."""
        if self.learner.parking is None:
            return None
        begun = time.monotonic()
        num_bytes = self.learner.parking.park()
        return RankParked(num_bytes, time.monotonic() - begun, is_asked)

    def _name_of_model(self) -> str:
        """As it is found again: by its path in full, or on the hub."""
        path = Path(self.start.model_dir)
        return str(path.resolve()) if path.is_dir() else self.start.model_dir

    def _publish_base(self) -> VersionFile | None:
        """With adapters, what they are beside, once: on rank 0 it comes back."""
        if not self.learner.policy.has_adapters:
            return None
        folder = Path(self.start.publish_dir) / BASE_FOLDER
        publisher = self._new_publisher(folder)
        try:
            return publisher.publish(0, shards(self.learner.policy, of_base=True))
        finally:
            publisher.close()

    def _publish_delta(self) -> DeltaMade:
        made = self._publisher.publish_delta()
        if made is None or self.file is None:
            return DeltaMade()
        base, delta = made
        return DeltaMade(base.digest, self.file.digest, delta)

    def _new_publisher(self, folder: Path) -> Publisher:
        """Ranks of other nodes send to those that are where the versions are."""
        num_local = self.config.train.ranks if self.start.host else None
        return Publisher(Buffers(folder), self.start.rank, self.start.world, num_local)

    def _canary_text(self) -> list[int]:
        """None for engines that run no model."""
        if self.config.weights.canary == 0 or self.config.rollout.engine == "emulated":
            return []
        return canary.drawn_text(self.learner.policy, self.config.max_trained_length)

    def _published(self) -> Published | None:
        """The version with what engines are held against; none but on rank 0. A collective."""
        known = canary.score(self.learner.policy, self._text) if self._text else None
        return Published(self.file, known, self._base) if self.file else None

    def _restore(self) -> SavedStep | None:
        """All that makes the next steps exact: no random number is drawn, rates follow from the
        step and from how many the schedule had before. None where it begins with the model."""
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
    """`run.deterministic` is for the daemon to keep, by sending the same micro-batches in the same
    order whatever the timing. What remains are kernels that add up by atomics, on CUDA: they are
    replaced by slower ones, or the rank fails and names the one that has no other. With
    `train.deterministic` alone only the backward pass of attention is replaced: nothing else of a
    step adds up by atomics, and no kernel that lacks a deterministic form fails.
    """
    deterministic = config.run.deterministic
    is_attention = config.orders_attention and device.type == "cuda" and not deterministic
    if deterministic or is_attention:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    attention.order_backward(is_attention)
    torch.use_deterministic_algorithms(deterministic)
    # On by default with the above. It is for finding reads of memory that nobody wrote, and costs
    # time.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - pyright knows it not
