"""Figures for Weights & Biases or MLflow, each sent by a process of its own, which reads
metrics.jsonl: it may block for as long as a network does, and fail without an effect on the run.

The file `tracker-NAME` in the run directory holds the id of the run there, with which a resumed run
continues, and the bytes of metrics.jsonl that are sent.
"""

import asyncio
import contextlib
import json
import logging
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
from lightrl.errors import first_line
from lightrl.log import last_line
from lightrl.system.append_file import read_ends
from lightrl.system.child import Child, ChildDied, Pipe, retry_on_resource_limit
from lightrl.system.files import replacing, write_at
from lightrl.system.threads import cancel
from lightrl.wire import Codec

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
        self._start = StartTracker(backend, str(run_dir.resolve()), config.model_dump_json())
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
        backend = BACKENDS[start.backend](start.run_dir, json.loads(start.config_json), stored)
        logger.info("%s: figures go to %s", start.backend, backend.place)
        try:
            for record, end in _records(pipe, Path(start.run_dir), stored.offset):
                backend.log(int(record.pop("step")), record)
                stored.store_offset(end)
        finally:
            backend.close()
    except Exception as e:  # each tracker has errors of its own
        logger.exception("%s ends", start.backend)
        sys.exit(f"{type(e).__name__}: {first_line(e)}")


def _records(pipe: TrackerPipe, run_dir: Path, end: int) -> Iterator[tuple[dict[str, float], int]]:
    """Yield each record behind the first `end` bytes, and its end, until the pipe is closed."""
    is_over = False
    while True:
        for line_end, record in read_ends(run_dir / FILE_NAME, dict[str, float], end):
            end = line_end
            if "step" in record:
                yield record, end
        if is_over:
            return
        try:
            pipe.receive(LOOK_S)
        except EOFError:
            is_over = True


class Wandb:
    """Weights & Biases ignores a step that is repeated after a resume: steps only grow."""

    def __init__(self, run_dir: str, config: dict[str, Any], stored: "_Stored") -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        logging_section = config["logging"]
        self._run: Any = wandb.init(
            project=logging_section["project"],
            name=config["run"]["name"],
            group=logging_section["group"] or None,
            tags=logging_section["tags"] or None,
            dir=run_dir,
            config=config,
            id=stored.id or stored.store(secrets.token_hex(4)),
            resume="allow",
        )
        self.place = getattr(self._run, "url", None) or run_dir

    def log(self, step: int, record: dict[str, float]) -> None:
        self._run.log(record, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, run_dir: str, config: dict[str, Any], stored: "_Stored") -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow: Any = mlflow
        logging_section = config["logging"]
        mlflow.set_experiment(logging_section["project"])
        run = mlflow.start_run(run_id=stored.id or None, run_name=config["run"]["name"])
        if not stored.id:
            stored.store(run.info.run_id)
            group = {"group": logging_section["group"]} if logging_section["group"] else {}
            mlflow.set_tags(dict.fromkeys(logging_section["tags"], "true") | group)
            parameters = [(key, str(value)[:MAX_PARAMETER]) for key, value in flat(config)]
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
        self.id, _, offset = text.partition(" ")
        self.offset = int(offset)

    def store(self, new: str) -> str:
        self.id = new
        self._write(0)
        return new

    def store_offset(self, offset: int) -> None:
        with contextlib.suppress(OSError):  # a full disk; some figures may be sent once more
            self._write(offset)

    def _write(self, offset: int) -> None:
        with replacing(self._file, lasting=False) as file:
            write_at(file, 0, f"{self.id} {offset}".encode())
