"""The pass of a model over a micro-batch: logprobs of its responses.

When a model is loaded, a few tokens are computed in its own way and in ours: sequences packed back
to back (`attention`), logits by tiles (`score`). A family that differs keeps its own way, and the
log has the reason.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lightrl.devices.memory import SCORED_VALUES
from lightrl.errors import first_line
from lightrl.trainer.model import attention
from lightrl.trainer.model.collate import Batch, collate
from lightrl.trainer.model.rows import put_rows, take_rows
from lightrl.trainer.model.score import Projection, token_scores
from lightrl.trainer.protocol import TrainSample
from lightrl.wire import pack_f32, pack_i32

# values of logits of a piece (256 MiB) where a model computes its own logits
PIECE_VALUES = SCORED_VALUES

# layers that attend to earlier tokens of the sequence, and keep no state
PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})

# differences of logprobs by rounding, absolute and relative, and the share of tokens that may be
# further apart: in bfloat16 a token may go to other experts
TOLERANCE = {"cpu": (1e-4, 0.0), "cuda": (0.1, 0.02)}
# tokens of the longest text, which exceeds narrow sliding windows
LONGEST_TEXT = 600


@dataclass(frozen=True)
class Way:
    """How a model computes logprobs. `packed`: sequences lie back to back. `projection`: for logits
    by tiles; None: the model computes them. `notes`: reasons, one line each."""

    packed: bool = False
    projection: Projection | None = None
    notes: tuple[str, ...] = ()


def response_logprobs(
    module: PreTrainedModel,
    way: Way,
    batch: Batch,
    temperature: float = 1.0,
    is_entropy_trained: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute logprobs of `batch.targets` and entropies of their distributions, float32 [rows,
    width], 0 outside the responses. `temperature` divides the logits, as the sampler did."""
    rows, width = batch.targets.shape
    targets = batch.targets.view(-1).index_select(0, batch.cells)
    inputs: dict[str, Any] = {"input_ids": batch.ids, "use_cache": False}
    if batch.packing is not None:
        inputs |= {"position_ids": batch.positions, "packing": batch.packing}
    if way.projection is None:
        kept = batch.sources if batch.packing is not None else batch.num_kept
        logits = module(**inputs, logits_to_keep=kept).logits.flatten(0, 1)
        scores = _own_scores(_at_sources(logits, batch), targets, temperature, is_entropy_trained)
    else:
        scale, softcap = way.projection.scale, way.projection.softcap
        projection = Projection(scale, softcap, temperature)
        method: Any = module.token_scores
        scores = method(inputs, batch.sources, targets, projection, is_entropy_trained)
    logprobs, entropy = (put_rows(x, batch.cells, rows * width).view(rows, width) for x in scores)
    return logprobs, entropy


def prepare(module: PreTrainedModel, device: torch.device) -> Way:
    """Choose how this model is computed. A collective if it is sharded."""
    setattr(module, "token_scores", MethodType(_token_scores, module))  # noqa: B010 - not its own
    register_fsdp_forward_method(module, "token_scores")
    try:
        with torch.no_grad():
            return _chosen(module, device)
    finally:
        if isinstance(module, FSDPModule):
            module.reshard()  # no backward pass follows that would


def num_embeddings(module: PreTrainedModel) -> int:
    """Token ids are smaller than this."""
    weight = module.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _chosen(module: PreTrainedModel, device: torch.device) -> Way:
    family, notes = type(module).__name__, []
    samples, vocabulary = _texts(module), num_embeddings(module)
    padded = collate(samples, device, vocabulary, packed=False)
    packed = collate(samples, device, vocabulary)
    expected, _ = response_logprobs(module, Way(), padded)
    projection = _projection(module.config.get_text_config())
    with _attempt() as problems:
        found, _ = response_logprobs(module, Way(projection=projection), padded)
        problems += _differences(found, expected, padded)
    if problems:
        notes.append(f"{family}: logits are made by the model, whole: {problems[0]}")
        projection = None
    reason = _known_reason(module)
    if not reason:
        own = module.config._attn_implementation or "eager"
        with _attempt() as problems:
            module.set_attn_implementation(attention.NAME)
            if module.config.get_text_config()._attn_implementation != attention.NAME:
                raise NotImplementedError("transformers keeps its own attention")
            found, _ = response_logprobs(module, Way(True, projection), packed)
            assert packed.packing is not None
            problems += packed.packing.refused
            problems += _differences(found, expected, padded)
        if reason := next(iter(problems), ""):
            module.set_attn_implementation(own)
    if reason:
        notes.append(f"{family}: sequences are padded, not packed: {reason}")
    return Way(not reason, projection, tuple(notes))


