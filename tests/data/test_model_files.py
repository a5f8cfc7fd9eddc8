"""A model directory: its small files, its tokenizer, its weights, and what is refused."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl.errors import ConfigError
from lightrl.model_files import (
    PlainTokenizer,
    load_tokenizer,
    model_files,
    stop_token_ids,
    weights_folder,
)
from tests.data.conftest import TEMPLATE, USER, ids, jsonl, make_model
from tests.support.tiers import is_older

TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}

GREEDY = {
    "id": 1,
    "content": "<eos>",
    "single_word": False,
    "lstrip": True,  # it takes the space before it, too
    "rstrip": False,
    "normalized": False,
    "special": True,
}


def test_the_small_files_of_a_model_are_collected_without_weights(plain_model):
    files = model_files(plain_model)
    assert sorted(files) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads(files["config.json"]) == {"eos_token_id": 1}


def test_stop_tokens_are_those_of_all_files_and_the_tokenizer(plain_model, plain):
    assert stop_token_ids(plain_model, plain) == (1, 2)


def test_a_model_that_is_missing_is_named_with_its_key(tmp_path):
    for load in (load_tokenizer, model_files):
        with pytest.raises(ConfigError, match=r"model.path = '/nowhere': no such directory"):
            load("/nowhere")
        with pytest.raises(
            ConfigError, match=r"model.path = 'no/such': no such directory, and the hub reports"
        ):
            load("no/such")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        model_files(str(tmp_path))


@pytest.fixture
def snapshot(tmp_path, monkeypatch) -> Path:
    """The local copy of org/model in an empty cache of the hub, which is out of reach."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef" * 2 + "01234567"
    repository = tmp_path / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def index(**weight_map: str) -> str:
    return json.dumps({"metadata": {}, "weight_map": weight_map})


def test_the_weights_of_a_hub_id_are_those_of_its_local_copy(snapshot):
    (snapshot / "model.safetensors").touch()
    assert weights_folder("org/model") == snapshot
    assert weights_folder(str(snapshot)) == snapshot


def test_sharded_weights_must_be_complete(snapshot):
    shards = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    (snapshot / "model.safetensors.index.json").write_text(
        index(a=shards[0], b=shards[1], c=shards[1])
    )
    (snapshot / shards[0]).touch()
    with pytest.raises(ConfigError, match=f"'org/model': 1 shards .* missing: {shards[1]}$"):
        weights_folder("org/model")
    (snapshot / shards[1]).touch()
    assert weights_folder("org/model") == snapshot


@pytest.mark.parametrize("text", ["{broken", "[]", '{"weight_map": 3}'])
def test_a_broken_index_of_shards_is_named(snapshot, text):
    (snapshot / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model.safetensors.index.json is not an index"):
        weights_folder("org/model")


def test_weights_that_are_not_safetensors_are_refused(snapshot):
    (snapshot / "pytorch_model.bin").touch()
    for path in ("org/model", str(snapshot)):
        with pytest.raises(ConfigError, match=r"has neither .* save_pretrained\(\) it$"):
            weights_folder(path)


def test_weights_out_of_reach_are_one_line(snapshot):
    with pytest.raises(
        ConfigError, match="'org/other': no such directory, and the hub reports"
    ) as caught:
        weights_folder("org/other")
    assert "\n" not in str(caught.value)


def test_a_broken_tokenizer_is_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{broken")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named_with_the_true_reason(
    plain_model, plain, snapshot, tmp_path, monkeypatch
):
    def refuse(file):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    index, model = "model.safetensors.index.json", shutil.copytree(plain_model, tmp_path / "copy")
    (snapshot / index).write_text("{}")
    with monkeypatch.context() as lack:
        lack.setattr(Path, "read_bytes", refuse)
        for load, name in (
            (load_tokenizer, "config.json"),
            (model_files, "config.json"),
            (lambda _: weights_folder("org/model"), index),
        ):
            with pytest.raises(ConfigError) as caught:
                load(str(model))
            assert str(caught.value).endswith(f": {name} cannot be read: Permission denied")
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").mkdir()
    with pytest.raises(
        ConfigError, match=r": generation_config.json cannot be read: Is a directory$"
    ):
        stop_token_ids(str(model), plain)


def test_a_file_too_large_for_the_wire_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "tokenizer.json").open("wb") as f:
        f.truncate(33 << 20)
    with pytest.raises(ConfigError, match=r"tokenizer.json has 33 MiB; at most 32 MiB"):
        model_files(str(tmp_path))


@pytest.mark.parametrize("model", ["plain_model", "chat_model"])
def test_loading_a_tokenizer_and_prompts_loads_no_more_than_it_takes(request, model, tmp_path):
    folder = request.getfixturevalue(model)
    path = jsonl(tmp_path, {"prompt": USER if model == "chat_model" else "hi"})
    program = (
        "import sys; from lightrl import model_files; from lightrl.config import schema; "
        "from lightrl.data import prompts; "
        f"settings = schema.Data(path={path!r}); "
        f"tokenizer = model_files.load_tokenizer({folder!r}); "
        "prompts.load_prompts(prompts.PromptSet(settings.all_sets[0], settings, tokenizer)); "
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    loaded = ["torch"] * is_older("transformers", 5, 19) + ["transformers"]
    assert done.stdout.split() == (loaded if model == "chat_model" else [])


def of_transformers(model: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model)


@pytest.mark.parametrize("with_bos", [False, True])
def test_a_plain_tokenizer_answers_as_that_of_transformers(tmp_path, with_bos):
    model = make_model(tmp_path / "model", with_bos, chat_template=None)
    plain, other = load_tokenizer(model), of_transformers(model)
    assert isinstance(plain, PlainTokenizer)
    texts = ["ab c", "", "a<eos>b<bos>", "<pad>", "ünknown", "<eos", *(c * 40 for c in "ab")]
    for special in (False, True):
        assert plain(texts, add_special_tokens=special)["input_ids"] == (
            expected := other(texts, add_special_tokens=special)["input_ids"]
        )
        assert [plain(t, add_special_tokens=special)["input_ids"] for t in texts] == expected
    assert ids("ab c") in plain(texts, add_special_tokens=False)["input_ids"]
    for name in ("bos_token_id", "eos_token_id", "chat_template"):
        assert getattr(plain, name) == getattr(other, name), name


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"eos_token": "<end>"}),  # a token that is still to be added
        ("tokenizer_config.json", {"eos_token": "a"}),  # one that is not special yet
        ("tokenizer_config.json", {"unheard_of": 1}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("special_tokens_map.json", {"pad_token": "b"}),
        ("added_tokens.json", {"<more>": 40}),
        ("tokenizer.json", {"truncation": TRUNCATION}),
        ("tokenizer.json", {"added_tokens": [GREEDY]}),
    ],
)
def test_a_tokenizer_that_is_not_plain_is_left_to_transformers(tmp_path, file, change):
    model = make_model(tmp_path / "model", with_bos=False, chat_template=None)
    path = tmp_path / "model" / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | change))
    assert not isinstance(load_tokenizer(model), PlainTokenizer)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ({"vision_config": {"depth": 2}}, "is multimodal (vision_config"),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"architectures": ["BertForMaskedLM"]}, "is a BertForMaskedLM, not a causal"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_line(plain_model, tmp_path, said, reason):
    shutil.copytree(plain_model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    table = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(table | said))
    for load in (load_tokenizer, weights_folder):
        with pytest.raises(ConfigError) as raised:
            load(str(tmp_path / "model"))
        assert str(raised.value).startswith("model.path = ")
        assert reason in str(raised.value)
        assert "\n" not in str(raised.value)
