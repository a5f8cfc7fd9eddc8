"""The rollout nodes of a simulation, as a user describes them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightrl.errors import SimError
from lightrl.sim.inputs.hardware import EngineProfile

SPOT = "spot"  # kind of preemptible nodes; they never train


@dataclass(frozen=True, slots=True)
class NodeSpec:
    name: str
    slots: int
    # its row in the report
    kind: str = "rollout"
    # factor on all its times
    slowness: float = 1.0
    # key in the scenario's engines of one that takes turns with other sizes; 0 = it does not
    parallel: int = 0
    # its devices, in multiples of the smallest engine's
    width: int = 1
    # of its engine; None = that of the scenario
    profile: EngineProfile | None = None


# What nodes of a recorded run did, by step: (seconds after it began, node, what); "ready" = it
# serves the newest version, "left" = it drained, "lost"
NodeChanges: TypeAlias = Mapping[int, Sequence[tuple[float, str, str]]]


def can_group(nodes: Sequence[NodeSpec], sizes: Iterable[int]) -> bool:
    """Return whether there are several sizes of engines, and each fits these nodes."""
    fixed, known = sum(n.kind != SPOT for n in nodes), sorted(sizes)
    return fixed > 0 and len(known) > 1 and all(fixed % (k // known[0]) == 0 for k in known)


def of_all_sizes(nodes: Sequence[NodeSpec], sizes: Sequence[int]) -> list[NodeSpec]:
    """Return these nodes, with engines of the smallest size, and further ones with engines of the
    other sizes on the same devices. Spot nodes stay as they are. Raise SimError."""
    if not sizes:
        return list(nodes)
    least = min(sizes)
    fixed = [n for n in nodes if n.kind != SPOT]
    made = [n for n in nodes if n.kind == SPOT]
    for size in sorted(sizes):
        width = size // least
        if len(fixed) % width:
            raise SimError(
                f"engines of {size} devices: {len(fixed)} nodes with engines of {least} cannot be "
                f"grouped by {width}"
            )
        for first in range(0, len(fixed), width):
            group = fixed[first : first + width]
            name = group[0].name + (f"x{width}" if width > 1 else "")
            slots, slowness = sum(n.slots for n in group), max(n.slowness for n in group)
            made.append(NodeSpec(name, slots, group[0].kind, slowness, size, width))
    return made


def profile_of(
    spec: NodeSpec, engines: Mapping[int, EngineProfile], spot_kv_tokens: int
) -> EngineProfile:
    """`spot_kv_tokens`: of an engine that shares its GPUs with no trainer; 0 = as on the others."""
    if spec.profile is not None:
        return spec.profile.slower(spec.slowness)
    profile = engines[spec.parallel or min(engines)].slower(spec.slowness)
    is_other = spec.kind == SPOT and spot_kv_tokens > 0
    return replace(profile, kv_tokens=spot_kv_tokens) if is_other else profile
