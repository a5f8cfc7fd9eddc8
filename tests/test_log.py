"""Test the log lines of a process from outside it: their fields, and failures they survive."""

import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lightrl import log
from lightrl.system.output import plain

LIMIT_S = 60.0
PROGRAM = """
import logging, sys
from lightrl import log
from lightrl.log import LogSettings
log.configure(LogSettings("rank", "trainer-0", {level!r}, {as_json}))
logger = logging.getLogger("lightrl.trainer.rank.rank")
"""


def logged(source: str, level: str = "info", as_json: bool = False) -> str:
    """Return the stdout and stderr of a process that runs `source`."""
    program = PROGRAM.format(level=level, as_json=as_json) + source
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
        check=False,
    )
    return done.stdout.decode()


def records(text: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_has_time_level_role_and_node():
    before = datetime.now()
    [line] = logged("logger.info('step %d', 3)").splitlines()
    moment, rest = datetime.fromisoformat(line[:23]), line[24:]
    assert rest == "INFO rank trainer-0: step 3"
    assert before - timedelta(seconds=1) < moment < datetime.now()


def test_what_a_library_lacks_on_a_cpu_is_not_logged():
    source = """
of_torchao = "import logging; logging.warning('no triton'); logging.error('no memory')"
exec(compile(of_torchao, "/site-packages/torchao/kernel.py", "exec"))
logging.getLogger("torch._library.triton").warning("no triton")
logging.getLogger("transformers").warning("a deprecated config")
"""
    lines = [line[24:] for line in logged(source).splitlines()]
    assert lines == [
        "ERROR rank trainer-0: no memory",
        "WARNING rank trainer-0: a deprecated config",
    ]


def test_a_line_of_json_has_the_same_fields_and_the_logger():
    before = datetime.now(UTC)
    [record] = records(logged("logger.warning('step %d', 3)", as_json=True))
    assert record["time"].endswith("Z")
    moment = datetime.fromisoformat(record.pop("time"))
    assert before - timedelta(seconds=1) < moment < datetime.now(UTC)
    assert record == {
        "level": "warning",
        "role": "rank",
        "node": "trainer-0",
        "logger": "lightrl.trainer.rank.rank",
        "message": "step 3",
    }


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_a_level_hides_less_severe_records(level):
    levels = ["debug", "info", "warning", "error"]
    source = "".join(f"logger.{name}('x')\n" for name in levels)
    written = [log.parse(line).level for line in logged(source, level).splitlines()]
    assert written == levels[levels.index(level) :]


def test_other_packages_log_only_warnings():
    source = "other = logging.getLogger('httpx')\nother.info('a')\nother.warning('b')"
    assert [log.parse(li).text for li in logged(source, "debug").splitlines()] == ["b"]


CRASH = "def fail():\n    raise ValueError('a\\x1b[2Jb')\n"


def test_a_traceback_follows_its_record_and_ends_with_the_error():
    text = logged(CRASH + "try:\n    fail()\nexcept ValueError:\n    logger.exception('oh')\n")
    assert log.parse(text.splitlines()[0]) == ("error", "oh")
    assert text.splitlines()[1] == "Traceback (most recent call last):"
    assert text.splitlines()[-1] == "ValueError: a\\u001b[2Jb"


IN_A_THREAD = "import threading\nthreading.Thread(target=fail).start()"


@pytest.mark.parametrize("where", ["fail()", IN_A_THREAD])
def test_uncaught_exceptions_prints_and_warnings_are_json_too(where):
    source = f"""{CRASH}
import warnings
print("one", "two")
print("half", end="", file=sys.stderr)
print(" a line", file=sys.stderr)
warnings.warn("old")
print("at the end", end="")
{where}
"""
    written = records(logged(source, "error", as_json=True))
    crash = next(r for r in written if "exception" in r)
    assert crash["level"] == "critical"
    assert crash["exception"].endswith("ValueError: a\x1b[2Jb")
    told = {(r["level"], r["logger"], r["message"]) for r in written}
    assert {("info", "stdout", "one two"), ("warning", "stderr", "half a line")} <= told
    assert ("info", "stdout", "at the end") in told
    assert not [r for r in written if r["logger"] == "py.warnings"]  # less severe than "error"


def test_a_message_can_neither_forge_a_line_nor_control_the_terminal():
    source = "logger.info('a\\x1b[2J\\n2026-11-22 00:00:00.000 ERROR rank trainer-0: forged')"
    [line] = logged(source).splitlines()
    assert line.endswith("a\\u001b[2J 2026-11-22 00:00:00.000 ERROR rank trainer-0: forged")
    [record] = records(logged(source, as_json=True))
    assert record["message"].startswith("a\x1b[2J\n")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("last", ["logger.error('why %s', 'not')", CRASH + "fail()"])
def test_the_last_message_can_be_parsed_from_a_log(as_json, last):
    last_line = logged(last, as_json=as_json).splitlines()[-1]
    assert plain(log.parse(last_line).text) in {"why not", "ValueError: a\\u001b[2Jb"}


def test_a_foreign_line_is_parsed_as_plain_text():
    for line in ("Killed", "", "{}", "[1]", '{"level": 1}', "2026-11-22 INFO"):
        assert log.parse(line) == ("", line)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_full_disk_loses_only_log_lines(tmp_path, as_json):
    done = tmp_path / "done"
    source = f"""
for k in range(2000):
    logger.info("x" * 50)
    print("y" * 50, file=sys.stderr)
open({str(done)!r}, "w").close()
"""
    program = PROGRAM.format(level="info", as_json=as_json) + source
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=full, timeout=LIMIT_S, check=False
        )
    assert process.returncode == 0
    assert done.exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_process_survives_a_log_pipe_without_a_reader(as_json):
    ours, theirs = os.pipe()
    os.close(ours)
    program = PROGRAM.format(level="info", as_json=as_json) + "for k in range(2000): logger.info(k)"
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=theirs, stderr=theirs, timeout=LIMIT_S, check=False
    )
    os.close(theirs)
    assert done.returncode == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_a_record_with_wrong_arguments_does_not_stop_the_log(as_json):
    text = logged("logger.info('%d', 'x')\nlogger.info('next')", as_json=as_json)
    assert ("info", "next") in [log.parse(line) for line in text.splitlines()]
    if as_json:
        records(text)


