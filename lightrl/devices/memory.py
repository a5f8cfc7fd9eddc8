"""How much GPU memory a training rank and an engine need, and what a version of the weights weighs:
arithmetic on the model's config.

Owns the estimates, which are for planning: who shares a GPU gets what others leave. Pure, but for
`shape_of_folder`, which reads a model directory, and `has_bfloat16_instructions`. Must not import
torch.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lightrl.errors import ConfigError
from lightrl.model_files import stored_tensors

GIB = 1 << 30
CONTEXT_BYTES = 1 * GIB  # CUDA context, libraries' workspaces, kernels
PEER_BYTES = GIB // 2  # buffers of NCCL
# of a rank's tensors: micro-batches differ in shape, and freed blocks do not always fit
FRAGMENTATION = 1.1
# logits converted to float32 logprobs per call: trainer/model/logprobs.py, engine/sampling.py
LOGITS_PER_CALL = 1 << 26
SCORE_BYTES = 20  # for each of them: float32 logits, logprobs, their gradients
# for each: float32 logits, as divided by the temperature, probabilities, and these by blocks: 16.
# The rest is room for the sort of top_k and top_p, which takes more.
SAMPLE_BYTES = 28
ENGINE_STEP_TOKENS = 8192  # of one forward pass of vLLM as it comes
GRAPHS_BYTES = GIB // 2  # CUDA graphs of an engine
MASTER, GRADIENT, BF16 = 4, 4, 2  # bytes for each parameter
# likewise; the scales of eight bits are one in 256 values, or few more
OPTIMIZER = {"adamw": 8.0, "adamw8bit": 2.1}
ADAM_PART = 1 << 26  # parameters with state on the device: trainer/learner/offload.py
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes in a model's config.json."""

    num_parameters: int
    hidden: int
    # of the experts of a token together
    intermediate: int
    layers: int
    # heads x head dimension
    q_width: int
    kv_width: int
    vocabulary: int
    # embeddings and head are one
    is_tied: bool = False


def shape_of(config: Mapping[str, Any], num_parameters: int | None = None) -> Shape | None:
    """Return the shape in a config.json, or None if it is of another kind. The parameters are
    counted from it if they are not given."""
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
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))
    if num_parameters is None:
        mlp = 3 * hidden * (experts * expert if experts else dense)
        embeddings = vocabulary * hidden * (1 if tied else 2)
        num_parameters = embeddings + layers * (
            2 * hidden * (q_width + kv_width) + mlp + 2 * hidden
        )
    intermediate = active * expert if experts else dense
    return Shape(num_parameters, hidden, intermediate, layers, q_width, kv_width, vocabulary, tied)


def shape_of_file(data: bytes) -> Shape | None:
    """Return the shape in the bytes of a config.json, or None."""
    config = _parsed(data)
    return None if config is None else shape_of(config)


def shape_of_folder(folder: Path) -> Shape | None:
    """Return the shape of the model in a directory, or None if it is unknown. The headers of its
    weights give the number of parameters."""
    try:
        config = _parsed((folder / "config.json").read_bytes())
        stored: Iterable[tuple[Path, Mapping[str, Any]]] = ()
        with suppress(ConfigError):  # of a checkpoint, or of a model that will be refused
            stored = stored_tensors(folder).values()
        count = sum(math.prod(entry["shape"]) for _, entry in stored)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if config is None else shape_of(config, count or None)


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        config: Any = json.loads(data)
    except ValueError:
        return None
    return cast("dict[str, Any]", config) if isinstance(config, dict) else None


@dataclass(frozen=True, slots=True)
class VersionSize:
    """One version of the policy, as it is served. Example: VersionSize(15_231_233_024,
    "bfloat16")"""

    num_bytes: int
    dtype: str


def version_size(shape: Shape, stored: bytes, dtype: str, on_gpu: bool) -> VersionSize:
    """`stored`: the model's config.json; `dtype`: `model.dtype`; `on_gpu`: of the training ranks.
    Without torch, what `weights.version.tensors.served_dtype` decides there."""
    if dtype == "auto":
        named = "bfloat16" if on_gpu else stored_dtype(stored)
        dtype = named if named in BYTES_OF else "float32"
    return VersionSize(shape.num_parameters * BYTES_OF[dtype], dtype)


def stored_dtype(stored: bytes) -> str:
    """Return the dtype that a model's config.json names; "" if it names none."""
    config = _parsed(stored) or {}
    return str(config.get("dtype") or config.get("torch_dtype") or "")


@functools.cache
def has_bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU multiplies in bfloat16. Without that, vLLM makes a few tokens a
    second. True where it cannot be read."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return True
    return bool(re.search(r"^(flags|Features)\b.*\b(avx512_bf16|amx_bf16|bf16)\b", text, re.M))


def activation_bytes(shape: Shape, checkpointing: bool) -> int:
    """Return the bytes of one token that a decoder keeps for the backward pass in bfloat16.

    Counted by hooks on what autograd saves: the inputs of all norms in float32, too, those of every
    matrix product in bfloat16. It fits Qwen3, which keeps most; Llama and Qwen2.5 keep a tenth
    less. `checkpointing` keeps the input of each layer and all of one layer.
    """
    layer = 16 * shape.hidden + 10 * (shape.q_width + shape.kv_width) + 8 * shape.intermediate
    last = 2 * shape.hidden * (shape.layers + 4)  # inputs of layers; the norm behind them
    return layer + last if checkpointing else layer * shape.layers + 8 * shape.hidden


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the arithmetic. Example: Item("weights, gradients and Adam, 16 B each", 8 <<
    30)."""

    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Training:
    """The settings that determine how much memory one rank needs. `tokens`: of a micro-batch;
    `adapters`: parameters that are trained in place of the model's, 0 = the model is trained."""

    world: int = 1
    tokens: int = 0
    # copies of the model, each divided among world / replicas ranks
    replicas: int = 1
    checkpointing: bool = False
    has_reference: bool = False
    optimizer: str = "adamw"
    offload: str = "none"
    # once a step: until then a rank holds the gradients of the whole model
    sums_late: bool = False
    # several updates in a step: weights and optimizer of its begin are needed again
    holds_start: bool = False
    adapters: int = 0
    # engines have the devices in between
    is_shared: bool = False


def trainer_items(shape: Shape, how: Training) -> Iterator[Item]:
    """Yield the most that one rank needs, part by part."""
    yield from _held(shape, how)
    yield Item("layers gathered in bfloat16, and their gradients", _gathered_bytes(shape, how))
    again = ", computed again" if how.checkpointing else ""
    activations = how.tokens * activation_bytes(shape, how.checkpointing)
    yield Item(f"activations of {how.tokens:,} tokens{again}", activations)
    # By tiles: see trainer/model/logprobs.py. Of a family that makes them itself they are there
    # as a whole.
    values = min(how.tokens * shape.vocabulary, LOGITS_PER_CALL)
    yield Item(f"logits of {how.tokens:,} tokens, by tiles", SCORE_BYTES * values)
    peers = PEER_BYTES if how.world > 1 else 0
    yield Item("CUDA and NCCL" if peers else "CUDA", CONTEXT_BYTES + peers)


