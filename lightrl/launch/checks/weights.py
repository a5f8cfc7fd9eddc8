"""The cost of moving the weights of a model: bytes, memory of the host, seconds of transfer.

Arithmetic on the headers of the model's files, for the dry run and `lightrl check`. Must not import
torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.devices import memory
from lightrl.devices.driver import Machine
from lightrl.devices.plan import training
from lightrl.weights.machine import scratch

LINKS_GBIT = (1, 10, 100)


@dataclass(frozen=True, slots=True)
class Room:
    """The result of a check for free space on this machine, with a line that describes it."""

    is_enough: bool
    text: str


def version_size(config: Config, machine: Machine) -> memory.VersionSize | None:
    """Return the size of a version; None if the model is not on this machine or not trained."""
    folder = Path(config.model.path)
    shape = memory.shape_of_folder(folder)
    if config.train.engine == "emulated" or shape is None:
        return None
    stored = (folder / "config.json").read_bytes()
    return memory.version_size(shape, stored, config.model.dtype, bool(machine.gpus))


def describe(config: Config, machine: Machine) -> list[str]:
    """Return lines of the dry run; none if the size of a version is unknown."""
    if (size := version_size(config, machine)) is None:
        return []
    parked = [parked.text] if (parked := room_to_park(config, machine)) else []
    num, lora = size.num_bytes, config.model.lora
    shape = memory.shape_of_folder(Path(config.model.path))
    if lora.rank and shape is not None:
        parameters = memory.adapter_parameters(shape, lora.rank, lora.targets)
        version = parameters * (4 if size.dtype == "float32" else 2)
        return [
            f"{_bytes(num)} of the model in {size.dtype}, once to each machine; then about "
            f"{_bytes(version)} of adapters a version, which every node pulls",
            *parked,
        ]
    times = ", ".join(f"{num * 8e-9 / gbit:.3g} s at {gbit} Gbit/s" for gbit in LINKS_GBIT)
    return [
        f"{_bytes(num)} a version in {size.dtype}; each machine that serves or trains holds up to "
        f"{scratch.NUM_VERSIONS}, {_bytes(scratch.NUM_VERSIONS * num)}, in memory or on disk",
        f"the transfer of a version takes {times}",
        _ways(config),
        *parked,
    ]


def is_slow_bfloat16(config: Config, look: Callable[[], Machine]) -> bool:
    """Return whether a CPU would compute in bfloat16 without instructions for it."""
    model = Path(config.model.path) / "config.json"
    if config.train.engine == "emulated" or memory.has_bfloat16_instructions():
        return False
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = memory.stored_dtype(model.read_bytes()) if model.is_file() else ""
    return dtype == "bfloat16" and not look().gpus


def _ways(config: Config) -> str:
    """Return how nodes get a version, by weights.broadcast."""
    here = "nodes on the trainer's machine map its file"
    if config.broadcast == "off" and config.weights.broadcast != "off":
        return f"{here}, others pull it: broadcasts do not act with async.max_staleness > 0"
    if config.broadcast == "off" or config.rollout.engine == "emulated":
        return f"{here}, others pull it"
    if config.broadcast == "auto":
        return f"{here}, idle ones elsewhere get it by broadcast, busy and --preemptible ones pull"
    return "all nodes get it by broadcast, but --preemptible ones pull it"


def room(config: Config, machine: Machine) -> Room | None:
    """Compare the versions of a run with shared memory and disk; None if the size is unknown."""
    if (size := version_size(config, machine)) is None:
        return None
    needed = scratch.needed_bytes(size.num_bytes)
    what = f"{scratch.NUM_VERSIONS} versions of {_bytes(size.num_bytes)}"
    free = {root: scratch.free_bytes(root) for root in scratch.roots()}
    for root, num_free in free.items():
        if num_free >= needed:
            is_slow = root != scratch.roots()[0]
            return Room(True, f"{what} fit into {root}" + ", which is slower" * is_slow)
    found = ", ".join(f"{_bytes(num_free)} in {root}" for root, num_free in free.items())
    return Room(
        False, f"{what} need {_bytes(needed)}; free are {found}: set TMPDIR to a larger disk"
    )


def room_to_load(config: Config, machine: Machine, available: int | None = None) -> Room | None:
    """Compare the memory of the host with what rank 0 needs while it loads the model; None if no
    GPU is here or the size is unknown. `available`: see `room_to_park`."""
    shape = memory.shape_of_folder(Path(config.model.path))
    if shape is None or not machine.gpus or config.train.engine == "emulated":
        return None
    needed = memory.loading_bytes(shape)
    free = scratch.available_memory() if available is None else available
    what = f"rank 0 holds the whole model in float32 while it loads it, {_bytes(needed)}"
    return Room(free >= needed, f"{what}; {_bytes(free)} are free")


def room_to_park(config: Config, machine: Machine, available: int | None = None) -> Room | None:
    """Compare the memory of the host with what all ranks here park while engines sample; None if
    they park nothing. `available`: bytes; default: those that are free now."""
    size, shape = version_size(config, machine), memory.shape_of_folder(Path(config.model.path))
    if config.rollout.placement != "shared" or size is None or shape is None:
        return None
    how, ranks = training(config, shape), config.train.ranks
    parked, more = (ranks * of(shape, how) for of in (memory.parked_bytes, memory.parked_gradients))
    versions = scratch.NUM_VERSIONS * size.num_bytes
    what = (
        f"while engines sample, {'1 rank parks' if ranks == 1 else f'{ranks} ranks park'} "
        f"{_bytes(parked)} in memory of the host, beside {_bytes(versions)} of versions, and "
        f"{_bytes(more)} more within a step"
    )
    free = scratch.available_memory() if available is None else available
    if not machine.gpus or free >= parked + versions + more:
        return Room(True, what)
    return Room(
        False,
        f"{what}: {_bytes(free)} are free; more trainer nodes, train.optim.name = 'adamw8bit' or "
        "rollout.placement = 'own' helps",
    )


def _bytes(num: int) -> str:
    """Example: 15.2 GB."""
    unit, size = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6)) if num >= s), ("kB", 1e3))
    return f"{num / size:.1f} {unit}"
