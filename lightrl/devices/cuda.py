"""CUDA from inside a child process: whether it is there as promised, and how long its work takes.

Imports torch: engines and training ranks import this file, daemons must not.
"""

import contextlib
import os
import time
from collections.abc import Generator

import torch

from lightrl.devices.visible import NOTHING, VISIBLE
from lightrl.errors import ConfigError


def has_cuda() -> bool:
    """Raises ConfigError, one line, if this process was given a GPU that torch does not find: a
    model that is silently trained on the CPU is worse than none."""
    if torch.cuda.is_available():
        return True
    given = os.environ.get(VISIBLE, "").strip()
    if torch.version.cuda is not None and given not in NOTHING:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES = {given}, but torch {torch.__version__} finds no GPU: lightrl "
            "check says more; set CUDA_VISIBLE_DEVICES= to use the CPU only"
        )
    return False


def now(device: torch.device) -> float:
    """Seconds on the clock, once all that was launched on the device is done. Only for places where
    somebody waits for the device in any case: it empties the queue of launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Stopwatch:
    """Adds up how long stretches of work took. On CUDA by events in the stream, which nobody waits
    for before `lap`: the processor goes on launching, and time between stretches does not
    count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Around one stretch."""
        if self._device.type != "cuda":
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(torch.cuda.current_stream(self._device))
        yield
        last.record(torch.cuda.current_stream(self._device))
        self._events.append((first, last))

    def lap(self) -> float:
        """Seconds since the last `lap`; waits for the device."""
        for first, last in self._events:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds
