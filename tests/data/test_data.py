"""Prompts from files in every known layout: their text, tokens and ids, and every error line."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import schema
from lightrl.config.data import DataSet, resolved
from lightrl.data.layouts import answer_of
from lightrl.data.prompts import PromptSet
from lightrl.data.prompts import load_prompts as load_set
from lightrl.errors import DataError
from lightrl.model_files import load_tokenizer
from tests.data.conftest import USER, ids, jsonl, load_prompts, prompt_set, settings

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


def test_a_template_that_writes_no_bos_gets_none(tmp_path, chat):
    chat.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    path = jsonl(tmp_path, {"prompt": USER})
    assert load_prompts(path, settings(), chat)[0].token_ids.tolist() == ids("hi")


def test_a_question_stands_for_a_prompt_only_where_none_is_named(tmp_path, plain):
    path = jsonl(tmp_path, {"question": "ab"})
    assert load_prompts(path, settings(), plain)[0].text == "ab"
    with pytest.raises(DataError, match=r"no 'task' \(data.prompt_key\); its keys are question"):
        load_prompts(path, settings(prompt_key="task"), plain)


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
    assert prompt.id == "train/17"
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


def test_of_several_answers_verls_is_taken_unless_another_column_is_named():
    row = {
        "answer": "so #### 4",
        "solution": "2+2=4",
        "ground_truth": "four",
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    assert answer_of(row, "answer") == "4"
    assert answer_of(row, "solution") == "2+2=4"
    assert answer_of({**row, "reward_model": {"style": "model"}}, "answer") == "so #### 4"
    del row["reward_model"], row["answer"]
    assert answer_of(row, "answer") == "four"


# Ids


def test_ids_are_the_rows_own_or_a_hash_of_the_prompt(tmp_path, plain):
    rows = [
        {"prompt": "ab", "id": "first"},
        {"prompt": "ab", "id": 5},
        {"prompt": "ab"},
        {"prompt": "cd"},
    ]
    prompts = load_prompts(jsonl(tmp_path, *rows, {"prompt": "ab"}), settings(), plain)
    assert [p.id for p in prompts[:2]] == ["train/first", "train/5"]
    assert prompts[4].id == f"{prompts[2].id}-2"
    assert len({p.id for p in prompts}) == 5
    # They depend on the prompt alone: not on its place, its other columns or the tokenizer.
    moved = load_prompts(
        jsonl(tmp_path, {"prompt": "cd", "answer": "x"}, {"prompt": "ab"}), settings(), plain
    )
    assert [p.id for p in moved] == [prompts[3].id, prompts[2].id]


def test_an_empty_id_is_none(tmp_path, plain):
    rows = ({"id": ""}, {"extra_info": {"index": ""}}, {})
    paths = (jsonl(tmp_path, {"prompt": "ab", **row}) for row in rows)
    assert len({load_prompts(path, settings(), plain)[0].id for path in paths}) == 1


def test_other_prompts_ids_or_answers_are_other_data(tmp_path, plain):
    """What a resumed run compares."""

    def digest(*rows):
        return prompt_set(jsonl(tmp_path, *rows), settings(), plain).digest

    rows = [{"prompt": "ab"}, {"prompt": "cd"}, {"prompt": "a", "id": 3}]
    known = digest(*rows)
    assert known == digest(*rows, b"")
    *same, values = digest(*(row | {"answer": "x"} for row in rows)).split()
    assert same == known.split()[:2]
    assert values != known.split()[2]
    assert known != digest({"prompt": "ab"}, {"prompt": "cc"}, rows[2])
    assert known != digest(*rows[:2], {"prompt": "a", "id": 4})
    assert known != digest(rows[1], rows[0], rows[2])


# Errors


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "contains no prompts"),
        ([{"prompt": "a"}, b"", b"{oops"], r"line 3: not valid JSON: Expecting property name"),
        ([b'{"prompt": '], r"line 1: not valid JSON: Expecting value at column 11$"),
        ([{"prompt": "a"}, b"\xff\xfe{}"], "line 2: not valid JSON"),
        ([{"prompt": "a"}, b'["a"]'], "line 2: expected a JSON object, found list"),
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
            [{"prompt": "a"}, {"prompt": []}],
            "line 2: the prompt is empty",
        ),
        (
            [{"prompt": USER}],
            "line 1: the prompt is chat messages, but the model's tokenizer has no chat",
        ),
        ([{"prompt": ["hi"]}], "line 1: a chat message looks like"),
        ([b'{"prompt": "\\ud800"}'], "line 1: column 'prompt' holds what JSON cannot carry"),
        (
            [b'{"prompt": "a", "id": "\\ud800", "extra_info": {"index": 1}}'],
            "line 1: the id holds what JSON cannot carry",
        ),
        ([b'{"prompt": "a", "id": "\\ud800"}'], "line 1: the id holds what JSON cannot carry"),
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
        load_prompts(str(file), schema.Data(path="x"), tokenizer)


def test_paths_that_lead_nowhere(tmp_path, plain):
    with pytest.raises(DataError, match=r"nowhere.jsonl: no such file"):
        load_prompts(str(tmp_path / "nowhere.jsonl"), settings(), plain)
    with pytest.raises(DataError, match=r"data/nowhere.jsonl: no such file"):  # looks like a hub id
        load_prompts("data/nowhere.jsonl", settings(), plain)
    with pytest.raises(
        DataError, match=r"holds no file of rows \(.jsonl, .parquet, .csv, .json\)$"
    ):
        load_prompts(str(tmp_path), settings(), plain)


def test_a_hub_data_set_that_cannot_be_loaded(plain):
    with pytest.raises(
        DataError,
        match=r"no/such.*(lightrl\[data\]|cannot be (loaded|reached))",
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
    assert [p.id for p in prompts] == ["train/3", "train/4"]
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


def test_ids_that_repeat_give_way_to_those_of_the_contents(tmp_path, plain):
    """Joined files of verl: the index of each begins at 0."""
    rows = [
        {"prompt": p, "extra_info": {"index": i}}
        for p, i in (("ab", 0), ("cd", 1), ("ef", 0), ("ab", 0), ("gh", "7"), ("ij", 7))
    ]
    path = jsonl(tmp_path, *rows)
    first, own, other, again, *sevens = [p.id for p in load_prompts(path, settings(), plain)]
    assert own == "train/1"
    assert again == f"{first}-2"
    assert not {"train/0", "train/7"} & {first, other, again, *sevens}
    assert len({first, other, again, *sevens}) == 5


def test_two_sets_may_have_the_same_ids_and_prompts(tmp_path, plain):
    path = jsonl(tmp_path, {"prompt": "ab", "id": 0}, {"prompt": "cd"})
    one, other = (load_prompts(path, settings(), plain, name=n) for n in ("one", "other"))
    assert one[0].id == "one/0"
    assert not {p.id for p in one} & {p.id for p in other}


# Chats


ANSWERED = [*USER, {"role": "assistant", "content": "so"}]


def test_an_answer_at_the_end_of_a_chat_is_refused_unless_it_is_to_be_continued(tmp_path, chat):
    path = jsonl(tmp_path, {"messages": USER}, {"messages": ANSWERED})
    with pytest.raises(
        DataError, match=r"line 2: the last message is the assistant's.*data\.continue_final = true"
    ):
        load_prompts(path, settings(prompt_key="messages"), chat)
    chat.chat_template = CONTINUED
    keys = {"prompt_key": "messages", "continue_final": True}
    texts = [p.text for p in load_prompts(path, settings(**keys), chat)]
    assert texts == ["<bos>user:hi|assistant:", "<bos>user:hi|assistant:so"]


CONTINUED = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{{ '|' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            [{"role": "system", "content": "be"}],
            "from 'system', so there is no user message to answer",
        ),
        ([{"role": "user", "content": ""}], "the prompt is empty"),
        ([{"role": "user", "content": None}], "the prompt is empty"),
        ([], "the prompt is empty"),
    ],
)
def test_a_chat_without_a_users_message_at_its_end_is_one_line(tmp_path, chat, messages, reason):
    path = jsonl(tmp_path, {"prompt": USER}, {"prompt": messages})
    with pytest.raises(DataError, match=f"train.jsonl, line 2: .*{reason}$"):
        load_prompts(path, settings(), chat)


def test_plain_text_becomes_a_chat_if_asked_to(tmp_path, chat, plain):
    path = jsonl(tmp_path, {"prompt": "hi"})
    keys = {"as_chat": True, "system_prompt": "be"}
    [prompt] = load_prompts(path, settings(**keys), chat)
    assert prompt.text == "<bos>system:be|user:hi|assistant:"
    with pytest.raises(DataError, match=r"line 1: .*\(data.as_chat\), but .* no chat template"):
        load_prompts(path, settings(**keys), plain)


def test_the_template_gets_what_the_config_says(tmp_path, chat):
    chat.chat_template = "{{ 'no ' if not enable_thinking }}{{ messages[0]['content'] }}"
    path = jsonl(tmp_path, {"prompt": USER})
    texts = [
        load_prompts(path, settings(chat_template_kwargs={"enable_thinking": t}), chat)[0].text
        for t in (True, False)
    ]
    assert texts == ["hi", "no hi"]


def test_what_another_message_of_the_file_has_is_not_shown_to_the_template(tmp_path, chat):
    """Parquet gives every struct all fields."""
    chat.chat_template = "{{ messages[0] | length }}{{ messages[0]['content'] }}"
    message = {"role": "user", "content": "hi", "tool_calls": None}
    assert load_prompts(jsonl(tmp_path, {"prompt": [message]}), settings(), chat)[0].text == "2hi"


# Too long, and not needed


def test_prompts_that_are_too_long_are_left_out_if_asked_to_and_counted(tmp_path, plain):
    path = jsonl(tmp_path, *({"prompt": "a" * n, "id": n} for n in (3, 12, 8, 9)))
    keys = {"max_prompt_length": 8, "too_long": "drop"}
    prompts = prompt_set(path, settings(**keys), plain)
    assert [p.id for p in prompts.scan()] == ["train/3", "train/8"]
    assert prompts.dropped_line() == (
        "data: train: 2 of 4 prompts have more than data.max_prompt_length = 8 tokens and are left "
        "out; the longest has 12"
    )
    none = jsonl(tmp_path, {"prompt": "a" * 9})
    with pytest.raises(
        DataError, match=r"every prompt \(1\) has more than data.max_prompt_length = 8"
    ):
        load_prompts(none, settings(**keys), plain)


def test_a_token_that_the_model_does_not_have_is_one_line(tmp_path, plain):
    [one] = resolved([DataSet(path=jsonl(tmp_path, {"prompt": "az"}))], settings())
    with pytest.raises(DataError, match=r"line 1: the tokenizer's token 28 is outside .* of 20$"):
        load_set(PromptSet(one, settings(), plain, vocabulary=20))
    with pytest.raises(DataError, match="token 28 is outside"):
        load_set(PromptSet(one, settings(), plain, vocabulary=28))
    load_set(PromptSet(one, settings(), plain, vocabulary=29))


def test_columns_that_json_cannot_carry_are_left_out_unless_they_are_needed(tmp_path, plain):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "ab", "image": {"bytes": b"\xff"}, "info": {"raw": b"\xff", "n": 1}}]
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    [prompt] = load_prompts(str(path), settings(), plain)
    assert prompt.row == {"prompt": "ab", "info": {"n": 1}}
    with pytest.raises(DataError, match=r"row 1: column 'image' holds what JSON cannot carry"):
        load_prompts(str(path), settings(answer_key="image"), plain)
    [prompt] = load_prompts(
        jsonl(tmp_path, b'{"prompt": "ab", "odd": "\\ud800", "n": 1}'), settings(), plain
    )
    assert prompt.row == {"prompt": "ab", "n": 1}


def test_binary_values_take_neither_the_id_nor_the_answer_beside_them_along(tmp_path, plain):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    extra = {"index": 7, "raw": b"x", "images": [{"bytes": b"x"}], "size": {"n": 1, "raw": b"x"}}
    row = {"prompt": "ab", "reward_model": {"ground_truth": "3", "raw": b"x"}, "extra_info": extra}
    path = str(tmp_path / "train.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    [prompt] = load_prompts(path, settings(), plain)
    assert prompt.id.endswith("/7")
    assert prompt.row["extra_info"] == {"index": 7, "size": {"n": 1}}
    assert answer_of(prompt.row, "answer") == "3"
    odd = b'{"prompt": "ab", "extra_info": {"index": 8, "odd": "\\ud800"}}'
    [prompt] = load_prompts(jsonl(tmp_path, odd), settings(), plain)
    assert (prompt.id[-2:], prompt.row["extra_info"]) == ("/8", {"index": 8})


def test_whether_any_row_has_an_answer_is_known_once_all_have_been_looked_at(tmp_path, plain):
    rows = [{"prompt": "ab"}] * 100 + [{"prompt": "ab", "answer": 1}]
    prompts = prompt_set(jsonl(tmp_path, *rows), settings(), plain)
    assert prompts.have_answers  # one could have
    load_set(prompts)
    assert (prompts.have_answers, prompts.portable) == (True, ("prompt", "answer"))
    none = prompt_set(jsonl(tmp_path, {"prompt": "ab", "answer": None}), settings(), plain)
    load_set(none)
    assert not none.have_answers


# NaN


NAN = float("nan")


def nan_file(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    if kind == "jsonl":
        return jsonl(folder, *rows)
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(rows)
    if kind == "parquet":
        parquet.write_table(table, folder / "train.parquet")
        return str(folder / "train.parquet")
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(table).save_to_disk(folder / "train")
    return str(folder / "train")


KINDS = pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])


@KINDS
def test_a_nan_is_a_value_that_is_missing(tmp_path, plain, kind):
    """As pandas has it; reward functions are told the same of every column."""
    rows = [
        {"prompt": "ab", "answer": NAN, "score": 1.5, "in": {"at": [NAN, 2.0]}},
        {"prompt": "ab", "answer": 4.0, "score": NAN, "in": {"at": []}},
    ]
    prompts = prompt_set(nan_file(tmp_path, kind, rows), settings(), plain)
    scanned = [prompt.row for prompt in prompts.scan()]
    expected = [
        {"prompt": "ab", "answer": None, "score": 1.5, "in": {"at": [None, 2.0]}},
        {"prompt": "ab", "answer": 4.0, "score": None, "in": {"at": []}},
    ]
    assert scanned == [prompt.row for prompt in prompts.prepare([0, 1])] == expected
    assert [answer_of(row, "answer") for row in scanned] == [None, 4.0]
    assert prompts.have_answers


@KINDS
def test_answers_that_are_all_nan_are_none(tmp_path, plain, kind):
    path = nan_file(tmp_path, kind, [{"prompt": "ab", "answer": NAN}] * 2)
    prompts = prompt_set(path, settings(), plain)
    load_set(prompts)
    assert not prompts.have_answers


@KINDS
def test_a_prompt_that_is_nan_or_null_is_said_to_be_missing(tmp_path, plain, kind):
    prompts = prompt_set(nan_file(tmp_path, kind, [{"prompt": NAN}]), settings(), plain)
    for read in (lambda: load_set(prompts), lambda: prompts.prepare([0])):
        with pytest.raises(
            DataError, match=r"1: 'prompt' is missing \(null or NaN\), expected text"
        ):
            read()
    with pytest.raises(DataError, match=r"1: 'prompt' is missing \(null or NaN\), expected text"):
        load_prompts(jsonl(tmp_path, {"prompt": None}), settings(), plain)


@KINDS
def test_chats_that_differ_in_a_nan_and_a_null_are_the_same_prompt(tmp_path, chat, kind):
    chats = [[{**USER[0], "weight": weight}] for weight in (NAN, None, 1.0)]
    path = nan_file(tmp_path, kind, [{"prompt": messages} for messages in chats])
    prompts = prompt_set(path, settings(), chat)
    first, second, third = [p.id for p in prompts.scan()]
    assert second == f"{first}-2"
    assert third not in (first, f"{first}-3")
    assert [p.id for p in prompts.prepare([0, 1, 2])] == [first, second, third]


def test_infinity_in_a_line_with_a_nan_is_still_a_number(tmp_path, plain):
    path = jsonl(tmp_path, b'{"prompt": "ab", "a": NaN, "b": -Infinity, "c": "NaN"}')
    row = prompt_set(path, settings(), plain).rows.read(0)
    assert row == {"prompt": "ab", "a": None, "b": float("-inf"), "c": "NaN"}
