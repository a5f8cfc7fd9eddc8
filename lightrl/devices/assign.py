"""Assign GPUs to training ranks and engines, and a share of their memory to each engine.

Pure. Input: the GPUs that the driver reports, CUDA_VISIBLE_DEVICES (set by hand or by Slurm) and
the config. Output: the GPUs of each child process, or one line of refusal.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightrl.devices.driver import Machine
from lightrl.devices.memory import GIB, Item
from lightrl.devices.visible import ORDER, VISIBLE, Device, gib, listed, visible
from lightrl.errors import ConfigError

ALONE = 0.92  # vLLM's default of gpu_memory_utilization
SPARE = 0.01  # of a GPU's memory: free memory varies a little
# of a process that uses CUDA: vLLM counts it in no share, but it reduces free memory
STARTED = 0.6 * GIB


class TooLittleMemory(ConfigError):
    """Too little memory is free on a GPU; processes that are ending may still hold it."""


@dataclass(frozen=True, slots=True)
class Part:
    """GPUs of one daemon. `memory`: share of each GPU for its engine; 0 means no limit."""

    tokens: tuple[str, ...] = ()
    memory: float = 0.0


CPU = Part()


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """Processes that run here. `least`: bytes that an engine needs on each of its GPUs."""

    ranks: int = 0
    trainers: int = 1  # nodes that share them
    engines: int = 0
    # GPUs of one engine
    per_engine: int = 1
    train_devices: tuple[int, ...] = ()
    rollout_devices: tuple[int, ...] = ()
    # empty: unknown
    rank_items: tuple[Item, ...] = ()
    rank_bytes: int = 0
    least: int = 0
    # gpu_memory_utilization of rollout.engine_args
    utilization: float | None = None
    # sizes of engines that use the same GPUs in turn; `engines` counts those of the first size
    parallel: tuple[int, ...] = ()
    # sleeping engines on each GPU beside the one that is awake
    asleep: int = 0
    # engines use devices in turn with ranks, of this daemon or of another one
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """One token for each rank, one part for each engine. `notes`: lines for users."""

    ranks: tuple[str, ...] = ()
    engines: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()
    trainers: int = 1  # nodes that share the ranks

    def options(self, daemon: str) -> tuple[str, ...]:
        """Return options of `lightrl daemon`, for trainer-0, rollout-0 ... of `lightrl up`."""
        role, _, k = daemon.rpartition("-")
        part = CPU
        if role == "trainer":
            each = len(self.ranks) // self.trainers
            part = Part(self.ranks[int(k) * each : (int(k) + 1) * each])
        elif role == "rollout" and int(k) < len(self.engines):
            part = self.engines[int(k)]
        if not part.tokens:
            return ()
        return "--gpus", ",".join(part.tokens), "--gpu-memory", str(part.memory)


NO_GPUS = Assignment()


@dataclass(slots=True)
class _Users:
    """Ranks and engines on one device."""

    ranks: list[int] = field(default_factory=list[int])
    engines: list[int] = field(default_factory=list[int])


def environment(tokens: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return additions to a child's environment; {} without tokens, when no GPU is used."""
    if not tokens:
        return {}
    added = {VISIBLE: ",".join(tokens)}
    if not _has_numbers(environ.get(VISIBLE)):  # else numbers are those of this process
        added[ORDER] = "PCI_BUS_ID"  # numbers are nvidia-smi's
    return added


def _has_numbers(setting: str | None) -> bool:
    return setting is not None and setting.replace(",", "").replace(" ", "").isdigit()