def _held(shape: Shape, how: Training) -> Iterator[Item]:
    """Yield what stays on the device between micro-batches, of this rank's share of the model."""
    ranks, trained = how.world // how.replicas, _trained(shape, how)
    place = _on_host if how.offload == "all" else Item
    if how.adapters:
        yield place("weights in bfloat16, frozen", BF16 * shape.num_parameters // ranks)
    name = "adapters" if how.adapters else "weights"
    yield place(f"{name} in float32", MASTER * trained // ranks)
    if how.holds_start:
        yield place(f"{name} of the step's begin", MASTER * trained // ranks)
    if how.sums_late and (ranks > 1 or how.offload == "all"):
        # FSDP takes them to the host when they are summed up
        late = "gradients in float32, of the whole model until they are summed up"
        yield Item(late, GRADIENT * trained)
    else:
        # Of replicas FSDP keeps them on the device until these have met.
        keep = Item if how.replicas > 1 else place
        yield keep("gradients in float32", GRADIENT * trained // ranks)
    state = int(OPTIMIZER[how.optimizer] * (trained // ranks))
    optimizer = f"optimizer ({how.optimizer})"
    if how.offload == "optimizer":
        yield _on_host(optimizer, state)
        part = int(OPTIMIZER[how.optimizer] * min(trained // ranks, ADAM_PART))
        yield Item(f"{optimizer}, the part that is stepped", part)
    else:
        yield place(optimizer, state)
    if how.holds_start:
        yield _on_host(f"{optimizer} of the step's begin", state)
    if how.has_reference and not how.adapters:
        yield place("reference model in bfloat16", BF16 * shape.num_parameters // ranks)
    if how.is_shared:
        yield _on_host("parked while engines sample", parked_bytes(shape, how))
        yield _on_host("gradients, parked in the middle of a step", parked_gradients(shape, how))


def loading_bytes(shape: Shape) -> int:
    """Return the bytes of the host that rank 0 needs while it loads a model, for all ranks."""
    return MASTER * shape.num_parameters


def _trained(shape: Shape, how: Training) -> int:
    return how.adapters or shape.num_parameters


def parked_bytes(shape: Shape, how: Training) -> int:
    """Return the bytes of one rank that are on its host between steps, beside those of `offload`.
    With AdamW 12 bytes a parameter, divided by the ranks of a replica."""
    ranks, trained = how.world // how.replicas, _trained(shape, how)
    if how.offload == "all":
        return 0
    num_bytes = MASTER * trained // ranks * (2 if how.holds_start else 1)
    if how.offload == "none":
        num_bytes += int(OPTIMIZER[how.optimizer] * (trained // ranks))
    if how.adapters or how.has_reference:
        num_bytes += BF16 * shape.num_parameters // ranks
    return num_bytes


def parked_gradients(shape: Shape, how: Training) -> int:
    """Return the bytes of one rank that are on its host in addition while a step is interrupted."""
    trained = _trained(shape, how)
    if how.sums_late:
        return GRADIENT * trained
    return 0 if how.offload == "all" else GRADIENT * trained // (how.world // how.replicas)


def _on_host(what: str, num_bytes: int) -> Item:
    """Return a line about memory of the host, which takes nothing of the device."""
    return Item(f"{what}: {num_bytes / GIB:.1f} GiB on the host", 0)


def _gathered_bytes(shape: Shape, how: Training) -> int:
    """Return the bytes that FSDP gathers: layer by layer, the next one ahead, and embeddings and
    head for a whole pass; with gradients in bfloat16, and in float32 to be summed up."""
    ends = (1 if shape.is_tied else 2) * shape.vocabulary * shape.hidden
    layer = max(0, shape.num_parameters - ends) // max(1, shape.layers)
    if how.adapters:
        return BF16 * (ends + 2 * layer)
    sums = (BF16 + GRADIENT) * max(layer, ends)
    return BF16 * (ends + 2 * layer) + sums


def adapter_parameters(shape: Shape, rank: int, targets: Iterable[str] = ()) -> int:
    """Return the parameters of LoRA on all linear layers but the head, or on those whose names end
    with one of `targets`."""
    h, q, k, i = shape.hidden, shape.q_width, shape.kv_width, shape.intermediate
    sums = {  # of what goes in and what comes out
        "q_proj": h + q,
        "k_proj": h + k,
        "v_proj": h + k,
        "o_proj": q + h,
        "gate_proj": h + i,
        "up_proj": h + i,
        "down_proj": i + h,
    }
    ends = tuple(targets)
    chosen = [n for name, n in sums.items() if name.endswith(ends) or not ends]
    # of a family with other names: rather too much
    return rank * shape.layers * sum(chosen or sums.values())


def trainer_bytes(items: Iterable[Item]) -> int:
    return int(FRAGMENTATION * sum(item.num_bytes for item in items))


def kv_bytes_per_token(shape: Shape) -> int:
    """Return the bytes of keys and values of one token in bfloat16."""
    return 2 * BF16 * shape.layers * shape.kv_width


def working_bytes(shape: Shape, slots: int) -> int:
    """Return what an engine needs beside weights and KV cache: one forward pass, logits and their
    sampling, CUDA."""
    step = ENGINE_STEP_TOKENS * (20 * shape.hidden + 8 * shape.intermediate)
    return step + sampling_bytes(shape, slots) + CONTEXT_BYTES + GRAPHS_BYTES


def sampling_bytes(shape: Shape, slots: int) -> int:
    """Return the bytes of logits, and of what is computed from them, in a step that draws one token
    for each of `slots`."""
    values = slots * shape.vocabulary
    return (BF16 + 4) * values + SAMPLE_BYTES * min(values, LOGITS_PER_CALL)


def draftable_values(room: float, most: int) -> int:
    """Return the logits of one step with drafts that fit into `room` bytes, at most `most`: each is
    stored once in bfloat16, and those of one sampling call take more."""
    sampled = SAMPLE_BYTES + BF16
    if room < sampled * LOGITS_PER_CALL:
        return min(most, max(0, int(room)) // sampled)
    return min(most, int(room - SAMPLE_BYTES * LOGITS_PER_CALL) // BF16)


def kv_cache_bytes(
    share: int, weights: int, shape: Shape, slots: int, max_length: int, gpus: int = 1
) -> int:
    """Return the bytes for the KV cache of an engine that may take `share` of each of its `gpus`.

    `weights`: bytes of the whole model. 0 if not even one sequence of `max_length` tokens fits.
    """
    left = share - weights // gpus - working_bytes(shape, slots)
    return left if left * gpus >= kv_bytes_per_token(shape) * max_length else 0


def engine_bytes(shape: Shape, slots: int, max_length: int, gpus: int = 1) -> int:
    """Return the least bytes that an engine needs on each of its `gpus`: its cache has room for one
    sequence."""
    sequence = kv_bytes_per_token(shape) * (max_length + 1)
    return (BF16 * shape.num_parameters + sequence) // gpus + working_bytes(shape, slots)
