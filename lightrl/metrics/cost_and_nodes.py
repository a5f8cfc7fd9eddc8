"""Compute the rows of snapshots: the nodes of a run, with smoothed token rates, and the run's cost;
and the figures of devices that are used in turn. Reads the core.
"""

import math
import os
import socket
from dataclasses import replace
from itertools import islice

from lightrl.core.coordinator import Coordinator
from lightrl.core.nodes.cost_model import Outcome
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.state import NodeState
from lightrl.core.weights.weight_sources import PULLING
from lightrl.messages.snapshot import CostRow, NodeRow, StepForecast

HALF_LIFE_S = 2.0  # of the weight of a measurement in a token rate
MAX_DEVICE_FIGURES = 512  # figures of single nodes, since the size of a message is limited


def cost_figures(core: Coordinator) -> dict[str, float]:
    """Return the cost of the whole run so far in US$; an empty dict if prices are unknown."""
    prices, learned, counters = core.settings.prices, core.scaling.learned, core.table.counters
    if prices is None:
        return {}
    usd = prices.usd(learned.reserved_s, learned.preemptible_s)
    figures = {"usd": usd}
    if (tokens := counters.rollout_tokens - counters.aborted_tokens) > 0:
        figures["usd_per_million_tokens"] = 1e6 * usd / tokens
    if core.step:
        figures["usd_per_step"] = usd / core.step
    return figures


def cost_row(core: Coordinator) -> CostRow:
    fleet, scaling, now = core.fleet, core.scaling, core.fleet.num_preemptible
    wanted = scaling.learned.wanted if core.settings.scale_max else None
    row = CostRow(scaling.num_reserved, now, wanted=wanted)
    row = replace(row, **cost_figures(core))  # of the same names
    # The fleet has no nodes after the end of a run.
    if not fleet.nodes or (forecast := scaling.forecast()) is None:
        return row
    nearby = range(max(0, now - 1), now + 3)
    outcomes = tuple(_row(forecast.outcome(n)) for n in nearby)
    return replace(row, forecast=outcomes, enough=scaling.enough(forecast))


def _row(outcome: Outcome) -> StepForecast:
    if math.isinf(outcome.step_s):  # JSON cannot represent infinity
        return StepForecast(outcome.nodes, None, None)
    return StepForecast(outcome.nodes, outcome.step_s, outcome.usd)


def turns_figures(core: Coordinator, step: int) -> dict[str, float]:
    """Return figures of the last closed step for devices that engines and training ranks, or
    engines of several sizes, use in turn."""
    figures = {f"planner/{name}": value for name, value in core.sizes.figures(step).items()}
    if core.fleet.devices.nodes:
        figures |= {f"offload/{name}": value for name, value in core.colocation.figures.items()}
        seconds = islice(core.colocation.device_s.items(), MAX_DEVICE_FIGURES)
        figures |= {f"device_s/{name}": value for name, value in seconds}
    return figures


class NodeRows:
    def __init__(self, head: str) -> None:
        """`head` is the name of the coordinator's daemon."""
        self._head = head
        self._rates: dict[str, _Rate] = {}

    def measure(self, fleet: Fleet, now: float) -> None:
        """Update the token rate of every node; called about once a second."""
        for name, node in fleet.nodes.items():
            self._rates.setdefault(name, _Rate(now, node.num_tokens)).update(now, node.num_tokens)
        for name in self._rates.keys() - fleet.nodes.keys():
            del self._rates[name]

    def rows(self, fleet: Fleet, now: float) -> tuple[NodeRow, ...]:
        """Return a row for each node, the coordinator's daemon first."""
        rows = {name: self._row(fleet, name, now) for name in sorted(fleet.nodes)}
        head = rows.pop(self._head, None) or NodeRow(
            self._head, (), str(NodeState.READY), socket.gethostname(), os.getpid()
        )
        return (replace(head, roles=("coordinator", *head.roles)), *rows.values())

    def _row(self, fleet: Fleet, name: str, now: float) -> NodeRow:
        node = fleet.nodes[name]
        is_rollout = "rollout" in node.roles
        rate = self._rates.get(name)
        version = node.policy_version
        if not is_rollout and fleet.published is not None and node.state is NodeState.READY:
            version = fleet.published.policy_version
        return NodeRow(
            name=name,
            roles=node.roles,
            state=str(node.state),
            host=node.host,
            pid=node.pid,
            device=node.device,
            policy_version=version,
            running=len(node.running),
            slots=node.slots if is_rollout else 0,
            tokens_per_s=rate.per_s if rate is not None else 0.0,
            kv_usage=node.load.kv_usage,
            heard_s_ago=now - node.heard_at,
            loop_lag_ms=node.loop_lag_ms,
            weights=node.weights if node.state in PULLING else None,
            broadcast=fleet.broadcasts.stage(node),
            state_s=max(0.0, now - node.since) if node.takes_turns else None,
            shares=node.shares,
            part=None if fleet.devices.are_whole or not node.shares else node.part,
        )


class _Rate:
    """The exponentially smoothed rate of a counter."""

    def __init__(self, now: float, count: int) -> None:
        self.per_s = 0.0
        self._at = now
        self._count = count

    def update(self, now: float, count: int) -> None:
        seconds = now - self._at
        if seconds <= 0:
            return
        kept = 0.5 ** (seconds / HALF_LIFE_S)
        # The counter of a restarted node starts at zero again.
        self.per_s = kept * self.per_s + (1 - kept) * max(0, count - self._count) / seconds
        self._at, self._count = now, count
