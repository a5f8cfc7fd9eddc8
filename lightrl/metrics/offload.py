"""What devices that are used in turn did in a step: by engines and training ranks, or by engines of
several sizes. Reads the core, decides nothing."""

from itertools import islice

from lightrl.core.coordinator import Coordinator

MAX_FIGURES = 512  # of single nodes: a message holds only so many


def turns_figures(core: Coordinator, step: int) -> dict[str, float]:
    """Of the step that closed last; nothing where no devices are used in turn."""
    sizes = {f"planner/{name}": value for name, value in core.sizes.figures(step).items()}
    return offload_figures(core) | sizes


def offload_figures(core: Coordinator) -> dict[str, float]:
    """Nothing where no node shares the trainer's devices."""
    if not core.fleet.devices.nodes:
        return {}
    figures, seconds = core.colocation.figures, core.colocation.device_s
    named = {f"offload/{name}": value for name, value in figures.items()}
    some = islice(seconds.items(), MAX_FIGURES)
    return named | {f"device_s/{name}": value for name, value in some}
