"""Prompts: read from files or the hub, tokenised once, drawn in a seeded order.

Owns which data set layouts are understood and the stable ids of prompts. Every problem is one line
that names the file and the line. Must not import transformers, datasets or pyarrow before they are
needed: daemons import this module.
"""

import hashlib
import json
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl import config
from lightrl.errors import DataError
from lightrl.model_files import HUB_ID, first_line
from lightrl.wire import to_json

_TOKENIZE_BATCH = 1024
MAX_ID = 128  # characters
# What a chat template, which is code of the model's, can fail with beside jinja2's own errors.
TEMPLATE_ERRORS = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task. Example: Prompt("9f3a0c51d2e4b687", "39%3=", array("i", [5, 11, 12, 5, 13]),
    {...})."""

    # stable over runs and epochs
    id: str
    # chat template applied
    text: str
    # int32
    token_ids: "array[int]"
    # all columns
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Task:
    """A row on its way to a Prompt; `where` names file and line for errors."""

    where: str
    text: str
    is_chat: bool
    row: dict[str, Any]
    id: str


def load_prompts(path: str, data: config.Data, tokenizer: Any) -> list[Prompt]:
    """All prompts of a JSONL or parquet file or an HF data set ("org/name[:split]"), in file order.

    Raises DataError, one line with file and line number, for the first thing that is wrong.
    """
    seen: dict[str, str] = {}
    occurrences: Counter[str] = Counter()
    tasks = [
        _task(where, row, data, tokenizer, seen, occurrences) for where, row in _numbered_rows(path)
    ]
    if not tasks:
        raise DataError(f"{path}: holds no prompts")
    bos = _expected_bos(tokenizer)
    prompts: list[Prompt] = []
    for start in range(0, len(tasks), _TOKENIZE_BATCH):
        batch = tasks[start : start + _TOKENIZE_BATCH]
        encoded = tokenizer([t.text for t in batch], add_special_tokens=False)["input_ids"]
        for task, ids in zip(batch, encoded, strict=True):
            # a template writes its own
            if bos is not None and not task.is_chat and ids[:1] != [bos]:
                ids = [bos, *ids]
            if not ids:
                raise DataError(f"{task.where}: the prompt is empty")
            if len(ids) > data.max_prompt_length:
                raise DataError(
                    f"{task.where}: the prompt has {len(ids)} tokens, more than "
                    f"data.max_prompt_length = {data.max_prompt_length}"
                )
            prompts.append(Prompt(task.id, task.text, array("i", ids), task.row))
    return prompts


def answer_of(row: Mapping[str, Any], answer_key: str) -> Any:
    """The reference answer of a row, wherever its layout keeps it; None if there is none."""
    if answer_key in row:
        return row[answer_key]
    for column in ("reward_model", "reward_spec"):  # verl, SkyRL
        nested = row.get(column)
        if isinstance(nested, Mapping) and "ground_truth" in nested:
            return nested["ground_truth"]
    return next((row[k] for k in ("ground_truth", "solution") if k in row), None)


def _numbered_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file, line 3", row) of every row. Rows hold only what JSON can carry: they travel to
    workers."""
    file = Path(path)
    if file.is_dir():
        raise DataError(f"{path}: is a directory, not a JSONL or parquet file")
    if file.exists():
        rows = _parquet_rows(file) if file.suffix == ".parquet" else _jsonl_rows(file)
    elif HUB_ID.fullmatch(path.partition(":")[0]) and file.suffix not in (
        ".jsonl",
        ".json",
        ".parquet",
    ):
        rows = _hub_rows(path)
    else:
        raise DataError(f"{path}: no such file")
    for where, row in rows:
        try:
            to_json(row)
        except (TypeError, ValueError, RecursionError) as e:
            raise DataError(
                f"{where}: a column holds what JSON cannot carry: {first_line(e)}"
            ) from None
        yield where, row


def _jsonl_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{file}, line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as e:
                    raise DataError(f"{where}: not valid JSON: {first_line(e)}") from None
                if not isinstance(row, dict):
                    raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
                yield where, row
    except OSError as e:
        raise DataError(f"{file}: cannot be read: {e.strerror}") from None


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{file}: reading parquet needs pyarrow: pip install 'lightrl[data]'"
        ) from None
    try:
        table = pyarrow.parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as e:
        raise DataError(f"{file}: not a readable parquet file: {first_line(e)}") from None
    number = 0
    for batch in table.to_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row


