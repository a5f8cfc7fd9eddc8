"""The rule "foreseen": devices change sides when the step is predicted to end soonest so.

Compared are, each from now on: to stay as it is; to release half of the shared nodes that sample;
all of them, if others go on; and if nodes are gone since a release, to take half of the released
ones back, or all. Of each it is known what those who sample then need for all that runs and waits
(`View.rest_s`, by `Outlook` and the lengths foreseen), and what the trainer still has to do at its
measured rate. A release is worth waiting for while those who stay need longer than the trainer
will, and so it would run dry:

    R(t) <= s + M / f

where R falls by `pace` a second while everybody samples, s is what a switch takes, M what the
trainer has to do, f the share of the devices that it would have. In a fluid that is T* of
`offload`; here it holds also for a tail that one device finishes as soon as eight (pace 1), for
half of the devices, and for a fleet that has just changed. Nothing is remembered from step to step:
the first one with another n is as good as any.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightrl.core.offload import NOTHING, Change, StepTimes, View, in_whole_parts, moved_s
from lightrl.core.placement import Outlook
from lightrl.core.scale_down import ScaleDown
from lightrl.core.state import Node

# of the time that is left: what a plan must save to be worth the error of its forecast
WORTH = 0.01


@dataclass(frozen=True, slots=True)
class Plan:
    going: Sequence[Outlook]
    coming: Sequence[Node]
    # until they go, from now
    window_s: float
    # the step, from now; and later, if they go at once
    ends_in: float
    haste_s: float = 0.0


class Foreseen:
    def __init__(self) -> None:
        self._opened_at = math.nan
        self._others = 0  # at the last release in this round
        self._scale_down = ScaleDown(again=True)

    def decide(self, view: View, now: float) -> Change:
        if view.opened_at != self._opened_at:
            self._opened_at, self._others = view.opened_at, 0
        if not view.others and not self._others:
            change = self._scale_down.decide(view)
            return change if _is_no_loss(view, change) else NOTHING
        if view.train_s is None:
            return NOTHING  # no step was trained yet
        stay, *plans = plans_of(view, len(view.others) < self._others)
        best = min(plans, key=_order, default=stay)
        worth = WORTH * best.ends_in
        if not best.ends_in < stay.ends_in - max(view.switch_s, worth):
            return NOTHING
        if best.haste_s > worth:
            return Change(look_at=now + best.window_s)
        if best.going:
            self._others = len(view.others)
        return Change(
            tuple(o.node.name for o in best.going), tuple(node.name for node in best.coming)
        )

    def learn(self, step: StepTimes) -> None:
        """What it needs is measured by `sides`, for both rules."""


def plans_of(view: View, may_return: bool) -> list[Plan]:
    """All that can be done, the first of them nothing."""
    half = len(view.sampling) // 2 if view.in_parts else 0
    goings = [going] if half and (going := view.emptiest(half)) else []
    if view.others and view.sampling:
        goings.append(view.emptiest(len(view.sampling)))
    plans = [_release(view, going) for going in goings]
    if may_return and view.released:
        back = sorted(view.released, key=lambda node: node.name)
        half_back = in_whole_parts(back, len(back) // 2, {}) if view.in_parts else []
        comings = [back, half_back] if half_back else [back]
        plans += [_take_back(view, coming) for coming in comings]
    return [_stay(view), *(plan for plan in plans if plan is not None)]


def _order(plan: Plan) -> tuple[float, float, int]:
    return plan.ends_in, plan.window_s, len(plan.going)


def _stay(view: View) -> Plan:
    nodes = view.now_sampling()
    rest = view.rest_s(nodes)
    if view.released and not view.sampling:
        return Plan((), (), 0.0, _train_all(view, rest, view.alone(nodes), 0.0)[0])
    return Plan((), (), 0.0, _train(view, rest, _share(view, len(view.released))))


def _release(view: View, going: Sequence[Outlook]) -> Plan | None:
    staying = view.without(going)
    if not view.fits(staying):
        return None
    now_s = view.rest_s(view.now_sampling())
    rest = max(now_s, view.rest_s(staying))  # what is known of single nodes is noisy
    pace = rest / now_s if now_s else 1.0
    rest += moved_s(going, staying)
    before = _share(view, len(view.released))
    share = _share(view, len(view.released) + len(going))
    begins = 0.0 if before else view.switch_s
    if share < 1:
        return Plan(going, (), 0.0, _train(view, rest, share, begins))
    end, idle = _train_all(view, rest, view.alone(staying), begins)
    window = min(idle / max(1e-9, pace - before / share), now_s)
    haste = (pace - 1.0) * window
    return Plan(going, (), window, end - haste, haste)


def _take_back(view: View, coming: Sequence[Node]) -> Plan | None:
    staying = [*view.now_sampling(), *coming]
    if not view.fits(staying):
        return None
    now_s = view.rest_s(view.now_sampling())
    done = min(1.0, view.switch_s / now_s) if now_s else 1.0
    rest = view.switch_s + (1 - done) * view.rest_s(staying)
    share = _share(view, len(view.released) - len(coming))
    return Plan((), coming, 0.0, _train(view, rest, share))


def _train_all(view: View, rest_s: float, alone: float, begins_s: float) -> tuple[float, float]:
    """(when the step is trained, how long the trainer had nothing to do), with all devices from
    `begins_s` on, while others sample for `rest_s`: the groups come as in the last round."""
    assert view.train_s is not None
    if math.isinf(rest_s):
        return math.inf, 0.0
    clock, idle = begins_s + view.ready_s, 0.0
    each = max(0.0, view.train_s - view.ready_s) / len(view.arrivals)
    for tokens, steps in view.arrivals:
        comes = rest_s * (alone * tokens + (1 - alone) * steps)
        idle += max(0.0, comes - clock)
        clock = max(clock, comes) + each
    return max(clock, rest_s), idle


def _train(view: View, rest_s: float, share: float, begins_s: float = 0.0) -> float:
    """The same with `share` of the devices until all responses have come; then the others change
    over. Counts on nothing but groups that are complete: there are more chances to release some.
    """
    assert view.train_s is not None
    trained = min(share * max(0.0, rest_s - begins_s), view.ready_s)
    left = view.train_s - trained
    if left <= 0:
        return rest_s
    if math.isinf(rest_s) or share * view.switch_s >= left:  # no other device is worth a switch
        return rest_s + left / max(share, 1e-9)
    return rest_s + left + (1 - share) * view.switch_s


def _is_no_loss(view: View, change: Change) -> bool:
    """Whether the step ends no later if these nodes are released, as far as that is known. The rest
    takes longer without them; where little is trained beside it, nothing makes up for that."""
    if view.train_s is None:
        return True
    going = [o for o in view.sampling if o.node.name in change.release]
    staying, count = view.without(going), len(view.released)
    stay_s = _train_beside(view, view.now_sampling(), 0.0, _share(view, count))
    moved = moved_s(going, staying)
    return _train_beside(view, staying, moved, _share(view, count + len(going))) <= stay_s


def _train_beside(view: View, nodes: Sequence[Node], more_s: float, share: float) -> float:
    """When the step is trained if `nodes` sample the rest and `more_s`, and `share` of the devices
    trains what comes, as in the last round, until the others change over, too."""
    assert view.train_s is not None
    rest_s, alone = view.rest_s(nodes) + more_s, view.alone(nodes)
    each = max(0.0, view.train_s - view.ready_s) / len(view.arrivals)
    clock, trained = view.switch_s, 0.0
    shares = [0.0, *(alone * tokens + (1 - alone) * steps for tokens, steps in view.arrivals)]
    for k, comes in enumerate(shares):
        clock = max(clock, comes * rest_s)
        work_s = min(each if k else view.ready_s, share * max(0.0, rest_s - clock))
        trained += work_s
        clock += work_s / share if share else 0.0
    return rest_s + view.train_s - trained + (1 - share) * view.switch_s


def _share(view: View, count: int) -> float:
    """Of the trainer's devices, while so many nodes have given theirs back."""
    if count == view.num_shared:
        return 1.0 if count else view.unused
    return view.unused + (1.0 - view.unused) * count / view.num_shared
