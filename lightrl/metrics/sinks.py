"""Where a run's figures go: one JSON object per step in metrics.jsonl, and the trackers people use.

Owns the files and sinks, not the names or values of metrics. Must not import a tracker that was not
asked for.
"""

import asyncio
import importlib.util
import io
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightrl.config.schema import Config
from lightrl.errors import ConfigError
from lightrl.metrics.prometheus import PrometheusServer
from lightrl.metrics.remote import RemoteTracker
from lightrl.system.append_file import AppendFile, read_back, read_rows
from lightrl.wire import to_json

FILE_NAME = "metrics.jsonl"

_Row: TypeAlias = dict[str, float | None]


def require_installed(backends: Sequence[str]) -> None:
    """Raises ConfigError, with what to install."""
    for backend in backends:
        if backend != "jsonl" and importlib.util.find_spec(backend) is None:
            raise ConfigError(
                f"logging.backends = {backend!r}: not installed: pip install {backend}"
            )


class MetricsLog:
    """Writes every record to all backends. Trackers that speak to a network have processes of their
    own.

    Raises ConfigError if a backend is not installed, with what to install. metrics.jsonl is always
    written, since the other views of a run read it. What the disk refuses is left out, and `report`
    is told.
    """

    def __init__(
        self,
        run_dir: Path,
        backends: tuple[str, ...],
        config: Config,
        report: Callable[[str], None],
    ) -> None:
        require_installed(backends)
        self._prometheus = None
        if config.logging.prometheus:
            self._prometheus = PrometheusServer(config.logging.prometheus, config.run.name)
        self._files: list[_Jsonl | _Tensorboard] = [_Jsonl(run_dir, report)]
        if "tensorboard" in backends:
            self._files.append(_Tensorboard(run_dir, report))
        self._trackers = [
            RemoteTracker(backend, run_dir, config, report)
            for backend in ("wandb", "mlflow")
            if backend in backends
        ]

    def write(self, step: int, record: dict[str, float]) -> None:
        """`step` counts optimizer steps. Example: write(4, {"reward/mean": 0.61, "lr": 1e-6})."""
        for sink in (*self._files, *self._trackers):
            sink.write(step, record)
        if self._prometheus is not None:
            self._prometheus.write({"step": float(step), **record})

    def show(self, figures: Callable[[], dict[str, float]]) -> None:
        """What is true at the moment, for Prometheus; asked for only if somebody may see it."""
        if self._prometheus is not None:
            self._prometheus.write(figures())

    async def close(self) -> None:
        """Trackers get some time to send the rest."""
        for file in self._files:
            file.close()
        if self._prometheus is not None:
            self._prometheus.close()
        await asyncio.gather(*(tracker.close() for tracker in self._trackers))


def read(run_dir: Path) -> list[dict[str, float]]:
    """All records of a run with their "step", in order of steps; [] if there are none.

    A step and an evaluation after it are one. A resumed run repeats steps: the later record counts.
    A torn last line is left out. Values that were not finite are NaN.
    """
    records: dict[int, dict[str, float]] = {}
    for row in read_rows(run_dir / FILE_NAME, _Row):
        if "step" in row:
            step, values = _values(row)
            before = records.get(step, {}) if _is_evaluation(values) else {}
            records[step] = {**before, **values}
    return [records[step] for step in sorted(records)]


def read_newest(run_dir: Path, num: int, until: int = sys.maxsize) -> list[dict[str, float]]:
    """As `read`, the newest `num` steps alone and none above `until`: nothing else of the file is
    read, which grows with the run.

    Of a run that was taken back, steps that it has not done again may be left out.
    """
    records: dict[int, dict[str, float]] = {}
    whole = set[int]()  # with their own record, not only that of an evaluation after them
    for _, row in read_back(run_dir / FILE_NAME, _Row):
        if "step" not in row:
            continue
        step, values = _values(row)
        if step > until or step in whole:
            continue
        records[step] = {**values, **records.get(step, {})}
        if not _is_evaluation(values):
            whole.add(step)
            if len(whole) == num:
                break
    return [records[step] for step in sorted(records)][-num:]


def _values(row: _Row) -> tuple[int, dict[str, float]]:
    """The step, and all that was written of it."""
    values = {k: math.nan if v is None else v for k, v in row.items()}
    step = values["step"] = int(values["step"])
    return step, values


def _is_evaluation(values: Mapping[str, float]) -> bool:
    return all(k == "step" or k.startswith("eval/") for k in values)


class _Jsonl:
    def __init__(self, run_dir: Path, report: Callable[[str], None]) -> None:
        self._file = AppendFile(run_dir / FILE_NAME, report, separator=b"\n")

    def write(self, step: int, record: dict[str, float]) -> None:
        self._file.append(to_json({"step": step, **record}) + b"\n")

    def close(self) -> None:
        self._file.close()


class _Tensorboard:
    """Event files in tensorboard's own format. Torch's writer would load torch into the daemon;
    tensorboard's has a thread, which a full disk ends."""

    def __init__(self, run_dir: Path, report: Callable[[str], None]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer import record_writer  # pyright: ignore[reportMissingImports]

        self._event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self._summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self._framing: Any = record_writer.RecordWriter
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendFile(run_dir / "tensorboard" / name, report)
        self._is_begun = False

    def write(self, step: int, record: dict[str, float]) -> None:
        events = [self._event(wall_time=time.time(), file_version="brain.Event:2")] * (
            not self._is_begun
        )
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in record.items()]
        events += [
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        ]
        piece = io.BytesIO()
        for event in events:
            self._framing(piece).write(event.SerializeToString())
        self._is_begun = self._file.append(piece.getvalue()) or self._is_begun

    def close(self) -> None:
        self._file.close()
