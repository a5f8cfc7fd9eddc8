"""The folder that the nodes of a machine share: whose it is, and what becomes of it."""

import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from lightrl.errors import WeightsError
from lightrl.weights.machine import scratch, store
from lightrl.weights.machine.local import close_version, open_version
from lightrl.weights.machine.store import Store
from lightrl.weights.version.manifest import VersionFile

DEADLINE_S = 90.0
DIGEST = "ab" * 32


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory and disk in one."""
    monkeypatch.setattr(scratch, "_shared", lambda: tmp_path)
    monkeypatch.setattr(scratch, "_disk", lambda: tmp_path)
    return tmp_path


def opened(identity: bytes = b"run") -> Store:
    one = Store(identity)
    one.open()
    return one


def test_nodes_of_a_run_share_a_folder_that_goes_with_the_last_of_them(root: Path):
    one, two, other = opened(), opened(), opened(b"another run")
    assert one.control == two.control != other.control
    assert stat.S_IMODE(one.control.stat().st_mode) == 0o700
    one.close()
    assert two.control.is_dir()
    two.close()
    other.close()
    assert not list(root.iterdir())


def test_a_thread_that_is_late_finds_a_folder_that_is_being_closed_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else it closes the folder's lock, too, and enters a new folder that nobody leaves."""
    one = opened()
    remove, ended = shutil.rmtree, list[BaseException]()

    def sweep() -> None:
        try:
            one.find(DIGEST, 1, threading.Event())
        except WeightsError as e:
            ended.append(e)

    late = threading.Thread(target=sweep)

    def rmtree(path: Path, ignore_errors: bool) -> None:
        remove(path, ignore_errors=ignore_errors)
        late.start()
        late.join(0.2)  # where it must not wait for us, it is through by then

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    one.close()
    late.join(DEADLINE_S)
    assert [str(e) for e in ended] == ["the folder of versions is closed"]
    assert not list(root.iterdir())


@pytest.mark.parametrize("kind", ["readable by others", "a link", "no folder"])
def test_what_is_not_ours_alone_is_not_used(root: Path, kind: str, caplog):
    path = root / Store(b"run")._name
    if kind == "readable by others":
        path.mkdir(mode=0o755)
    elif kind == "a link":
        (root / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(root / "elsewhere")
    else:
        path.touch()
    one = opened()
    assert one.control != path
    assert stat.S_IMODE(one.control.stat().st_mode) == 0o700
    assert "another user" in caplog.text
    one.close()
    assert os.path.lexists(path)


def test_what_a_dead_run_left_goes_after_a_while_and_not_before(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    dead, living = opened(b"dead"), opened(b"living")
    folders = dead.control, living.control
    for folder in folders:
        (folder / f"{DIGEST}.bin").write_bytes(b"x")
        os.utime(folder, (0, time.time() - store.STALE_S / 2))
    os.close(dead._folders.popitem()[1][1])  # as the kernel does when it is killed
    opened(b"third").close()
    assert all(folder.is_dir() for folder in folders)
    for folder in folders:
        os.utime(folder, (0, time.time() - 2 * store.STALE_S))
    again = opened(b"dead")  # its own is never removed
    assert (again.control / f"{DIGEST}.bin").exists()
    os.close(again._folders.popitem()[1][1])
    opened(b"third").close()
    assert [folder.is_dir() for folder in folders] == [False, True]
    living.close()


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "AB" * 32, "ab" * 31 + "/x", "a" * 200])
def test_what_is_no_digest_is_no_file(root: Path, digest: str):
    one = opened()
    with pytest.raises(WeightsError, match="digest"):
        one.find(digest, 1000, threading.Event())
    one.close()


def test_what_a_node_uses_or_pulls_stays(root: Path):
    one, two = opened(), opened()
    names = (f"{DIGEST}.bin", f"{DIGEST}.bin.part", f"{DIGEST}.manifest", f"{DIGEST}.1-a.manifest")
    files = [one.control / name for name in names]
    for file in files:
        file.touch()
    used = open_version(VersionFile(1, DIGEST, 0, str(files[0]), ""))
    lock = two.try_lock(DIGEST)
    assert lock is not None
    assert one.try_lock(DIGEST) is None
    one.sweep()
    assert all(file.exists() for file in files)
    lock.close()
    one.sweep()
    assert [file.exists() for file in files] == [True, False, True, True]
    close_version(used)
    one.sweep({DIGEST})
    assert files[0].exists()
    os.utime(files[3], (0, time.time() - 2 * store.STALE_S))
    one.sweep()
    assert not list(one.control.iterdir())
    one.close()
    two.close()


def test_a_manifest_whose_version_never_came_is_swept(root: Path):
    one = opened()
    (one.control / f"{DIGEST}.manifest").touch()
    one.sweep()
    assert not list(one.control.iterdir())
    one.close()
