"""What moving the weights of a model takes: bytes, host memory, seconds on the line.

Arithmetic for `lightrl up --dry-run` and `lightrl check`; moves nothing. Reads the headers of the
model's files and no weights; must not import torch.
"""

from dataclasses import dataclass
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.devices import memory
from lightrl.devices.assign import Assignment
from lightrl.devices.driver import Machine
from lightrl.devices.plan import training
from lightrl.weights.machine import scratch

LINES_GBIT = (1, 10, 100)  # for which seconds are reported


def version_size(config: Config, machine: Machine) -> memory.VersionSize | None:
    """None where the model's files are not on this machine, or nothing is trained."""
    if config.train.engine == "emulated":
        return None
    folder = Path(config.model.path)
    shape = memory.shape_of_folder(folder)
    if shape is None:
        return None
    stored = (folder / "config.json").read_bytes()
    return memory.version_size(shape, stored, config.model.dtype, bool(machine.gpus))


def describe(config: Config, machine: Machine) -> list[str]:
    """Lines of the dry run; none where nothing is known of the model."""
    size = version_size(config, machine)
    if size is None:
        return []
    parked = [parked.text] if (parked := room_to_park(config, machine)) else []
    if adapters := _of_adapters(config, size):
        return [*adapters, *parked]
    held = scratch.NUM_VERSIONS * size.num_bytes
    seconds = ", ".join(
        f"{_seconds(size.num_bytes * 8 / (gbit * 1e9))} at {gbit} Gbit/s" for gbit in LINES_GBIT
    )
    return [
        f"{_bytes(size.num_bytes)} a version in {size.dtype}; each machine that serves or trains "
        f"holds up to {scratch.NUM_VERSIONS}, {_bytes(held)}, in shared memory or on disk",
        f"a whole version on the line takes {seconds}",
        *_ways(config, size),
        *parked,
    ]


@dataclass(frozen=True, slots=True)
class Room:
    """Whether this machine has room for something, and a line about it."""

    is_enough: bool
    text: str


def room_to_park(config: Config, machine: Machine, available: int | None = None) -> Room | None:
    """In the memory of the host, for all ranks that `lightrl up` starts here; None where nothing is
    parked, or the model is not here. `available`: bytes of the host; default: those that are free
    now."""
    size, shape = version_size(config, machine), memory.shape_of_folder(Path(config.model.path))
    if config.rollout.placement != "shared" or size is None or shape is None:
        return None
    how = training(config, shape)
    ranks = config.train.ranks
    parked, more = (ranks * of(shape, how) for of in (memory.parked_bytes, memory.parked_gradients))
    versions = scratch.NUM_VERSIONS * size.num_bytes
    what = (
        f"while engines sample {'1 rank parks' if ranks == 1 else f'{ranks} ranks park'} "
        f"{_bytes(parked)} in memory of the host, beside "
        f"{_bytes(versions)} of versions; {_bytes(more)} more in the middle of a step"
    )
    if not machine.gpus:
        return Room(True, f"{what}; on a CPU that is memory that they had before")
    free = scratch.available_memory() if available is None else available
    if free >= parked + versions + more:
        return Room(True, what)
    return Room(
        False,
        f"{what}: it has {_bytes(free)} free; more memory, more trainer nodes, "
        "train.optim.name = 'adamw8bit' or rollout.placement = 'own' helps",
    )


def _of_adapters(config: Config, size: memory.VersionSize) -> list[str]:
    """With LoRA: the base travels once, and a version is small."""
    lora, shape = config.model.lora, memory.shape_of_folder(Path(config.model.path))
    if not lora.rank or shape is None:
        return []
    num = memory.adapter_parameters(shape, lora.rank, lora.targets)
    version = num * (4 if size.dtype == "float32" else 2)
    return [
        f"{_bytes(size.num_bytes)} of the model in {size.dtype}, once to each machine; then about "
        f"{_bytes(version)} of adapters a version",
        "adapters are pulled by every node: no broadcasts, no differences between versions",
    ]


def notes(config: Config, gpus: Assignment) -> list[str]:
    """What a setting cannot do with the devices of this machine; `gpus`: who gets which."""
    if config.weights.broadcast != "always" or not any(part.tokens for part in gpus.engines):
        return []
    shared = set(gpus.ranks) & {token for part in gpus.engines for token in part.tokens}
    why = "has no two members on one GPU" if shared else "is not used on the trainer's machine"
    return [
        f"weights.broadcast = always: NCCL {why}: the engines here map the trainer's file instead"
    ]


def _ways(config: Config, size: memory.VersionSize) -> list[str]:
    """How nodes get a version, by weights.broadcast."""
    mode, num = config.broadcast, config.rollout.nodes
    who = f"the {num} nodes" if num else "nodes"
    maps = (
        "the node here maps the trainer's file and moves nothing"
        if num == 1
        else f"{who} here map the trainer's file and move nothing"
    )
    pull = "pull it, first from each other"
    if mode == "off":
        is_async = config.weights.broadcast != "off"
        why = ": async.max_staleness > 0, broadcasts would hold up the trainer" if is_async else ""
        return [f"{maps}; those of other machines {pull}{why}"]
    if config.rollout.engine == "emulated":
        return [f"{maps}; those of other machines {pull}: emulated engines receive no broadcast"]
    if mode == "auto":
        return [
            f"{maps}; idle nodes of other machines get it by broadcast, busy and --preemptible "
            f"ones {pull}",
            _broadcast_seconds(size),
        ]
    return [
        "all nodes get it by broadcast, those that are busy or on this machine, too; "
        f"--preemptible ones {pull}",
        _broadcast_seconds(size),
    ]


def _broadcast_seconds(size: memory.VersionSize) -> str:
    """However many nodes: each sends on what it has got, by NCCL as by gloo."""
    gbit = LINES_GBIT[-1]
    seconds = _seconds(size.num_bytes * 8 / (gbit * 1e9))
    return f"by broadcast at {gbit} Gbit/s: {seconds}, once over each line"


def room(config: Config, machine: Machine) -> Room | None:
    """In shared memory or on disk, for the versions of a run; None where the model is not here."""
    size = version_size(config, machine)
    if size is None:
        return None
    needed = scratch.needed_bytes(size.num_bytes)
    what = f"{scratch.NUM_VERSIONS} versions of {_bytes(size.num_bytes)}"
    free = {root: scratch.free_bytes(root) for root in scratch.roots()}
    for root, num_free in free.items():
        if num_free >= needed:
            is_slow = root != scratch.roots()[0]
            slower = ": shared memory is too small for them, and the disk slower" if is_slow else ""
            return Room(True, f"{what} fit into {root}{slower}")
    found = ", ".join(f"{_bytes(num_free)} in {root}" for root, num_free in free.items())
    return Room(
        False, f"{what} need {_bytes(needed)}; free are {found}: set TMPDIR to a larger disk"
    )


def _bytes(num: int) -> str:
    """Example: 15.2 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num >= size:
            return f"{num / size:.1f} {unit}"
    return f"{num / 1e3:.1f} kB"


def _seconds(seconds: float) -> str:
    """Example: 1.2 s."""
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
