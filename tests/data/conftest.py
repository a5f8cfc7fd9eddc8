"""Models without weights whose tokenizers have a token for each letter, and data files."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import schema
from lightrl.config.data import DataSet, resolved
from lightrl.data.prompts import Prompt, PromptSet
from lightrl.data.prompts import load_prompts as load_set
from lightrl.model_files import load_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz:|# "
VOCAB = {"<bos>": 0, "<eos>": 1, "<pad>": 2, **{c: i for i, c in enumerate(LETTERS, 3)}}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_model(folder: Path, with_bos: bool, chat_template: str | None) -> str:
    """A model directory without weights, whose tokenizer has one token for each letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
        )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<eos>"}
    if with_bos:
        settings["bos_token"] = "<bos>"
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return str(folder)


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory) -> str:
    return make_model(
        tmp_path_factory.mktemp("models") / "plain", with_bos=False, chat_template=None
    )


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> str:
    return make_model(
        tmp_path_factory.mktemp("models") / "chat", with_bos=True, chat_template=TEMPLATE
    )


@pytest.fixture(scope="session")
def plain(plain_model) -> Any:
    return load_tokenizer(plain_model)


@pytest.fixture
def chat(chat_model) -> Any:
    return load_tokenizer(chat_model)


def settings(**keys: Any) -> schema.Data:
    return schema.Data(**{"path": "unused", **keys})


def prompt_set(path: str, data: schema.Data, tokenizer: Any, **keys: Any) -> PromptSet:
    [one] = resolved([DataSet(path=path, **keys)], data)
    return PromptSet(one, data, tokenizer)


def load_prompts(path: str, data: schema.Data, tokenizer: Any, **keys: Any) -> list[Prompt]:
    return load_set(prompt_set(path, data, tokenizer, **keys))


def jsonl(folder: Path, *rows: Any) -> str:
    path = folder / "train.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def num_open_in(folder: Path) -> int:
    """Descriptors of this process that are open on files in the folder."""
    num = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one for looking is closed by now
            num += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/")
    return num


def ids(text: str) -> list[int]:
    return [VOCAB[c] for c in text]


USER = [{"role": "user", "content": "hi"}]
