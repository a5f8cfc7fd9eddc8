"""The logs of all processes of a run, by the standard `logging`: one format, chosen by the config,
with role and node. Child processes get the settings in the environment.

Modules do `logger = logging.getLogger(__name__)`. A line that cannot be written is lost.

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
LAST_BYTES = 1 << 16  # read of the end of a log
WARNING = "WARNING: "  # prefix of a line on a screen; a log has levels

# Loggers that warn of what a CPU lacks, used or not.
_OPTIONAL = ("torch._library.triton", "torch.utils._pytree")

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
    """`level` is "" for a line that was printed, not logged."""

    level: str
    text: str


_settings: LogSettings | None = None  # of this process
_is_plain = True  # it prints lines for people, not its log


def configure(settings: LogSettings) -> None:
    """Write every record, uncaught error and, with `json`, printed line to stdout. A later call
    replaces the settings."""
    global _settings, _is_plain
    is_first, _settings, _is_plain = _is_plain, settings, False
    if is_first:
        never_fail()
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread
    _handle_with(LogOutput(_Output(sys.stdout)), settings)
    capture_lines(_log_printed if settings.json else None)


def configure_file(settings: LogSettings, file: Path) -> None:
    """Write the log to `file` alone, in a process whose stdout is for a person."""
    global _settings
    _settings = settings
    _handle_with(LogOutput(_File(file)), settings)


def configure_again(level: str, as_json: bool) -> None:
    """Take the level and the form of the run's config."""
    if _settings is not None and (_settings.level, _settings.json) != (level, as_json):
        configure(replace(_settings, level=level, json=as_json))


def environment(role: str, node: str | None = None) -> dict[str, str]:
    """Return the variable by which a child process logs as this one does."""
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
    """Log why this process ends, if its output is JSON. Return whether it is."""
    if _settings is None and inherited().json:
        configure(inherited())
    is_json = _settings is not None and _settings.json and not _is_plain
    if is_json:
        logger.error(text)
    return is_json


def reporter(log: logging.Logger) -> Callable[[str], None]:
    """Return a function that logs lines for screens, each at the level of its prefix."""

    def report(line: str) -> None:
        level = logging.WARNING if line.startswith(WARNING) else logging.INFO
        log.log(level, "%s", line.removeprefix(WARNING))

    return report


def parse(line: str) -> LogLine:
    """Parse a line of a log in either form. Any other line is its own text."""
    if (found := _TEXT.fullmatch(line)) is not None:
        return LogLine(found[1].lower(), found[2])
    with contextlib.suppress(ValueError, KeyError, TypeError):
        record: dict[str, Any] = dict(json.loads(line))
        raised = str(record.get("exception", "")).strip().splitlines()
        return LogLine(record["level"], raised[-1] if raised else record["message"])
    return LogLine("", line)


def last_line(file: Path, since: int = 0) -> str:
    """Return the text of the last line of a log after `since` bytes; "" if none."""
    try:
        with file.open("rb") as log:
            log.seek(max(since, file.stat().st_size - LAST_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return parse(lines[-1].strip()).text if lines else ""


class _Formatter(logging.Formatter):
    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._settings = settings

    def format(self, record: logging.LogRecord) -> str:
        raised = self.formatException(record.exc_info) if record.exc_info else ""
        return (self._json if self._settings.json else self._text)(record, raised)

    def _text(self, record: logging.LogRecord, raised: str) -> str:
        moment = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        who = f"{self._settings.role} {self._settings.node}"
        line = f"{moment} {record.levelname} {who}: {plain(record.getMessage())}"
        return "\n".join([line, *map(plain, raised.splitlines())])

    def _json(self, record: logging.LogRecord, raised: str) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._settings.role,
            "node": self._settings.node,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if raised:
            line["exception"] = raised
        return plain(json.dumps(line, ensure_ascii=False))


@dataclass
class _Output:
    """A stream that loses what it cannot write."""

    stream: TextIO

    def write(self, text: str) -> None:
        print_to(self.stream, text.removesuffix("\n"))


@dataclass
class _File:
    """A file that is opened for each line, since its folder comes and goes with the run."""

    path: Path

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError), self.path.open("ab") as file:
            file.write(text.encode())


class LogOutput(logging.StreamHandler[_Output | _File]):
    """The one handler of this package."""


def _handle_with(handler: LogOutput, settings: LogSettings) -> None:
    """Attach the handler to the root logger, where other packages log from warnings on. In a reward
    worker the root logger belongs to the user's code; a file has this package's records alone."""
    handler.setFormatter(_Formatter(settings))
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
        for name in _OPTIONAL:
            logging.getLogger(name).setLevel(logging.ERROR)
        handler.addFilter(_is_used)


def _is_used(record: logging.LogRecord) -> bool:
    """Drop what torchao reports when transformers imports it: kernels that nothing here calls."""
    return "/site-packages/torchao/" not in record.pathname or record.levelno >= logging.ERROR


def _log_printed(stream: str, line: str) -> None:
    """Log a line that a library has printed; its level follows from the stream."""
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
