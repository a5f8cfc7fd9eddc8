"""Spot traces that are made up from a seed."""

import math

from lightrl.errors import SimError
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.inputs.workload import uniforms


def synthetic_trace(
    num_nodes: int, duration_s: float, up_s: float, down_s: float, seed: int = 0
) -> tuple[TraceEvent, ...]:
    """Return a trace in which each node is present for `up_s` and absent for `down_s` on average,
    both exponential, from its steady state on."""
    if num_nodes < 1 or min(duration_s, up_s, down_s) <= 0:
        raise SimError("a synthetic trace needs at least one node and positive times")
    events: list[TraceEvent] = []
    for k in range(num_nodes):
        node, at = f"spot-{k}", 0.0
        up = uniforms(seed, node, "first")[0] < up_s / (up_s + down_s)
        for n in range(1_000_000):
            if n > 0 or up:
                events.append(TraceEvent(at, node, up))
            at -= math.log(uniforms(seed, node, n)[0]) * (up_s if up else down_s)
            up = not up
            if at >= duration_s:
                break
    return tuple(sorted(events, key=lambda e: (e.at_s, e.node)))
