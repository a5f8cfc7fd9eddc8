"""The power fails at any moment of the life of a journal, a config and a key: what was promised is
there."""

import asyncio
from pathlib import Path
from typing import Any

from lightrl.config.run_file import load_config, parse_config
from lightrl.core.log_entries import LogEntry, RoundOpened, SnapshotBegan
from lightrl.errors import ConfigError, JournalError
from lightrl.journal.read import LOG, newest, rewind, segments
from lightrl.journal.write import JournalWriter
from lightrl.keys import read_key, write_key
from lightrl.launch.folder import create_run_dir, rewrite_config
from tests.journal.conftest import within
from tests.support.power import Recorder, require_every_sync


async def flushed(writer: JournalWriter[LogEntry]) -> None:
    done = asyncio.Event()
    writer.after_flush(done.set)
    await done.wait()


def rounds_in(folder: Path) -> set[int]:
    """All that is said in the newest segment; none if there is no journal."""
    try:
        facts = newest(folder, LOG)[1]
    except JournalError:
        return set()
    return {fact.step for fact in facts if isinstance(fact, RoundOpened)}


def test_what_a_journal_says_is_durable_survives(tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    recorder = Recorder(run_dir)

    async def life() -> None:
        writer = JournalWriter(run_dir / "journal", LOG, 1, print)
        known: list[LogEntry] = []
        for step in (0, 1):
            writer.begin(step, [SnapshotBegan(step=step), *known])
            writer.drop_before(step)
            await flushed(writer)
            recorder.promise(set())
            for number in (2 * step, 2 * step + 1):
                known.append(RoundOpened(number, "plain"))
                writer.append(known[-1])
                await flushed(writer)
                recorder.promise({number})
        writer.begin(2, [SnapshotBegan(step=2), *known])
        writer.drop_before(2)
        await writer.close()

    def recovers(place: Path, promises: list[Any]) -> None:
        assert rounds_in(place / "journal") >= set().union(*promises)
        assert not promises or segments(place / "journal")

    with recorder:
        within(life)
    require_every_sync(recorder, tmp_path / "found", recovers)


def test_a_journal_that_is_cut_back_is_there_before_or_after(tmp_path: Path):
    folder = tmp_path / "journal"

    async def life() -> None:
        writer = JournalWriter(folder, LOG, 1, print)
        for step in (0, 1, 2):
            writer.begin(step, [SnapshotBegan(step=step)])
            writer.append(RoundOpened(step, "plain"))
        await writer.close()

    within(life)
    with Recorder(tmp_path) as recorder:
        rewind(folder, LOG, 1)
        recorder.promise("cut back")

    def recovers(place: Path, promises: list[Any]) -> None:
        found = newest(place / "journal", LOG)[1]
        assert found == [SnapshotBegan(step=1)] or (
            not promises and found[0] == SnapshotBegan(step=2)
        )

    require_every_sync(recorder, tmp_path.with_name(f"{tmp_path.name}-found"), recovers)


def test_config_and_key_of_a_run_survive(tmp_path: Path):
    tree = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "run": {"dir": str(tmp_path / "runs"), "name": "a"},
    }
    config = parse_config(tree)
    after = config.model_copy(update={"train": config.train.model_copy(update={"steps": 7})})
    with Recorder(tmp_path) as recorder:
        create_run_dir(config)
        recorder.promise(config)
        rewrite_config(after)
        recorder.promise(after)

    def recovers(place: Path, promises: list[Any]) -> None:
        if not promises:
            return
        steps = load_config(place / "runs" / "a" / "config.toml").train.steps
        assert steps in ({config.train.steps, 7} if len(promises) == 1 else {7})
        try:
            assert len(read_key(place / "runs" / "a" / "key")) == 64
        except ConfigError as e:
            raise AssertionError(str(e)) from None

    found = tmp_path.with_name(f"{tmp_path.name}-found")
    # the key's comes after it
    first = "files.sync < files.write_whole < folder.create_run_dir: runs/a"
    # they follow from the key
    written = "keys.write_key < keys.write_keys < folder.create_run_dir: runs/a"
    derived = [f"{written}/join", f"{written}/environment"]
    require_every_sync(recorder, found, recovers, besides=[first, *derived])


def test_a_key_of_its_own_survives(tmp_path: Path):
    with Recorder(tmp_path) as recorder:
        recorder.promise(write_key(tmp_path / "key"))

    def recovers(place: Path, promises: list[Any]) -> None:
        assert not promises or [read_key(place / "key")] == promises

    require_every_sync(recorder, tmp_path.with_name(f"{tmp_path.name}-found"), recovers)
