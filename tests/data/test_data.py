"""Prompts from files in every known layout, every error line, and the order in which prompts are
drawn."""

import errno
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightrl import config
from lightrl.data import PromptCursor, answer_of, load_prompts
from lightrl.errors import ConfigError, DataError
from lightrl.model_files import load_tokenizer, model_files, stop_token_ids, weights_folder
from lightrl.tokenizer import PlainTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz:|# "
VOCAB = {"<bos>": 0, "<eos>": 1, "<pad>": 2, **{c: i for i, c in enumerate(LETTERS, 3)}}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
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


@pytest.fixture(scope="session")
def chat(chat_model) -> Any:
    return load_tokenizer(chat_model)


def settings(**keys: Any) -> config.Data:
    return config.Data(path="unused", **keys)


def jsonl(folder: Path, *rows: Any) -> str:
    path = folder / "train.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def ids(text: str) -> list[int]:
    return [VOCAB[c] for c in text]


USER = [{"role": "user", "content": "hi"}]


# Model directory


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
            ConfigError, match=r"model.path = 'no/such': no such directory, and the hub says"
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
    with pytest.raises(ConfigError, match=f"'org/model': 1 shards are missing: {shards[1]}"):
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
        with pytest.raises(ConfigError, match=r"has no \*.safetensors; .* save_pretrained\(\)$"):
            weights_folder(path)


def test_weights_out_of_reach_are_one_line(snapshot):
    with pytest.raises(
        ConfigError, match="'org/other': no such directory, and the hub says"
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
        "import sys; from lightrl import config, data, model_files; "
        f"data.load_prompts({path!r}, config.Data(path=''), "
        f"model_files.load_tokenizer({folder!r})); "
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == (["transformers"] if model == "chat_model" else [])


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


# Layouts


def test_plain_text_is_tokenised_as_it_is(tmp_path, plain):
    path = jsonl(tmp_path, {"prompt": "ab", "answer": "c", "level": 3}, b"", {"prompt": "cab"})
    first, second = load_prompts(path, settings(), plain)
    assert (first.text, first.token_ids.tolist()) == ("ab", ids("ab"))
    assert first.token_ids.itemsize == 4
    assert first.row == {"prompt": "ab", "answer": "c", "level": 3}
    assert second.token_ids.tolist() == ids("cab")


def test_plain_text_gets_bos_where_the_model_expects_it_but_no_eos(tmp_path, chat):
    path = jsonl(tmp_path, {"prompt": "ab"}, {"prompt": "<bos>ab"})
    assert [p.token_ids.tolist() for p in load_prompts(path, settings(), chat)] == [
        [0, *ids("ab")]
    ] * 2


def test_chat_messages_go_through_the_template(tmp_path, chat):
    path = jsonl(tmp_path, {"prompt": USER, "answer": "x"})
    [prompt] = load_prompts(path, settings(), chat)
    assert prompt.text == "<bos>user:hi|assistant:"
    assert prompt.token_ids.tolist() == [0, *ids("user:hi|assistant:")]  # one BOS, no EOS


def test_a_system_prompt_is_put_before_chats_without_one(tmp_path, chat):
    path = jsonl(
        tmp_path, {"prompt": USER}, {"prompt": [{"role": "system", "content": "be"}, *USER]}
    )
    texts = [p.text for p in load_prompts(path, settings(system_prompt="think"), chat)]
    assert texts == [
        "<bos>system:think|user:hi|assistant:",
        "<bos>system:be|user:hi|assistant:",
    ]


def test_verls_layout(tmp_path, chat):
    row = {
        "data_source": "sums",
        "prompt": USER,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 17, "split": "train"},
    }
    [prompt] = load_prompts(jsonl(tmp_path, row), settings(), chat)
    assert prompt.id == "17"
    assert prompt.row == row
    assert answer_of(prompt.row, "answer") == "4"


def test_gsm8ks_layout_is_found_without_settings(tmp_path, plain):
    path = jsonl(tmp_path, {"question": "how many", "answer": "so #### 4"})
    [prompt] = load_prompts(path, settings(), plain)
    assert prompt.text == "how many"
    assert answer_of(prompt.row, "answer") == "so #### 4"


def test_other_columns_can_be_named(tmp_path, plain):
    path = jsonl(tmp_path, {"problem": "ab", "label": 5})
    [prompt] = load_prompts(path, settings(prompt_key="problem", answer_key="label"), plain)
    assert prompt.text == "ab"
    assert answer_of(prompt.row, "label") == 5


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"answer": None, "solution": "x"}, None),
        ({"solution": "x"}, "x"),
        ({"ground_truth": 0}, 0),
        ({"reward_spec": {"method": "rule", "ground_truth": "y"}}, "y"),
        ({"reward_model": {"style": "model"}}, None),
        ({}, None),
    ],
)
def test_the_answer_is_found_where_the_layout_keeps_it(row, answer):
    assert answer_of(row, "answer") == answer


# Ids


def test_ids_are_the_rows_own_or_a_hash_of_the_prompt(tmp_path, plain):
    rows = [
        {"prompt": "ab", "id": "first"},
        {"prompt": "ab", "id": 5},
        {"prompt": "ab"},
        {"prompt": "cd"},
    ]
    prompts = load_prompts(jsonl(tmp_path, *rows, {"prompt": "ab"}), settings(), plain)
    assert [p.id for p in prompts[:2]] == ["first", "5"]
    assert prompts[4].id == f"{prompts[2].id}-2"
    assert len({p.id for p in prompts}) == 5
    # They depend on the prompt alone: not on its place, its other columns or the tokenizer.
    moved = load_prompts(
        jsonl(tmp_path, {"prompt": "cd", "answer": "x"}, {"prompt": "ab"}), settings(), plain
    )
    assert [p.id for p in moved] == [prompts[3].id, prompts[2].id]


