"""Families of models, tiny and random: a config of each, and model directories."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 400  # two tiles

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from uniform, so that what is wrong shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 24, "do_layer_norm_before": False, "dropout": 0.1}
GLM = {"n_routed_experts": 4, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5}

# Whose sequences may lie back to back.
PACKED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2-sliding": SLIDING | {"use_sliding_window": True},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "llama": {"num_key_value_heads": 4, "attention_bias": True},
    "gemma3_text": SLIDING,
    "gemma3_text-capped": SLIDING | {"final_logit_softcapping": 2.0},
    "opt": OPT,
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "glm4_moe": EXPERTS | GLM,
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "mistral": {"sliding_window": 5},
}


def saved(folder: Path, family: str, settings: Mapping[str, Any]) -> Path:
    """A model directory. What follows the first dash of the name is ours."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(family.split("-")[0], **SHAPE | {**settings})
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, buffer in module.named_buffers():
        if "correction_bias" in name:
            buffer.normal_()
    module.save_pretrained(folder)
    return folder
