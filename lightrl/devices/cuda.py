"""Check for CUDA in a child process, and time its work.

Imports torch: for engines and training ranks, not for daemons.
"""

import contextlib
import os
import time
from collections.abc import Generator

import torch

from lightrl.devices.visible import NOTHING, VISIBLE
from lightrl.errors import ConfigError


def has_cuda() -> bool:
    """Return whether torch finds a GPU. Raises ConfigError if one was assigned to this process that
    torch does not find, instead of training on the CPU silently."""
    if torch.cuda.is_available():
        return True
    given = os.environ.get(VISIBLE, "").strip()
    if torch.version.cuda is not None and given not in NOTHING:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES = {given}, but torch {torch.__version__} finds no GPU: run "
            "lightrl check; set CUDA_VISIBLE_DEVICES= to use the CPU only"
        )
    return False


def now(device: torch.device) -> float:
    """Synchronize the device, and return the clock in seconds. Only where a synchronization happens
    in any case, since it empties the queue of kernel launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Stopwatch:
    """Adds up the time of sections of work.

    Uses CUDA events, so that only `lap` synchronizes, and time between sections does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Time one section."""
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
        """Return the seconds of the sections since the last `lap`; waits for the device."""
        for first, last in self._events:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds
