"""Model directories without weights, whose tokenizers have a chat template's markers as tokens."""

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MARKER = re.compile(
    r"<\|[\w.]+\|?>|<[\w.]+\|>|</?(?:think|tool_call|tool_response|sop|s)>"
    r"|<[a-z_]+_of_[a-z]+>|<｜[^｜<>]+｜>"
)
# Tokens that end a turn, and so are in generation_config.json.
STOPS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|observation|>",
    "</s>",
    "<end_of_utterance>",
    "<|eot|>",
]
# In these, the marker is no end of turn.
NO_STOPS = {"gptoss": ["<|end|>"], "phi3": ["<|user|>"], "phi3_5": ["<|user|>"]}
BOS, EOS = "<bos>", "<eos>"
WORDS = "abababab yes no the a b c answer question user assistant tool result 1 2 3 .\n\n" * 20


def trl_templates() -> dict[str, str]:
    """The chat templates that TRL ships, by name, without those that it patches for training."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    found = {f.stem: f.read_text() for f in sorted(folder.glob("*.jinja"))}
    return {name: text for name, text in found.items() if not name.endswith("_training")}


def make_model(folder: Path, template: str | None, name: str = "") -> Path:
    """Byte pairs with merges such as "ab", and the markers in `template` as special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    markers = sorted({BOS, EOS, *MARKER.findall(template or "")} | {"<|endoftext|>"})
    tokenizer.add_special_tokens([m for m in markers if "think" not in m and "tool_call>" not in m])
    tokenizer.add_tokens([m for m in markers if "think" in m or "tool_call>" in m])
    end = next((s for s in STOPS if s in markers and s not in NO_STOPS.get(name, ())), EOS)
    stops = [s for s in STOPS if s in markers and s not in NO_STOPS.get(name, ())] or [EOS]
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": BOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = [tokenizer.token_to_id(s) for s in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    size = {"vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(size))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def make_weights(folder: Path, preferred: Sequence[str], max_positions: int = 512) -> None:
    """Random weights, of which the head prefers some tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    known: dict[str, int] = dict(tokenizer["model"]["vocab"])
    known |= {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_positions,
        "vocab_size": max(known.values()) + 1,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "eos_token_id": known["<|im_end|>"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        model.model.embed_tokens.weight += 1.0
        model.lm_head.weight -= 0.15
        model.lm_head.weight[[known[token] for token in preferred]] += 0.3
    generation = (folder / "generation_config.json").read_text()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(generation)
