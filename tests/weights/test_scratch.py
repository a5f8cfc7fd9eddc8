"""Scratch directories: never in each other's way, and none stays behind."""

import multiprocessing
import os
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from lightrl.weights.machine import scratch
from lightrl.weights.machine.scratch import scratch_dir

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """(shared memory, disk), both below tmp_path."""
    shared, disk = tmp_path / "shm", tmp_path / "tmp"
    for root in (shared, disk):
        root.mkdir()
    monkeypatch.setattr(scratch, "_shared", lambda: shared)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    return shared, disk


def used(root: Path) -> list[Path]:
    return sorted(root.iterdir())


def test_two_of_the_same_name_are_two_directories_that_vanish(roots):
    with scratch_dir("a") as first, scratch_dir("a") as second:
        assert first != second
        (second / "weights").write_bytes(b"x")
        with scratch_dir("b"):  # looks for stale ones
            assert first.is_dir()
            assert (second / "weights").is_file()
    assert [used(root) for root in roots] == [[], []]


@pytest.mark.parametrize("name", ["host/0", "../../up", "a b\nc", "x" * 300, ""])
def test_any_name_will_do(roots, name):
    with scratch_dir(name) as path:
        assert path.parent in roots
        assert path.is_dir()


def test_what_a_dead_daemon_left_goes_even_if_its_pid_is_ours(roots):
    process = multiprocessing.get_context("spawn").Process()
    process.start()
    process.join()
    left = [root / f"lightrl-{pid}-head" for root in roots for pid in (process.pid, os.getpid())]
    alive = [root / f"lightrl-{os.getppid()}-head" for root in roots]
    others = [root / name for root in roots for name in ("lightrl-notes", "else-1-x")]
    for path in [*left, *alive, *others]:
        path.mkdir()
        (path / "version_1.bin").write_bytes(b"x")
    with scratch_dir("head"):
        assert not any(p.exists() for p in left)
    assert all((p / "version_1.bin").is_file() for p in [*alive, *others])


def test_a_locked_directory_stays_whatever_its_pid_says(roots):
    """A daemon in another container has a pid that means nothing here."""
    with scratch_dir("a") as path:
        moved = path.rename(path.with_name("lightrl-999999999-a"))
        with scratch_dir("b"):
            assert moved.is_dir()
    shutil.rmtree(moved)


@pytest.mark.parametrize(
    ("free_gib", "need_gib", "is_shared"),
    [(1.5, 0, True), (0.9, 0, False), (7, 2, True), (5, 2, False)],
)
def test_shared_memory_is_used_if_three_versions_fit(
    roots, monkeypatch, free_gib, need_gib, is_shared
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, int(free_gib * 2**30)))
    with scratch_dir("a", need_bytes=need_gib << 30) as path:
        assert path.parent == roots[0 if is_shared else 1]