@contextmanager
def _attempt() -> Iterator[list[str]]:
    """Turn errors into problems: code of families differs."""
    problems: list[str] = []
    try:
        yield problems
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # noqa: BLE001 - code of families differs
        problems.append(first_line(e))


def _differences(found: Tensor, expected: Tensor, batch: Batch) -> list[str]:
    tolerance, share = TOLERANCE.get(found.device.type, TOLERANCE["cuda"])
    difference = (found - expected).abs()
    # also what is not a number
    num_off = (~(difference <= tolerance * (1 + expected.abs()))).sum().item()
    if num_off <= share * batch.mask.sum().item():
        return []
    return [f"logprobs differ by {difference.max().item():.2g}"]


def _known_reason(module: PreTrainedModel) -> str:
    """Return why sequences must not be packed; "" if the config does not forbid it."""
    config = module.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - PLAIN_LAYERS
    if kinds:
        return f"it has layers of {', '.join(sorted(map(str, kinds)))}"
    if getattr(module, "_is_stateful", False):
        return "its layers keep a state"
    if not getattr(module, "_supports_attention_backend", False):
        return "transformers lets nobody else compute its attention"
    return ""


def _projection(config: Any) -> Projection:
    """Read it from the config: a soft cap (Gemma), a factor (Cohere), a divisor (Granite)."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return Projection(scale, getattr(config, "final_logit_softcapping", None))


def _texts(module: PreTrainedModel) -> list[TrainSample]:
    """Return two of different length, of arbitrary tokens."""
    config = module.config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    length = 11
    if 0 < window < LONGEST_TEXT:
        length = min(LONGEST_TEXT, window + max(8, window // 4))
    length = max(4, min(length, getattr(config, "max_position_embeddings", None) or length))
    vocabulary = num_embeddings(module)
    texts = [[(7919 * i + 13 * n) % vocabulary for i in range(n)] for n in (length, length // 2)]
    return [
        TrainSample("", pack_i32(t[:1]), pack_i32(t[1:]), pack_f32([0.0] * (len(t) - 1)), 0.0)
        for t in texts
    ]


def _token_scores(
    module: PreTrainedModel,
    inputs: dict[str, Any],
    sources: Tensor,
    targets: Tensor,
    projection: Projection,
    is_entropy_trained: bool,
) -> tuple[Tensor, Tensor]:
    """A method of the module, so that FSDP gathers weights as for `forward`."""
    hidden = module.base_model(**inputs).last_hidden_state
    hidden = take_rows(hidden.flatten(0, 1), sources)
    head: Any = module.get_output_embeddings()
    bias = getattr(head, "bias", None)
    return token_scores(hidden, head.weight, bias, targets, projection, is_entropy_trained)


def _at_sources(logits: Tensor, batch: Batch) -> Tensor:
    """Select logits: a packed row has exactly these, other rows the last columns."""
    if batch.packing is not None:
        return logits
    length = batch.ids.shape[1]
    row, column = batch.sources // length, batch.sources % length
    return take_rows(logits, row * batch.num_kept + column - (length - batch.num_kept))


def _own_scores(
    logits: Tensor, targets: Tensor, temperature: float, is_entropy_trained: bool
) -> tuple[Tensor, Tensor]:
    """[tokens, vocabulary] of any dtype -> logprobs, entropies [tokens]. The backward pass keeps no
    float32 copy of all logits."""
    piece = max(1, PIECE_VALUES // logits.shape[-1])
    if len(targets) <= piece:
        return _score(logits, targets, temperature, is_entropy_trained)
    parts = [
        checkpoint(_score, some, ids, temperature, is_entropy_trained, use_reentrant=False)
        for some, ids in zip(logits.split(piece), targets.split(piece), strict=True)
    ]
    logprobs, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
    return logprobs, entropy


def _score(
    logits: Tensor, targets: Tensor, temperature: float, is_entropy_trained: bool
) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    every = logits.log_softmax(-1)
    if is_entropy_trained:
        # not by `entr`, whose gradient is infinite at probability 0, as is the logprob
        finite = every.clamp(min=torch.finfo(every.dtype).min)
        entropy = -(every.exp() * finite).sum(-1)
    else:
        with torch.no_grad():
            entropy = torch.special.entr(every.exp()).sum(-1)
    return every.gather(-1, targets[:, None])[:, 0], entropy
