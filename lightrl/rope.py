"""Rotary embeddings that depend on the length of a sequence: decided once, for trainer and engines
alike.

transformers chooses the frequencies of "longrope" (Phi-3.5, Phi-4-mini) and "dynamic" (NTK) in
every pass, by the longest position in it. So logprobs depend on what else is in the batch, and keys
that an engine has cached are of other frequencies than those of the tokens that follow. vLLM
chooses those of longrope once, by its max_model_len. Here both are chosen once, by the longest
sequence of the run (`Config.max_model_length`), and written into the config from which a model is
built. Reads model configs, by attributes or as JSON; must not import torch or transformers.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

# Kinds whose `factor` multiplies the original context, not max_position_embeddings.
_WITH_ORIGINAL = ("longrope", "su", "yarn", "llama3", "deepseek_yarn")


def settle(config: Any, max_length: int) -> str:
    """Makes the rotary frequencies of a Hugging Face config those of sequences of `max_length`
    tokens, at every length. Returns a line that states what was chosen, "" if nothing depended on
    the length.

    longrope: both lists of factors become the long one if `max_length` exceeds the original
    context, else the short one. dynamic: beyond the model's context it becomes the default kind
    with the base of a sequence of `max_length` (transformers' `_compute_dynamic_ntk_parameters`).
    """
    text = config.get_text_config()
    note = ""
    for rope in _parts(getattr(text, "rope_parameters", None)):
        match rope.get("rope_type"):
            case "longrope":
                kind = _settle_longrope(rope, text.max_position_embeddings, max_length)
                note = f"longrope: the {kind} factors"
            case "dynamic" if "alpha" not in rope and max_length > text.max_position_embeddings:
                _settle_dynamic(rope, text, max_length)
                note = "dynamic rope: the frequencies of the longest sequence"
            case _:
                pass
    if not note:
        return ""
    # vLLM lays out so many positions.
    text.max_position_embeddings = max(text.max_position_embeddings, max_length + 1)
    return f"{note} are used at all lengths, since sequences may have {max_length:,} tokens"


def settled(config: Any, max_length: int) -> Any:
    """Run `settle` and return the config, as vLLM's `hf_overrides` must."""
    settle(config, max_length)
    return config


def _settle_longrope(rope: dict[str, Any], context: int, max_length: int) -> str:
    """Returns which of the two factors is chosen."""
    original = rope["original_max_position_embeddings"]
    kind = "long" if max_length > original else "short"
    rope["short_factor"] = rope["long_factor"] = rope[f"{kind}_factor"]
    # By which the embeddings are multiplied. transformers reads `attention_factor` or `factor`,
    # vLLM and Phi-3.5-MoE two scales: all are written.
    factor = rope.get("factor") or context / original
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scale = rope.get(f"{kind}_mscale") or rope.get("attention_factor") or default
    rope["short_mscale"] = rope["long_mscale"] = rope["attention_factor"] = scale
    return kind


def _settle_dynamic(rope: dict[str, Any], text: Any, max_length: int) -> None:
    heads = text.hidden_size // text.num_attention_heads
    size = getattr(text, "head_dim", None) or heads
    size = int(size * (rope.get("partial_rotary_factor") or 1.0))
    factor = rope.pop("factor")
    growth = factor * max_length / text.max_position_embeddings - (factor - 1)
    rope["rope_theta"] *= growth ** (size / (size - 2))
    rope["rope_type"] = "default"
    for key in ("type", "original_max_position_embeddings"):
        rope.pop(key, None)


def context(text: Mapping[str, Any]) -> int | None:
    """Tokens that a model reads, by its config.json (of a model that reads more than text, by its
    part `text_config`); None: not given there. Scaled positions reach as far as in vLLM: YaRN as
    Qwen's model cards add it leaves max_position_embeddings as it was."""
    longest = text.get("max_position_embeddings")
    if not isinstance(longest, int):
        return None
    found = longest
    for rope in _parts(text.get("rope_parameters") or text.get("rope_scaling")):
        factor, kind = rope.get("factor"), rope.get("rope_type") or rope.get("type")
        if not isinstance(factor, int | float) or "gemma3" in str(text.get("model_type")):
            continue  # Gemma 3 states what it reaches
        reference = longest
        if kind in _WITH_ORIGINAL:
            own = text.get("original_max_position_embeddings")
            reference = rope.get("original_max_position_embeddings") or own or longest
        found = max(found, int(factor * reference))
    return found


def _parts(rope: Any) -> Iterator[dict[str, Any]]:
    """The parameters of all layers, or of each kind of layers."""
    if not isinstance(rope, dict):
        return
    if "rope_type" in rope or "type" in rope:
        yield rope
    else:
        yield from (part for part in rope.values() if isinstance(part, dict))
