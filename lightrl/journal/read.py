"""Read the journal of a stopped run, and find damage.

Chooses segments, cuts them and moves them aside. Any content of the files leads to records, to
lines that report losses, or to a JournalError.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from zlib import crc32

from lightrl.core.log_entries import (
    LogEntry,
    ShardSent,
    ShellNote,
    SnapshotBegan,
    SnapshotEnded,
    VersionPublished,
)
from lightrl.errors import JournalError, ProtocolError
from lightrl.journal import disk
from lightrl.journal.codec import LOG, LogCodec
from lightrl.journal.disk import Segment, segments
from lightrl.journal.merge import merge
from lightrl.messages.training import TrainShard
from lightrl.system import framing
from lightrl.wire import MAX_FRAME_BYTES, Codec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Damage:
    """The unreadable end of a segment. Example: Damage(path, 8412, 77, 1, "a record is cut
    off")."""

    path: Path
    offset: int
    bytes_lost: int
    # estimated
    records_lost: int
    reason: str

    def __str__(self) -> str:
        lost = (
            f"{self.bytes_lost} bytes (about {self.records_lost} records) from byte "
            f"{self.offset} on"
        )
        return f"{self.path}: {lost} are lost: {self.reason}"


class Reading(Generic[T]):
    """Iterates over the records of a segment up to the first bad one, then sets `damage`."""

    def __init__(self, path: Path, codec: Codec[T], only: frozenset[str] = frozenset()) -> None:
        """`only`: names of the classes to return; empty means all."""
        self.damage: Damage | None = None
        self.num_base = 0  # records of the base
        self.base_is_whole = False
        self.num_records = 0  # good ones, so far
        self._path = path
        self._codec = codec
        self._only = only
        self._offset = 0  # where the good part ends

    def __iter__(self) -> Iterator[T]:
        size = 0
        try:
            with open(self._path, "rb", buffering=1 << 20) as file:
                size = os.fstat(file.fileno()).st_size
                self._read_header(file.read(disk.HEADER_BYTES))
                self._offset = disk.HEADER_BYTES
                self.base_is_whole = not self.num_base
                while self._offset < size:
                    payload = framing.read_payload(file, size - self._offset, MAX_FRAME_BYTES)
                    record = self._decode(payload)
                    self.num_records += 1
                    self._offset += framing.size(payload)
                    self.base_is_whole = self.num_records >= self.num_base
                    if record is not None:
                        yield record
                if not self.base_is_whole:
                    raise ProtocolError("records are cut off")
        except OSError as e:
            self._cut(size, f"it cannot be read: {e.strerror}")
        except ProtocolError as e:
            self._cut(size, str(e))

    def _read_header(self, data: bytes) -> None:
        if len(data) < disk.HEADER_BYTES:
            raise ProtocolError("its header is cut off")
        magic, version, num_base, _ = disk.HEADER.unpack_from(data)
        if magic != disk.MAGIC:
            raise ProtocolError("this is no segment of a journal")
        if version != disk.FORMAT:
            raise ProtocolError(
                f"it has format {version}, but this LightRL reads format {disk.FORMAT}"
            )
        if disk.CHECKSUM.unpack_from(data, disk.HEADER.size)[0] != crc32(data[: disk.HEADER.size]):
            raise ProtocolError("its header is damaged")
        self.num_base = num_base

    def _decode(self, payload: bytes) -> T | None:
        if self._only and self._codec.name(payload) not in self._only:
            return None
        return self._codec.decode(payload)

    def _cut(self, size: int, reason: str) -> None:
        lost = max(0, size - self._offset)
        read = max(1, self._offset - disk.HEADER_BYTES)
        about = max(1, round(lost * self.num_records / read))  # by the mean size of those read
        self.damage = Damage(self._path, self._offset, lost, about, reason)


def read_segment(path: Path, codec: Codec[T]) -> Reading[T]:
    """Return an iterator over the records; check `damage` after it has ended."""
    return Reading(path, codec)


def read_merged(path: Path, codec: Codec[LogEntry]) -> tuple[list[LogEntry], Reading[Any]]:
    """Return the entries of a segment, with small token entries merged, and its Reading."""
    # Columns of tokens are merged as they are: item by item would take many times as long.
    packed = codec.packed if isinstance(codec, LogCodec) else codec
    reading: Reading[Any] = Reading(path, packed)
    return list(merge(reading)), reading


def newest(folder: Path, codec: Codec[LogEntry]) -> tuple[Segment, list[LogEntry], list[str]]:
    """Return the newest readable segment, its entries (merged), and lines that report losses.

    Raises JournalError if no segment can be read.
    """
    lines: list[str] = []
    for segment in reversed(segments(folder)):
        entries, reading = read_merged(segment.path, codec)
        if reading.base_is_whole:
            if lines:
                lines.append(f"continuing from {segment.path}: everything after it is lost")
            if reading.damage is not None:
                lines.append(str(reading.damage))
            return segment, entries, lines
        lines.append(f"{reading.damage}, and with its first records the whole segment")
    if lines:
        raise JournalError(f"no segment of the journal can be read. {lines[0]}")
    raise JournalError(f"{folder}: there is no journal")


def is_blank(folder: Path) -> bool:
    """Return whether the run has not begun: no journal, or one that holds only the first snapshot.

    False if a segment is damaged or was moved aside.
    """
    if not folder.is_dir() or disk.last_number(folder) == 0:
        return True
    [first, *more] = segments(folder) or [None]
    if first is None or more or first.number != disk.last_number(folder):
        return False
    reading = read_segment(first.path, LOG)
    match [entry for entry in reading if not isinstance(entry, ShellNote)]:
        case [SnapshotBegan(step=0, num_drawn=0, version=None), SnapshotEnded()]:
            return reading.damage is None
        case _:
            return False


class StepPortions(NamedTuple):
    """The portions in which a step was accumulated: their sizes in groups, in order, and the
    replica of each; no replicas = one."""

    sizes: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()


def shards(
    folder: Path, codec: Codec[LogEntry], step: int
) -> tuple[list[TrainShard], StepPortions]:
    """Return the shards of a published step and how they were accumulated.

    Raises JournalError if any shard is missing.
    """
    found: list[TrainShard] = []
    portions: StepPortions | None = None
    damage: list[Damage] = []
    wanted = frozenset({ShardSent.__name__, VersionPublished.__name__})
    for segment in segments(folder):
        if segment.step != step:
            continue
        reading = Reading(segment.path, codec, wanted)
        for entry in reading:
            if isinstance(entry, ShardSent) and entry.shard.step == step:
                if entry.shard.index == 0:  # the step starts over
                    found.clear()
                found.append(entry.shard)
            elif isinstance(entry, VersionPublished) and entry.version == step + 1:
                trained = StepPortions(entry.portions, entry.replicas)  # or loaded
                portions = trained if entry.portions else portions or trained
        if reading.damage is not None:  # harmless if it is the torn end after a crash
            damage.append(reading.damage)
    missing = _missing(found)
    if step < (first := min((s.step for s in segments(folder)), default=0)):
        missing = f"the journal begins at step {first}"
    if portions is None:
        missing = missing or "its portions are missing"
    if missing:
        why = "".join(f" ({d})" for d in damage)
        raise JournalError(f"{folder}: step {step} cannot be trained again: {missing}{why}")
    return found, portions or StepPortions()


def _missing(found: Sequence[TrainShard]) -> str:
    """Return a few words on what is missing; "" if the step is whole."""
    whole = next((k for k, shard in enumerate(found) if shard.index != k), len(found))
    if whole < len(found) or not found or not found[-1].last:
        return f"shard {whole} is missing"
    if sum(len(shard.groups) for shard in found) != found[-1].num_groups:
        return f"its shards do not hold {found[-1].num_groups} groups"
    return ""


def recut(sent: Sequence[TrainShard], portions: StepPortions) -> list[TrainShard]:
    """Return the groups of one step in the portions in which the trainer accumulated them.

    Training them again gives the same bits. Raises JournalError if the portions do not add up to
    the groups.
    """
    groups = [group for shard in sent for group in shard.groups]
    sizes, replicas = portions
    if sum(sizes) != len(groups) or any(n <= 0 for n in sizes):
        raise JournalError(f"{len(groups)} groups do not fit portions {list(sizes)}")
    if replicas and (len(replicas) != len(sizes) or min(replicas) < 0):
        raise JournalError(f"{len(sizes)} portions do not fit replicas {list(replicas)}")
    sizes = sizes or (0,)  # a step without groups has a last shard, too
    part = replace(sent[0], last=False, num_groups=0, alone=True)
    parts: list[TrainShard] = []
    rows = zip(sizes, accumulate(sizes), replicas or (0,) * len(sizes), strict=True)
    for index, (size, end, replica) in enumerate(rows):
        cut = tuple(groups[end - size : end])
        parts.append(replace(part, index=index, groups=cut, replica=replica))
    return [*parts[:-1], replace(parts[-1], last=True, num_groups=len(groups))]


def trim(folder: Path, used: Segment) -> list[str]:
    """Move segments newer than `used` aside as *.damaged, and return their new names.

    Raises JournalError.
    """
    newer = [segment for segment in reversed(segments(folder)) if segment.number > used.number]
    return [_move_aside(segment, disk.DAMAGED) for segment in newer]


def rewind(folder: Path, codec: Codec[LogEntry], step: int) -> Segment:
    """Cut the journal back to the moment when `step` steps were done, and move the rest aside.

    A new segment holds the base of the earliest segment of that step. Raises JournalError if no
    segment of that step can be read, or if the journal is in use.
    """
    if not (known := segments(folder)):
        raise JournalError(f"{folder}: there is no journal")
    held = disk.hold(folder)
    try:
        for source in known:
            if source.step == step and (base := _base(source, codec)) is not None:
                break
        else:
            steps = ", ".join(map(str, sorted({s.step for s in known})))
            raise JournalError(f"{folder}: no segment begins at step {step} (only at {steps})")
        copy = disk.segment_at(folder, disk.last_number(folder) + 1, step)
        os.close(disk.create(copy, [codec.encode(entry) for entry in base])[0])
        for segment in reversed(known):  # the copy is the newest now, also after a crash
            if segment.number >= source.number:
                _move_aside(segment, disk.REWOUND)
        return copy
    except OSError as e:
        raise JournalError(f"{folder}: {e.strerror}") from None
    finally:
        os.close(held)


def _base(segment: Segment, codec: Codec[T]) -> list[T] | None:
    """Return the base of a segment if all its records can be read."""
    reading = read_segment(segment.path, codec)
    base: list[T] = []
    for record in reading:
        base.append(record)
        if reading.base_is_whole:
            break
    return base if reading.base_is_whole and base else None


def _move_aside(segment: Segment, why: str) -> str:
    """Rename a segment and return its new name."""
    aside = segment.path.with_name(f"{segment.path.name}.{why}")
    try:
        os.rename(segment.path, aside)
        return aside.name
    except OSError as e:
        raise JournalError(f"{segment.path} cannot be moved aside: {e.strerror}") from None
