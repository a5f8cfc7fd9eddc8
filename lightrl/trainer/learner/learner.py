"""Train the policy on one rank: its optimizer, and the gradients and figures of one step.

Gradients are un-normalised sums, so a step does not depend, but for rounding, on how its samples
were split or in which order they came.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightrl.config.algorithm import AlgorithmSection
from lightrl.config.schema import Config
from lightrl.devices.cuda import Stopwatch, now
from lightrl.system.process import resident_bytes
from lightrl.trainer.algorithm import loss
from lightrl.trainer.algorithm.advantage import whitened
from lightrl.trainer.learner import optim, out_of_memory
from lightrl.trainer.learner.figures import MAXIMA, SUMS, StepFigures
from lightrl.trainer.learner.host_memory import HostMemory
from lightrl.trainer.learner.late_sums import LateSums
from lightrl.trainer.learner.offload import HostedState, Parking
from lightrl.trainer.learner.step_start import StepStart
from lightrl.trainer.learner.token_mean import TokenMean
from lightrl.trainer.model.collate import Batch, collate, num_tokens_read
from lightrl.trainer.model.flops import TrainingFlops, peak_flops
from lightrl.trainer.model.lora import adapters_off
from lightrl.trainer.model.policy import Policy, load_policy, response_logprobs
from lightrl.trainer.protocol import MAX_BATCHES, MicroBatch, Update


class Learner:
    """Trains the policy on one rank. Owns the policy, its optimizer and the step's gradients."""

    def __init__(
        self,
        config: Config,
        model_dir: Path,
        device: torch.device,
        world: int,
        still_computing: Callable[[], None],
    ) -> None:
        """Load the weights of `model_dir`. A collective of the `world` ranks. `still_computing` is
        called between the passes of a long `update`.

        Raises TrainerError for a model that cannot be loaded.
        """
        self.config = config
        self.steps_before = 0  # of the schedule: those of the run from which this one began
        self._still_computing = still_computing
        self.device = device
        self.world = world
        self.policy = self._load(model_dir, "trained")
        self.algorithm = self._algorithm()
        self.reference = None
        # With adapters the model without them is the reference: see `_reference_logprobs`.
        if self.algorithm.kl_coef > 0 and not self.policy.has_adapters:
            self.reference = self._load(model_dir, "reference")
        is_last = self._sums_late()
        replicas = config.train.replicas
        self.late = LateSums(self.policy, is_last, replicas) if is_last or replicas > 1 else None
        self._flops = TrainingFlops(self.policy.module, self.policy.module.config.get_text_config())
        self.parameters = [p for p in self.policy.module.parameters() if p.requires_grad]
        self.optimizer = optim.new_optimizer(self.parameters, config.train.optim)
        is_shared = config.rollout.placement == "shared"
        self.host = HostMemory(device) if is_shared or device.type != "cpu" else None
        self.hosted = None
        if config.train.offload == "optimizer":
            self.hosted = HostedState(self.optimizer, self.parameters, self.host)
        is_uneven = config.round.tail_batching != "off"
        is_by_token = loss.loss_norm(self.algorithm) == "token"
        self.token_mean = TokenMean() if is_uneven and is_by_token else None
        self._start = StepStart(self.policy.module, self.parameters, self.optimizer, self.host)
        self.parking = self._new_parking(self.host) if is_shared and self.host else None
        self._begin()

    def accumulate(self, batches: Sequence[MicroBatch]) -> None:
        """Run forward and backward over these micro-batches and accumulate the gradients. Where
        advantages depend on the whole mini-batch, hold them until its end."""
        if self.algorithm.is_whitened:
            self.held += batches
        else:
            self._accumulate(batches)

    def reset(self) -> None:
        """Undo the step. What is parked stays parked. No collective: some replicas may be parked,
        and others not."""
        if self.parking is not None:
            self.parking.drop_gradients()
        if self.late is not None:
            self.late.drop()
        if self.token_mean is not None:
            self.token_mean.clear()
        if self._has_moved:
            self._start.restore()
        if self.parking is not None:
            self.parking.put_state_away()
        self._begin()

    def update(self, end: Update) -> None:
        """Make the optimizer step of a mini-batch, if any sample has a gradient."""
        self._fetch()
        # a replica that holds nothing takes part in the sums
        if self.held or (self.algorithm.is_whitened and self.config.train.replicas > 1):
            batches = self._whitened()
            for first in range(0, len(batches), MAX_BATCHES):
                self._accumulate(batches[first : first + MAX_BATCHES])
                self._still_computing()
        if self.late is not None:
            self.late.reduce()
        began = now(self.device)  # the passes end when their sums are read
        totals = dict(zip(SUMS, self._total(self.sums).tolist(), strict=True))
        largest = self._total(self.maxima, dist.ReduceOp.MAX).tolist()
        num_tokens = float(end.num_tokens)
        if self.token_mean is not None:
            per_response = self.token_mean.add(end.num_responses, end.num_tokens)
            num_tokens = end.num_responses * per_response
        scale = 1 / loss.denominator(
            self.algorithm,
            end.num_responses,
            num_tokens,
            self.config.rollout.max_response_length,
        )
        maxima = dict(zip(MAXIMA, largest, strict=True))
        self._figures.add(totals, maxima, scale, end.num_responses, end.num_tokens)
        if totals["responses"]:
            if self.parking is not None and self.hosted is None:
                self.parking.fetch_state()
            # The last update of a step is never undone.
            if end.policy_version is None and not self._has_moved:
                self._start.hold()
            with out_of_memory.final(self.config, "in the optimizer step"):
                grad_norm, is_skipped = self._descend(scale, self._learning_rate(end.step))
            self._has_moved |= not is_skipped
            self._figures.add_update(grad_norm, is_skipped)
            if self.parking is not None and end.policy_version is None:
                self.parking.put_state_away()  # at the end of the step all is parked
        self._updating_s += now(self.device) - began
        self._begin_mini_batch()

    def finish(self, end: Update) -> dict[str, float]:
        """Make the last update of the step. Return the metrics of the step."""
        self.update(end)
        metrics = self._figures.metrics(
            self._learning_rate(end.step),
            has_weights=self.algorithm.tis_bounds != "off",
            has_reference=self.algorithm.kl_coef > 0,
        )
        metrics |= {
            **self._performance(computing_s := self.computing.lap()),
            "timing_s/forward_backward": computing_s,
            "timing_s/reference": self.referring.lap(),
            "timing_s/optimizer": self._updating_s,
        }
        if self.parking is not None:
            metrics["timing_s/fetch"] = self._fetching_s
        if self.token_mean is not None:
            metrics["train/tokens_per_response"] = self.token_mean.add(0, 0)
            self.token_mean.end_step()
        self._begin()
        return metrics

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor that can be read and written, on the device or on the host."""
        return tensor if self.host is None else self.host.view(tensor)

    def _fetch(self) -> None:
        if self.parking is not None and self.parking.is_parked:
            began = time.monotonic()
            self.parking.fetch()
            self._fetching_s += time.monotonic() - began

    def _new_parking(self, host: HostMemory) -> Parking:
        modules = [self.policy.module]
        if self.reference is not None:
            modules.append(self.reference.module)
        return Parking(host, modules, self.parameters, self.optimizer, self._start, self.late)

    def _begin(self) -> None:
        self._figures = StepFigures()
        self._has_moved = False  # in this step
        self._updating_s = self._fetching_s = 0.0
        self.num_batches = 0
        self.computing = Stopwatch(self.device)  # forward and backward passes of the step
        self.referring = Stopwatch(self.device)  # passes of the reference, included above
        self._num_flops = 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._begin_mini_batch()

    def _begin_mini_batch(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        # of one dtype on all ranks, also on those without samples
        self.maxima = torch.full_like(self.sums[: len(MAXIMA)], -torch.inf)
        self.held: list[MicroBatch] = []  # only where advantages wait for the mini-batch's end

    def _load(self, model_dir: Path, use: Literal["trained", "reference"]) -> Policy:
        train, model = self.config.train, self.config.model
        checkpointing = train.activation_checkpointing
        if checkpointing == "auto":
            checkpointing = self.device.type == "cuda"
        is_trained = use == "trained"
        return load_policy(
            model_dir,
            self.device,
            self.world,
            checkpointing and is_trained,
            model.dtype if is_trained else "auto",
            train.replicas,
            train.offload == "all",
            model.lora if model.lora.rank and is_trained else None,
            self.config.max_model_length,
            use,
        )

    def _sums_late(self) -> bool:
        train = self.config.train
        # a replica of one rank has nothing to sum before the update
        sync = "auto" if self.world == train.replicas > 1 else train.sync
        return sync == "last" or (sync == "auto" and self.device.type == "cpu")

    def _algorithm(self) -> AlgorithmSection:
        """With the importance weights for this device: engines that compute in float32 on a CPU
        need none."""
        is_float32 = self.device.type == "cpu" and self.policy.served == torch.float32
        bounds = self.config.tis_bounds(is_float32) or "off"
        return self.config.algorithm.model_copy(update={"tis_bounds": bounds})

    def _accumulate(self, batches: Sequence[MicroBatch]) -> None:
        """Run forward and backward over each micro-batch, and count its FLOPs."""
        self._fetch()
        for samples in batches:
            # also without samples, for collectives with other ranks of this replica
            if samples or self.world > self.config.train.replicas:
                vocabulary, packed = self.policy.vocabulary, self.policy.way.packed
                batch = collate(samples, self.device, vocabulary, packed)
                with self.computing.running(), out_of_memory.final(self.config, "", samples):
                    self._backward(batch, samples)
                self._num_flops += self._flops.of(map(num_tokens_read, samples))
        self.num_batches += len(batches)

    def _backward(self, batch: Batch, samples: MicroBatch) -> None:
        if self.late is not None:
            self.late.begin()
        # Greedy samples have no distribution of their own.
        temperature = self.config.rollout.temperature or 1.0
        ref_logprobs = self._reference_logprobs(batch, temperature)
        has_bonus = self.algorithm.entropy_coef > 0
        begun_with = self._logprobs_at_begin(batch, temperature) if self._has_moved else None
        logprobs, entropy = response_logprobs(self.policy, batch, temperature, has_bonus)
        ours = logprobs.detach() if begun_with is None else begun_with
        old_logprobs = ours if self._is_held_to_own else batch.rollout_logprobs
        sums = loss.losses(
            self.algorithm,
            logprobs,
            old_logprobs,
            batch.rollout_logprobs,
            ref_logprobs,
            batch.advantages,
            batch.mask,
            entropy if has_bonus else None,
        )
        sums.total.backward()
        # engines serve the weights of the step's beginning
        is_compared = begun_with is not None or not self._has_moved
        gaps, largest_gaps = _gaps(ours, batch, is_compared)
        advantages = batch.advantages[: len(samples)].double()  # squares exceed float32
        num_read = sum(map(num_tokens_read, samples))
        values = [
            sums.policy,
            sums.kl,
            sums.kl_of_tokens,
            (entropy.detach() * batch.mask).sum(),
            sums.ratios,
            sums.num_clipped_low,
            sums.num_clipped_high,
            sums.num_clipped_dual,
            sums.weights,
            sums.squared_weights,
            sums.num_truncated,
            *gaps,
            batch.mask.sum(),
            len(samples),
            advantages.sum(),
            advantages.square().sum(),
            num_read,
            batch.ids.numel() - num_read,
        ]
        self.sums += _stacked(values, ours)
        maxima = [*largest_gaps, sums.max_weight, -sums.min_weight, sums.max_ratio, -sums.min_ratio]
        has_any = bool(samples)
        maxima += [advantages.max(), -advantages.min()] if has_any else [-math.inf, -math.inf]
        self.maxima = torch.maximum(self.maxima, _stacked(maxima, ours))

    def _logprobs_at_begin(self, batch: Batch, temperature: float) -> Tensor | None:
        """Of the weights at the step's beginning, if they are needed. A collective."""
        if not self._is_held_to_own:
            return None
        with self._start.in_place(), torch.no_grad():
            return response_logprobs(self.policy, batch, temperature)[0]

    @property
    def _is_held_to_own(self) -> bool:
        """Ratios are to the policy of the step's beginning, not to what engines sampled from."""
        return self.algorithm.old_logprobs == "trainer"

    def _reference_logprobs(self, batch: Batch, temperature: float) -> Tensor | None:
        """Return logprobs of the reference, or None without a KL term."""
        if self.algorithm.kl_coef == 0:
            return None
        with self.referring.running(), torch.no_grad():
            if self.reference is not None:
                return response_logprobs(self.reference, batch, temperature)[0]
            with adapters_off(self.policy.module):
                return response_logprobs(self.policy, batch, temperature)[0]

    def _whitened(self) -> list[MicroBatch]:
        """The held micro-batches with whitened advantages, without responses that have no
        gradient."""

        def total(values: Sequence[float]) -> list[float]:
            here = torch.tensor(values, dtype=torch.float64, device=self.device)
            return self._total(here).tolist()

        batches = whitened(self.held, total)
        has_terms = self.algorithm.kl_coef > 0 or self.algorithm.entropy_coef > 0
        return [tuple(s for s in batch if s.advantage or has_terms) for batch in batches]

    def _descend(self, scale: float, lr: float) -> tuple[float, bool]:
        """Update. Return the norm of the normalised gradient before clipping, and whether it was
        not finite, so that the update was skipped."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        # FSDP averages over the ranks; the loss is a sum over all samples
        scale *= self.world
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
        (self.hosted or self.optimizer).step()
        return grad_norm, False

    def _learning_rate(self, step: int) -> float:
        train, before = self.config.train, self.steps_before
        return optim.learning_rate(train.optim, before + step, before + train.steps)

    def _performance(self, computing_s: float) -> dict[str, float]:
        """Figures of all ranks, after `computing_s` seconds of passes. A collective."""
        is_cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if is_cuda else 0
        most = self._over_ranks([self.num_batches, peak], dist.ReduceOp.MAX)
        flops, resident = self._over_ranks([self._num_flops, resident_bytes()], dist.ReduceOp.SUM)
        metrics = {"perf/micro_batches": most[0], "perf/host_memory_gib": resident / 2**30}
        if is_cuda:
            metrics["perf/peak_memory_gib"] = most[1] / 2**30
            peak_of_one = peak_flops(torch.cuda.get_device_name(self.device))
            if peak_of_one and computing_s > 0:
                metrics["perf/mfu"] = flops / (computing_s * self.world * peak_of_one)
        return metrics

    def _over_ranks(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        here = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self._total(here, op).tolist()

    def _total(self, value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over all ranks."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value, op)
        return value


def _gaps(ours: Tensor, batch: Batch, is_compared: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Engine against trainer: sums and maxima, in the order of `SUMS` and `MAXIMA`."""
    every = batch.mask if is_compared else torch.zeros_like(batch.mask)
    compared = batch.is_current * every
    gap = (ours - batch.rollout_logprobs).abs() * compared
    prob_gap = (ours.exp() - batch.rollout_logprobs.exp()).abs() * every
    # Of samples from the engine: the divergence of its distribution from the policy.
    mismatch_of_all = loss.kl("k3", batch.rollout_logprobs, ours, every)
    mismatch = mismatch_of_all * compared
    summed = [gap, compared, mismatch, prob_gap, prob_gap.square(), mismatch_of_all, every]
    return [x.sum() for x in summed], [x.max() for x in (gap, mismatch, prob_gap)]


def _stacked(values: Sequence[Tensor | float], like: Tensor) -> Tensor:
    """Numbers are filled in on the device: a copy would wait for it."""
    first = like[0, 0]
    each = [v if isinstance(v, Tensor) else torch.full_like(first, v) for v in values]
    return torch.stack(each)
