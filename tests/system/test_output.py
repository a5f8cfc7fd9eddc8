"""Lines of a process: what a terminal must not do to it, and what they must not do to a
terminal."""

import os
import pty
import select
import subprocess
import sys
import termios
import threading

import pytest

from lightrl.system.output import plain

LIMIT_S = 60.0
PROGRAM = "from lightrl.system.output import flush, never_fail, print_error, print_lines\n"


def python(source: str, out: int, err: int | None = None) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + source], stdout=out, stderr=out if err is None else err
    )


def read_all(descriptor: int) -> bytes:
    """Until all who write have closed it."""
    said = b""
    try:
        while data := os.read(descriptor, 65536):
            said += data
    except OSError:  # of a terminal that nobody holds any more
        pass
    os.close(descriptor)
    return said


def test_lines_keep_their_order_and_the_last_ones_are_not_lost():
    ours, theirs = os.pipe()
    process = python(
        "for i in range(2000): print_lines(f'line {i}')\nprint_error('the end')", theirs
    )
    os.close(theirs)
    assert read_all(ours).decode().splitlines() == [*(f"line {i}" for i in range(2000)), "the end"]
    assert process.wait(LIMIT_S) == 0


def test_whoever_is_not_read_goes_on_and_says_later_how_many_lines_are_missing():
    ours, theirs = os.pipe()
    done, mark = os.pipe()
    source = f"""
import os
for i in range(100_000): print_lines(f'line {{i}}')
os.write({mark}, b'x')
flush({LIMIT_S})
print_lines('read again')
"""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + source], stdout=theirs, pass_fds=(mark,)
    ) as process:
        for descriptor in (theirs, mark):
            os.close(descriptor)
        try:
            assert select.select([done], [], [], LIMIT_S)[0], "it waits for a reader"
            assert os.read(done, 1) == b"x"  # although nothing was read
            lines = read_all(ours).decode().splitlines()
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
    expected = num_missing = 0
    for line in lines[:-1]:
        if "were not read in time" in line:
            num_missing = int(line.split()[1])
            expected += num_missing
        else:
            assert line == f"line {expected}"
            expected += 1
    assert expected == 100_000
    assert num_missing > 0
    assert lines[-1] == "read again"


@pytest.mark.parametrize(
    "source",
    [
        "print_lines('one')\nprint_error('two')",
        "never_fail()\nprint('one')\nraise ValueError('two')",
    ],
)
def test_a_stopped_terminal_does_not_keep_a_process_from_ending(source):
    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)  # as ctrl-S does
    process = python(source, theirs)
    assert process.wait(LIMIT_S) in {0, 1}
    os.close(theirs)
    os.close(ours)


def test_a_process_that_forks_says_nothing_twice():
    ours, theirs = os.pipe()
    process = python(
        "import os, warnings\nwarnings.simplefilter('ignore')  # of forks beside threads\n"
        "print_lines('one')\nif os.fork() == 0:\n    print_lines('child')\nelse:\n    "
        "os.wait()\n    print_lines('two')",
        theirs,
    )
    os.close(theirs)
    lines = read_all(ours).decode().splitlines()
    assert sorted(lines) == ["child", "one", "two"]
    assert lines.index("child") < lines.index("two")
    assert process.wait(LIMIT_S) == 0


def test_a_log_file_has_each_line_before_the_next_statement_runs(tmp_path):
    with (tmp_path / "log").open("ab") as log:
        source = (
            "import os\nfor i in range(20_000): print_lines(f'line {i}')\nos.kill(os.getpid(), 9)"
        )
        assert python(source, log.fileno()).wait(LIMIT_S) == -9
    assert (tmp_path / "log").read_text().splitlines() == [f"line {i}" for i in range(20_000)]


def test_what_is_printed_by_others_does_not_hold_up_a_process_either():
    """never_fail() stands for prints of libraries, warnings and tracebacks."""
    ours, theirs = os.pipe()
    read, told = os.pipe()
    source = f"""
import os, sys
never_fail()
for i in range(50_000): print(f'line {{i}}', file=sys.stderr)
os.write({told}, b'x')
flush({LIMIT_S})
"""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + source], stderr=theirs, pass_fds=(told,)
    ) as process:
        for descriptor in (theirs, told):
            os.close(descriptor)
        assert os.read(read, 1) == b"x"
        reader = threading.Thread(target=read_all, args=(ours,))
        reader.start()
        assert process.wait(LIMIT_S) == 0
        reader.join()


def test_a_line_cannot_move_the_cursor_colour_the_terminal_or_turn_text_around():
    assert plain("a\x1b[31m\x7f\x9b2J\u202egnp\u2066x\u2069\r\n\tz") == (
        "a\\u001b[31m\\u007f\\u009b2J\\u202egnp\\u2066x\\u2069   z"
    )
    assert plain("grün 漢字 \U0001f600 [red]") == "grün 漢字 \U0001f600 [red]"
    assert plain("\U000e0041\udc80") == "\\udb40\\udc41\\udc80"  # as JSON spells it


def test_print_lines_shows_escapes_instead_of_sending_them():
    ours, theirs = os.pipe()
    process = python("print_lines('a\\x1b[2J')\nprint_error('b\\x9b2J')", theirs)
    os.close(theirs)
    assert read_all(ours) == b"a\\u001b[2J\nb\\u009b2J\n"
    assert process.wait(LIMIT_S) == 0