def _hub_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    name, _, split = path.partition(":")
    split = split or "train"
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{path}: no such file; as an HF data set it needs datasets: pip install "
            "'lightrl[data]'"
        ) from None
    try:
        rows = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError) as e:
        raise DataError(f"{name}: split {split!r} cannot be loaded: {first_line(e)}") from None
    for number, row in enumerate(rows, 1):
        yield f"{name}:{split}, row {number}", dict(row)


def _task(
    where: str,
    row: dict[str, Any],
    data: config.Data,
    tokenizer: Any,
    seen: dict[str, str],
    occurrences: Counter[str],
) -> _Task:
    """`seen` (explicit id -> where) and `occurrences` (of contents) grow from row to row."""
    key = data.prompt_key
    if key == "prompt" and key not in row and "question" in row:  # GSM8K
        key = "question"
    if key not in row:
        raise DataError(
            f"{where}: no {key!r} (data.prompt_key); its keys are {', '.join(row) or 'none'}"
        )
    prompt = row[key]
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, list):
        text = _apply_chat_template(where, prompt, data.system_prompt, tokenizer)
    else:
        raise DataError(
            f"{where}: {key!r} is {type(prompt).__name__}, expected text or a list of chat messages"
        )

    explicit = _explicit_id(row)
    if explicit is None:
        content = hashlib.blake2b(
            json.dumps(prompt, sort_keys=True).encode(), digest_size=8
        ).hexdigest()
        occurrences[content] += 1
        number = occurrences[content]
        return _Task(
            where,
            text,
            isinstance(prompt, list),
            row,
            content if number == 1 else f"{content}-{number}",
        )
    _require_usable(where, explicit)
    if explicit in seen:
        raise DataError(f"{where}: id {explicit!r} was used before ({seen[explicit]})")
    seen[explicit] = where
    return _Task(where, text, isinstance(prompt, list), row, explicit)


def _explicit_id(row: Mapping[str, Any]) -> str | None:
    extra = row.get("extra_info")
    for value in (row.get("id"), extra.get("index") if isinstance(extra, Mapping) else None):
        if isinstance(value, str | int) and str(value):
            return str(value)
    return None


def _require_usable(where: str, name: str) -> None:
    """It becomes part of the names of responses, which are printed and travel in messages."""
    if len(name) > MAX_ID or not name.isprintable():
        raise DataError(
            f"{where}: id {name[:40]!r}: at most {MAX_ID} characters, none of them control "
            "characters"
        )


def _apply_chat_template(
    where: str, messages: list[Any], system_prompt: str, tokenizer: Any
) -> str:
    for m in messages:
        if not isinstance(m, dict) or not isinstance(m.get("role"), str) or "content" not in m:
            raise DataError(
                f"{where}: a chat message looks like {{'role': ..., 'content': ...}}, not "
                f"{str(m)[:80]!r}"
            )
    if not messages:
        raise DataError(f"{where}: the prompt is empty")
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where}: the prompt is chat messages, but the model's tokenizer has no chat template"
        )
    if system_prompt and all(m["role"] != "system" for m in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (TemplateError, *TEMPLATE_ERRORS) as e:
        raise DataError(f"{where}: the chat template refuses the prompt: {first_line(e)}") from None


def _expected_bos(tokenizer: Any) -> int | None:
    """The BOS id if the tokenizer starts plain text with it; nothing else it adds belongs in a
    prompt."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else None


# The order in which they are drawn


class PromptCursor:
    """Draws prompt numbers epoch after epoch, each in its own order that depends on (seed, epoch)
    only."""

    def __init__(self, num_prompts: int, seed: int, shuffle: bool) -> None:
        if num_prompts < 1:
            raise ValueError("a cursor needs at least one prompt")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0  # drawn from this epoch
        self._order = self._order_of(0)

    def draw(self, n: int) -> list[tuple[int, int]]:
        """The next n as (epoch, index into the prompts). An epoch holds every index once."""
        drawn: list[tuple[int, int]] = []
        while len(drawn) < n:
            if self._position == self._num_prompts:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            end = min(self._num_prompts, self._position + n - len(drawn))
            drawn += [(self._epoch, i) for i in self._order[self._position : end]]
            self._position = end
        return drawn

    def state(self) -> dict[str, int]:
        """What `restore` needs, given the same prompts, seed and shuffle."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, int]) -> None:
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position <= self._num_prompts:
            raise DataError(
                f"the data cursor {dict(state)} does not fit a data set of "
                f"{self._num_prompts} prompts"
            )
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._num_prompts))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
