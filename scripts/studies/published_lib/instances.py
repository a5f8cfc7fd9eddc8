"""What is told of preemptible instances: RLBoost's published figures again, and
LightRL beyond them.

Owns how these figures follow from simulated rows. A change is compared by what it leaves, as in
1 - 0.19 of the throughput, so that its error is one of the throughput.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from scripts.studies.published_lib.played import Check, Played
from scripts.studies.published_lib.published import Instances
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

Found = Mapping[str, Sequence[Played]]

THROUGHPUT, TOKENS_PER_DOLLAR = 1.15, 1.60  # what LightRL is to reach


def checks_of(instances: Instances, found: Found) -> list[Check]:
    """All that the rows which were played can tell."""
    told: list[Check] = []
    if "colocated" in found:
        for count, speed_up in instances.speed_up.items():
            name = f"+ {count} preemptible"
            if name in found:
                cost = _cost(found, name) / _cost(found, "colocated")
                told += [
                    Check(f"{name}: speed-up", speed_up, _gain(found, name, "colocated")),
                    Check(f"{name}: cost of a token", instances.cost[count], cost),
                ]
    told += _of_mechanisms(instances, found)
    for limit, count in instances.best.items():
        at = f"{limit} tokens: " if limit == SHORT_LIMIT else ""
        names = {n: f"{at}+ {n} preemptible" for n in INSTANCES}
        if all(name in found for name in names.values()):
            best = min(names, key=lambda n: _cost(found, names[n]))
            told.append(Check(f"limit of {limit}: best number", count, best))
    return told


def _of_mechanisms(instances: Instances, found: Found) -> list[Check]:
    told: list[Check] = []
    pairs = [(f"+ {n}, no window", f"+ {n} preemptible") for n in range(1, MOST + 1)]
    if all(name in found for pair in pairs for name in pair):
        without, usual = (fmean(1 / _step_s(found, p[k]) for p in pairs) for k in range(2))
        told.append(Check("throughput without window", 1 + instances.no_window, without / usual))
    rows = "changing: with memory", "changing: without memory"
    if all(name in found for name in rows):
        told.append(Check("throughput with memory", 1 + instances.memory, _gain(found, *rows)))
    undisturbed = f"+ {MOST} preemptible"
    if all(name in found for name in (MOVING, STARTING_AGAIN, undisturbed)):
        moving, again = (
            _step_s(found, name) - _step_s(found, undisturbed) for name in (MOVING, STARTING_AGAIN)
        )
        spared = 1 - moving / again if again > 0 else 0.0
        told.append(Check("three of six lost: time spared by moving", -instances.moving, spared))
    return told


def checks_beyond(found: Found) -> list[Check]:
    """Against what is asked of LightRL; nobody has published it."""
    told: list[Check] = []
    for name in (FULL, STRICT):
        if all(row in found for row in (name, RLBOOST_ROW, "colocated")):
            dollars = _cost(found, "colocated") / _cost(found, name)
            gain = _gain(found, name, RLBOOST_ROW)
            told += [
                Check(f"{name}: throughput over RLBoost", THROUGHPUT, gain),
                Check(f"{name}: tokens a dollar over colocated", TOKENS_PER_DOLLAR, dollars),
            ]
    return told


def _step_s(found: Found, name: str) -> float:
    return fmean(p.step_s for p in found[name])


def _cost(found: Found, name: str) -> float:
    """Of a step; all steps train as many responses of the same prompts."""
    return fmean(p.cost_per_step for p in found[name])


def _gain(found: Found, name: str, over: str) -> float:
    return _step_s(found, over) / _step_s(found, name)
