"""Programs that attack the machine: each costs its own outcome alone and leaves neither process nor
file."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lightrl.errors import RewardError
from lightrl.rewards.code.reward import SHORTEST_S, CodeReward
from lightrl.rewards.code.sandbox import Ended, Limits, Sandbox
from tests.rewards.test_code import sample

LIMITS = Limits(memory_bytes=512 << 20, disk_bytes=16 << 20, output_bytes=1 << 20, processes=16)
LONG_S = 60.0  # ends a test that hangs


def _refused() -> str:
    try:
        Sandbox(LIMITS)
    except RewardError as e:
        return str(e)
    return ""


_why = _refused()
pytestmark = pytest.mark.skipif(bool(_why), reason=_why or "a sandbox can be had")


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(LIMITS)


def run(sandbox: Sandbox, code: str, time_s: float = LONG_S, stdin: bytes = b"") -> Ended:
    return sandbox.run({"mode": "input", "program": code}, time_s, stdin)


def leaves_nobody(marker: str) -> bool:
    """Waits for it: the kernel ends the processes of a namespace after the first."""
    ends_at = time.monotonic() + LONG_S
    while any(_has(pid, marker) for pid in Path("/proc").iterdir() if pid.name.isdigit()):
        if time.monotonic() > ends_at:
            return False
    return True


def _has(pid: Path, marker: str) -> bool:
    try:
        return marker.encode() in (pid / "comm").read_bytes()
    except OSError:
        return False


def test_a_program_reads_writes_and_ends(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "print(int(input()) + 1)", stdin=b"41\n")
    assert (outcome.status, outcome.code, outcome.output) == ("exited", 0, b"42\n")


def test_what_a_program_raises_is_said(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "1 / 0")
    assert outcome.code == 1
    assert "ZeroDivisionError" in outcome.errors


def test_a_program_sees_nothing_of_the_machine(sandbox: Sandbox, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the key of the run")
    code = f"""
import os
for path in ({str(key)!r}, "/proc", "/etc/passwd", "/home", {str(Path(__file__))!r}):
    assert not os.path.exists(path), path
assert set(os.environ) <= {{"PYTHONHASHSEED", "LC_CTYPE", "PWD"}}, os.environ
assert os.getppid() == 1
assert sorted(os.listdir("/tmp")) == ["main.py"]
"""
    outcome = run(sandbox, code)
    assert (outcome.status, outcome.code) == ("exited", 0), outcome.errors


@pytest.mark.parametrize("path", ["/here", "/usr/lib/here", "/dev/here", os.__file__])
def test_a_program_writes_nowhere_but_in_tmp(sandbox: Sandbox, path: str) -> None:
    outcome = run(sandbox, f"open({path!r}, 'a')")
    assert outcome.code == 1
    assert "Read-only file system" in outcome.errors or "denied" in outcome.errors


def test_a_program_reaches_no_network(sandbox: Sandbox) -> None:
    code = """
import socket
for address in ("127.0.0.1", "10.0.0.1"):
    with socket.socket() as s:
        try:
            s.connect((address, 9))
        except OSError as e:
            print(e.errno)
"""
    assert run(sandbox, code).output in (b"101\n101\n", b"111\n101\n")  # no route, or nobody


NAMED = "import ctypes\nctypes.CDLL(None).prctl(15, b'{}', 0, 0, 0)\n"


def test_a_fork_bomb_stays_within_its_processes_and_leaves_none(sandbox: Sandbox) -> None:
    code = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        children += 1
except BlockingIOError:
    print(children < 16)
"""
    assert run(sandbox, NAMED.format("bomb-of-test") + code).output == b"True\n"
    assert leaves_nobody("bomb-of-test")


def test_a_program_that_leaves_its_group_is_found(sandbox: Sandbox) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
    assert run(sandbox, NAMED.format("left-its-group") + code).status == "exited"
    assert leaves_nobody("left-its-group")


def test_memory_is_limited_for_each_process(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "x = bytearray(2 << 30)")
    assert "MemoryError" in outcome.errors