def assign(machine: Machine, environ: Mapping[str, str], wanted: DeviceRequest) -> Assignment:
    """Assign devices. Raises ConfigError, one line; TooLittleMemory if a later try may succeed."""
    named = bool(wanted.train_devices or wanted.rollout_devices)
    if not wanted.ranks and not wanted.engines:
        return Assignment()
    if machine.problem:
        if machine.gpus or named:
            raise ConfigError(f"{machine.problem} (set CUDA_VISIBLE_DEVICES= to use the CPU only)")
        _require_one_size(wanted)
        return Assignment(notes=(f"no GPU is used: {machine.problem}",))
    devices = visible(machine, environ)
    if not devices:
        key = "train.devices" if wanted.train_devices else "rollout.devices"
        why = "there is none here"
        if machine.gpus:
            why = f"CUDA_VISIBLE_DEVICES = {environ.get(VISIBLE, '')!r} leaves none"
        if named:
            raise ConfigError(f"{key}: names GPUs, but {why}")
        _require_one_size(wanted)
        return Assignment(notes=(f"no GPU is used: {why}",) if machine.gpus else ())
    ranks = _of_ranks(devices, wanted)
    if wanted.is_shared:
        if not ranks:  # ranks of another daemon may hold memory that they release in turn
            devices = tuple(replace(device, free=device.total) for device in devices)
        engines = _of_shared_engines(devices, ranks, wanted)
    else:
        engines = _of_engines(devices, ranks, wanted)
    users = _users(ranks, engines)
    shares = [1.0] * len(engines)
    notes = [f"rank {k}: {devices[d].label}" for k, d in enumerate(ranks)]
    lines: list[str] = []
    for d, on in sorted(users.items()):
        share, line = _share(devices[d], on, wanted)
        lines += [line] if line else []
        for k in on.engines:
            shares[k] = min(shares[k], share)
    for k, group in enumerate(engines):
        share = f", gpu_memory_utilization = {shares[k]:g}" if shares[k] < 1 else ""
        turn = ", in turn with training ranks" if wanted.is_shared else ""
        labels = ", ".join(devices[d].label for d in group)
        size = f" of {len(group)}, in turn with others" if wanted.asleep else ""
        notes.append(f"engine {k}{size}: {labels}{turn}{share}")
    parts = [
        Part(tuple(devices[d].token for d in group), shares[k] if shares[k] < 1 else 0.0)
        for k, group in enumerate(engines)
    ]
    tokens = tuple(devices[d].token for d in ranks)
    return Assignment(tokens, tuple(parts), (*notes, *lines), wanted.trainers)


# Devices


def _of_ranks(devices: tuple[Device, ...], wanted: DeviceRequest) -> list[int]:
    """Choose a device for each rank: NCCL refuses two ranks on one."""
    if not wanted.ranks:
        return []
    chosen = list(wanted.train_devices or range(min(wanted.ranks, len(devices))))
    _require_there("train.devices", chosen, devices)
    if len(chosen) < wanted.ranks:
        raise ConfigError(
            f"{_ranks(wanted)}: each needs a GPU of its own, and {len(chosen)} can be used here"
        )
    if wanted.ranks > 1 and any(devices[d].is_slice for d in chosen):
        raise ConfigError(
            f"{_ranks(wanted)}: NCCL does not connect MIG slices; train with one rank, or on GPUs"
        )
    return chosen


def _ranks(wanted: DeviceRequest) -> str:
    return f"{'train.nodes x ' if wanted.trainers > 1 else ''}train.ranks = {wanted.ranks}"


def _of_engines(
    devices: tuple[Device, ...], ranks: list[int], wanted: DeviceRequest
) -> list[list[int]]:
    """Choose the devices of each engine: those without ranks, as long as there are any."""
    if not wanted.engines:
        return []
    _require_there("rollout.devices", wanted.rollout_devices, devices)
    if wanted.parallel:
        return _of_all_sizes(devices, ranks, wanted)
    size = wanted.per_engine
    if wanted.rollout_devices:
        groups = _grouped(wanted.rollout_devices, size)
    else:
        free = [d for d in range(len(devices)) if d not in ranks]
        groups = _grouped(free, size) or _grouped(range(len(devices)), size)
    if not groups:
        raise ConfigError(
            f"an engine takes {size} GPUs (tensor_parallel_size of rollout.engine_args), and "
            f"{len(wanted.rollout_devices or devices)} can be used here"
        )
    if size > 1 and any(devices[d].is_slice for group in groups for d in group):
        raise ConfigError("an engine cannot span MIG slices: leave tensor_parallel_size at 1")
    return [groups[k % len(groups)] for k in range(wanted.engines)]