# Errors


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "holds no prompts"),
        ([{"prompt": "a"}, b"", b"{oops"], r"line 3: not valid JSON: Expecting property name"),
        ([{"prompt": "a"}, b"\xff\xfe{}"], "line 2: not valid JSON"),
        ([b'["a"]'], "line 1: expected a JSON object, found list"),
        (
            [{"prompt": "a"}, {"text": "a", "answer": "b"}],
            r"line 2: no 'prompt' \(data.prompt_key\); its keys are text, answer",
        ),
        ([{"prompt": 5}], "line 1: 'prompt' is int, expected text or a list of chat messages"),
        ([{"prompt": "a"}, {"prompt": ""}], "line 2: the prompt is empty"),
        (
            [{"prompt": "a"}, {"prompt": "abcdefghi"}],
            r"line 2: the prompt has 9 tokens, more than data.max_prompt_length = 8",
        ),
        ([{"prompt": "a", "id": "x" * 129}], "line 1: id 'x+': at most 128 characters"),
        (
            [{"prompt": "a", "id": "x\ty"}],
            "line 1: id .*: at most 128 characters, none of them control",
        ),
        (
            [{"prompt": "a", "id": 7}, {"prompt": "b"}, {"prompt": "c", "id": "7"}],
            r"line 3: id '7' was used before \(.*line 1\)",
        ),
        (
            [{"prompt": USER}],
            "line 1: the prompt is chat messages, but the model's tokenizer has no chat",
        ),
        ([{"prompt": ["hi"]}], "line 1: a chat message looks like"),
        ([b'{"prompt": "\\ud800"}'], "line 1: a column holds what JSON cannot carry"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_its_number(tmp_path, plain, rows, reason):
    path = jsonl(tmp_path, *rows)
    with pytest.raises(DataError, match=reason) as caught:
        load_prompts(path, settings(max_prompt_length=8), plain)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_a_chat_is_one_line(tmp_path, chat_model):
    tokenizer = load_tokenizer(chat_model)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        DataError, match="line 1: the chat template refuses the prompt: roles must alternate"
    ):
        load_prompts(jsonl(tmp_path, {"prompt": USER}), settings(), tokenizer)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[7].role.x }}"])
def test_a_template_with_a_bug_is_one_line(tmp_path, chat_model, template):
    tokenizer = load_tokenizer(chat_model)
    tokenizer.chat_template = template
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}]}))
    with pytest.raises(DataError, match="line 1: the chat template refuses the prompt: "):
        load_prompts(str(file), config.Data(path="x"), tokenizer)


def test_paths_that_lead_nowhere(tmp_path, plain):
    with pytest.raises(DataError, match=r"nowhere.jsonl: no such file"):
        load_prompts(str(tmp_path / "nowhere.jsonl"), settings(), plain)
    with pytest.raises(DataError, match=r"data/nowhere.jsonl: no such file"):  # looks like a hub id
        load_prompts("data/nowhere.jsonl", settings(), plain)
    with pytest.raises(DataError, match=r"is a directory"):
        load_prompts(str(tmp_path), settings(), plain)


def test_a_hub_data_set_that_cannot_be_loaded(plain):
    with pytest.raises(
        DataError, match=r"no/such.*(pip install 'lightrl\[data\]'|cannot be loaded)"
    ):
        load_prompts("no/such:train", settings(), plain)


def test_parquet_is_read_like_jsonl(tmp_path, chat):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    rows = [
        {"prompt": USER, "reward_model": {"ground_truth": "4"}, "extra_info": {"index": i}}
        for i in (3, 4)
    ]
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    prompts = load_prompts(str(path), settings(), chat)
    assert [p.id for p in prompts] == ["3", "4"]
    assert [p.row for p in prompts] == rows
    with pytest.raises(DataError, match="row 1: the prompt has 19 tokens"):
        load_prompts(str(path), settings(max_prompt_length=8), chat)


def test_a_broken_parquet_file_or_a_missing_library_is_one_line(tmp_path, plain):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(
        DataError, match=r"train.parquet: (not a readable parquet file|.*lightrl\[data\])"
    ):
        load_prompts(str(path), settings(), plain)


# The cursor


def test_every_epoch_holds_every_prompt_once_in_an_order_of_its_own():
    cursor = PromptCursor(10, seed=3, shuffle=True)
    drawn = [pair for _ in range(10) for pair in cursor.draw(3)]  # draws do not divide the epoch
    assert [epoch for epoch, _ in drawn] == [0] * 10 + [1] * 10 + [2] * 10
    orders = [[i for e, i in drawn if e == epoch] for epoch in range(3)]
    assert all(Counter(order) == Counter(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert PromptCursor(10, seed=3, shuffle=True).draw(30) == drawn
    assert PromptCursor(10, seed=4, shuffle=True).draw(30) != drawn


def test_a_draw_may_span_epochs():
    assert PromptCursor(2, seed=0, shuffle=False).draw(5) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
    ]


@pytest.mark.parametrize("num_drawn", range(12))
def test_a_restored_cursor_goes_on_where_the_other_stopped(num_drawn):
    cursor = PromptCursor(4, seed=1, shuffle=True)
    cursor.draw(num_drawn)
    restored = PromptCursor(4, seed=1, shuffle=True)
    restored.restore(json.loads(json.dumps(cursor.state())))
    assert restored.draw(9) == cursor.draw(9)


def test_a_cursor_of_another_data_set_is_refused():
    with pytest.raises(DataError, match="does not fit a data set of 4 prompts"):
        PromptCursor(4, seed=0, shuffle=True).restore({"epoch": 0, "position": 5})


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
