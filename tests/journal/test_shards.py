"""What the trainer got for a published step comes back whole and in its old portions, or not at
all."""

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import pytest

from lightrl.core.log_entries import LogEntry, ShardSent, SnapshotBegan, VersionPublished
from lightrl.errors import JournalError
from lightrl.journal.read import LOG, StepPortions, recut, segments, shards
from lightrl.messages.training import TrainGroup, TrainResponse, TrainShard
from lightrl.wire import pack_f32, pack_i32
from tests.journal.conftest import item, shard, small_story, write

A, B, C = (
    ShardSent(shard(2, 0, ["a", "b"])),
    ShardSent(shard(2, 1, ["c"])),
    ShardSent(shard(2, 2, ["d", "e"], last=True, total=5)),
)
DONE = VersionPublished(3, "d3", (1, 3, 1))
BASE: list[LogEntry] = [SnapshotBegan(step=2)]


def read(tmp_path: Path, *parts: list[LogEntry]) -> tuple[list[TrainShard], StepPortions]:
    """Each part is one segment of step 2."""
    asyncio.run(write(tmp_path, *((2, BASE, part) for part in parts)))
    found, portions = shards(tmp_path, LOG, 2)
    return list(found), portions


def test_a_step_comes_back_from_all_its_segments(tmp_path):
    found, portions = read(tmp_path, [A, B], [C], [DONE])
    assert found == [A.shard, B.shard, C.shard]
    assert portions == StepPortions((1, 3, 1))


def test_a_step_that_began_anew_counts_from_there(tmp_path):
    whole = ShardSent(shard(2, 0, ["a", "b", "c", "d", "e"], last=True, total=5))
    found, _ = read(tmp_path, [A, B, C], [whole, DONE])
    assert found == [whole.shard]
    assert len(segments(tmp_path)) == 2


def test_other_steps_do_not_count(tmp_path):
    ahead = ShardSent(shard(3, 0, ["z"], last=True, total=1))
    asyncio.run(
        write(tmp_path, (3, [SnapshotBegan(step=3)], [ahead, VersionPublished(4, "d4", (1,))]))
    )
    found, portions = read(tmp_path, [A, B, C, DONE, ahead])
    assert (len(found), portions) == (3, StepPortions((1, 3, 1)))
    with pytest.raises(JournalError, match="step 7 cannot be trained again: shard 0 is missing"):
        shards(tmp_path, LOG, 7)


def test_a_version_that_was_loaded_does_not_hide_how_it_was_trained(tmp_path):
    by_two = VersionPublished(3, "d3", (1, 3, 1), replicas=(1, 0, 1))
    for done in (DONE, by_two):
        found = read(tmp_path / str(len(done.replicas)), [A, B, C, done, VersionPublished(3, "d3")])
        assert found[1] == (done.portions, done.replicas)


@pytest.mark.parametrize(
    ("facts", "missing"),
    [
        ([A, C, DONE], "shard 1 is missing"),
        ([B, C, DONE], "shard 0 is missing"),
        ([A, B, DONE], "shard 2 is missing"),
        ([DONE], "shard 0 is missing"),
        ([A, B, C], "its portions are missing"),
        ([A, B, ShardSent(shard(2, 2, ["d"], last=True, total=5)), DONE], "do not hold 5 groups"),
    ],
)
def test_what_is_missing_is_said(tmp_path, facts, missing):
    with pytest.raises(JournalError, match=missing):
        read(tmp_path, facts)


def test_a_torn_end_does_no_harm_but_damage_before_it_does(tmp_path):
    read(tmp_path, [A, B, C, DONE])
    [segment] = segments(tmp_path)
    data = segment.path.read_bytes()
    segment.path.write_bytes(data + b"torn")
    assert len(list(shards(tmp_path, LOG, 2)[0])) == 3
    for at in range(len(data) - 1):
        spoilt = bytearray(data)
        spoilt[at] ^= 0x40
        with open(segment.path, "r+b", buffering=0) as file:
            file.write(spoilt)
        with pytest.raises(JournalError) as e:
            shards(tmp_path, LOG, 2)
        assert str(segment.path) in str(e.value)
        assert "\n" not in str(e.value)


# The same cuts again


def test_groups_are_cut_as_they_were_accumulated():
    parts = recut([A.shard, B.shard, C.shard], StepPortions((1, 3, 1)))
    assert [[g.group for g in p.groups] for p in parts] == [["a"], ["b", "c", "d"], ["e"]]
    assert [(p.step, p.index, p.policy_version, p.alone) for p in parts] == [
        (2, k, 2, True) for k in range(3)
    ]
    assert [(p.last, p.num_groups) for p in parts] == [(False, 0), (False, 0), (True, 5)]


def test_a_step_without_groups_has_one_shard_that_ends_it():
    [part] = recut([shard(4, 0, [], last=True)], StepPortions())
    assert (part.step, part.index, part.groups, part.last, part.num_groups) == (4, 0, (), True, 0)


@pytest.mark.parametrize("portions", [(), (4,), (6,), (5, 0), (6, -1)])
def test_portions_that_do_not_fit_are_refused(portions):
    with pytest.raises(JournalError, match="5 groups do not fit portions"):
        recut([A.shard, B.shard, C.shard], StepPortions(portions))


def test_each_goes_to_the_replica_that_accumulated_it():
    sent = [A.shard, B.shard, C.shard]
    assert [p.replica for p in recut(sent, StepPortions((1, 3, 1), (2, 0, 1)))] == [2, 0, 1]
    assert [p.replica for p in recut(sent, StepPortions((1, 3, 1)))] == [0, 0, 0]
    for replicas in [(0,), (0, 1, 0, 1), (0, -1, 0)]:
        with pytest.raises(JournalError, match="3 portions do not fit replicas"):
            recut(sent, StepPortions((1, 3, 1), replicas))


def test_tokens_between_are_not_even_decoded(tmp_path):
    """They are most of a journal."""
    found, _ = read(tmp_path, [*small_story()[:3], A, B, C, DONE])
    assert len(found) == 3
    assert item("a", 0, 1).offset == 0


def test_a_loss_mask_comes_back_with_its_tokens_and_old_journals_have_none(tmp_path):
    trained = TrainResponse("a#0", pack_i32([5, 6, 7]), pack_f32([-1.0] * 3), 1.0, "stop", b"\x05")
    group = TrainGroup("a", b"", (trained,))
    sent = ShardSent(TrainShard(2, 0, 2, (group,), last=True, num_groups=1))
    found, portions = read(tmp_path, [sent, VersionPublished(3, "d3", (1,))])
    [again] = recut(found, portions)
    assert again.groups == (group,)
    fields = msgspec.to_builtins(trained, builtin_types=(bytes,))
    del fields["loss_mask"]
    old = msgspec.convert(fields, TrainResponse)
    assert old == dataclasses.replace(trained, loss_mask=b"")


def test_journals_from_before_there_were_replicas_are_of_one():
    published = VersionPublished(3, "d3", (1, 3, 1), replicas=(0, 1, 0))
    again = ShardSent(dataclasses.replace(A.shard, alone=True, replica=1))

    def old(entry: LogEntry) -> LogEntry:
        name, fields = msgspec.msgpack.decode(LOG.encode(entry))
        fields.pop("replicas", None)
        fields.get("shard", {}).pop("replica", None)
        return LOG.decode(msgspec.msgpack.encode((name, fields)))

    assert old(published) == VersionPublished(3, "d3", (1, 3, 1))
    assert old(again) == ShardSent(dataclasses.replace(A.shard, alone=True))
