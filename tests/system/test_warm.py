"""A child forked from an origin is what one that was started is, so that a test may use either."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from lightrl.messages.message import Message
from lightrl.system import open_files
from lightrl.system.child import Child, ChildDied
from lightrl.wire import Codec
from tests.support.cli import EMULATED, all_end, descendants, running
from tests.support.cli import until as until_says
from tests.support.trainer_coordinator import until
from tests.support.warm import ASIDE, origin

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks beside")

DEADLINE_S = 60
PROBE = """
import ctypes, json, os, resource, signal, sys, threading

def main(sock):
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
    links = {n: os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
    said = {
        "parent": os.getppid(),
        "leads its session": os.getsid(0) == os.getpid(),
        "dies with": number.value,
        "command line": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
        "arguments": sys.argv,
        "environment": dict(os.environ),
        "path": sys.path,
        "folder": os.getcwd(),
        "limits": [resource.getrlimit(n) for n in range(10)],
        "descriptors": sorted(n for n, to in links.items() if os.path.lexists(to) or ":" in to),
        "input": links["0"],
        "outputs": [links["1"], links["2"]],
        "signals": [str(signal.getsignal(n)) for n in range(1, 32) if n not in (1, 15)],
        "heeds its pipe": [callable(signal.getsignal(n)) for n in (1, 15)],
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "threads": threading.active_count(),
        "is forked": "tests.support.warm" in sys.modules,
    }
    open(os.environ["SAID"], "w").write(json.dumps(said))
    print("out of words", flush=True)
    sock.recv(1)
    sys.exit(3)
"""


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'lib'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # A limit that an earlier test has raised here would be lowered in a child that runs already.
    monkeypatch.setattr(open_files, "_before", None)
    return "probe:main"


async def facts(target: str, folder: Path) -> tuple[dict[str, object], str]:
    """What such a child finds, and how it ended."""
    said = folder.with_suffix(".json")
    codec: Codec[Message] = Codec(Message)
    log = folder / "log"
    environment = {"SAID": str(said), "MORE": "ü = 1"}
    child = await Child.start(target, "name", codec, codec, environment, log)
    async with asyncio.timeout(DEADLINE_S):
        await until(log.read_bytes)
        assert os.getpgid(child.pid) == child.pid
        child._writer.close()
        with pytest.raises(ChildDied) as died:
            await child.receive()
    assert await child.stop() == 3
    found = json.loads(said.read_text().replace(str(folder), "FOLDER"))
    number = found["arguments"][3]
    for key in ("arguments", "command line", "descriptors"):
        found[key] = ["N" if word == number else word for word in found[key]]
    found["descriptors"].sort()  # by whatever number: "19" comes before "2"
    return found, str(died.value).replace(str(child.pid), "PID")


def test_a_forked_child_is_what_a_started_one_is(probe: str, tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    async def both() -> None:
        started = await facts(probe, tmp_path / "a")
        with origin("probe") as warm:
            assert warm
            with warm.forks():
                forked = await facts(probe, tmp_path / "b")
        assert (started[0].pop("is forked"), forked[0].pop("is forked")) == (False, True)
        for key, value in started[0].items():  # a failure says which
            assert (key, forked[0][key]) == (key, value)
        assert forked == started
        assert forked[1] == "name (pid PID) ended with exit status 3: out of words"

    asyncio.run(both())


def test_children_are_started_where_the_imports_have_started_threads(probe: str, tmp_path: Path):
    """As pyarrow does: a fork would lack them."""
    thread = (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    (tmp_path / "lib" / "threads.py").write_text(thread)
    (tmp_path / "a").mkdir()
    with origin("probe", "threads") as warm:
        assert warm
        with warm.forks():
            found, _ = asyncio.run(facts(probe, tmp_path / "a"))
    assert found["is forked"] is False


def test_it_has_its_pipe_whatever_number_that_has(probe: str, tmp_path: Path):
    """As in a test's process that has many descriptors open."""

    async def all_of_them() -> None:
        with origin("probe") as warm:
            assert warm
            opened: list[int] = []
            try:
                for number in range(ASIDE, ASIDE + 6):
                    while (last := os.open(os.devnull, os.O_RDONLY)) < number:
                        opened.append(last)
                    os.close(last)
                    (tmp_path / str(number)).mkdir()
                    with warm.forks():
                        _, died = await facts(probe, tmp_path / str(number))
                    assert died == "name (pid PID) ended with exit status 3: out of words"
            finally:
                for descriptor in opened:
                    os.close(descriptor)

    asyncio.run(all_of_them())


@pytest.mark.e2e
def test_what_a_forked_run_starts_is_forked_and_ends_with_it(warm_runs, tmp_path: Path):
    with running(tmp_path, *EMULATED, "train.steps=100000") as run:
        until_says(run, "reward")
        below = descendants(run.pid)
        children = [pid for daemon in pids_below(run.pid) for pid in pids_below(daemon)]
        names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        # nothing that is emulated has torch, but where it was forked
        forked = [names[pid] for pid in children if "libtorch" in maps(pid)]
        assert any(b"emulated-engine" in name for name in forked)
        assert any(b"lightrl-rank-0" in name for name in forked)
        assert not any(b"reward" in name for name in forked)
        run.kill()
    assert all_end(below)


def pids_below(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()
