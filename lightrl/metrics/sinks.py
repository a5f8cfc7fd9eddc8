"""Where a run's figures go: one JSON object per step in metrics.jsonl, TensorBoard, Prometheus, and
trackers in processes of their own (`tracker.py`).

Must not import a tracker that is not configured.
"""

import asyncio
import importlib.util
import io
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightrl.config.schema import Config
from lightrl.errors import ConfigError
from lightrl.metrics.tracker import FILE_NAME, Tracker
from lightrl.system.addresses import ALL_HOSTS, WILDCARD, split_address
from lightrl.system.append_file import AppendFile, read_rows
from lightrl.wire import to_json

_NOT_IN_PROMETHEUS = re.compile(r"[^a-zA-Z0-9_:]")


def require_installed(backends: Sequence[str]) -> None:
    """Raise ConfigError, with the package to install."""
    for backend in backends:
        if backend != "jsonl" and importlib.util.find_spec(backend) is None:
            raise ConfigError(
                f"logging.backends = {backend!r}: not installed: pip install {backend}"
            )


class MetricsLog:
    """Writes every record to all backends. metrics.jsonl is always written, because the other views
    of a run read it. `report` gets a line for what the disk refuses."""

    def __init__(
        self,
        run_dir: Path,
        backends: tuple[str, ...],
        config: Config,
        report: Callable[[str], None],
    ) -> None:
        """Raise ConfigError if a backend is not installed, with the package to install."""
        require_installed(backends)
        self._prometheus = None
        if config.logging.prometheus:
            self._prometheus = PrometheusServer(config.logging.prometheus, config.run.name)
        self._file = AppendFile(run_dir / FILE_NAME, report, separator=b"\n")
        is_tensorboard = "tensorboard" in backends
        self._tensorboard = _Tensorboard(run_dir, report) if is_tensorboard else None
        self._trackers = [
            Tracker(backend, run_dir, config, report)
            for backend in ("wandb", "mlflow")
            if backend in backends
        ]

    def write(self, step: int, record: dict[str, float]) -> None:
        """`step` counts optimizer steps. Example: write(4, {"reward/mean": 0.61, "lr": 1e-6})."""
        self._file.append(to_json({"step": step, **record}) + b"\n")
        if self._tensorboard is not None:
            self._tensorboard.write(step, record)
        if self._prometheus is not None:
            self._prometheus.write({"step": float(step), **record})

    def show(self, figures: Callable[[], dict[str, float]]) -> None:
        """Write current figures to Prometheus; `figures` is called only if it is configured."""
        if self._prometheus is not None:
            self._prometheus.write(figures())

    async def close(self) -> None:
        """Wait a limited time until trackers have sent the rest."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.file.close()
        if self._prometheus is not None:
            self._prometheus.close()
        await asyncio.gather(*(tracker.close() for tracker in self._trackers))


def read(
    run_dir: Path, newest: int = sys.maxsize, until: int = sys.maxsize
) -> list[dict[str, float]]:
    """Return the records of a run with their "step", in order of steps: the newest up to step
    `until`, by default all.

    A step and the evaluation after it are one record. A resumed run repeats steps: the later record
    counts. A torn last line is left out. Values that were not finite are NaN.
    """
    records: dict[int, dict[str, float]] = {}
    for values in read_rows(run_dir / FILE_NAME, dict[str, float]):
        if "step" not in values or values["step"] > until:
            continue
        step = values["step"] = int(values["step"])
        is_evaluation = all(k == "step" or k.startswith("eval/") for k in values)
        records[step] = (records.get(step, {}) if is_evaluation else {}) | values
        if len(records) > newest:
            del records[min(records)]
    return [records[step] for step in sorted(records)]


class _Tensorboard:
    """Event files in tensorboard's own format. Torch's writer would load torch into the daemon;
    tensorboard's has a thread that ends on a full disk."""

    def __init__(self, run_dir: Path, report: Callable[[str], None]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer import record_writer  # pyright: ignore[reportMissingImports]

        self._event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self._summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self._framing: Any = record_writer.RecordWriter
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self.file = AppendFile(run_dir / "tensorboard" / name, report)
        self._is_begun = False

    def write(self, step: int, record: dict[str, float]) -> None:
        now, piece = time.time(), io.BytesIO()
        write = self._framing(piece).write
        if not self._is_begun:
            write(self._event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in record.items()]
        summary = self._summary(value=values)
        write(self._event(wall_time=now, step=step, summary=summary).SerializeToString())
        self._is_begun = self.file.append(piece.getvalue()) or self._is_begun


class PrometheusServer:
    """Serves the newest figures at `http://ADDRESS/metrics`, in a thread of prometheus_client's."""

    def __init__(self, address: str, run: str) -> None:
        """Raise ConfigError, one line, if `address`, host and port, cannot be served."""
        try:
            import prometheus_client
        except ModuleNotFoundError:
            raise ConfigError(
                f"logging.prometheus = {address!r}: not installed: pip install prometheus-client"
            ) from None
        found = split_address(address)
        assert found is not None  # checked by the config
        host, port = found
        self._run = run
        self._values: dict[str, float] = {}
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)  # pyright: ignore[reportArgumentType] - anything with `collect`
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, WILDCARD if host in ALL_HOSTS else host, registry
            )
        except OSError as e:
            raise ConfigError(f"logging.prometheus = {address!r}: {e.strerror}") from None
        self.port = self._server.server_port

    def write(self, record: dict[str, float]) -> None:
        """Replace the figures that are in the record."""
        self._values = {**self._values, **record}  # a new dict, because a thread reads it

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client at every scrape."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._values.items():
            gauge = GaugeMetricFamily(exposed(name), name, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def exposed(name: str) -> str:
    """Example: exposed("eval/gsm8k/avg@4") == "lightrl_eval_gsm8k_avg_4"."""
    return f"lightrl_{_NOT_IN_PROMETHEUS.sub('_', name)}"
