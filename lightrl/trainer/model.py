"""The policy as a torch module on one rank: loading, sharding, logprobs of responses, its shards.

Owns everything that depends on transformers and FSDP2. Knows nothing of losses, steps or versions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightrl.devices.memory import SCORED_VALUES
from lightrl.errors import TrainerError
from lightrl.trainer.protocol import TrainSample
from lightrl.weights.broadcast.pieces import rows
from lightrl.weights.publish.publisher import Shard
from lightrl.weights.version.tensors import served_dtype

# Logits are turned into logprobs in float32 by pieces of at most so many values (256 MiB).
SCORE_VALUES = SCORED_VALUES


@dataclass(frozen=True)
class Policy:
    """A causal language model with float32 master weights.

    `stored`: the dtype in which each parameter and persistent buffer is in the model directory.
    `served`: the one in which engines are given the parameters.
    """

    module: PreTrainedModel
    stored: dict[str, torch.dtype]
    served: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def vocabulary(self) -> int:
        """Token ids are smaller than this."""
        weight = self.module.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight.shape[0]


def load_policy(
    model_dir: Path,
    device: torch.device,
    world: int = 1,
    activation_checkpointing: bool = False,
    served: str = "auto",
) -> Policy:
    """The model in a local HF directory, sharded over the default process group if `world` > 1.

    `served`: `model.dtype` of the config; "auto" as engines on this kind of device understand it.
    Raises TrainerError, one line, if there is none that transformers can load.
    """
    if not (model_dir / "config.json").is_file():  # transformers would ask the hub
        raise TrainerError(f"{model_dir}: not a model directory: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        module = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype="auto", local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as e:
        reason = str(e).strip().splitlines()[:1] or [type(e).__name__]
        raise TrainerError(f"{model_dir}: cannot be loaded: {reason[0]}") from e
    stored = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    module.float()
    module.eval()
    if activation_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
        module.train()  # transformers checkpoints in training mode only
        _drop_dropout(module)
    if world > 1:
        _shard(module, device, world)
    else:
        module.to(device)  # pyright: ignore[reportArgumentType] - transformers' decorator hides the signature
    return Policy(module, stored, served_dtype(served, config, device.type))


def freeze(policy: Policy) -> Policy:
    """The same policy without gradients, for a reference model."""
    policy.module.requires_grad_(False)
    return policy


@dataclass(frozen=True)
class Batch:
    """A micro-batch as tensors, padded at the right, where causal attention never looks: no mask is
    needed.

    Prompts are aligned at the left. `width` columns reach from the end of the shortest prompt to
    the end of the longest sample; column j of the last four is about the token in column j of
    `targets`.
    """

    # int64 [rows, length], what the model reads
    ids: Tensor
    # int64 [rows, width], what its last `width` positions predict
    targets: Tensor
    # float32 [rows, width], 1 at response tokens
    mask: Tensor
    # float32 [rows, width], 0 outside the response
    rollout_logprobs: Tensor
    # float32 [rows, 1]
    advantages: Tensor


def collate(samples: Sequence[TrainSample], device: torch.device, vocabulary: int) -> Batch:
    """No samples give one row of padding without any response token: a pass that adds nothing.

    Raises TrainerError, one line that names the response, for a sample without prompt, with other
    than one finite logprob per token, or with a token id outside the vocabulary.
    """
    prompts = [np.frombuffer(s.prompt, "<i4") for s in samples]
    responses = [np.frombuffer(s.token_ids, "<i4") for s in samples]
    logprobs = [np.frombuffer(s.rollout_logprobs, "<f4") for s in samples]
    for sample, p, r, lp in zip(samples, prompts, responses, logprobs, strict=True):
        if not len(p) or len(r) != len(lp):
            raise TrainerError(
                f"{sample.response}: {len(p)} prompt tokens, {len(r)} response tokens, "
                f"{len(lp)} logprobs"
            )
    rows = max(1, len(samples))
    start = min((len(p) for p in prompts), default=1)
    length = max([start + 1, *(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))])
    ids = np.zeros((rows, length), np.int64)
    mask = np.zeros((rows, length), np.float32)
    rollout = np.zeros((rows, length), np.float32)
    for i, (p, r, lp) in enumerate(zip(prompts, responses, logprobs, strict=True)):
        end = len(p) + len(r)
        ids[i, : len(p)] = p
        ids[i, len(p) : end] = r
        mask[i, len(p) : end] = 1
        rollout[i, len(p) : end] = lp
    _check(samples, ids, rollout, vocabulary)
    advantages = np.array([s.advantage for s in samples] or [0.0], np.float32)[:, None]
    on = [_moved(torch.from_numpy(a), device) for a in (ids, mask, rollout, advantages)]
    return Batch(on[0][:, :-1], on[0][:, start:], on[1][:, start:], on[2][:, start:], on[3])


def _moved(array: Tensor, device: torch.device) -> Tensor:
    """To CUDA from pinned memory: the copy is queued like a kernel, and nobody waits for the pass
    before."""
    return array.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else array


def _check(
    samples: Sequence[TrainSample], ids: np.ndarray, rollout: np.ndarray, vocabulary: int
) -> None:
    """On whole arrays, padding included: cheap, and padding is always right."""
    wrong_ids = (ids < 0) | (ids >= vocabulary)
    if wrong_ids.any():
        row, column = np.argwhere(wrong_ids)[0]
        raise TrainerError(
            f"{samples[row].response}: token id {ids[row, column]} is outside the "
            f"vocabulary of {vocabulary}"
        )
    if not np.isfinite(rollout).all():
        row, column = np.argwhere(~np.isfinite(rollout))[0]
        raise TrainerError(f"{samples[row].response}: a rollout logprob is {rollout[row, column]}")


def response_logprobs(
    policy: Policy, batch: Batch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logprobs of `batch.targets` and entropies of their distributions (no gradient), float32
    [rows, width].

    `temperature` divides the logits, as the sampler did. Values outside the mask mean nothing but
    are finite.
    """
    rows, width = batch.targets.shape
    cuda = policy.device.type == "cuda"
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=cuda):
        logits = policy.module(input_ids=batch.ids, use_cache=False, logits_to_keep=width).logits
    vocabulary = logits.shape[-1]
    piece = max(1, SCORE_VALUES // vocabulary)
    flat, targets = logits.reshape(-1, vocabulary), batch.targets.reshape(-1)
    if len(targets) <= piece:
        logprobs, entropy = _score(flat, targets, temperature)
    else:  # keep no float32 copy of the logits for the backward pass
        parts = [
            checkpoint(_score, some, ids, temperature, use_reentrant=False)
            for some, ids in zip(flat.split(piece), targets.split(piece), strict=True)
        ]
        logprobs, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
    return logprobs.view(rows, width), entropy.view(rows, width)


def shards(policy: Policy, is_stored: bool = False) -> list[Shard]:
    """What this rank has of each parameter and persistent buffer under its HF name, tied ones once.

    Parameters are to be written in the dtype that is served, buffers in their own; with `is_stored`
    all as the model directory has them. No collective.
    """
    parameters = {id(parameter) for parameter in policy.module.parameters()}
    found: dict[int, Shard] = {}
    # FSDP takes this as a sign to have its shards in place.
    for name, tensor in policy.module.state_dict(keep_vars=True).items():
        if id(tensor) not in found:
            dtype = policy.stored[name]
            if not is_stored and id(tensor) in parameters and dtype.is_floating_point:
                dtype = policy.served
            found[id(tensor)] = _shard_of(name, tensor.detach(), dtype)
    return list(found.values())


def _shard_of(name: str, tensor: Tensor, dtype: torch.dtype) -> Shard:
    """FSDP gives each rank as many rows, but for the last ones."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        values = tensor.reshape(-1)
        is_mine = not dist.is_initialized() or dist.get_rank() == 0
        return Shard(name, dtype, shape, values if is_mine else values[:0])
    world, rank = tensor.device_mesh.size(), tensor.device_mesh.get_local_rank()
    first, end = rows(shape[0], rank, world)
    local = tensor.to_local()
    if local.shape[0] != end - first:
        raise TrainerError(f"{name}: rank {rank} has {local.shape[0]} of {shape[0]} rows")
    row, chunk = prod(shape[1:]), -(-shape[0] // world)
    return Shard(name, dtype, shape, local.reshape(-1), first * row, chunk * row)


def _score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[n, vocabulary], [n] -> logprob [n], entropy [n]."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    every = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = torch.special.entr(every.exp()).sum(-1)
    return every.gather(-1, targets[:, None])[:, 0], entropy


def _shard(module: PreTrainedModel, device: torch.device, world: int) -> None:
    """FSDP2, one group per decoder layer. Gradients come out as the mean over ranks: see `rank`.

    The module is on the processor: each group is moved to the device when it is divided, so that a
    model of which a GPU holds a share need not fit into it as a whole.
    """
    mesh = init_device_mesh(device.type, (world,))
    precision = MixedPrecisionPolicy()
    if device.type == "cuda":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = set(module._no_split_modules or ())
    for layer in [m for m in module.modules() if type(m).__name__ in layers]:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)


def _drop_dropout(module: nn.Module) -> None:
    """Training mode must not change probabilities: ratios and logprob differences would be
    noise."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if hasattr(part, "attention_dropout"):
            setattr(part, "attention_dropout", 0.0)  # noqa: B010 - a float, not a tensor or module
