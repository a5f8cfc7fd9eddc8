"""One training rank: a process that adds up gradients while a round runs, updates once, and
publishes.

Owns the model, the optimizer and the sums of one step on this rank. Decides nothing: which samples,
which micro-batches and when comes from the daemon. Gradients are un-normalised sums, so a step does
not depend, but for rounding, on how its samples were split or in which order they came.
"""

import ctypes
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import assert_never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

from lightrl.config import Config
from lightrl.devices.cuda import Stopwatch, has_cuda, now
from lightrl.errors import TrainerError
from lightrl.model_files import weights_folder
from lightrl.trainer import canary, checkpoint, loss
from lightrl.trainer.group import join
from lightrl.trainer.model import (
    Batch,
    Policy,
    collate,
    freeze,
    load_policy,
    response_logprobs,
    shards,
)
from lightrl.trainer.protocol import (
    Accumulate,
    Accumulated,
    Cleared,
    ClearStep,
    DeltaMade,
    EncodeDelta,
    FinishStep,
    JoinGroup,
    LeaveGroup,
    MicroBatch,
    OpenGroup,
    Published,
    RankCommand,
    RankEvent,
    RankStarted,
    Save,
    Saved,
    SaveFailed,
    SendWeights,
    StartRank,
    StepFinished,
)
from lightrl.trainer.rank_main import serve
from lightrl.trainer.saved import CHECKPOINTS, SavedStep, checkpoint_path
from lightrl.trainer.sender import Sender
from lightrl.weights.broadcast.rendezvous import IsUnwanted
from lightrl.weights.publish.buffers import Buffers
from lightrl.weights.publish.publisher import Publisher
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.tensors import dtype_name

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

# Sums over the micro-batches of a step, in this order in `Rank.sums`.
SUMS = (
    "policy",
    "kl",
    "entropy",
    "clipped",
    "weights",
    "truncated",
    "gap",
    "tokens",
    "responses",
    "squares",
)


def main(sock: socket.socket) -> None:
    """The child process: serves commands until the daemon closes the pipe."""
    _reuse_memory()
    disable_progress_bar()  # the end of the log is shown when a rank dies
    try:
        serve(sock, Rank)
    except EOFError:
        if dist.is_initialized():
            dist.destroy_process_group()


