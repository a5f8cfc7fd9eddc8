"""A coordinator that goes on from a journal, in the shell: what it finds there, and what it does at once."""

import asyncio
from pathlib import Path

import pytest

from lightrl.core.facts import PromptsDrawn, RoundOpened
from lightrl.errors import DataError
from lightrl.journal.disk import segments
from lightrl.journal.read import FACTS, read_segment
from lightrl.journal.write import JournalWriter
from lightrl.node.durable import FOLDER
from lightrl.wire import from_json

from .harness import QUICKSTART, a_run
from .test_runs import SLOW, busy, require_exact


async def interrupted(tmp_path: Path, min_tokens: int) -> None:
    """A run whose coordinator vanished in the middle of its step."""
    async with a_run(tmp_path, **SLOW) as run:
        await run.add_rollout("a")
        await run.until(lambda s: busy(s, "a") and s.rollout_tokens >= min_tokens)
        await run.silence()


async def finish(tmp_path: Path) -> None:
    async with a_run(tmp_path, resume=True, **SLOW) as run:
        await run.add_rollout("b")
        await run.until_finished()
        assert run.head.succeeded
        assert require_exact(run, tmp_path) == 16


def test_run_goes_on_from_its_tokens_and_loses_none(tmp_path: Path):
    async def scenario():
        await interrupted(tmp_path, 200)
        await finish(tmp_path)

    asyncio.run(scenario())
    summary = from_json((tmp_path / "test" / "summary.json").read_bytes(), dict)
    assert summary["trained_responses"] == 16
    assert summary["rollout_tokens"] == 16 * 240  # each counted once, though some came before and some after


def test_journal_that_ends_between_a_question_and_its_answer_is_gone_on_from(tmp_path: Path):
    """The newest thing known is that a round was opened, and not yet which prompts it got."""

    async def scenario():
        await interrupted(tmp_path, 1)
        folder = tmp_path / "test" / FOLDER
        newest = segments(folder)[-1]
        facts = list(read_segment(newest.path, FACTS))
        opened = next(i for i, fact in enumerate(facts) if isinstance(fact, RoundOpened))
        assert isinstance(facts[opened + 1], PromptsDrawn)
        writer = JournalWriter(folder, FACTS, 5, print)
        writer.begin(0, facts[:opened])
        writer.append(facts[opened])
        await writer.close()
        await finish(tmp_path)

    asyncio.run(scenario())


def test_other_data_is_refused_in_one_line(tmp_path: Path):
    async def scenario():
        await interrupted(tmp_path, 1)
        shuffled = tmp_path / "other.jsonl"
        shuffled.write_text("".join(reversed((QUICKSTART / "train.jsonl").read_text().splitlines(True))))
        other = {"data": {"path": str(shuffled)}}
        with pytest.raises(DataError, match="these are not the prompts that the run began with"):
            async with a_run(tmp_path, resume=True, **SLOW, **other):
                pass

    asyncio.run(scenario())
