"""A model directory for reward workers: nothing of it but the tokenizer is read."""

import json
from pathlib import Path

import pytest

from tests.support.reward_pool import LETTERS


@pytest.fixture(scope="session")
def model_files(tmp_path_factory) -> Path:
    """A tokenizer of ten letters: id 0 = <eos>, 1 = a, 2 = b, ..."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<eos>": 0, **{c: i for i, c in enumerate(LETTERS, 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    # Only here is it said that <eos> is special.
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    return folder
