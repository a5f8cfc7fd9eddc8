"""Programs that attack the machine: each costs its own outcome alone and leaves neither process nor
file."""

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from lightrl.errors import RewardError
from lightrl.rewards.code.reward import SHORTEST_S, CodeReward
from lightrl.rewards.code.sandbox import Limits, Outcome, Sandbox, _descendants
from tests.rewards.test_code import sample

LIMITS = Limits(memory_bytes=512 << 20, disk_bytes=16 << 20, output_bytes=1 << 20, processes=16)
LONG_S = 60.0  # ends a test that hangs


def _possible() -> bool:
    try:
        Sandbox(LIMITS).close()
    except RewardError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _possible(), reason="this kernel refuses namespaces")


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS) as made:
        yield made


def run(sandbox: Sandbox, code: str, time_s: float = LONG_S, stdin: bytes = b"") -> Outcome:
    return sandbox.run("main.py", time_s, stdin, {"main.py": code.encode()})


def processes() -> set[int]:
    return {int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()}


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
assert set(os.environ) <= {{"PYTHONHASHSEED", "LC_CTYPE"}}, os.environ
assert os.getppid() == 1 and os.getuid() != 0
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
try:
    socket.socket(40, socket.SOCK_STREAM)  # to the hypervisor
except PermissionError:
    print("refused")
"""
    outcome = run(sandbox, code)
    assert outcome.output == b"101\n101\nrefused\n"  # ENETUNREACH


def test_a_fork_bomb_stays_within_its_processes_and_leaves_none() -> None:
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
    with Sandbox(LIMITS) as sandbox:
        assert run(sandbox, code).output == b"True\n"
        # They are killed with the program, not with the sandbox.
        assert run(sandbox, "import os; print(bool(os.fork()) and os.wait()[1])").code == 0
        first = sandbox.first_pid
    assert first not in processes()


def test_a_program_that_leaves_its_group_is_found(sandbox: Sandbox) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setpgid(0, 0)\n    time.sleep(1000)\n"
    before = time.monotonic()
    assert run(sandbox, code).status == "exited"
    assert time.monotonic() - before < LONG_S
    assert run(sandbox, "import os\nos.kill(-1, 0)").code == 1  # nobody else is there


def test_many_processes_leave_the_processors_to_others(sandbox: Sandbox) -> None:
    """Else programs of other responses exceed their time beside a fork bomb that computes."""
    code = """
import os
children = [os.fork() for _ in range(3)]
children += [0 not in children and os.fork()]
if 0 in children:
    while True: pass
while any(os.getpriority(os.PRIO_PROCESS, child) < 19 for child in children): pass
print("all")
"""
    assert run(sandbox, code).output == b"all\n"


def test_a_program_has_one_session(sandbox: Sandbox) -> None:
    """Where the kernel shares the processors among sessions, several would have several shares."""
    code = "import os\nif os.fork() == 0:\n    os.setsid()\n    print('left')\nelse: os.wait()"
    outcome = run(sandbox, code)
    assert outcome.output == b""
    assert "Operation not permitted" in outcome.errors


def test_memory_is_limited_for_each_process(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "x = bytearray(2 << 30)")
    assert "MemoryError" in outcome.errors


@pytest.mark.parametrize("call", ["work()", "threading.Thread(target=work).start()"])
def test_memory_is_limited_for_all_processes_together(call: str) -> None:
    code = f"""
import os, threading, time
def work():
    for _ in range(8):
        if os.fork() == 0:
            x = bytearray(os.urandom(1)) * (200 << 20)
            time.sleep(1000)
    os.wait()
{call}
"""
    with Sandbox(LIMITS) as sandbox:
        first = sandbox.first_pid
        assert run(sandbox, code).status == "memory"
        assert not sandbox.is_alive
    assert first not in processes()


@pytest.mark.parametrize(
    "descriptor", ["-1", "os.open('/dev/zero', os.O_RDWR)"], ids=["anonymous", "zero"]
)
def test_memory_that_stays_when_a_process_lets_go_of_it_cannot_be_had(
    sandbox: Sandbox, descriptor: str
) -> None:
    """Its pages are in nobody's resident set, so no limit would count them."""
    code = f"import mmap, os\nmmap.mmap({descriptor}, 1 << 20)[0] = 1"
    outcome = run(sandbox, code)
    assert outcome.code == 1
    assert "not permitted" in outcome.errors or "No such file" in outcome.errors
    private = "import mmap\nmmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)"
    assert run(sandbox, private).code == 0


