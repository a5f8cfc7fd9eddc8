"""The process that sends figures to Weights & Biases or MLflow, which block for as long as a
network does.

The file `tracker-NAME` in the run directory holds the id of the run there, with which a resumed run
continues. The daemon imports only the messages; a tracker is imported when it is started.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from lightrl.config.values import flat
from lightrl.system.child import Pipe
from lightrl.wire import Codec

logger = logging.getLogger(__name__)

TARGET = "lightrl.metrics.tracker:main"
MAX_NAME = 250  # characters that MLflow takes
MAX_PARAMETER = 500  # characters of a value that every version of MLflow takes
PARAMETERS_AT_ONCE = 100
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True, slots=True)
class StartTracker:
    """Begin, or continue the run that is named in the run directory. `backend`: "wandb" or
    "mlflow"."""

    backend: str
    run_dir: str
    name: str
    project: str
    group: str
    tags: tuple[str, ...]
    # a resolved Config
    config_json: str


@dataclass(frozen=True, slots=True)
class LogRecord:
    """Figures of a step. Example: LogRecord(4, {"reward/mean": 0.61})"""

    step: int
    record: dict[str, float]


@dataclass(frozen=True, slots=True)
class FinishTracker:
    """Send the rest; answered by TrackerFinished."""


@dataclass(frozen=True, slots=True)
class TrackerStarted:
    """`place`: where the figures go, an address or a folder, for people."""

    place: str


@dataclass(frozen=True, slots=True)
class TrackerFailed:
    """The process ends; `reason` is one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class TrackerFinished:
    """All records are sent."""


TrackerCommand: TypeAlias = StartTracker | LogRecord | FinishTracker
TrackerEvent: TypeAlias = TrackerStarted | TrackerFailed | TrackerFinished
COMMANDS: Codec[TrackerCommand] = Codec(TrackerCommand)
EVENTS: Codec[TrackerEvent] = Codec(TrackerEvent)


class Backend(Protocol):
    place: str

    def log(self, step: int, record: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def main(sock: socket.socket) -> None:
    """Serve until the end of the run, or of its daemon."""
    pipe: Pipe[TrackerCommand, TrackerEvent] = Pipe(sock, COMMANDS, EVENTS)
    with contextlib.suppress(EOFError):
        commands = _commands(pipe)
        start = next(commands)
        assert isinstance(start, StartTracker)
        try:
            backend = BACKENDS[start.backend](start)
            pipe.send(TrackerStarted(backend.place))
            try:
                for command in commands:
                    if not isinstance(command, LogRecord):
                        break
                    backend.log(command.step, command.record)
            finally:
                backend.close()
            pipe.send(TrackerFinished())
        except EOFError:
            raise
        except Exception as e:  # each tracker has errors of its own
            logger.exception("%s ends", start.backend)
            lines = str(e).strip().splitlines() or [""]
            pipe.send(TrackerFailed(f"{type(e).__name__}: {lines[0]}"[:300]))


def _commands(pipe: Pipe[TrackerCommand, TrackerEvent]) -> Iterator[TrackerCommand]:
    """Yield commands until the pipe is closed."""
    with contextlib.suppress(EOFError):
        while True:
            yield from pipe.receive()


class Wandb:
    """Weights & Biases ignores a step that is repeated after a resume: steps only grow."""

    def __init__(self, start: StartTracker) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        known = _Id(start)
        self._run: Any = wandb.init(
            project=start.project,
            name=start.name,
            group=start.group or None,
            tags=list(start.tags) or None,
            dir=start.run_dir,
            config=json.loads(start.config_json),
            id=known.id or known.keep(secrets.token_hex(4)),
            resume="allow",
        )
        self.place = getattr(self._run, "url", None) or start.run_dir

    def log(self, step: int, record: dict[str, float]) -> None:
        self._run.log(record, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, start: StartTracker) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow: Any = mlflow
        known = _Id(start)
        mlflow.set_experiment(start.project)
        run = mlflow.start_run(run_id=known.id or None, run_name=start.name)
        if not known.id:
            known.keep(run.info.run_id)
            tags = dict.fromkeys(start.tags, "true")
            mlflow.set_tags(tags | ({"group": start.group} if start.group else {}))
            config = flat(json.loads(start.config_json))
            parameters = [(key, str(value)[:MAX_PARAMETER]) for key, value in config]
            for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
                mlflow.log_params(dict(parameters[first : first + PARAMETERS_AT_ONCE]))
        self.place = mlflow.get_tracking_uri()

    def log(self, step: int, record: dict[str, float]) -> None:
        named = {allowed_by_mlflow(name): value for name, value in record.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def allowed_by_mlflow(name: str) -> str:
    """Return a name that MLflow accepts: it refuses a whole record for one name with other
    characters, or that is no plain path, and reward functions may use any name.

    Example: allowed_by_mlflow("reward/acc (%)@1") == "reward/acc ____at_1"."""
    cleaned = _NOT_IN_MLFLOW.sub("_", name.replace("@", "_at_"))
    return "/".join(part for part in cleaned.split("/") if part.strip("."))[:MAX_NAME]


BACKENDS: dict[str, type[Wandb] | type[Mlflow]] = {"wandb": Wandb, "mlflow": Mlflow}


class _Id:
    """The id of the run at the tracker, stored for a resumed run."""

    def __init__(self, start: StartTracker) -> None:
        self._file = Path(start.run_dir) / f"tracker-{start.backend}"
        self.id = self._file.read_text().strip() if self._file.exists() else ""

    def keep(self, new: str) -> str:
        draft = self._file.with_name(f".{self._file.name}")
        draft.write_text(new)
        os.replace(draft, self._file)
        return new
