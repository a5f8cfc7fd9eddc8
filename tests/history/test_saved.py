"""history.bin: what a coordinator that goes on finds there, whatever became of the file
meanwhile."""

import subprocess
import sys
import threading
from array import array
from pathlib import Path

import pytest

from lightrl.history.saved import FILE_NAME, SavedHistory, _size, read
from lightrl.history.store import History, PastResponse, PromptAnswers

FULL = Path("/dev/full")  # every write to it fails as on a full disk


def answered(prompt: str, epoch: int = 0, num_tokens: int = 3) -> PromptAnswers:
    """Two responses, one given up and without a reward."""
    whole = PastResponse(epoch, array("i", range(num_tokens)), True, 0.1 + epoch)
    part = PastResponse(epoch, array("i", [-1, 1 << 20]), False)
    return PromptAnswers(prompt, epoch, ((0, whole), (5, part)))


def save(run_dir: Path, *rounds: list[PromptAnswers], slack_bytes: int = 1 << 20) -> History:
    """As a coordinator does that learns these rounds."""
    history = History()
    saved = SavedHistory(run_dir, history, pytest.fail, slack_bytes)
    saved.begin()
    for round in rounds:
        history.learn(round)
        saved.append(round)
    saved.close()
    return history


def recall(run_dir: Path) -> tuple[list[PromptAnswers], list[str]]:
    """What the next coordinator knows, and what it was told."""
    told: list[str] = []
    history = History()
    saved = SavedHistory(run_dir, history, told.append)
    saved.recall()
    saved.close()
    return list(history.all()), told


def test_what_was_learnt_is_known_to_the_next_coordinator(tmp_path):
    history = save(
        tmp_path, [answered("a"), answered('\0"b"\n', 7)], [answered("ü", 1), answered("a", 1, 9)]
    )
    known, told = recall(tmp_path)
    assert known == list(history.all())
    assert [a.prompt for a in known] == ['\0"b"\n', "ü", "a"]
    assert not told


def test_a_run_without_such_a_file_knows_nothing_and_a_new_run_ignores_one(tmp_path):
    assert recall(tmp_path) == ([], [])
    save(tmp_path, [answered("a")])
    save(tmp_path)
    assert recall(tmp_path) == ([], [])


def test_responses_without_tokens_are_not_written(tmp_path):
    save(
        tmp_path,
        [
            PromptAnswers(
                "a",
                0,
                (
                    (0, PastResponse(0, array("i"), False)),
                    (1, PastResponse(0, array("i", [4]), True)),
                ),
            )
        ],
    )
    [known], _ = recall(tmp_path)
    assert known.responses == ((1, PastResponse(0, array("i", [4]), True)),)


def test_an_end_torn_anywhere_costs_the_last_record_only_and_is_repaired(tmp_path):
    save(tmp_path, [answered("a")], [answered("b")])
    whole = (tmp_path / FILE_NAME).stat().st_size
    save(tmp_path, [answered("a")], [answered("b")], [answered("c")])
    data = (tmp_path / FILE_NAME).read_bytes()
    assert len(data) > whole + 40
    for end in range(whole + 1, len(data)):
        (tmp_path / FILE_NAME).write_bytes(data[:end])
        known, told = recall(tmp_path)
        assert known == [answered("a"), answered("b")]
        assert told == ["WARNING: history.bin: its end is torn; 4 responses are left"]
        assert (tmp_path / FILE_NAME).read_bytes() == data[:whole]


def test_a_flipped_bit_costs_its_record_only(tmp_path):
    records = [answered(p) for p in "abc"]
    save(tmp_path, records)
    data = (tmp_path / FILE_NAME).read_bytes()
    size = len(data) // 3
    for position in range(size, 2 * size):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        (tmp_path / FILE_NAME).write_bytes(damaged)
        damage: list[str] = []
        known = list(read(tmp_path / FILE_NAME, damage))
        assert damage
        assert known[0] == records[0]
        assert known[1:] == records[2:] or (known[1:] == [] and position < size + 4)  # its length


def test_noise_is_no_history(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(bytes(100_000))
    known, told = recall(tmp_path)
    assert (known, len(told)) == ([], 1)
    assert (tmp_path / FILE_NAME).read_bytes() == b""


def test_a_record_of_another_version_of_the_program_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("lightrl.history.saved._encode", lambda answered: b'{"prompt": "a"}\n')
    save(tmp_path, [answered("a")])
    monkeypatch.undo()
    known, [told] = recall(tmp_path)
    assert known == []
    assert told.startswith("WARNING: history.bin: undecodable")


def test_the_file_is_written_anew_before_it_holds_more_than_twice_what_lives(tmp_path):
    sizes: list[int] = []
    history = History()
    saved = SavedHistory(tmp_path, history, pytest.fail, slack_bytes=500)
    for epoch in range(50):
        round = [answered(p, epoch, 100) for p in "ab"]
        history.learn(round)
        saved.append(round)
        if epoch % 10 == 9:  # what is written so far
            saved.close()
            sizes.append((tmp_path / FILE_NAME).stat().st_size)
            history = History()
            saved = SavedHistory(tmp_path, history, pytest.fail, slack_bytes=500)
            saved.recall()
            assert list(history.all()) == round
    saved.close()
    live = 2 * (102 * 4 + 150)
    assert max(sizes) < 2 * live + 500 + live
    assert [f.name for f in tmp_path.iterdir()] == [FILE_NAME]


def test_only_rounds_that_wait_for_a_slow_disk_are_counted(tmp_path, monkeypatch):
    """Not the whole history, which is in memory anyway."""
    round = [answered("a")]
    told: list[str] = []
    may_write = threading.Event()
    history = History()
    saved = SavedHistory(tmp_path, history, told.append)
    saved._thread.submit(may_write.wait)
    monkeypatch.setattr("lightrl.history.saved.MAX_WAITING_BYTES", 2 * _size(round))
    try:
        for _ in range(2):
            history.learn(round)
            saved.append(round)
        saved._rewrite()
        assert not told
        saved.append(round)
        assert ["the disk is too slow" in line for line in told] == [True]
    finally:
        may_write.set()
        saved.close()


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_on_a_full_disk_it_is_left_out_with_one_line(tmp_path):
    (tmp_path / FILE_NAME).symlink_to(FULL)
    told: list[str] = []
    history = History()
    saved = SavedHistory(tmp_path, history, told.append)
    for epoch in range(3):
        history.learn([answered("a", epoch)])
        saved.append([answered("a", epoch)])
    saved.close()
    assert told == [
        (
            "WARNING: history.bin: cannot write (No space left on device); skipping records "
            "until it can"
        )
    ]
    assert len(history.of("a")) == 2


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("why", ["Is a directory", "No space left on device"])
def test_where_it_cannot_be_written_anew_it_is_given_up_with_one_line(tmp_path, why):
    if why == "Is a directory":
        (tmp_path / ".history.bin.draft").mkdir()
    else:
        (tmp_path / ".history.bin.draft").symlink_to(FULL)
    told: list[str] = []
    history = History()
    saved = SavedHistory(tmp_path, history, told.append, slack_bytes=0)
    for epoch in range(9):
        history.learn([answered("a", epoch)])
        saved.append([answered("a", epoch)])
    saved.close()
    assert told == [f"WARNING: history.bin: not saved any more ({why}): a resume will draft less"]
    [known], told = recall(tmp_path)  # what was written before
    assert known.epoch < 8
    assert not told


def test_a_disk_that_takes_only_a_part_leaves_whole_records(tmp_path):
    """The limit of a file's size stands for a disk with a few bytes left."""
    program = f"""
import resource, signal
from array import array
from pathlib import Path
from lightrl.history.saved import SavedHistory
from lightrl.history.store import PromptAnswers, History, PastResponse
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (350, resource.RLIM_INFINITY))
history = History()
saved = SavedHistory(Path({str(tmp_path)!r}), history, print)
for prompt in "abcd":
    round = [PromptAnswers(prompt, 0, ((0, PastResponse(0, array("i", bytes(100)), True)),))]
    history.learn(round)
    saved.append(round)
saved.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        (
            "WARNING: history.bin: cannot write (No space left on device); skipping records "
            "until it can"
        )
    ]
    known, told = recall(tmp_path)
    assert [a.prompt for a in known] == ["a", "b"]
    assert not told


def test_what_cannot_be_read_is_one_line_and_no_error(tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    known, told = recall(tmp_path)
    assert known == []
    assert told[0] == "WARNING: history.bin: Is a directory; 0 responses are left"
    assert told[1].startswith("WARNING: history.bin: not saved any more (")


WRITTEN = bytes.fromhex(
    "3c000000bc8b03a683a670726f6d7074a161a565706f636802a9726573706f6e736573929400c40807000000"
    "ffffffffc3cb3fe00000000000009403c40409000000c2c0"
)


def test_a_file_of_an_earlier_version_is_read_and_its_bytes_stay(tmp_path):
    two = (
        (0, PastResponse(2, array("i", [7, -1]), True, 0.5)),
        (3, PastResponse(2, array("i", [9]), False)),
    )
    record = PromptAnswers("a", 2, two)
    save(tmp_path, [record])
    assert (tmp_path / FILE_NAME).read_bytes() == WRITTEN
    (tmp_path / FILE_NAME).write_bytes(WRITTEN)
    assert recall(tmp_path) == ([record], [])
