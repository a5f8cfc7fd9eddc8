"""Whatever happens to the bytes: reading ends in a line at most, and gives a prefix of what was
written."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from lightrl.core.log_entries import (
    LogEntry,
    RoundOpened,
    RoundSnapshot,
    SnapshotBegan,
    TokensTaken,
)
from lightrl.errors import JournalError
from lightrl.journal import disk
from lightrl.journal.codec import LOG
from lightrl.journal.read import newest, read_segment, rewind, segments, shards, trim
from lightrl.system import framing
from tests.journal.conftest import small_story, write


def read(path: Path) -> tuple[list[LogEntry], str]:
    reading = read_segment(path, LOG)
    facts = list(reading)
    return facts, str(reading.damage) if reading.damage is not None else ""


def overwrite(path: Path, data: bytes) -> None:
    """In place: to truncate a file and to write it anew costs milliseconds."""
    with open(path, "r+b", buffering=0) as file:
        file.write(data)


def one(folder: Path) -> Path:
    [segment] = segments(folder)
    return segment.path


def test_what_was_written_is_read(journal):
    facts, damage = read(one(journal))
    assert facts == [SnapshotBegan(step=2), RoundOpened(2, "plain"), *small_story()]
    assert damage == ""


def test_every_truncation_gives_a_prefix_and_one_line(journal):
    path, (whole, _) = one(journal), read(one(journal))
    data = path.read_bytes()
    ends = [disk.HEADER_BYTES]
    for fact in whole:
        ends.append(ends[-1] + framing.size(LOG.encode(fact)))
    assert ends[-1] == len(data)
    for length in range(len(data) - 1, -1, -1):
        os.truncate(path, length)
        facts, damage = read(path)
        assert facts == whole[: sum(end <= length for end in ends[1:])], length
        if length not in ends[2:]:
            assert damage.count("\n") == 0, length
            assert str(path) in damage, length


def test_thousands_of_flipped_bits_give_a_prefix_and_one_line(journal):
    path, (whole, _) = one(journal), read(one(journal))
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 3):
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << bit % 8
        overwrite(path, spoilt)
        facts, damage = read(path)
        assert len(facts) < len(whole), bit
        assert facts == whole[: len(facts)], bit
        assert damage, bit
        assert "\n" not in damage, bit


def test_random_bytes_written_over_any_part_give_a_prefix(journal):
    rng = random.Random(5)
    path, (whole, _) = one(journal), read(one(journal))
    data = path.read_bytes()
    for _ in range(2000):
        at, count = rng.randrange(len(data)), rng.randrange(1, 64)
        noise = rng.choice([rng.randbytes(count), bytes(count)])
        overwrite(path, (data[:at] + noise + data[at + count :])[: len(data)])
        facts, _ = read(path)
        assert facts == whole[: len(facts)]


def test_a_tail_of_zeros_as_some_file_systems_leave_it_is_cut_off(journal):
    path, (whole, _) = one(journal), read(one(journal))
    size = path.stat().st_size
    os.truncate(path, size + 4096)
    facts, damage = read(path)
    assert facts == whole
    assert "4096 bytes" in damage
    assert f"from byte {size} on" in damage


def test_a_length_larger_than_the_file_allocates_nothing(journal):
    path, (whole, _) = one(journal), read(one(journal))
    with open(path, "ab") as file:
        file.write(framing.HEAD.pack(0xFFFFFFFF, 0))
    assert read(path)[0] == whole


def test_a_folder_with_anything_else_in_it_is_read_all_the_same(journal):
    (journal / "notes.txt").write_text("hello")
    (journal / "00000009_step_1.log.damaged").write_text("?")
    (journal / "00000009_step_1.log.tmp").write_text("?")
    (journal / "00000009_step_x.log").mkdir()
    assert newest(journal, LOG)[0].number == 1


def test_no_folder_and_an_empty_one_are_no_journal(tmp_path):
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(JournalError, match="there is no journal"):
            newest(folder, LOG)


def test_a_segment_that_is_a_folder_or_cannot_be_opened_is_damage(tmp_path):
    (tmp_path / "00000001_step_0.log").mkdir()
    with pytest.raises(JournalError, match="cannot be read"):
        newest(tmp_path, LOG)


def test_another_format_and_another_program_are_named(journal):
    path = one(journal)
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\x09" + data[9:])
    with pytest.raises(JournalError, match="format 9"):
        newest(journal, LOG)
    path.write_bytes(b"#!/bin/sh\n" + data)
    with pytest.raises(JournalError, match="no segment of a journal"):
        newest(journal, LOG)


def test_a_fact_that_this_version_does_not_know_ends_what_is_read(journal):
    """Its checksum is right, but what follows may depend on it."""
    path, (whole, _) = one(journal), read(one(journal))
    frame = LOG.encode(RoundOpened(7, "plain")).replace(b"RoundOpened", b"RoundClosed")
    with open(path, "ab") as file:
        file.write(b"".join(framing.framed([frame, LOG.encode(RoundOpened(8, "plain"))])))
    facts, damage = read(path)
    assert facts == whole
    assert "RoundClosed" in damage


# Which segment a run goes on from


@pytest.fixture
def two(tmp_path: Path) -> Path:
    folder = tmp_path / "journal"
    stood = [SnapshotBegan(step=3), RoundSnapshot(3, "plain", 0, (), False)]
    asyncio.run(
        write(
            folder,
            (2, [SnapshotBegan(step=2)], small_story()),
            (3, stood, [RoundOpened(3, "plain")]),
        )
    )
    return folder


def test_the_newest_segment_with_a_whole_base_is_the_one_to_go_on_from(two):
    old, new = segments(two)
    segment, facts, lines = newest(two, LOG)
    assert (segment, facts[0], lines) == (new, SnapshotBegan(step=3), [])
    data = new.path.read_bytes()
    base_end = len(data) - framing.size(LOG.encode(RoundOpened(3, "plain")))
    for length in range(len(data) - 1, -1, -1):
        os.truncate(new.path, length)
        segment, facts, lines = newest(two, LOG)
        assert segment == (new if length >= base_end else old), length
        assert len(lines) == (2 if length < base_end else 1 if length > base_end else 0), length
        assert all(line.count("\n") == 0 for line in lines)
        assert facts[0] == SnapshotBegan(step=3 if segment == new else 2)


def test_what_is_newer_than_the_segment_in_use_is_moved_aside(two):
    old, new = segments(two)
    os.truncate(new.path, disk.HEADER_BYTES + 3)
    segment, _, _ = newest(two, LOG)
    assert trim(two, segment) == [f"{new.path.name}.damaged"]
    assert segments(two) == [old]
    assert (two / f"{new.path.name}.damaged").exists()
    asyncio.run(write(two, (2, [SnapshotBegan(step=2)], [])))
    assert [s.number for s in segments(two)] == [1, 3]  # a number is never given twice


def test_nothing_whole_at_all_is_one_line(two):
    for segment in segments(two):
        os.truncate(segment.path, disk.HEADER_BYTES + 3)
    with pytest.raises(JournalError) as e:
        newest(two, LOG)
    assert "\n" not in str(e.value)
    with pytest.raises(JournalError):
        shards(two, LOG, 2)
    with pytest.raises(JournalError):
        rewind(two, LOG, 2)


# Back to a checkpoint


def test_rewind_goes_back_to_the_beginning_of_a_step(tmp_path):
    folder = tmp_path / "journal"
    again = [SnapshotBegan(step=2), RoundSnapshot(2, "plain", 0, (), False)]
    parts = [
        (1, [SnapshotBegan(step=1)], []),
        (2, [SnapshotBegan(step=2)], small_story()),
        (2, again, []),
        (3, again, []),
    ]
    asyncio.run(write(folder, *parts))  # type: ignore[arg-type]
    names = [s.path.name for s in segments(folder)]
    segment = rewind(folder, LOG, 2)
    assert newest(folder, LOG) == (segment, [SnapshotBegan(step=2)], [])
    assert [s.step for s in segments(folder)] == [1, 2]
    assert sorted(p.name for p in folder.glob("*.rewound")) == [
        f"{name}.rewound" for name in names[1:]
    ]
    assert rewind(folder, LOG, 2) > segment  # may be done twice
    asyncio.run(write(folder, (2, [SnapshotBegan(step=2)], [])))
    assert len(segments(folder)) == 3


def test_rewind_takes_a_later_segment_of_the_step_if_the_first_is_damaged(two):
    asyncio.run(write(two, (3, [SnapshotBegan(step=3, num_drawn=9)], [])))
    os.truncate(segments(two)[1].path, disk.HEADER_BYTES + 3)
    rewind(two, LOG, 3)
    assert newest(two, LOG)[1] == [SnapshotBegan(step=3, num_drawn=9)]


def test_rewind_says_how_far_the_journal_reaches(two):
    with pytest.raises(JournalError, match=r"no segment begins at step 7 \(only at 2, 3\)"):
        rewind(two, LOG, 7)
    assert len(segments(two)) == 2


def test_tokens_survive_the_way_to_the_disk_bit_for_bit(journal):
    facts, _ = read(one(journal))
    assert [f for f in facts if isinstance(f, TokensTaken)] == [
        f for f in small_story() if isinstance(f, TokensTaken)
    ]