def _of_all_sizes(
    devices: tuple[Device, ...], ranks: list[int], wanted: DeviceRequest
) -> list[list[int]]:
    """Choose the same GPUs for all sizes, beside the ranks; the smallest size comes first."""
    needed = wanted.engines * wanted.parallel[0]
    free = (d for d in range(len(devices)) if d not in ranks)
    mine = list(wanted.rollout_devices or free)
    if len(mine) < needed:
        beside = f" beside {_ranks(wanted)}" if ranks and not wanted.rollout_devices else ""
        raise ConfigError(
            f"rollout.parallel: {wanted.engines} engines of {wanted.parallel[0]} "
            f"(rollout.nodes) take {needed} GPUs, and {len(mine)} can be used here{beside}"
        )
    if any(devices[d].is_slice for d in mine[:needed]):
        raise ConfigError("rollout.parallel: an engine cannot span MIG slices; leave it out")
    return [group for size in wanted.parallel for group in _grouped(mine[:needed], size)]


def _require_one_size(wanted: DeviceRequest) -> None:
    if wanted.asleep:
        raise ConfigError(
            "rollout.parallel: its engines span several GPUs, and no GPU can be used here; leave "
            "it out"
        )


def _of_shared_engines(
    devices: tuple[Device, ...], ranks: list[int], wanted: DeviceRequest
) -> list[list[int]]:
    """Choose for each engine devices of the ranks of one trainer node."""
    if not ranks:
        return _of_engines(devices, ranks, wanted)
    others = [d for d in wanted.rollout_devices if d not in ranks]
    if others:
        raise ConfigError(
            f"rollout.devices: no rank trains on GPU {others[0]}, and rollout.placement = "
            f"'shared' uses the trainer's ({listed(ranks)}): leave it out"
        )
    size, each = wanted.per_engine, len(ranks) // wanted.trainers
    mine = [d for d in ranks if d in (wanted.rollout_devices or ranks)]
    groups = [
        group
        for first in range(0, len(ranks), each)
        for group in _grouped([d for d in ranks[first : first + each] if d in mine], size)
    ]
    if wanted.engines and not groups:
        raise ConfigError(
            f"an engine takes {size} GPUs (tensor_parallel_size of rollout.engine_args), and a "
            f"trainer node has {each} that it could use in turn with it"
        )
    return [groups[k % len(groups)] for k in range(wanted.engines)]


def _grouped(numbers: Sequence[int], size: int) -> list[list[int]]:
    return [list(numbers[i : i + size]) for i in range(0, len(numbers) - size + 1, size)]


def _require_there(key: str, chosen: Sequence[int], devices: tuple[Device, ...]) -> None:
    for d in chosen:
        if d >= len(devices):
            raise ConfigError(
                f"{key}: there is no GPU {d} to use here, only {listed(range(len(devices)))}"
            )


def _users(ranks: list[int], engines: list[list[int]]) -> dict[int, _Users]:
    users: dict[int, _Users] = {}
    for k, d in enumerate(ranks):
        users.setdefault(d, _Users()).ranks.append(k)
    for k, group in enumerate(engines):
        for d in group:
            users.setdefault(d, _Users()).engines.append(k)
    return users


# Memory


