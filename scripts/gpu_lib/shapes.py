"""Models of real shapes with random weights: nothing is downloaded. Imports torch only when
called."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from gpu_lib.parts import ROOT

TOKENIZER = ROOT / "configs" / "quickstart" / "model"
# of normal logits, in sqrt(2 ln vocabulary): as peaked as a trained model's, one to three nats
SPREAD = 0.85
# Of logits of a model that two computations in bfloat16 are held against each other with. Random
# layers pass rounding on far more than trained ones do: as peaked as a trained model, one of 0.5B
# has logprobs 0.067 apart by transformers' own two kinds of attention alone (on a CPU).
CALM = 1.0

COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen2.5-0.5B and Qwen2.5-3B, but for the special tokens, which are the quickstart's.
    "0.5b": COMMON
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
    },
    "3b": COMMON
    | {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
    },
    # Qwen2.5-7B likewise.
    "7b": COMMON
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "small": COMMON
    | {
        "initializer_range": 0.06,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "vocab_size": 2048,
    },
}


def on_device() -> str:
    """The --device of scripts/gpu: "cuda", or "cpu", where only the function is checked."""
    return os.environ.get("LIGHTRL_GPU_DEVICE", "cuda")


def shape_for(name: str) -> str:
    """The shape itself on a GPU; a small one in its place on a CPU."""
    return name if on_device() == "cuda" else "small"


def num_parameters(config: dict[str, Any]) -> int:
    """Of a Qwen2 with tied embeddings."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = 2 * hidden * hidden + hidden + 2 * (hidden * kv + kv)
    layer = attention + 3 * hidden * middle + 2 * hidden
    return config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden


def make_config(folder: Path, shape: str, **changes: Any) -> Path:
    """A model directory without weights: config.json and the quickstart's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | changes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


def make_module(
    folder: Path, device: str, dtype: Any, seed: int = 0, deviation: float | None = None
) -> Any:
    """The module of a model directory with random weights, for inference. `deviation`: of its
    logits; None: SPREAD."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        module: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        ).eval()
    ids = torch.randint(config.vocab_size, (1, 64), device=device)
    with torch.inference_mode():
        spread = module(input_ids=ids).logits.float().std(-1).mean().item()
    with torch.no_grad():
        wanted = deviation or SPREAD * math.sqrt(2 * math.log(config.vocab_size))
        module.model.norm.weight.mul_(wanted / spread)
    return module


def make_model(
    folder: Path, shape: str, device: str, seed: int = 0, deviation: float | None = None
) -> Path:
    """A model directory with random weights in bfloat16, as `lightrl up` takes it."""
    import torch

    make_config(folder, shape)
    module = make_module(folder, device, torch.bfloat16, seed, deviation)
    config = (folder / "config.json").read_text()
    module.save_pretrained(folder)
    (folder / "config.json").write_text(config)
    return folder