def test_memory_is_limited_for_all_processes_together(sandbox: Sandbox) -> None:
    code = """
import os, threading, time
def work():
    for _ in range(8):
        if os.fork() == 0:
            x = bytearray(os.urandom(1)) * (200 << 20)
            time.sleep(1000)
    os.wait()
thread = threading.Thread(target=work)
thread.start()
thread.join()  # Python 3.12 refuses to fork while the interpreter ends
"""
    assert run(sandbox, NAMED.format("much-memory") + code).status == "memory"
    assert leaves_nobody("much-memory")


def test_input_can_be_mapped_as_fast_readers_do(sandbox: Sandbox) -> None:
    assert run(sandbox, "import mmap\nprint(mmap.mmap(0, 0).readline())", stdin=b"a\n").code == 0


def test_a_disk_bomb_fills_its_own_disk(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "with open('/tmp/x', 'wb') as f:\n    f.write(bytes(100 << 20))")
    assert outcome.code == 1
    several = "for k in range(9):\n    open(f'/tmp/y{k}', 'wb').write(bytes(4 << 20))"
    assert "No space left" in run(sandbox, several).errors


def test_endless_output_is_cut(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "while True: print('x' * 1000)")
    assert (outcome.status, len(outcome.output)) == ("output", LIMITS.output_bytes)
    errors = run(sandbox, "import sys\nwhile True: sys.stderr.write('x' * 1000)")
    assert errors.code != 0


def test_an_endless_loop_ends_at_its_limit(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "while True: pass", 0.2)
    assert outcome.status == "timeout"
    assert outcome.wall_s >= 0.2
    assert run(sandbox, "print(1)").output == b"1\n"


@pytest.mark.parametrize(
    "call",
    [
        "libc.ptrace(16, 1, 0, 0)",
        "libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None)",
        "libc.setresuid(0, 0, 0)",
    ],
)
def test_what_leads_out_is_refused_or_does_nothing(sandbox: Sandbox, call: str) -> None:
    code = f"import ctypes, os\nlibc = ctypes.CDLL(None)\nprint({call} in (None, -1))"
    outcome = run(sandbox, code)
    assert outcome.output == b"True\n", outcome.errors


def test_a_program_reaches_no_process_but_its_own(sandbox: Sandbox) -> None:
    code = "import os\ntry: os.kill(1, 9)\nexcept PermissionError: pass\nos.kill(-1, 9)\nprint(1)"
    assert run(sandbox, code).status == "exited"
    assert run(sandbox, "print(1)").output == b"1\n"


JUNK = {
    "a link": "os.unlink('main.py')\nos.symlink('/dev/null', 'main.py')",
    "what nobody may read": (
        "os.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.symlink('/', 'a/b/d')\n"
        "for path in ('a/b/c', 'a/b', 'a', 'main.py'): os.chmod(path, 0)"
    ),
    "depth": "for _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')",
    "modules": "for name in ('json', 'os', 'site'): open(f'{name}.py', 'w').write('1 / 0')",
}


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("is_isolated", [True, False])
def test_a_program_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, junk: str, is_isolated: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sandbox = Sandbox(LIMITS, is_isolated)
    assert run(sandbox, f"import os\n{JUNK[junk]}").code == 0
    assert run(sandbox, "import os\nprint(os.listdir())").output == b"['main.py']\n"
    assert os.listdir(tmp_path) == []


def test_without_walls_limits_stay_and_nothing_is_left() -> None:
    sandbox = Sandbox(LIMITS, is_isolated=False)
    code = "import os, time\nif os.fork() == 0: time.sleep(1000)"
    assert run(sandbox, NAMED.format("without-walls") + code).status == "exited"
    assert leaves_nobody("without-walls")
    folder = Path(run(sandbox, "import os; print(os.getcwd())").output.decode().strip())
    assert not folder.exists()
    assert "MemoryError" in run(sandbox, "x = bytearray(2 << 30)").errors
    assert run(sandbox, "while True: pass", 0.2).status == "timeout"


def test_a_machine_without_bubblewrap_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RewardError, match=r"apt install bubblewrap") as raised:
        Sandbox(LIMITS)
    assert "\n" not in str(raised.value)


def test_a_kernel_that_refuses_a_sandbox_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1"
    )
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RewardError, match=r"No permissions.*user namespaces") as raised:
        Sandbox(LIMITS)
    assert "\n" not in str(raised.value)