def test_input_can_be_mapped_as_fast_readers_do(sandbox: Sandbox) -> None:
    assert run(sandbox, "import mmap\nprint(mmap.mmap(0, 0).readline())", stdin=b"a\n").code == 0


def test_a_program_cannot_interrupt_the_first_process(sandbox: Sandbox) -> None:
    for number in range(1, 32):
        run(sandbox, f"import os\nos.kill(1, {number})")
        assert sandbox.is_alive
    heeds = "import signal\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert run(sandbox, heeds).output == b"True\n"


def test_a_sandbox_that_is_closed_again_kills_nobody() -> None:
    """Its process's id may be another's by then."""
    sandbox = Sandbox(LIMITS)
    sandbox.close()
    command = ["sh", "-c", "sleep 1000 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        sandbox._process.pid = other.pid
        sandbox.close()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.1)
        os.kill(child, signal.SIGKILL)


def test_the_first_process_has_nothing_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "of the worker")
    with Sandbox(LIMITS) as made:
        for pid in (made.first_pid, *_descendants(made.first_pid)):
            assert b"SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert os.getsid(pid) == made.first_pid


def test_a_first_process_that_answers_no_more_costs_the_sandbox(sandbox: Sandbox) -> None:
    for pid in _descendants(sandbox.first_pid):
        os.kill(pid, signal.SIGSTOP)
    assert run(sandbox, "print(1)", 0.1).status == "crashed"
    assert not sandbox.is_alive


def test_a_disk_bomb_fills_its_own_disk(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "with open('/tmp/x', 'wb') as f:\n    f.write(bytes(100 << 20))")
    assert outcome.code == 1
    several = "for k in range(9):\n    open(f'/tmp/y{k}', 'wb').write(bytes(4 << 20))"
    assert "No space left" in run(sandbox, several).errors
    many = run(sandbox, "for k in range(100_000):\n    open(f'/tmp/{k}', 'w').close()")
    assert "No space left" in many.errors


def test_endless_output_is_cut(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "while True: print('x' * 1000)")
    assert (outcome.status, len(outcome.output)) == ("output", LIMITS.output_bytes)
    assert (
        run(sandbox, "import sys\nwhile True: sys.stderr.write('x' * 1000)", 0.2).status
        == "timeout"
    )


def test_an_endless_loop_ends_at_its_limit(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "while True: pass", 0.2)
    assert outcome.status == "timeout"
    assert outcome.wall_s >= 0.2
    assert run(sandbox, "print(1)").output == b"1\n"


