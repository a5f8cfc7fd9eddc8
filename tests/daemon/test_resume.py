"""A coordinator that goes on from a journal, in the shell: what it finds there, and what it does at
once."""

import asyncio
import json
from pathlib import Path

import pytest

from lightrl.coordinator.journaling import FOLDER
from lightrl.core.log_entries import PromptsDrawn, RoundOpened
from lightrl.core.state import RunState
from lightrl.errors import DataError
from lightrl.journal.disk import segments
from lightrl.journal.read import LOG, read_segment
from lightrl.journal.write import JournalWriter
from lightrl.transport.zap import AUTHENTICATOR
from lightrl.wire import from_json
from tests.daemon.test_runs import SLOW, busy, require_exact
from tests.support.daemons import DEADLINE_S, QUICKSTART, Running, ScriptedTrainer, a_run

pytestmark = pytest.mark.usefixtures("warm_daemons")


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
    # each counted once, though some came before and some after
    assert summary["rollout_tokens"] == 16 * 240


STEPS = {"train": {"steps": 5, "prompts_per_step": 4}}


def steps_in_journal(run: Running) -> set[int]:
    return {s.step for s in segments(run.config.run_dir / FOLDER)}


async def to_the_second_checkpoint(run: Running, kept: dict[int, int]) -> ScriptedTrainer:
    """The trainer stops before it publishes version 5; returns it."""
    run.trainer.kept, run.trainer.holds_at = kept, 4
    await run.add_rollout("a")
    await run.until(lambda s: s.step >= 4)
    async with asyncio.timeout(DEADLINE_S):
        while min(steps_in_journal(run)) < kept[4]:  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(0.02)
    return run.trainer


def test_a_trainer_may_fall_back_to_the_oldest_checkpoint_that_is_kept(tmp_path: Path):
    """Of the checkpoints of steps 2 and 4 the newer one is damaged: it gets the very same shards
    again."""

    async def scenario():
        async with a_run(tmp_path, **STEPS) as run:
            first = await to_the_second_checkpoint(run, {2: 0, 4: 2})
            assert min(steps_in_journal(run)) == 2
            await run.replace_trainer(begins_at=2)
            await run.until_finished()
            assert run.head.succeeded
            again = [s for s in run.trainer.shards if s.step < 4]
            assert {s.step for s in again} == {2, 3}
            for step in (2, 3):
                before = [g for s in first.shards if s.step == step for g in s.groups]
                assert [g for s in again if s.step == step for g in s.groups] == before

    asyncio.run(scenario())


@pytest.mark.e2e
def test_a_trainer_that_falls_behind_the_journal_ends_the_run_with_one_line(tmp_path: Path):
    """With `checkpoint.keep_last` = 1 there is none before the newest."""

    async def scenario():
        async with a_run(tmp_path, **STEPS) as run:
            await to_the_second_checkpoint(run, {2: 2, 4: 4})
            await run.replace_trainer(begins_at=0)
            await run.until_finished()
            assert run.head._core.state is RunState.FAILED
            texts = [text for _, text in run.head._records._events]
            [line] = [text for text in texts if text.startswith("run failed")]
            assert "step 0 cannot be trained again: the journal begins at step 4" in line
            assert line.count("cannot be trained") == 1

    asyncio.run(scenario())


@pytest.mark.e2e
def test_journal_that_ends_between_a_question_and_its_answer_is_gone_on_from(tmp_path: Path):
    """The newest thing known is that a round was opened, and not yet which prompts it got."""

    async def scenario():
        await interrupted(tmp_path, 1)
        folder = tmp_path / "test" / FOLDER
        newest = segments(folder)[-1]
        facts = list(read_segment(newest.path, LOG))
        opened = next(i for i, fact in enumerate(facts) if isinstance(fact, RoundOpened))
        assert isinstance(facts[opened + 1], PromptsDrawn)
        writer = JournalWriter(folder, LOG, 5, print)
        writer.begin(0, facts[:opened])
        writer.append(facts[opened])
        await writer.close()
        await finish(tmp_path)

    asyncio.run(scenario())


def backwards(lines: list[str]) -> list[str]:
    return lines[::-1]


def with_another_answer(lines: list[str]) -> list[str]:
    first = json.loads(lines[0])
    return [json.dumps({**first, "answer": "other"}) + "\n", *lines[1:]]


@pytest.mark.e2e
@pytest.mark.parametrize("change", [backwards, with_another_answer])
def test_other_data_is_refused_in_one_line(tmp_path: Path, change):
    async def scenario():
        await interrupted(tmp_path, 1)
        shuffled = tmp_path / "other.jsonl"
        lines = (QUICKSTART / "train.jsonl").read_text().splitlines(True)
        shuffled.write_text("".join(change(lines)))
        other = {"data": {"path": str(shuffled)}}
        with pytest.raises(DataError, match="the data differ from those the run started with"):
            async with a_run(tmp_path, resume=True, **SLOW, **other):
                pass
        assert AUTHENTICATOR._sock is None  # nobody listens any more

    asyncio.run(scenario())
