"""What reward functions start, see and run in: nothing of it outlives its worker, and little is let
in."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.cli import main
from lightrl.config import schema
from lightrl.errors import RewardError
from lightrl.rewards.protocol import WorkerSetup, inherited
from lightrl.rewards.runner import RewardPool
from tests.support.cli import QUICKSTART, all_end, linux_only
from tests.support.reward_pool import LIMIT_S, job, reward_set, run_jobs
from tests.support.tiers import e2e

SLEEPERS = """
import os, pathlib, signal, subprocess, sys, time
FILE = pathlib.Path(__file__).with_name("started")
FORK = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    time.sleep(1000)"
IGNORES = "import signal, time\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(1000)"

def reward(sample):
    started = [
        subprocess.Popen(["sleep", "1000"]),
        subprocess.Popen(["sleep", "1000"], start_new_session=True),
        subprocess.Popen([sys.executable, "-c", IGNORES], start_new_session=True),
    ]
    subprocess.run([sys.executable, "-c", FORK])  # its parent has ended
    FILE.with_suffix(".new").write_text(str(os.getpid()))
    FILE.with_suffix(".new").rename(FILE)
    match sample.row.get("do"):
        case "hang":
            time.sleep(1000)
        case "crash":
            os._exit(3)
        case "group":
            os.killpg(os.getpgrp(), signal.SIGKILL)
    return 1.0
"""
# A daemon as far as its reward pool goes.
DAEMON = """
import asyncio, sys
from pathlib import Path
from lightrl.config import schema
from lightrl.rewards.protocol import RewardJob
from lightrl.rewards.runner import RewardPool
from lightrl.rewards.protocol import RewardSet, WorkerSetup
from array import array

async def main(folder, model_files):
    settings = schema.Reward(functions=(f"{folder}/rewards.py:reward",))
    show = lambda result: print(result, flush=True)
    alike = RewardSet(settings.functions, (1.0,), "prompt", "answer", (), True)
    setup = WorkerSetup(settings.model_dump_json(), (alike,), str(model_files))
    pool = RewardPool(settings, setup, folder, show, print)
    await pool.start()
    pool.submit(RewardJob("a", 1, "say abc", {}, array("i", [1, 0]), "stop"))
    await pool.run()

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def below(pid: int) -> list[int]:
    """Process file descriptors of everything below `pid`."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        more = children.get(todo.pop(), [])
        found += more
        todo += more
    return [os.pidfd_open(p) for p in found]


def daemon(folder: Path, files: Path) -> "subprocess.Popen[str]":
    """Has scored one response when this returns."""
    (folder / "rewards.py").write_text(SLEEPERS)
    command = [sys.executable, "-c", DAEMON, str(folder), str(files)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "reward=1.0" in process.stdout.readline()
    return process


def sleepers() -> set[int]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if (
                file.read_bytes() == b"sleep\x001000\x00"
                or b"time.sleep(1000)" in file.read_bytes()
            ):
                found.add(int(file.parent.name))
        except OSError:
            continue
    return found


@linux_only
def test_nothing_that_a_reward_has_started_outlives_kill_9_of_its_daemon(model_files, tmp_path):
    with daemon(tmp_path, model_files) as process:
        processes = below(process.pid)
        assert len(processes) == 2 + 4  # reaper, worker, and what it has started
        process.kill()
        assert all_end(processes)


@linux_only
def test_the_reaper_heeds_no_signal_that_is_for_the_daemon(model_files, tmp_path):
    with daemon(tmp_path, model_files) as process:
        processes = below(process.pid)
        for descriptor in processes[:2]:
            for number in (
                signal.SIGTERM,
                signal.SIGINT,
                signal.SIGHUP,
                signal.SIGUSR1,
                signal.SIGQUIT,
            ):
                if descriptor == processes[0] or number in {
                    signal.SIGTERM,
                    signal.SIGINT,
                    signal.SIGHUP,
                }:
                    signal.pidfd_send_signal(descriptor, number)
        process.terminate()
        assert all_end(processes)


@linux_only
@pytest.mark.parametrize(
    ("do", "failure"),
    [("pass", ""), ("crash", "crashed"), *e2e([("hang", "timeout"), ("group", "crashed")])],
)
def test_nothing_is_left_of_a_worker_however_it_ends(model_files, tmp_path, do, failure):
    before = sleepers()
    results = run_jobs(SLEEPERS, [job("a", do=do)], model_files, tmp_path, timeout_s=3.0)
    assert results["a"].failure == failure
    assert (tmp_path / "started").exists()
    assert sleepers() <= before


@linux_only
def test_a_worker_dies_with_its_reaper_and_is_replaced(model_files, tmp_path):
    source = (
        "import os\n"
        "def reward(sample):\n"
        "    return {'reward': 1.0, 'parent': os.getppid(), 'worker': os.getpid()}\n"
    )
    (tmp_path / "rewards.py").write_text(source)
    settings = schema.Reward(functions=(f"{tmp_path}/rewards.py:reward",))
    results: asyncio.Queue = asyncio.Queue()

    async def scenario() -> None:
        sets = (reward_set(settings),)
        setup = WorkerSetup(settings.model_dump_json(), sets, str(model_files))
        pool = RewardPool(settings, setup, tmp_path, results.put_nowait, print)
        await pool.start()
        serving = asyncio.create_task(pool.run())
        pool.submit(job("a"))
        first = (await results.get()).metrics
        os.kill(int(first["parent"]), signal.SIGKILL)
        for k in itertools.count():  # until it has died
            pool.submit(job(f"b{k}"))
            if (await results.get()).metrics.get("worker", first["worker"]) != first["worker"]:
                break
        await pool.stop()
        serving.cancel()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


SEEN = """
import os

def reward(sample):
    names = ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "LIGHTRL_KEY", "PATH", "HOME")
    seen = {n: float(n in os.environ) for n in names}
    return {"reward": 1.0, "foo": float(os.environ.get("FOO", 0)), **seen}
"""


def test_secrets_of_the_environment_are_not_seen_and_named_ones_are(
    model_files, tmp_path, monkeypatch
):
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "LIGHTRL_KEY"):
        monkeypatch.setenv(name, "secret")
    few = run_jobs(SEEN, [job("a")], model_files, tmp_path)["a"].metrics
    usual = {"PATH": 1.0, "HOME": 1.0}
    assert few == dict.fromkeys(few, 0.0) | usual
    named = run_jobs(SEEN, [job("a")], model_files, tmp_path, env=("OPENAI_*", "LIGHTRL_KEY"))[
        "a"
    ].metrics
    assert named == few | {"OPENAI_API_KEY": 1.0}


def test_usual_names_pass_in_capitals_or_not():
    given = {"https_proxy": "a", "HTTPS_PROXY": "b", "LC_ALL": "c", "MY_TOKEN": "d", "path": "e"}
    assert inherited(given, ()) == {"https_proxy": "a", "HTTPS_PROXY": "b", "LC_ALL": "c"}
    assert inherited(given | {"LIGHTRL_KEY": "f"}, ("*",)) == given


def test_a_command_is_put_before_the_worker_and_its_processes_end_with_it(model_files, tmp_path):
    before = sleepers()
    # as a sandbox, which stays the parent
    shell = ("sh", "-c", 'sleep 1000 & FOO=2 "$@"; exit $?', "sh")
    for command, foo in ((("env", "FOO=1"), 1.0), (shell, 2.0)):
        metrics = run_jobs(SEEN, [job("a")], model_files, tmp_path, command=command)["a"].metrics
        assert metrics["foo"] == foo
    assert sleepers() <= before


def test_a_command_that_does_not_exist_is_one_line_before_the_run_begins(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["up", str(QUICKSTART), 'reward.command=["no-such-sandbox", "--net"]'])
    line = "lightrl: reward.command = 'no-such-sandbox': no such program on this machine\n"
    assert capsys.readouterr().err == line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-sandbox", "no-such-sandbox: cannot be started: No such file"),
        ("false", "exit status 1"),
    ],
)
def test_a_command_that_cannot_run_the_worker_says_so(model_files, tmp_path, command, reason):
    with pytest.raises(RewardError, match=reason):
        run_jobs(SEEN, [job("a")], model_files, tmp_path, command=(command,))
