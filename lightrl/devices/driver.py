"""Query the NVIDIA driver for the GPUs of this machine, and check the installed torch against it.

Uses nvidia-smi, which comes with every driver and does not initialise CUDA in this process. Must
not import torch: daemons call this.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

TIMEOUT_S = 30.0  # without persistence mode, loading the driver takes seconds for each GPU
MIB = 1 << 20
QUERY = "index,uuid,memory.total,memory.free,driver_version,mig.mode.current,name"
# The oldest driver branch that runs a major version of CUDA (NVIDIA: "CUDA minor version
# compatibility").
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}

_SLICE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
_GPU = re.compile(r"GPU (\d+): ")
_CUDA = re.compile(r"CUDA (?:\w+ )?Version\s*: (\d+)\.(\d+)")
_BUILT_FOR = re.compile(r"^cuda\b[^=\n]*= *'(\d+)\.(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Slice:
    """A MIG instance. `total` in bytes, from its profile: 3g.40gb has 40 GB."""

    uuid: str
    profile: str
    total: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `index`: nvidia-smi's, in PCI order. `total`, `free`: bytes; None if unknown."""

    index: int
    uuid: str
    name: str
    total: int | None
    free: int | None
    # divided into slices, so not usable as a whole
    is_mig: bool = False
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of this machine. `problem`: one line why torch can use none of them, or ""."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    problem: str = ""


NO_DRIVER = Machine()


def look() -> Machine:
    """Query the driver, which takes about a second. Returns NO_DRIVER if there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return _without_smi(Path("/dev"))
    try:
        answer = _ask(command, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
        if answer.returncode:
            output = " ".join(answer.stdout.split()) or " ".join(answer.stderr.split())
            if "No devices were found" in output:
                return NO_DRIVER
            return Machine(problem=f"nvidia-smi fails: {output[:160] or answer.returncode}")
        gpus, driver = parse_gpus(answer.stdout)
        if any(gpu.is_mig for gpu in gpus):
            gpus = with_slices(gpus, _ask(command, "-L").stdout)
        problem = torch_problem(torch_build(), driver, lambda: _ask(command).stdout) if gpus else ""
    except subprocess.TimeoutExpired:
        return Machine(
            problem=f"nvidia-smi does not answer within {TIMEOUT_S:.0f} s; is the driver loaded?"
        )
    except (OSError, ValueError) as e:
        return Machine(problem=f"nvidia-smi cannot be understood: {e}")
    return Machine(gpus, driver, problem)


def _ask(command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [command, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )


def _without_smi(devices: Path) -> Machine:
    """Count the GPUs of a container that has the driver's libraries but not its tools."""
    found = sorted(int(p.name[6:]) for p in devices.glob("nvidia[0-9]*") if p.name[6:].isdigit())
    problem = torch_problem(torch_build(), "", str) if found else ""
    return Machine(tuple(Gpu(i, "", "GPU", None, None) for i in range(len(found))), "", problem)


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Parse the answer to QUERY, without header and units (MiB), and the driver's version.

    Raises ValueError.
    """
    gpus: list[Gpu] = []
    driver = ""
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(",", 6)]
        if len(fields) != 7 or not fields[0].isdigit():
            raise ValueError(f"unexpected line {line[:80]!r}")
        index, uuid, total, free, driver, mig, name = fields
        gpus.append(Gpu(int(index), uuid, name, _mib(total), _mib(free), mig == "Enabled"))
    return tuple(gpus), driver


def _mib(text: str) -> int | None:
    """Return bytes; None for "[N/A]", of GPUs that share the machine's memory."""
    return int(text) * MIB if text.isdigit() else None


def with_slices(gpus: tuple[Gpu, ...], text: str) -> tuple[Gpu, ...]:
    """Add the MIG slices from `text`, the output of nvidia-smi -L."""
    slices: dict[int, list[Slice]] = {}
    index = -1
    for line in text.splitlines():
        if gpu := _GPU.match(line):
            index = int(gpu[1])
        elif found := _SLICE.match(line):
            size = re.search(r"\.(\d+)gb", found[1])
            total = int(size[1]) * 10**9 if size else None
            slices.setdefault(index, []).append(Slice(found[2], found[1], total))
    return tuple(replace(g, slices=tuple(slices.get(g.index, ()))) for g in gpus)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """`cuda`: the version that torch was built for; None for a build without CUDA."""

    version: str
    cuda: tuple[int, int] | None


def torch_build() -> TorchBuild | None:
    """Return the build of the installed torch, without importing it; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    version = re.search(r"__version__ *= *'([^']+)'", text)
    cuda = _BUILT_FOR.search(text)
    return TorchBuild(
        version[1] if version else "?", (int(cuda[1]), int(cuda[2])) if cuda else None
    )


def torch_problem(build: TorchBuild | None, driver: str, header: Callable[[], str]) -> str:
    """Return one line why this torch cannot use the GPUs of this driver, and what to do; or "".

    `header` returns nvidia-smi's header, which includes a compatibility package for old drivers; it
    is called only if the driver alone would be too old.
    """
    if build is None:
        return "torch is not installed; run scripts/setup"
    if build.cuda is None:
        return (
            f"torch {build.version} is built for CPU; run scripts/setup, or install a torch "
            "for CUDA"
        )
    major = build.cuda[0]
    oldest = OLDEST_DRIVER.get(major)
    if not driver or oldest is None or _numbers(driver) >= oldest:
        return ""
    supported = _CUDA.search(header())
    if supported and int(supported[1]) >= major:
        return ""
    wanted = ".".join(map(str, oldest))
    return (
        f"driver {driver} is too old for torch {build.version} (CUDA {major}.{build.cuda[1]}), "
        f"which needs driver {wanted} or newer; update it, or install a torch for an older CUDA"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