def _share(device: Device, on: _Users, wanted: DeviceRequest) -> tuple[float, str]:
    """Return the share of a device's memory for each engine on it, 1 for no limit, and a line that
    explains it. Raises TooLittleMemory."""
    is_shared = len(on.engines) + len(on.ranks) + wanted.asleep > 1
    if device.total is None or device.free is None or (on.ranks and not wanted.rank_items):
        return _divided_blindly(device, on, wanted) if is_shared and on.engines else (1.0, "")
    held = f"{device.label} has {gib(device.free)} free of {gib(device.total)}"
    rank = wanted.rank_bytes if on.ranks else 0
    beside = int(STARTED) * len(on.engines) if wanted.is_shared else 0  # engines that sleep
    if rank + beside > device.free:
        asleep = f" beside {_engines(on)} asleep" if beside else ""
        raise TooLittleMemory(
            f"{held}, and a training rank needs {gib(rank + beside)}{asleep}: {_remedy(on)}"
        )
    if not on.engines:
        return 1.0, ""
    if wanted.is_shared:
        rank = int(STARTED)  # of a suspended rank
    left = device.free - rank - int(STARTED) * wanted.asleep
    awake = 1 if wanted.asleep else len(on.engines)
    each = left / awake / device.total
    minus = f" - {gib(rank)} of a training rank" if rank else ""
    minus += f" - {gib(STARTED * wanted.asleep)} of engines asleep" if wanted.asleep else ""
    turns = " that take turns" if wanted.asleep else ""
    spare = max(SPARE, STARTED / device.total)
    if (share := wanted.utilization) is not None:
        if share > each:
            raise TooLittleMemory(
                f"{held}{minus}: gpu_memory_utilization = {share:g} for {_engines(on)} is "
                f"more than that; {_floor(each):g} is possible"
            )
    elif not is_shared and each >= ALONE + spare:
        return 1.0, ""
    else:
        share = _floor(min(each - spare, (ALONE - rank / device.total) / awake - SPARE))
    if share * device.total < wanted.least:
        raise TooLittleMemory(
            f"{held}{minus}; an engine needs {gib(wanted.least)} and would get "
            f"{gib(max(0.0, share) * device.total)}: {_remedy(on)}"
        )
    if not is_shared and wanted.utilization is not None:
        return 1.0, ""  # as the config has it
    return share, (
        f"{held}{minus} = {gib(left)} for {_engines(on)}{turns}: gpu_memory_utilization = "
        f"{share:g} each, which is {gib(share * device.total)}"
    )


def _divided_blindly(device: Device, on: _Users, wanted: DeviceRequest) -> tuple[float, str]:
    others = 0 if wanted.is_shared else len(on.ranks)
    awake = 1 if wanted.asleep else len(on.engines)
    share = wanted.utilization or _floor(
        (0.9 - 0.05 * (wanted.is_shared + wanted.asleep)) / (awake + others)
    )
    unknown = f"{device.label}: memory needs are unknown, so its engines get equal shares"
    return share, f"{unknown}: {share:g} each"


def _engines(on: _Users) -> str:
    return "1 engine" if len(on.engines) == 1 else f"{len(on.engines)} engines"


def _remedy(on: _Users) -> str:
    fewer = ", fewer rollout.nodes" if len(on.engines) > 1 else ""
    less = ", more train.ranks, a smaller train.max_tokens_per_gpu, train.offload"
    less = f"{less}, train.optim.name = 'adamw8bit', model.lora.rank" if on.ranks else ""
    return f"another GPU (train.devices, rollout.devices){fewer}{less}, or end what else runs there"


def _floor(share: float) -> float:
    return math.floor(100 * share) / 100


def arithmetic(items: Sequence[Item], total: int, has_gpu: bool = True) -> Iterator[str]:
    """Yield a line for each part of a rank's memory."""
    needs = "needs" if has_gpu else "would need"
    yield f"a training rank {needs} {gib(total)} on a GPU, a tenth of it for fragmentation:"
    for item in items:
        yield f"{gib(item.num_bytes):>10}  {item.what}"
