"""How much GPU memory a training rank and an engine need, and what a version of the weights weighs:
arithmetic on the model's config.

Owns the estimates, which are for planning: who shares a GPU gets what others leave. Pure; the files
of a model directory are read by `shape_of_folder` alone. Must not import torch.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

GIB = 1 << 30
CONTEXT_BYTES = 1 * GIB  # CUDA context, libraries' workspaces, kernels
PEER_BYTES = GIB // 2  # buffers of NCCL
# of a rank's tensors: micro-batches differ in shape, and freed blocks do not always fit
FRAGMENTATION = 1.1
# logits that become float32 logprobs at once: trainer/model.py, engine/sampling.py
SCORED_VALUES = 1 << 26
SCORE_BYTES = 20  # for each of them: float32 logits, logprobs, their gradients
SAMPLE_BYTES = 28  # for each: float32 logits, logprobs, probabilities; float64 sums
ENGINE_STEP_TOKENS = 8192  # of one forward pass of vLLM as it comes
GRAPHS_BYTES = GIB // 2  # CUDA graphs of an engine
MASTER, GRADIENT, ADAM, BF16 = 4, 4, 8, 2  # bytes for each parameter
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's config.json says of its size."""

    num_parameters: int
    hidden: int
    # of the experts of a token together
    intermediate: int
    layers: int
    # heads x head dimension
    q_width: int
    kv_width: int
    vocabulary: int


