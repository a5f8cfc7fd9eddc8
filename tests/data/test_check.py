"""Every row is looked at: of small sets at once, of large ones in a process of its own."""

import asyncio
from pathlib import Path

import pytest

from lightrl.config.schema import Config
from lightrl.data.check import SMALL, check_large, check_small
from lightrl.data.prompts import PromptSet
from lightrl.errors import DataError
from tests.data.conftest import jsonl, settings

GOOD, LONG, BAD = {"prompt": "ab"}, {"prompt": "a" * 9}, {"prompt": 5}


def config_of(plain_model: str, folder: Path, *sets: tuple[str, list[dict[str, object]]]) -> Config:
    tables = []
    for name, rows in sets:
        file = Path(jsonl(folder, *rows))
        tables.append({"path": str(file.rename(folder / f"{name}.jsonl"))})
    data = {"sets": tables, "max_prompt_length": 8, "too_long": "drop"}
    return Config.model_validate({"model": {"path": plain_model}, "data": data})


def test_a_small_set_is_looked_at_at_once_and_a_large_one_is_not(tmp_path, plain):
    rows = [GOOD, LONG, BAD]
    small = PromptSet(settings(path=jsonl(tmp_path, *rows)).all_sets[0], settings(), plain)
    with pytest.raises(DataError, match="line 3: 'prompt' is int"):
        check_small([small])
    large = jsonl(tmp_path, *([GOOD] * SMALL), BAD)
    one = PromptSet(settings(path=large).all_sets[0], settings(), plain)
    assert check_small([one]) == [one]


def test_a_process_of_its_own_says_what_is_left_out_and_what_is_wrong(plain_model, tmp_path):
    config = config_of(
        plain_model,
        tmp_path,
        ("good", [GOOD, LONG, GOOD]),
        ("bad", [GOOD, LONG, BAD]),
        ("skipped", [BAD]),
        ("long", [LONG]),
    )
    lines: list[str] = []

    async def check(*names: str) -> None:
        async with asyncio.timeout(60):
            await check_large(config, names, 100, tmp_path / "data.log", lines.append)

    asyncio.run(check("good"))
    assert lines == [
        "data: good: 1 of 3 prompts have more than data.max_prompt_length = 8 tokens and are left "
        "out; the longest has 9"
    ]
    with pytest.raises(DataError, match=r"bad.jsonl, line 3: 'prompt' is int, expected text"):
        asyncio.run(check("good", "bad"))
    with pytest.raises(DataError, match=r"long.jsonl: every prompt \(1\) has more than"):
        asyncio.run(check("long"))


def test_a_process_that_is_killed_does_not_end_the_run(plain_model, tmp_path):
    """It looks at rows before their turn; that is all that is lost."""
    config = config_of(plain_model, tmp_path, ("good", [GOOD]))
    lines: list[str] = []

    async def check() -> None:
        checking = asyncio.ensure_future(
            check_large(
                config, ["good", "nobody has this one"], 100, tmp_path / "log", lines.append
            )
        )
        async with asyncio.timeout(60):
            await checking

    asyncio.run(check())
    [line] = lines
    assert line.startswith("WARNING: rows are no longer checked ahead of their turn: data (pid")
