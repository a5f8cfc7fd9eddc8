"""The logs of all processes of a run, by the standard `logging`: one format, chosen by the config.

Owns how a line looks, for people or for machines, that it carries role and node, and how a child
process learns to write the same. Modules do `logger = logging.getLogger(__name__)`. A line is never
worth more than its process: see system/output.py.

    2026-11-22 14:09:59.123 INFO coordinator head: step 3 done
    {"time": "2026-11-22T14:09:59.123Z", "level": "info", "role": "coordinator", "node": "head",
     "logger": "lightrl.coordinator.daemon", "message": "step 3 done"}        (on one line)
"""

import contextlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from lightrl.system.output import capture_lines, never_fail, plain, print_to

PACKAGE = "lightrl"
ENVIRONMENT = "LIGHTRL_LOG"  # the settings for child processes
LAST_BYTES = 1 << 16  # of the end of a log, in which its last line is looked for
WARNING = "WARNING: "  # how a line for a screen begins that is one; a log has levels

_TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ([A-Z]+) \S+ \S*: (.*)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogSettings:
    """`role`: coordinator, trainer, rollout, several of them with commas, rank, engine, reward,
    data or launcher. `level`: debug, info, warning or error."""

    role: str = "launcher"
    node: str = ""
    level: str = "info"
    json: bool = False


class LogLine(NamedTuple):
    """`level` is "" for what was not logged by us, but printed."""

    level: str
    text: str


_settings: LogSettings | None = None  # of this process
_is_plain = True  # it prints lines for people, not its log


def configure(settings: LogSettings) -> None:
    """From now on whatever is logged here, uncaught or, with `json`, printed is a line on stdout.

    Called again, the newer settings count.
    """
    global _settings, _is_plain
    is_first, _settings, _is_plain = _is_plain, settings, False
    if is_first:
        never_fail()
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread
    _handle_with(LogOutput(_Output(sys.stdout)), settings)
    capture_lines(_log_printed if settings.json else None)


def configure_file(settings: LogSettings, file: Path) -> None:
    """The same for a process that talks to a person: what it logs is written to `file` alone."""
    global _settings
    _settings = settings
    _handle_with(LogOutput(_File(file)), settings)


def configure_again(level: str, as_json: bool) -> None:
    """The level and the form of the config of the run, when it is known."""
    if _settings is not None and (_settings.level, _settings.json) != (level, as_json):
        configure(replace(_settings, level=level, json=as_json))


def environment(role: str, node: str | None = None) -> dict[str, str]:
    """What a child process is started with, so that it logs as this one does."""
    settings = _settings or LogSettings()
    child = replace(settings, role=role, node=settings.node if node is None else node)
    return {ENVIRONMENT: json.dumps(asdict(child))}


def inherited() -> LogSettings:
    """Return the settings that the parent process passed in the environment."""
    try:
        return LogSettings(**json.loads(os.environ.get(ENVIRONMENT, "{}")))
    except (ValueError, TypeError):  # not ours
        return LogSettings()


def error_for_machines(text: str) -> bool:
    """Log why this process ends, if its output is JSON. Returns whether it is."""
    if _settings is None and inherited().json:
        configure(inherited())
    is_json = _settings is not None and _settings.json and not _is_plain
    if is_json:
        logger.error(text)
    return is_json


def reporter(log: logging.Logger) -> Callable[[str], None]:
    """A function that logs lines for screens, each at the level of its prefix."""

    def report(line: str) -> None:
        level = logging.WARNING if line.startswith(WARNING) else logging.INFO
        log.log(level, "%s", line.removeprefix(WARNING))

    return report


def parse(line: str) -> LogLine:
    """A line of a log of ours, either form. What is no such line is its own text."""
    if (found := _TEXT.fullmatch(line)) is not None:
        return LogLine(found[1].lower(), found[2])
    with contextlib.suppress(ValueError, KeyError, TypeError):
        record: dict[str, Any] = dict(json.loads(line))
        raised = str(record.get("exception", "")).strip().splitlines()
        return LogLine(record["level"], raised[-1] if raised else record["message"])
    return LogLine("", line)


def last_line(file: Path, since: int = 0) -> str:
    """The text of the last line of a log after `since` bytes; "" if none."""
    try:
        with file.open("rb") as log:
            log.seek(max(since, file.stat().st_size - LAST_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return parse(lines[-1].strip()).text if lines else ""


class _TextFormatter(logging.Formatter):
    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._who = f"{settings.role} {settings.node}"

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        lines = [f"{moment} {record.levelname} {self._who}: {plain(record.getMessage())}"]
        return "\n".join(lines + list(map(plain, _exception(self, record).splitlines())))


class _JsonFormatter(logging.Formatter):
    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._settings = settings

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._settings.role,
            "node": self._settings.node,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if raised := _exception(self, record):
            line["exception"] = raised
        return plain(json.dumps(line, ensure_ascii=False))


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""


class _Output:
    """The stream of a handler. It loses what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        print_to(self._stream, text.removesuffix("\n"))


class _File:
    """Opened for each line: there are few, and its folder comes and goes with the run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(text.encode())


class LogOutput(logging.StreamHandler[_Output | _File]):
    """The one handler of this package."""


def _handle_with(handler: LogOutput, settings: LogSettings) -> None:
    """Other packages log from warnings on: their details would hide ours.

    In a reward worker the root logger is the user's code's, to configure or not; a file is for
    what is ours.
    """
    handler.setFormatter((_JsonFormatter if settings.json else _TextFormatter)(settings))
    package, root = logging.getLogger(PACKAGE), logging.getLogger()
    is_ours_alone = settings.role == "reward" or isinstance(handler.stream, _File)
    top = package if is_ours_alone else root
    for old in [h for h in top.handlers if isinstance(h, LogOutput)]:
        top.removeHandler(old)
    top.addHandler(handler)
    package.propagate = not is_ours_alone
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    package.setLevel(level)
    if top is root:
        root.setLevel(max(level, logging.WARNING))
        logging.captureWarnings(True)


def _log_printed(stream: str, line: str) -> None:
    """What was printed and not logged, by whatever library; it has no level to be judged by."""
    level = logging.WARNING if stream == "stderr" else logging.INFO
    record = logging.LogRecord(stream, level, "", 0, line, None, None)
    for handler in [*logging.getLogger(PACKAGE).handlers, *logging.getLogger().handlers]:
        if isinstance(handler, LogOutput):
            handler.handle(record)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logger.critical("unexpected error: this process ends", exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and args.exc_type is not SystemExit:
        name = args.thread.name if args.thread is not None else "a thread"
        exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
        logger.critical("%s: unexpected error, it ends", name, exc_info=exc_info)