@pytest.mark.parametrize(
    "call",
    [
        "os.kill(1, 9)",
        "libc.ptrace(16, 1, 0, 0)",
        "libc.unshare(0x10000000)",
        "libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None)",
        "libc.memfd_create(b'x', 0)",
        "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
        "libc.syscall(438, libc.syscall(434, 1, 0), 3, 0)",  # pidfd_getfd
        "libc.socket(16, 3, 0)",  # netlink
        "libc.setsockopt(libc.socket(1, 1, 0), 1, 7, int_(1 << 20), 4)",  # a large buffer
        "libc.ftruncate(0, 1 << 20)",  # stdin is memory
    ],
)
def test_what_leads_out_is_refused_or_does_nothing(sandbox: Sandbox, call: str) -> None:
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None)
libc.ptrace.restype = libc.syscall.restype = ctypes.c_long
int_ = lambda n: ctypes.byref(ctypes.c_int(n))
answer = {call}
print(answer in (None, -1))
"""
    assert run(sandbox, code).output == b"True\n"
    assert run(sandbox, "print(1)").output == b"1\n"


JUNK = {
    "a link": "os.unlink('main.py')\nos.symlink('/dev/null', 'main.py')",
    "a folder like the program": "os.unlink('main.py')\nos.makedirs('main.py/a')",
    "a pipe": "os.unlink('main.py')\nos.mkfifo('main.py')",
    "what nobody may read": (
        "os.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.symlink('/', 'a/b/d')\n"
        "for path in ('a/b/c', 'a/b', 'a', 'main.py'): os.chmod(path, 0)"
    ),
    "a folder that nobody may enter": "os.chmod('.', 0o1777)\nos.chmod('.', 0)",
    "depth": "for _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')",
    "names": (
        "for name in (b'\\xff', b'a\\nb', b'-rf', b' ', b'*', b'x' * 255):\n"
        "    os.mkdir(name)\n    open(name + b'/' + name, 'w').close()"
    ),
    "modules": "for name in ('json', 'os', 'site'): open(f'{name}.py', 'w').write('1 / 0')",
}
MUCH = {
    "many files": "for k in range(10_000): open(f'{k}', 'w').close()",
    "a full disk": "for k in range(9): open(f'{k}', 'wb').write(bytes(4 << 20))",
}


@pytest.mark.parametrize(
    ("junk", "is_isolated"), [*product(JUNK, (True, False)), *((much, True) for much in MUCH)]
)
def test_what_one_program_leaves_behind_does_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, junk: str, is_isolated: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Sandbox(LIMITS, is_isolated) as sandbox:
        run(sandbox, f"import os\n{(JUNK | MUCH)[junk]}")
        code = "import os\nopen('x', 'wb').write(bytes(8 << 20))\nprint(sorted(os.listdir()))"
        assert run(sandbox, code).output == b"['main.py', 'x']\n"
        run(sandbox, f"import os\n{(JUNK | MUCH)[junk]}")
    assert os.listdir(tmp_path) == []


def test_nor_does_what_a_killed_worker_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    left = tmp_path / f"lightrl-{ended.pid}-code-x"
    left.mkdir()
    subprocess.run([sys.executable, "-c", f"import os\n{JUNK['depth']}"], cwd=left, check=True)
    reward = CodeReward(timeout_s=LONG_S, limits=LIMITS, is_isolated=False)
    assert reward(sample("print(1)", {"inputs": [""], "outputs": ["1"]}))["reward"] == 1.0
    assert not left.exists()


def test_without_walls_limits_stay_and_nothing_is_left() -> None:
    with Sandbox(LIMITS, is_isolated=False) as sandbox:
        outcome = run(
            sandbox, "import os, time\nif os.fork() == 0:\n    os.setpgid(0, 0); time.sleep(1000)"
        )
        assert outcome.status == "exited"
        folder = Path(run(sandbox, "import os; print(os.getcwd())").output.decode().strip())
        assert "MemoryError" in run(sandbox, "x = bytearray(2 << 30)").errors
        assert run(sandbox, "while True: pass", 0.2).status == "timeout"
        first = sandbox.first_pid
    assert not folder.exists()
    assert first not in processes()


def test_programs_read_the_packages_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "extra.py").write_text("ANSWER = 42")
    tmp_path.chmod(0o755)
    with Sandbox(LIMITS, packages=[str(tmp_path)]) as sandbox:
        for _ in range(2):  # where packages lie in /tmp, they stay when it is emptied
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


def test_nor_the_socket_of_the_first_process_whatever_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    usual = socket.socketpair

    def far_away() -> tuple[socket.socket, socket.socket]:
        ours, theirs = usual()
        with theirs:
            return ours, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 5000))

    monkeypatch.setattr("socket.socketpair", far_away)
    try:
        with Sandbox(LIMITS) as sandbox:
            assert run(sandbox, "import os\nos.fstat(5000)").code == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_processor_whose_system_calls_are_unknown_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(RewardError, match=r"no sandbox on this processor \(vax\)"):
        Sandbox(LIMITS)


def test_sets_have_one_order_in_all_runs(sandbox: Sandbox) -> None:
    code = "print(hash('a'), hash('b'))"
    with Sandbox(LIMITS) as other:
        assert run(sandbox, code).output == run(other, code).output


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
