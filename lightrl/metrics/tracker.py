"""Figures for Weights & Biases or MLflow, each sent by a process of its own, which reads
metrics.jsonl: it may block for as long as a network does, and fail without an effect on the run.

The file `tracker-NAME` in the run directory holds the id of the run there, with which a resumed run
continues, and the bytes of metrics.jsonl that are sent.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from lightrl.config.schema import Config
from lightrl.config.values import flat
from lightrl.errors import ProtocolError, first_line
from lightrl.log import last_line
from lightrl.system.child import Child, ChildDied, Pipe, retry_on_resource_limit
from lightrl.system.threads import cancel
from lightrl.wire import Codec, from_json

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"
TARGET = "lightrl.metrics.tracker:main"
GETS_NO_MORE = "it gets no figures from now on, metrics.jsonl still does"
LAST_S = 60.0  # to send the rest at the end of a run
LOOK_S = 0.5  # between two looks at the file
MAX_NAME = 250  # characters that MLflow takes
MAX_PARAMETER = 500  # characters of a value that every version of MLflow takes
PARAMETERS_AT_ONCE = 100
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True, slots=True)
class StartTracker:
    """Begin, or continue the run that is named in the run directory. The only command: the process
    ends when the pipe is closed and the rest is sent."""

    # "wandb" or "mlflow"
    backend: str
    run_dir: str
    name: str
    project: str
    group: str
    tags: tuple[str, ...]
    # a resolved Config
    config_json: str


COMMANDS: Codec[StartTracker] = Codec(StartTracker)
TrackerPipe: TypeAlias = Pipe[StartTracker, StartTracker]  # with no event


class Tracker:
    """The daemon's end. Needs a running event loop; `await close()` at the end, when metrics.jsonl
    is written."""

    def __init__(
        self, backend: str, run_dir: Path, config: Config, report: Callable[[str], None]
    ) -> None:
        settings = config.logging
        self._start = StartTracker(
            backend,
            str(run_dir.resolve()),
            config.run.name,
            settings.project,
            settings.group,
            settings.tags,
            config.model_dump_json(),
        )
        self._log = run_dir / "logs" / f"{backend}.log"
        self._report = report
        self._child: Child[StartTracker, StartTracker] | None = None
        self._begun = asyncio.Event()  # the process has started, or failed to
        self._task = asyncio.get_running_loop().create_task(self._run(), name=backend)

    async def close(self) -> None:
        """Wait at most `LAST_S` until the rest is sent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await self._begun.wait()
        is_sending = self._child is not None and not self._task.done()
        await cancel(self._task)
        if self._child is not None:
            code = await self._child.stop(LAST_S)
            if is_sending and code:
                late = f"not all figures were sent within {LAST_S:g} s"
                self._warn(late if code < 0 else last_line(self._log))

    async def _run(self) -> None:
        name = f"{self._start.backend} tracker"
        start = partial(Child.start, TARGET, name, COMMANDS, COMMANDS, log=self._log)
        try:
            self._log.parent.mkdir(exist_ok=True)
            self._child = await retry_on_resource_limit(start, f"the {name}", self._report)
            self._child.send(self._start)
            self._begun.set()
            await self._child.receive()
        except (OSError, ChildDied) as e:
            self._warn(str(e))
        finally:
            self._begun.set()

    def _warn(self, reason: str) -> None:
        where = f"(see logs/{self._log.name})"
        self._report(f"WARNING: {self._start.backend}: {reason}; {GETS_NO_MORE} {where}")


def main(sock: socket.socket) -> None:
    """Send records until the end of the run, or of its daemon."""
    pipe: TrackerPipe = Pipe(sock, COMMANDS, COMMANDS)
    try:
        [start] = pipe.receive()
    except EOFError:
        return
    try:
        stored = _Stored(start)
        backend = BACKENDS[start.backend](start, stored)
        logger.info("%s: figures go to %s", start.backend, backend.place)
        try:
            for step, record, end in _records(pipe, start.run_dir, stored.offset):
                backend.log(step, record)
                stored.store_offset(end)
        finally:
            backend.close()
    except Exception as e:  # each tracker has errors of its own
        logger.exception("%s ends", start.backend)
        sys.exit(f"{type(e).__name__}: {first_line(e)}")


def _records(
    pipe: TrackerPipe, run_dir: str, offset: int | None
) -> Iterator[tuple[int, dict[str, float], int]]:
    """Yield step, figures and end of each line after `offset`, or None for the end of the file,
    until the pipe is closed."""
    is_over = False
    with open(Path(run_dir) / FILE_NAME, "a+b", buffering=0) as file:  # not made yet by the daemon
        end = file.seek(0, os.SEEK_END) if offset is None else offset
        while True:
            file.seek(end)
            *lines, _ = file.read().split(b"\n")
            for line in lines:
                end += len(line) + 1
                with contextlib.suppress(ProtocolError, KeyError):  # a piece torn by a crash
                    record = from_json(line, dict[str, float])
                    step = int(record.pop("step"))
                    yield step, record, end
            if is_over:
                return
            try:
                pipe.receive(LOOK_S)
            except EOFError:
                is_over = True


class Wandb:
    """Weights & Biases ignores a step that is repeated after a resume: steps only grow."""

    def __init__(self, start: StartTracker, stored: "_Stored") -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run: Any = wandb.init(
            project=start.project,
            name=start.name,
            group=start.group or None,
            tags=list(start.tags) or None,
            dir=start.run_dir,
            config=json.loads(start.config_json),
            id=stored.id or stored.store(secrets.token_hex(4)),
            resume="allow",
        )
        self.place = getattr(self._run, "url", None) or start.run_dir

    def log(self, step: int, record: dict[str, float]) -> None:
        self._run.log(record, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, start: StartTracker, stored: "_Stored") -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow: Any = mlflow
        mlflow.set_experiment(start.project)
        run = mlflow.start_run(run_id=stored.id or None, run_name=start.name)
        if not stored.id:
            stored.store(run.info.run_id)
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


class _Stored:
    """The state that a resumed run needs: its id at the tracker, and the number of sent bytes."""

    def __init__(self, start: StartTracker) -> None:
        self._file = Path(start.run_dir) / f"tracker-{start.backend}"
        text = self._file.read_text() if self._file.exists() else " 0"
        self.id, _, offset = text.strip("\n").partition(" ")
        self.offset = int(offset) if offset else None  # of a file of an earlier version

    def store(self, new: str) -> str:
        self.id = new
        self._write(0)
        return new

    def store_offset(self, offset: int) -> None:
        with contextlib.suppress(OSError):  # a full disk; some figures may be sent once more
            self._write(offset)

    def _write(self, offset: int) -> None:
        draft = self._file.with_name(f".{self._file.name}")
        draft.write_text(f"{self.id} {offset}")
        os.replace(draft, self._file)