def test_children_inherit_the_log_settings_of_their_parent():
    source = """
import os, subprocess
child = (
    "import logging\\nfrom lightrl import log\\nlog.configure(log.inherited())\\n"
    "logging.getLogger('lightrl.x').info('no')\\nlogging.getLogger('lightrl.x').warning('yes')"
)
env = {**os.environ, **log.environment("reward", "head")}
subprocess.run([sys.executable, "-c", child], env=env, check=True)
log.configure_again("info", False)
logger.info("now")
"""
    first, second = logged(source, "warning", as_json=True).splitlines()
    record = json.loads(first)
    assert (record["role"], record["node"], record["message"]) == ("reward", "head", "yes")
    assert second.endswith("INFO rank trainer-0: now")


def test_the_root_logger_of_a_reward_worker_belongs_to_the_user():
    source = """
logging.basicConfig(level="INFO", format="mine %(message)s")
logging.getLogger("user").info("a")
logger.warning("b")
"""
    program = PROGRAM.format(level="info", as_json=False).replace('"rank"', '"reward"') + source
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stderr == "mine a\n"
    [line] = done.stdout.splitlines()
    assert line.endswith("WARNING reward trainer-0: b")


@pytest.mark.parametrize("value", ["", "x", "[]", '{"colour": 1}'])
def test_invalid_settings_in_the_environment_are_ignored(monkeypatch, value):
    monkeypatch.setenv(log.ENVIRONMENT, value)
    assert log.inherited() == log.LogSettings()


def test_a_launcher_logs_to_its_file_once_the_folder_exists(tmp_path):
    folder = tmp_path / "logs"
    source = f"""
from pathlib import Path
log.configure_file(LogSettings("launcher", "here"), Path({str(folder)!r}) / "launcher.log")
logger.info("lost")
Path({str(folder)!r}).mkdir()
logger.info("kept")
"""
    assert logged(source) == ""
    [line] = (folder / "launcher.log").read_text().splitlines()
    assert line.endswith("INFO launcher here: kept")


def test_a_reported_line_has_the_level_of_its_prefix(caplog):
    with caplog.at_level("INFO", logger="lightrl.x"):
        report = log.reporter(logging.getLogger("lightrl.x"))
        report("WARNING: 100% full")
        report("written again")
    told = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert told == [("WARNING", "100% full"), ("INFO", "written again")]
