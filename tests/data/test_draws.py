"""Prompts of several sets in their order: ahead of time, again after a restart, without those that
are too long."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.schema import Data
from lightrl.data.draws import AHEAD, Draws
from lightrl.data.prompts import PromptSet
from lightrl.errors import DataError
from tests.data.conftest import jsonl

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write(folder: Path, name: str, num: int, *, has_ids: bool = True) -> str:
    """Prompts of 1 to 7 letters, in turn."""
    folder.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = [
        {"prompt": LETTERS[i % 26] * (1 + i % 7), "answer": i, "name": name} for i in range(num)
    ]
    if has_ids:
        rows = [row | {"id": i} for i, row in enumerate(rows)]
    file = Path(jsonl(folder, *rows))
    return str(file.rename(folder / f"{name}.jsonl"))


@pytest.fixture
def open_draws(plain) -> Iterator[Any]:
    opened: list[Draws] = []

    def begin(data: Data, num_drawn: int = 0, seed: int = 3, *, starts: bool = True) -> Draws:
        sets = [PromptSet(one, data, plain) for one in data.all_sets]
        draws = Draws(sets, seed, shuffle=data.shuffle, batch=8)
        opened.append(draws)
        draws.skip(num_drawn)
        if starts:
            draws.start()
        return draws

    yield begin
    for draws in opened:
        draws.close()


def drawn(draws: Draws, *counts: int) -> list[tuple[int, str]]:
    async def draw() -> list[tuple[int, str]]:
        return [(epoch, p.id) for count in counts for epoch, p in await draws.draw(count)]

    return asyncio.run(draw())


@pytest.fixture
def mixed(tmp_path) -> Data:
    return Data.model_validate(
        {
            "sets": [
                {"path": write(tmp_path, "sums", 40), "weight": 3},
                {"path": write(tmp_path, "words", 70, has_ids=False), "weight": 1},
            ],
            "max_prompt_length": 8,
        }
    )


def test_every_prompt_comes_once_in_an_epoch_of_its_set_and_sets_by_their_weights(
    open_draws, mixed
):
    pairs = drawn(open_draws(mixed), 1, 39, 200, 60)
    assert len(set(pairs)) == 300
    by_set = Counter(name.partition("/")[0] for _, name in pairs)
    assert by_set["sums"] == pytest.approx(225, abs=4)
    for name, size in (("sums", 40), ("words", 70)):
        own = [(epoch, p) for epoch, p in pairs if p.startswith(name)]
        assert [epoch for epoch, _ in own] == [k // size for k in range(len(own))]
        assert len({p for _, p in own[:size]}) == size


def test_sets_without_weights_count_by_their_size(open_draws, tmp_path):
    paths = [write(tmp_path, "sums", 30), write(tmp_path, "words", 90)]
    data = Data.model_validate({"sets": [{"path": path} for path in paths]})
    pairs = drawn(open_draws(data), 120)
    assert Counter(p.partition("/")[0] for _, p in pairs)["sums"] == pytest.approx(30, abs=3)


def test_it_does_not_matter_how_many_are_drawn_at_once_but_the_seed_does(open_draws, mixed):
    assert drawn(open_draws(mixed), 7, 50, 300) == drawn(
        open_draws(mixed), *(3 for _ in range(119))
    )
    assert drawn(open_draws(mixed), 50) != drawn(open_draws(mixed, seed=4), 50)


def test_sets_of_one_size_have_orders_of_their_own(open_draws, tmp_path):
    paths = [write(tmp_path, "sums", 30), write(tmp_path, "words", 30)]
    data = Data.model_validate({"sets": [{"path": path} for path in paths]})
    first, second = (
        [p.partition("/")[2] for _, p in drawn(open_draws(data), 60) if p.startswith(name)]
        for name in ("sums", "words")
    )
    assert first[:20] != second[:20]


def test_the_first_set_is_drawn_as_if_it_were_alone(open_draws, mixed):
    alone = Data(path=mixed.sets[0].path)
    of_first = [p for p in drawn(open_draws(mixed), 60) if p[1].startswith("sums/")]
    assert of_first == drawn(open_draws(alone), len(of_first))


@pytest.mark.parametrize("too_long", ["error", "drop"])
@pytest.mark.parametrize("num_drawn", [0, 1, 33, 150, 2 * AHEAD + 5])
def test_it_goes_on_from_a_count_and_knows_what_was_drawn_before(
    open_draws, mixed, too_long, num_drawn
):
    most = 8 if too_long == "error" else 5
    data = mixed.model_copy(update={"too_long": too_long, "max_prompt_length": most})
    whole = drawn(open_draws(data), num_drawn, 100)
    later = open_draws(data, num_drawn)
    assert drawn(later, 100) == whole[num_drawn:]
    other = open_draws(data, num_drawn)
    for _, prompt in whole[max(0, num_drawn - 100) : num_drawn]:
        found = asyncio.run(other.get(prompt))
        assert found.id == prompt
        assert found.row["name"] == prompt.partition("/")[0]


def test_prompts_that_are_too_long_are_never_drawn_and_the_others_once_an_epoch(
    open_draws, tmp_path
):
    path = write(tmp_path, "sums", 70)
    data = Data(path=path, max_prompt_length=3, too_long="drop")
    pairs = drawn(open_draws(data), 45)
    assert len(set(pairs)) == 45
    assert [epoch for epoch, _ in pairs] == [0] * 30 + [1] * 15
    assert {int(p.partition("/")[2]) % 7 for _, p in pairs} == {0, 1, 2}


def test_where_all_are_too_long_that_is_said(open_draws, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "abcdef"}) + "\n")
    data = Data(path=str(tmp_path / "long.jsonl"), max_prompt_length=3, too_long="drop")
    with pytest.raises(DataError, match=r"every prompt \(1\) has more"):
        drawn(open_draws(data), 1)


def test_a_row_that_is_wrong_is_said_when_it_is_drawn(open_draws, tmp_path):
    path = jsonl(tmp_path, {"prompt": "ab"}, {"prompt": 5})
    with pytest.raises(DataError, match=r"line 2: 'prompt' is int"):
        drawn(open_draws(Data(path=path)), 2)


def test_the_rows_of_what_was_drawn_are_there(open_draws, mixed):
    draws = open_draws(mixed)
    for _, prompt in asyncio.run(draws.draw(30)):
        full = asyncio.run(draws.get(prompt.id))
        assert draws.cached(prompt.id) is full
        assert (full.id, full.text, full.token_ids) == (prompt.id, prompt.text, prompt.token_ids)
        assert full.row["prompt"] == full.text


def test_another_process_that_asks_for_a_prompt_of_other_data_is_told(open_draws, mixed):
    draws = open_draws(mixed, 100)
    with pytest.raises(DataError, match=r"words.jsonl: has no prompt words/unknown"):
        asyncio.run(draws.get("words/unknown"))


def test_an_event_loop_goes_on_while_prompts_are_read(open_draws, mixed):
    """A thread that is stuck in a file holds up the draw that needs it, and nobody else."""
    *before, first, second, third = (name for _, name in drawn(open_draws(mixed), 43))
    draws = open_draws(mixed, 40, starts=False)
    is_read = threading.Event()
    draws._thread.submit(is_read.wait, 60.0)
    draws.start()

    async def scenario() -> list[str]:
        waiting = [
            asyncio.ensure_future(draws.draw(3)),
            asyncio.ensure_future(draws.get(before[-5])),
        ]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        is_read.set()
        prompts, one = await asyncio.gather(*waiting)
        return [*(p.id for _, p in prompts), one.id]

    assert asyncio.run(scenario()) == [first, second, third, before[-5]]
    assert draws.waited_s > 0