def shape_of(config: Mapping[str, Any], num_parameters: int | None = None) -> Shape | None:
    """Of a config.json; the parameters are counted from it if not given. None if it is of another
    kind."""
    text: Mapping[str, Any] = config.get("text_config") or config
    try:
        hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        heads, vocabulary = int(text["num_attention_heads"]), int(text["vocab_size"])
        head_dim = int(text.get("head_dim") or hidden // heads)
        kv_width = int(text.get("num_key_value_heads") or heads) * head_dim
        dense = int(text.get("intermediate_size") or 4 * hidden)
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
        expert = int(text.get("moe_intermediate_size") or dense)
        active = int(text.get("num_experts_per_tok") or 0)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    q_width = heads * head_dim
    if num_parameters is None:
        mlp = 3 * hidden * (experts * expert if experts else dense)
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
        embeddings = vocabulary * hidden * (1 if tied else 2)
        num_parameters = embeddings + layers * (
            2 * hidden * (q_width + kv_width) + mlp + 2 * hidden
        )
    intermediate = active * expert if experts else dense
    return Shape(num_parameters, hidden, intermediate, layers, q_width, kv_width, vocabulary)


def shape_of_file(data: bytes) -> Shape | None:
    """Of the bytes of a config.json."""
    config = _parsed(data)
    return None if config is None else shape_of(config)


def shape_of_folder(folder: Path) -> Shape | None:
    """Of a model directory; its safetensors files say how many parameters there are. None: not
    known."""
    try:
        config = _parsed((folder / "config.json").read_bytes())
        count = sum(_parameters(file) for file in folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if config is None else shape_of(config, count or None)


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        config: Any = json.loads(data)
    except ValueError:
        return None
    return cast("dict[str, Any]", config) if isinstance(config, dict) else None


def _parameters(file: Path) -> int:
    """From the header: 8 bytes of its length, then JSON with the shape of each tensor."""
    with file.open("rb") as data:
        size = int.from_bytes(data.read(8), "little")
        if size > 100 << 20:  # the format's own limit
            raise ValueError(f"{file}: no safetensors header")
        header = json.loads(data.read(size))
    return sum(
        math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"
    )


@dataclass(frozen=True, slots=True)
class VersionSize:
    """Of one version of the policy, as it is served. Example: VersionSize(15_231_233_024,
    "bfloat16")"""

    num_bytes: int
    dtype: str


def version_size(shape: Shape, stored: bytes, dtype: str, on_gpu: bool) -> VersionSize:
    """`stored`: the model's config.json; `dtype`: `model.dtype`; `on_gpu`: of the training ranks.
    Without torch, what `weights.version.tensors.served_dtype` decides there."""
    if dtype == "auto":
        config = _parsed(stored) or {}
        said = "bfloat16" if on_gpu else config.get("dtype") or config.get("torch_dtype")
        dtype = said if said in BYTES_OF else "float32"
    return VersionSize(shape.num_parameters * BYTES_OF[dtype], dtype)


def activation_bytes(shape: Shape, checkpointing: bool) -> int:
    """Of one token, kept for the backward pass by a transformers decoder in bfloat16 autocast.

    Counted by hooks on what autograd saves: the residual stream and all norms in float32, the
    inputs of every matrix product in bfloat16. It fits Qwen3, which keeps most; Llama keeps a tenth
    less. `checkpointing` keeps the input of each layer and all of one layer.
    """
    layer = 13 * shape.hidden + 14 * shape.q_width + 10 * shape.kv_width + 8 * shape.intermediate
    return layer + 4 * shape.hidden * (shape.layers + 1) if checkpointing else layer * shape.layers


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the arithmetic. Example: Item("weights, gradients and Adam, 16 B each", 8 <<
    30)."""

    what: str
    num_bytes: int


def trainer_items(
    shape: Shape, ranks: int, tokens: int, checkpointing: bool = False, has_reference: bool = False
) -> Iterator[Item]:
    """What one rank of `ranks` needs at most, for micro-batches of `tokens` tokens, padding
    included."""
    each = MASTER + GRADIENT + ADAM
    yield Item(
        f"weights, gradients and Adam in float32, {each} B each",
        each * shape.num_parameters // ranks,
    )
    if has_reference:
        yield Item("reference model in float32", MASTER * shape.num_parameters // ranks)
    # Autocast keeps a copy of every weight until the backward pass is over; FSDP gathers layer by
    # layer.
    copies = shape.num_parameters
    if ranks > 1:
        copies = 2 * shape.vocabulary * shape.hidden + 2 * shape.num_parameters // max(
            1, shape.layers
        )
    yield Item("weights in bfloat16", BF16 * copies)
    yield Item(f"activations of {tokens:,} tokens", tokens * activation_bytes(shape, checkpointing))
    values = tokens * shape.vocabulary
    logits = 2 * BF16 * values + SCORE_BYTES * min(values, SCORED_VALUES)
    yield Item(f"logits of {tokens:,} tokens", logits)
    yield Item(
        "CUDA" if ranks == 1 else "CUDA and NCCL", CONTEXT_BYTES + (PEER_BYTES if ranks > 1 else 0)
    )


def trainer_bytes(items: Iterable[Item]) -> int:
    return int(FRAGMENTATION * sum(item.num_bytes for item in items))


def kv_bytes_per_token(shape: Shape) -> int:
    """In bfloat16."""
    return 2 * BF16 * shape.layers * shape.kv_width


def working_bytes(shape: Shape, slots: int) -> int:
    """Of an engine besides weights and KV cache: one forward pass, logits and their sampling,
    CUDA."""
    step = ENGINE_STEP_TOKENS * (20 * shape.hidden + 8 * shape.intermediate)
    return step + sampling_bytes(shape, slots) + CONTEXT_BYTES + GRAPHS_BYTES


def sampling_bytes(shape: Shape, slots: int) -> int:
    """Of logits, and of what is made of them, in a step that draws one token for each of
    `slots`."""
    values = slots * shape.vocabulary
    return (BF16 + 4) * values + SAMPLE_BYTES * min(values, SCORED_VALUES)


def draftable_values(room: float, most: int) -> int:
    """Logits of one step with drafts that fit into `room` bytes, at most `most`: each is there once
    in bfloat16, and those that are sampled from at once take more."""
    sampled = SAMPLE_BYTES + BF16
    if room < sampled * SCORED_VALUES:
        return min(most, max(0, int(room)) // sampled)
    return min(most, int(room - SAMPLE_BYTES * SCORED_VALUES) // BF16)


def kv_cache_bytes(
    share: int, weights: int, shape: Shape, slots: int, max_length: int, gpus: int = 1
) -> int:
    """What is left for the KV cache of an engine that may take `share` bytes of each of its `gpus`.

    `weights`: bytes of the whole model. 0 if not even one sequence of `max_length` tokens fits.
    """
    left = share - weights // gpus - working_bytes(shape, slots)
    return left if left * gpus >= kv_bytes_per_token(shape) * max_length else 0


def engine_bytes(shape: Shape, slots: int, max_length: int, gpus: int = 1) -> int:
    """The least with which an engine can work, on each of its `gpus`: room for one sequence in its
    cache."""
    sequence = kv_bytes_per_token(shape) * (max_length + 1)
    return (BF16 * shape.num_parameters + sequence) // gpus + working_bytes(shape, slots)