class Rank:
    """One rank of a run, from its first published version on."""

    def __init__(self, start: StartRank) -> None:
        begun = time.monotonic()
        self.config = Config.model_validate_json(start.config_json)
        self.algorithm = self.config.algorithm
        self.start = start
        self.step = start.start_step
        self._publisher = Publisher(Buffers(Path(start.publish_dir)), start.rank, start.world)
        self.device = _device(start)
        self._sender = Sender(self.device)
        torch.set_num_threads(self.config.train.threads)
        _order_sums(self.config.run.deterministic)
        # Before the ranks wait for each other: it may take as long as a download.
        self.model_dir = weights_folder(start.model_dir)
        if start.world > 1:
            join(start, self.device)
        self.policy = self._load(self.config.train.activation_checkpointing)
        # Before a checkpoint is restored: the same for the whole run.
        self._text = self._canary_text()
        self.reference = freeze(self._load(False)) if self.algorithm.kl_coef > 0 else None
        self.parameters = [p for p in self.policy.module.parameters() if p.requires_grad]
        optim = self.config.train.optim
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self.held: list[MicroBatch] = []  # only where gradients must wait for the step's end
        self.file: VersionFile | None = None  # published last, on rank 0
        self._clear()
        saved = self._restore() if start.start_step > 0 else None
        self._publish(start.start_step)
        if saved and self.file:
            saved.require_digest(self.file.digest, dtype_name(self.policy.served))
        self._publisher.allocate_second()
        published = self._published()
        self.started = RankStarted(str(self.device), time.monotonic() - begun, published)

    def perform(
        self, command: RankCommand, is_unwanted: IsUnwanted | None = None
    ) -> Iterator[RankEvent]:
        match command:
            case Accumulate(step, batches):
                self._expect(step, command)
                if loss.needs_whole_step(self.algorithm):
                    self.held += batches
                else:
                    self._accumulate(batches)
                yield Accumulated(step)
            case ClearStep(step):
                self._expect(step, command)
                self.optimizer.zero_grad(set_to_none=True)
                self._clear()
                yield Cleared(step)
            case FinishStep(step):
                self._expect(step, command)
                metrics = self._update(command)
                begun = time.monotonic()
                self._publish(command.policy_version)
                if published := self._published():  # first of all: rollout nodes wait for it
                    yield published
                publish_s = time.monotonic() - begun
                metrics |= {"timing_s/publish": publish_s, "weights/publish_s": publish_s}
                self.step += 1
                yield StepFinished(step, metrics)
            case EncodeDelta(step):
                self._expect(step, command)
                yield self._publish_delta()
            case Save(step, path, export):
                self._expect(step, command)
                try:
                    self._save(Path(path), export)
                except TrainerError as e:
                    yield SaveFailed(path, str(e))
                else:
                    yield Saved(path)
            case OpenGroup() | JoinGroup() | SendWeights():
                yield self._sender.perform(command, is_unwanted)
            case LeaveGroup():
                self._sender.leave("the trainer has left it")
            case StartRank():
                raise TrainerError("StartRank, but the rank has started")
            case _:
                assert_never(command)

    def _load(self, activation_checkpointing: bool) -> Policy:
        world, dtype = self.start.world, self.config.model.dtype
        return load_policy(self.model_dir, self.device, world, activation_checkpointing, dtype)

    def _expect(self, step: int, command: RankCommand) -> None:
        if step != self.step:
            raise TrainerError(
                f"{type(command).__name__} of step {step}, but the rank is at step {self.step}"
            )

    def _clear(self) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        self.maxima = torch.zeros(2, device=self.device)  # logprob difference, importance weight
        self.num_batches = 0
        self.computing = Stopwatch(self.device)  # forward and backward passes of the step
        self.held = []

    def _accumulate(self, batches: Sequence[MicroBatch], advantage_factor: float = 1.0) -> None:
        for samples in batches:
            # Without samples, too, when others compute: their collectives need us.
            if samples or self.start.world > 1:
                batch = collate(samples, self.device, self.policy.vocabulary)
                with self.computing.running():
                    self._backward(batch, len(samples), advantage_factor)
        self.num_batches += len(batches)

    def _backward(self, batch: Batch, num_responses: int, advantage_factor: float) -> None:
        # Greedy samples have no distribution of their own.
        temperature = self.config.rollout.temperature or 1.0
        ref_logprobs = None
        if self.reference is not None:
            with torch.no_grad():
                ref_logprobs, _ = response_logprobs(self.reference, batch, temperature)
        logprobs, entropy = response_logprobs(self.policy, batch, temperature)
        old_logprobs = logprobs.detach()  # one update per step: the policy has not moved since
        sums = loss.losses(
            self.algorithm,
            logprobs,
            old_logprobs,
            batch.rollout_logprobs,
            ref_logprobs,
            batch.advantages * advantage_factor,
            batch.mask,
        )
        sums.total.backward()
        gap = (old_logprobs - batch.rollout_logprobs).abs() * batch.mask
        # Not by `new_tensor`: a copy from the processor would wait for the device.
        counts = torch.full_like(gap[0, 0], num_responses)
        values = [
            sums.policy,
            sums.kl,
            (entropy * batch.mask).sum(),
            sums.num_clipped,
            sums.weights,
            sums.num_truncated,
            gap.sum(),
            batch.mask.sum(),
        ]
        self.sums += torch.stack([*values, counts, batch.advantages.square().sum()])
        self.maxima = torch.maximum(self.maxima, torch.stack([gap.max(), sums.max_weight]))

    def _update(self, finish: FinishStep) -> dict[str, float]:
        """The optimizer step, if there is anything to learn from; the metrics of the step."""
        scale = 1.0
        if self.held:
            squares = torch.tensor(
                sum(s.advantage**2 for batch in self.held for s in batch),
                dtype=torch.float64,
                device=self.device,
            )
            factor = loss.advantage_scale(
                self.algorithm, self._total(squares).item(), finish.num_responses
            )
            self._accumulate(self.held, factor)
        begun = now(self.device)  # the sums are needed next: they are complete when the passes are
        totals = dict(zip(SUMS, self._total(self.sums).tolist(), strict=True))
        max_gap, max_weight = self._total(self.maxima, dist.ReduceOp.MAX).tolist()
        if not self.held:
            scale = loss.advantage_scale(self.algorithm, totals["squares"], finish.num_responses)
        scale /= loss.denominator(
            self.algorithm,
            finish.num_responses,
            finish.num_tokens,
            self.config.rollout.max_response_length,
        )
        lr = self._learning_rate(finish.step)
        grad_norm, skipped = 0.0, False
        if totals["responses"]:
            grad_norm, skipped = self._descend(scale, lr)
        self.optimizer.zero_grad(set_to_none=True)
        tokens = max(1.0, totals["tokens"])
        metrics = {
            "loss/policy": totals["policy"] * scale,
            "loss/kl": totals["kl"] * scale,
            "entropy": totals["entropy"] / tokens,
            "clip_frac": totals["clipped"] / tokens,
            "grad_norm": grad_norm,
            "lr": lr,
            "train_rollout_logprob_abs_diff": totals["gap"] / tokens,
            "train_rollout_logprob_abs_diff_max": max_gap,
            "train/skipped_nonfinite": float(skipped),
            "num_tokens": float(finish.num_tokens),
            "num_trained_tokens": totals["tokens"],
            "num_micro_batches": float(self.num_batches),
            "timing_s/forward_backward": self.computing.lap(),
            "timing_s/optimizer": now(self.device) - begun,  # its weights are published next
        }
        if self.algorithm.tis_cap > 0:
            metrics["tis/mean"] = totals["weights"] / tokens
            metrics["tis/max"] = max_weight
            metrics["tis/truncated_share"] = totals["truncated"] / tokens
        self._clear()
        return metrics

    def _descend(self, scale: float, lr: float) -> tuple[float, bool]:
        """Norm of the normalised gradient before clipping, and whether the update was left out for
        it."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        # FSDP averages over the ranks; the loss is a sum over all samples
        scale *= self.start.world
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        grad_norm = norm.item() * scale
        if not torch.isfinite(norm):
            return grad_norm, True
        if (limit := self.config.train.optim.grad_clip) > 0:
            scale *= min(1.0, limit / (grad_norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return grad_norm, False

    def _learning_rate(self, step: int) -> float:
        optim = self.config.train.optim
        return optim.lr * min(1.0, (step + 1) / max(1, optim.warmup_steps))

    def _total(self, value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Over all ranks."""
        if self.start.world > 1:
            value = value.clone()
            dist.all_reduce(value, op)
        return value

    def _publish(self, policy_version: int) -> None:
        """All ranks write their shards of it; on rank 0 the file appears when all have."""
        self.policy_version = policy_version
        self.file = self._publisher.publish(policy_version, shards(self.policy))

    def _publish_delta(self) -> DeltaMade:
        made = self._publisher.publish_delta()
        if made is None or self.file is None:
            return DeltaMade()
        base, delta = made
        return DeltaMade(base.digest, self.file.digest, delta)

    def _canary_text(self) -> list[int]:
        """None for engines that run no model."""
        if self.config.weights.canary == 0 or self.config.rollout.engine == "emulated":
            return []
        return canary.drawn_text(self.policy, self.config.max_model_length)

    def _published(self) -> Published | None:
        """The version with what engines are held against; none but on rank 0. A collective."""
        known = canary.score(self.policy, self._text) if self._text else None
        return Published(self.file, known) if self.file else None

    def _restore(self) -> SavedStep:
        """All that makes the next steps exact: no random number is drawn, rates follow from the
        step."""
        path = checkpoint_path(Path(self.start.run_dir) / CHECKPOINTS, self.start.start_step)
        return checkpoint.restore(path, self.policy, self.optimizer)

    def _save(self, path: Path, export: bool) -> None:
        saved = SavedStep(
            step=self.step,
            policy_version=self.policy_version,
            digest=self.file.digest if self.file else "",
            dtype=dtype_name(self.policy.served),
            has_optimizer=bool(self.optimizer.state),
        )
        export_from = self.model_dir if export else None
        keep_last = self.config.checkpoint.keep_last
        checkpoint.save(path, saved, self.policy, self.optimizer, export_from, keep_last)


def _device(start: StartRank) -> torch.device:
    if has_cuda():
        return torch.device("cuda", start.rank % torch.cuda.device_count())
    return torch.device("cpu")


def _order_sums(deterministic: bool) -> None:
    """`run.deterministic` is for the daemon to keep, by sending the same micro-batches in the same
    order whatever the timing. What remains are kernels that add up by atomics, on CUDA: they are
    replaced by slower ones, or the rank fails and names the one that has no other.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(deterministic)
    # On by default with the above. It is for finding reads of memory that nobody wrote, and costs
    # time.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - pyright knows it not


def _reuse_memory() -> None:
    """glibc hands freed tensors of 128 KiB and more back to the kernel; faulting the pages in again
    in every layer of every pass costs a tiny model on a CPU a quarter of its time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc accepts
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
