"""The files in which versions are published: whose turn it is, and what nobody may take for one."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.weights.publish.buffers import SPARED, Buffers

SIZE = 1 << 16


def publish(buffers, version, size=SIZE):
    draft = buffers.take(size)
    os.pwrite(draft.descriptor, bytes([version]) * size, 0)
    return buffers.finish(draft, version, b"manifest %d" % version)


def inode(file):
    return Path(file.path).stat().st_ino


def names(folder):
    return sorted(path.name.replace(".", " ").split()[0] for path in folder.glob("*.bin"))


def test_two_files_are_used_in_turn_and_no_version_keeps_its_name_while_it_goes(tmp_path):
    buffers = Buffers(tmp_path)
    files = [publish(buffers, version) for version in range(4)]
    assert names(tmp_path) == ["version_2", "version_3"]
    assert not Path(files[1].path).exists()
    assert not Path(files[1].manifest_path).exists()
    assert Path(files[3].path).read_bytes() == b"\3" * SIZE
    assert Path(files[3].manifest_path).read_bytes() == b"manifest 3"
    older = inode(files[2])
    draft = buffers.take(SIZE)
    assert names(tmp_path) == ["draft", "version_3"]
    assert os.fstat(draft.descriptor).st_ino == older
    buffers.give_back(draft)
    assert inode(publish(buffers, 4)) == older


def test_a_file_that_is_read_stays_as_it_is_and_the_third_one_goes_when_it_is_free(tmp_path):
    buffers = Buffers(tmp_path)
    files = [publish(buffers, version) for version in range(2)]
    with Path(files[0].path).open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        publish(buffers, 2)
        assert names(tmp_path) == ["version_0", "version_1", "version_2"]
        publish(buffers, 3)
        assert reader.read() == b"\0" * SIZE
    for version in range(4, 4 + SPARED):
        publish(buffers, version)
        assert len(buffers.keys()) == 3
    publish(buffers, 8)
    assert names(tmp_path) == ["version_7", "version_8"]
    assert len(buffers.keys()) == 2


def test_a_file_can_be_read_as_soon_as_it_is_published_and_not_before(tmp_path):
    buffers = Buffers(tmp_path)
    publish(buffers, 0)
    draft = buffers.take(SIZE)
    with draft.path.open("rb") as early, pytest.raises(BlockingIOError):
        fcntl.flock(early, fcntl.LOCK_SH | fcntl.LOCK_NB)
    file = buffers.finish(draft, 1, b"manifest")
    with Path(file.path).open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_what_a_killed_writer_left_is_no_version_and_is_used_by_the_next_one(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from lightrl.weights.publish.buffers import Buffers\n"
        "buffers = Buffers(Path(sys.argv[1]))\n"
        "buffers.finish(buffers.take(65536), 7, b'manifest')\n"
        "draft = buffers.take(65536)\n"
        "os.pwrite(draft.descriptor, b'x' * 999, 0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert names(tmp_path) == ["draft", "version_7"]
    buffers = Buffers(tmp_path)
    with next(tmp_path.glob("version_7.*.bin")).open("rb") as served:  # as by the daemon
        fcntl.flock(served, fcntl.LOCK_SH)
        publish(buffers, 7)
        assert names(tmp_path) == ["version_7", "version_7"]
        publish(buffers, 8)
    for version in range(9, 10 + SPARED):
        publish(buffers, version)
    assert names(tmp_path) == ["version_12", "version_13"]


def test_files_of_another_size_are_not_used(tmp_path):
    publish(Buffers(tmp_path), 1, SIZE // 2)
    file = publish(Buffers(tmp_path), 1)
    assert Path(file.path).stat().st_size == SIZE
    assert names(tmp_path) == ["version_1"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    try:
        buffers = Buffers(tmp_path)
        publish(buffers, 1, 600 << 10)
        with pytest.raises(OSError, match="No space left on device for 614400 bytes") as raised:
            publish(buffers, 2, 600 << 10)
        assert raised.value.errno == errno.ENOSPC
        assert names(tmp_path) == ["version_1"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
