"""Checks of preemptible instances: RLBoost's published figures, and what is asked of LightRL.

A published change is compared by what remains, as in 1 - 0.19 of the throughput, so that its error
is one of the throughput.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from scripts.studies.published_lib.published import Instances
from scripts.studies.published_lib.simulated import Check, Simulated
from scripts.studies.published_lib.systems import (
    FULL,
    INSTANCES,
    MOST,
    MOVING,
    RLBOOST_ROW,
    SHORT_LIMIT,
    STARTING_AGAIN,
    STRICT,
)

Found = Mapping[str, Sequence[Simulated]]

THROUGHPUT, TOKENS_PER_DOLLAR = 1.15, 1.60  # what LightRL is to reach


def checks_of(instances: Instances, found: Found) -> list[Check]:
    """Return the checks that the simulated rows allow."""
    checks: list[Check] = []
    if "colocated" in found:
        for count, speed_up in instances.speed_up.items():
            name = f"+ {count} preemptible"
            if name in found:
                cost = _cost(found, name) / _cost(found, "colocated")
                checks += [
                    Check(f"{name}: speed-up", speed_up, _gain(found, name, "colocated")),
                    Check(f"{name}: cost of a token", instances.cost[count], cost),
                ]
    checks += _of_mechanisms(instances, found)
    for limit, count in instances.best.items():
        at = f"{limit} tokens: " if limit == SHORT_LIMIT else ""
        names = {n: f"{at}+ {n} preemptible" for n in INSTANCES}
        if all(name in found for name in names.values()):
            best = min(names, key=lambda n: _cost(found, names[n]))
            checks.append(Check(f"limit of {limit}: best number", count, best))
    return checks


def _of_mechanisms(instances: Instances, found: Found) -> list[Check]:
    checks: list[Check] = []
    pairs = [(f"+ {n}, no window", f"+ {n} preemptible") for n in range(1, MOST + 1)]
    if all(name in found for pair in pairs for name in pair):
        without, usual = (fmean(1 / _step_s(found, p[k]) for p in pairs) for k in range(2))
        checks.append(Check("throughput without window", 1 + instances.no_window, without / usual))
    rows = "changing: with memory", "changing: without memory"
    if all(name in found for name in rows):
        checks.append(Check("throughput with memory", 1 + instances.memory, _gain(found, *rows)))
    undisturbed = f"+ {MOST} preemptible"
    if all(name in found for name in (MOVING, STARTING_AGAIN, undisturbed)):
        moving, again = (
            _step_s(found, name) - _step_s(found, undisturbed) for name in (MOVING, STARTING_AGAIN)
        )
        spared = 1 - moving / again if again > 0 else 0.0
        checks.append(Check("three of six lost: time spared by moving", -instances.moving, spared))
    return checks


def checks_extra(found: Found) -> list[Check]:
    """Return checks against what is asked of LightRL, which is not published."""
    checks: list[Check] = []
    for name in (FULL, STRICT):
        if all(row in found for row in (name, RLBOOST_ROW, "colocated")):
            dollars = _cost(found, "colocated") / _cost(found, name)
            gain = _gain(found, name, RLBOOST_ROW)
            checks += [
                Check(f"{name}: throughput over RLBoost", THROUGHPUT, gain),
                Check(f"{name}: tokens a dollar over colocated", TOKENS_PER_DOLLAR, dollars),
            ]
    return checks


def _step_s(found: Found, name: str) -> float:
    return fmean(p.step_s for p in found[name])


def _cost(found: Found, name: str) -> float:
    """Of a step; all steps train as many responses of the same prompts."""
    return fmean(p.cost_per_step for p in found[name])


def _gain(found: Found, name: str, over: str) -> float:
    return _step_s(found, over) / _step_s(found, name)
