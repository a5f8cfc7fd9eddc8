"""What a run can do without is left out when the disk refuses, and nothing else happens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.system.append_file import AppendFile

FULL = Path("/dev/full")  # every write to it fails as on a full disk

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def test_what_the_disk_refuses_is_left_out_and_said_once(tmp_path):
    told: list[str] = []
    file = AppendFile(tmp_path / "there" / "records", told.append)
    (tmp_path / "there").symlink_to("not there yet")  # no folder can be made in its place
    assert not file.append(b"a\n")
    assert not file.append(b"b\n")
    [line] = told
    assert line.startswith("WARNING: records: cannot write (")
    (tmp_path / "there").unlink()
    assert file.append(b"c\n")
    assert file.append(b"d\n")
    assert told[1:] == ["records: written again; 2 records are missing"]
    assert (tmp_path / "there" / "records").read_bytes() == b"c\nd\n"
    file.close()


def test_a_full_disk_is_one_line(tmp_path):
    told: list[str] = []
    (tmp_path / "records").symlink_to(FULL)
    file = AppendFile(tmp_path / "records", told.append, separator=b"\n")
    assert not file.append(b"a\n")
    assert not file.append(b"b\n")
    assert told == [
        "WARNING: records: cannot write (No space left on device); skipping records until it can"
    ]
    file.close()


def test_a_torn_line_does_not_spoil_the_next(tmp_path):
    (tmp_path / "records").write_bytes(b"a\nto")
    file = AppendFile(tmp_path / "records", pytest.fail, separator=b"\n")
    file.append(b"b\n")
    file.append(b"c\n")
    file.close()
    assert (tmp_path / "records").read_bytes() == b"a\nto\nb\nc\n"


def test_a_piece_that_fits_only_in_part_is_not_there_at_all(tmp_path):
    """The limit of a file's size stands for a disk with a few bytes left."""
    program = f"""
import resource, signal
from pathlib import Path
from lightrl.system.append_file import AppendFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
file = AppendFile(Path({str(tmp_path / "records")!r}), print)
print(file.append(b"1234567\\n"), file.append(b"1234567\\n"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(file.append(b"abc\\n"))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[1::2] == ["True False", "True"]
    assert (tmp_path / "records").read_bytes() == b"1234567\nabc\n"


def test_lines_that_cannot_be_printed_do_not_end_a_process():
    """Nor do they make it fail at its end, where Python flushes what it could not write before."""
    program = (
        "from lightrl.system.output import print_lines\n"
        "for k in range(2000):\n    print_lines('x' * 50)\n"
    )
    with FULL.open("wb") as out:
        ended = subprocess.run([sys.executable, "-c", program], stdout=out, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_lines_come_in_order_with_those_of_print():
    program = (
        "from lightrl.system.output import never_fail, print_lines\nnever_fail()\n"
        "print('a')\nprint_lines('b ä')\nprint('c')\n"
    )
    command = [sys.executable, "-c", program]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    assert subprocess.run(command, capture_output=True, env=env).stdout.decode() == "a\nb ä\nc\n"


def test_others_code_that_prints_on_a_full_disk_goes_on():
    program = (
        "from lightrl.system.output import never_fail\nimport sys\nnever_fail()\n"
        "for k in range(2000):\n    print('x' * 50)\n    print('y', file=sys.stderr)\nsys.exit(7)\n"
    )
    with FULL.open("wb") as out:
        assert (
            subprocess.run([sys.executable, "-c", program], stdout=out, stderr=out).returncode == 7
        )
