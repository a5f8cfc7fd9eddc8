"""Return the GPUs and MIG slices that CUDA_VISIBLE_DEVICES, set by hand or by Slurm, permits.
Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightrl.devices.driver import Machine
from lightrl.devices.memory import GIB
from lightrl.errors import ConfigError

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
# values of CUDA, and of Slurm for a job without GPUs, that mean no GPU
NOTHING = {"", "-1", "NoDevFiles"}
KINDS = (("GPU-", "GPU"), ("MIG-", "MIG slice"))  # by the prefix of a UUID


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or a MIG slice. `total` and `free` in bytes; None if unknown."""

    # its name in a child's CUDA_VISIBLE_DEVICES
    token: str
    label: str
    total: int | None = None
    free: int | None = None
    is_slice: bool = False

    def describe(self) -> str:
        if self.total is None or self.free is None:
            return f"{self.label}; its memory is not known"
        return f"{self.label}, {gib(self.free)} free of {gib(self.total)}"


def visible(machine: Machine, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the devices in the order of torch's numbers. Raises ConfigError for a wrong
    CUDA_VISIBLE_DEVICES."""
    setting = environ.get(VISIBLE)
    if setting is None:
        return tuple(device for i in range(len(machine.gpus)) for device in _devices(machine, i))
    if setting.strip() in NOTHING or not machine.gpus:
        return ()
    named = [part.strip() for part in setting.split(",")]
    if not machine.gpus[0].uuid:  # no nvidia-smi: the GPUs were only counted
        return tuple(Device(part, f"GPU {part}") for part in named)
    numbers = [gpu.index for gpu in machine.gpus]
    # CUDA numbers the fastest GPU first unless CUDA_DEVICE_ORDER is set, so that nvidia-smi's
    # figures belong to other numbers.
    is_mixed = len({gpu.name for gpu in machine.gpus}) > 1 and environ.get(ORDER) != "PCI_BUS_ID"
    found = [_named(machine, part, setting, numbers, is_mixed) for part in named]
    for token, count in Counter(device.label for device in found).items():
        if count > 1:
            raise ConfigError(f"CUDA_VISIBLE_DEVICES = {setting}: names {token} {count} times")
    return tuple(found)


def _named(machine: Machine, part: str, setting: str, numbers: list[int], is_mixed: bool) -> Device:
    wrong = f"CUDA_VISIBLE_DEVICES = {setting}"
    if part.isdigit():
        if int(part) not in numbers:
            raise ConfigError(f"{wrong}: there is no GPU {part} here, only {listed(numbers)}")
        if is_mixed:
            return Device(part, f"GPU {part} as CUDA counts")
        devices = _devices(machine, numbers.index(int(part)))
        if len(devices) != 1:
            raise ConfigError(
                f"{wrong}: GPU {part} is divided into {len(devices)} MIG slices; name them by the "
                "UUIDs of nvidia-smi -L"
            )
        return devices[0]
    kind = next((k for start, k in KINDS if part.startswith(start)), "GPU or MIG slice")
    every = [(i, device) for i in range(len(machine.gpus)) for device in _devices(machine, i)]
    if part.startswith("GPU-"):
        matching = [
            device
            for i, device in every
            if machine.gpus[i].uuid.startswith(part) and not device.is_slice
        ]
    else:
        matching = [device for _, device in every if device.token == part]
    if len(matching) != 1:
        raise ConfigError(
            f"{wrong}: {part!r} is no {kind} of this machine; nvidia-smi -L lists them"
        )
    return matching[0]


def _devices(machine: Machine, i: int) -> tuple[Device, ...]:
    """Return the GPU, by its number, or its MIG slices."""
    gpu = machine.gpus[i]
    label = f"GPU {gpu.index} ({gpu.name})" if gpu.uuid else f"GPU {gpu.index}"
    if not gpu.is_mig:
        return (Device(str(gpu.index), label, gpu.total, gpu.free),)
    return tuple(
        Device(
            s.uuid,
            f"slice {s.uuid} ({s.profile} of GPU {gpu.index})",
            s.total,
            s.total,
            is_slice=True,
        )
        for s in gpu.slices
    )


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