def test_a_sandbox_that_is_refused_later_is_no_wrong_response(
    monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox, tmp_path: Path
) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: Resource temporarily unavailable' >&2\nexit 1")
    refusing.chmod(0o755)
    monkeypatch.setattr(sandbox, "_walls", [str(refusing)])
    with pytest.raises(RewardError, match=r"no sandbox .*temporarily unavailable"):
        run(sandbox, "print(1)")


def test_programs_read_the_packages_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "extra.py").write_text("ANSWER = 42")
    tmp_path.chmod(0o755)
    sandbox = Sandbox(LIMITS, packages=[str(tmp_path)])
    assert run(sandbox, "import extra; print(extra.ANSWER)").output == b"42\n"
    assert run(sandbox, f"open({str(tmp_path / 'x')!r}, 'w')").code == 1


def test_a_response_whose_tests_all_hang_has_a_score_before_its_call_is_too_late() -> None:
    """Else the worker is killed, and the response has none."""
    limit_s = 4.0
    reward = CodeReward(limit_s, partial=True, limits=LIMITS)
    before = time.monotonic()
    figures = reward(sample("while True: pass", {"inputs": ["1"] * 9, "outputs": ["2"] * 9}))
    assert time.monotonic() - before < limit_s
    assert figures == {"reward": 0.0, "passed": 0.0, "timeouts": 1.0}


def test_a_program_has_no_descriptor_but_its_streams(sandbox: Sandbox) -> None:
    code = """
import os
def is_open(n):
    try: os.fstat(n)
    except OSError: return False
    return True
print([n for n in range(64) if is_open(n)])
"""
    assert run(sandbox, code).output == b"[0, 1, 2]\n"


def test_sets_have_one_order_in_all_runs(sandbox: Sandbox) -> None:
    code = "print(hash('a'), hash('b'))"
    assert run(sandbox, code).output == run(sandbox, code).output


def test_a_right_answer_of_a_program_that_fails_is_none() -> None:
    reward = CodeReward(timeout_s=LONG_S, limits=LIMITS)
    tests = {"inputs": ["", ""], "outputs": ["2", "3"]}
    assert reward(sample("print(2); exit(1)", {"inputs": [""], "outputs": ["2"]}))["reward"] == 0.0
    wrong = reward(sample("print(2)", tests))
    assert wrong == {"reward": 0.0, "timeouts": 0.0}  # the time of a wrong answer says nothing
    right = reward(sample("print(2)", {"inputs": [""], "outputs": ["2"]}))
    assert 0 < right["slowest_s"] < LONG_S
    partial = CodeReward(timeout_s=LONG_S, partial=True, limits=LIMITS)
    assert partial(sample("print(3)", tests)) == {"reward": 0.5, "passed": 0.5, "timeouts": 0.0}


def test_the_limit_of_a_test_follows_from_the_run_and_not_from_earlier_calls() -> None:
    reward = CodeReward(timeout_s=LONG_S, limits=LIMITS)
    tests = {"inputs": [""], "outputs": ["2"]}
    slow = f"import time; time.sleep({SHORTEST_S} + 0.5); print(2)"
    for _ in range(2):  # a quick right answer before
        assert reward(sample("print(2)", tests))["reward"] == 1.0
        assert reward(sample(slow, tests))["reward"] == 1.0
    held = replace(sample(slow, tests), slowest_s=0.1)
    assert reward(held) == {"reward": 0.0, "timeouts": 1.0}
    assert reward(replace(held, slowest_s=4.0))["reward"] == 1.0


def test_a_row_without_tests_is_an_error() -> None:
    with pytest.raises(RewardError, match="the row has no tests"):
        CodeReward(timeout_s=LONG_S, limits=LIMITS)(sample("print(1)"))


def test_each_attack_costs_its_own_response_alone() -> None:
    reward = CodeReward(timeout_s=LONG_S, limits=LIMITS)
    tests = {"inputs": ["1"], "outputs": ["2"]}
    right = "print(int(input()) + 1)"
    bombs = (
        "import os\nwhile True: os.fork()",
        "x = bytearray(9 << 30)",
        "import os; os.kill(-1, 9)",
        *(f"import os\n{junk}" for junk in JUNK.values()),
    )
    for bomb in bombs:
        assert reward(sample(bomb, tests))["reward"] == 0.0
        assert reward(sample(right, tests))["reward"] == 1.0
