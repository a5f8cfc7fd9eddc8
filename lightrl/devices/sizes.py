"""List the engines of several sizes over the same GPUs: names, slots, options. Pure."""

from dataclasses import dataclass

from lightrl.config.schema import Config
from lightrl.devices.assign import Assignment


@dataclass(frozen=True, slots=True)
class SizedEngine:
    """One engine. Example: SizedEngine("rollout-1-tp2", 2, 1, 128) is on the third and fourth of
    these GPUs."""

    name: str
    # GPUs that it spans
    size: int
    # among those of its size
    index: int
    slots: int


def sized_engines(config: Config) -> list[SizedEngine]:
    """Return the engines of all sizes, the smallest first; [] if the run has one size.

    A larger engine has the slots of the smaller ones on the same GPUs.
    """
    rollout = config.rollout
    made: list[SizedEngine] = []
    for size in rollout.parallel:
        width = size // rollout.parallel[0]
        slots, indices = rollout.slots * width, range(rollout.nodes // width)
        made += [SizedEngine(f"rollout-{k}-tp{size}", size, k, slots) for k in indices]
    return made


def slots_of(config: Config, size: int) -> int:
    """Return the slots of an engine of `size` GPUs, in a run with several sizes."""
    return config.rollout.slots * (size // config.rollout.parallel[0] if size else 1)


def sized_options(config: Config, gpus: Assignment) -> dict[str, tuple[str, ...]]:
    """Return the options of their daemons by name; `gpus` are those of all sizes."""
    return {
        engine.name: ("--parallel", str(engine.size), *gpus.options(f"rollout-{k}"))
        for k, engine in enumerate(sized_engines(config))
    }


def describe_sizes(config: Config) -> list[str]:
    """Return a line for each size, for `--dry-run`."""
    lines: list[str] = []
    for size in config.rollout.parallel:
        engines = [e for e in sized_engines(config) if e.size == size]
        names = engines[0].name if len(engines) == 1 else f"{engines[0].name} to {engines[-1].name}"
        gpus = "1 GPU" if size == 1 else f"{size} GPUs"
        when = "awake first" if size == config.rollout.parallel[0] else "asleep at first"
        lines.append(f"engines of {gpus}: {names}, {engines[0].slots} slots each, {when}")
    return lines
