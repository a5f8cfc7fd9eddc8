"""When devices that sample and train change sides: what the rules see, what they answer.

Reserved nodes may share their devices with the trainer; others only sample. With W engine-seconds
of sampling in a step, N shared engines that sample for a window T, n others that sample all the
time, and t_train seconds of training behind the window, nobody waits if

    n (T + t_train) + N T = W        so        T* = max(0, (W - n t_train) / (n + N))

and with n = W / t_train it is 0: more nodes save nothing. (RLBoost, arXiv 2510.19225, finds T by
correcting it from step to step; the equation is ours.) Pure arithmetic over a `View`; what decides
are the classes below, what is measured for them is in `sharing_policy`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightrl.core.log_entries import WindowMemory
from lightrl.core.responses.placement import PREFILL_TOKENS_PER_STEP, Outlook
from lightrl.core.state import Node, RoundKind

KV_SHARE = 0.95  # of the caches that may be planned with


@dataclass(frozen=True, slots=True)
class Change:
    """Which nodes go over to training, and which come back to sample."""

    release: tuple[str, ...] = ()
    take_back: tuple[str, ...] = ()
    # if nothing happens until then, decide again
    look_at: float | None = None


@dataclass(slots=True)
class View:
    """A training round as it stands, what still runs and waits in it as predicted."""

    kind: RoundKind
    opened_at: float
    # share of the responses launched
    finished: float
    # shared nodes that sample
    sampling: list[Outlook]
    # nodes that share nothing
    others: list[Outlook]
    # shared nodes that train
    released: list[Node]
    # seconds of all shared devices that the trainer still has to do in this step; None = unknown
    train_s: float | None
    # of these, for groups that are complete
    ready_s: float
    # the others, in equal shares: after which part of the tokens to the longest response, and of
    # the engine steps of all, each is complete
    arrivals: Sequence[tuple[float, float]]
    # from a decision until the devices work on the other side
    switch_s: float
    # engine steps of each response that goes on, fewest first
    left: Sequence[float]
    # most tokens of context at once until all have ended, and of the caches, by node; none =
    # without limit
    kv_tokens: float = 0.0
    caches: dict[str, int] = field(default_factory=dict[str, int])
    # nodes of both kinds that load the version of this round
    shared_loading: int = 0
    others_loading: int = 0
    # some shared nodes can train without the others
    in_parts: bool = True
    # of the trainer's devices, that no engine uses
    unused: float = 0.0

    @property
    def num(self) -> int:
        return len(self.left)

    @property
    def num_shared(self) -> int:
        return len(self.sampling) + len(self.released)

    @property
    def num_others(self) -> int:
        """With those that will sample in a moment."""
        return len(self.others) + self.others_loading

    def now_sampling(self) -> list[Node]:
        return [o.node for o in (*self.sampling, *self.others)]

    def without(self, going: Sequence[Outlook]) -> list[Node]:
        """Who samples once these are released."""
        names = {o.node.name for o in going}
        return [node for node in self.now_sampling() if node.name not in names]

    def emptiest(self, count: int) -> list[Outlook]:
        """Shared nodes by whose release fewest responses move, at most so many; see
        `in_whole_parts`."""
        running = {o.node.name: o.running for o in self.sampling}
        nodes = in_whole_parts([o.node for o in self.sampling], count, running)
        looks = {o.node.name: o for o in self.sampling}
        return [looks[node.name] for node in nodes]

    def fits(self, nodes: Sequence[Node]) -> bool:
        """Whether their caches hold all that runs and waits until its end."""
        caches = [self.caches.get(node.name, 0) for node in nodes]
        return not all(caches) or self.kv_tokens <= KV_SHARE * sum(caches)

    def rest_s(self, nodes: Sequence[Node]) -> float:
        """Seconds until `nodes` have done all that runs and waits; infinite without nodes.

        Each alone with an equal share of it, and the response with most before it, would take so
        long; together they take the harmonic mean, since the fast ones do more.
        """
        if not self.left:
            return 0.0
        if not nodes:
            return math.inf
        count = len(nodes)
        # Of each `count` responses in order one: the longest, and those in the middle.
        share = [*self.left[-1 - count - count // 2 :: -count][::-1], self.left[-1]]
        per_s = 0.0
        for node in nodes:
            turns = node.capacity
            mine = share
            if len(share) > turns:
                mine = sorted(sum(share[k::turns]) for k in range(turns))
            per_s += 1.0 / max(1e-9, node.speed.curve.finishes_in(mine))
        return count / per_s

    def alone(self, nodes: Sequence[Node]) -> float:
        """Which share of their rest is due to the longest response, not to how many there are."""
        rest = self.rest_s(nodes)
        if not nodes or not rest:
            return 1.0
        step_s = sum(node.speed.step_s(1) for node in nodes) / len(nodes)
        return min(1.0, step_s * self.left[-1] / rest)


def in_whole_parts(nodes: Sequence[Node], count: int, running: Mapping[str, int]) -> list[Node]:
    """At most `count` of these, those with fewest responses first; never one without the others
    that use the same part of the devices."""
    parts: dict[tuple[str, int], list[Node]] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        parts.setdefault((node.shares, node.part), []).append(node)
    chosen: list[Node] = []
    loads = {key: sum(running.get(n.name, 0) for n in part) for key, part in parts.items()}
    for key in sorted(parts, key=lambda key: (loads[key], parts[key][0].name)):
        part = parts[key]
        if len(chosen) + len(part) <= count:
            chosen += part
    return chosen


def moved_s(going: Sequence[Outlook], staying: Sequence[Node]) -> float:
    """What it costs those who stay to prefill what ran at those who go."""
    if not staying:
        return 0.0
    held = sum(o.node.context for o in going)
    step_s = sum(node.speed.step_s(1) for node in staying) / len(staying)
    return step_s * held / PREFILL_TOKENS_PER_STEP / len(staying)


def best_window_s(work_s: float, train_s: float, shared: int, others: float) -> float:
    """T* of the equation above; infinite without nodes."""
    nodes = shared + others
    return max(0.0, (work_s - others * train_s) / nodes) if nodes else math.inf


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step has come to, in seconds."""

    kind: RoundKind
    # nodes that share nothing: on average in the step, and now
    others: float
    others_now: int
    # until its last response had come
    rollout_s: float
    # of all nodes that sampled, added up
    work_s: float
    # of the trainer, with all shared devices
    train_s: float
    # it had its devices and no work
    trainer_waited_s: float
    # the others had none
    others_waited_s: float


class Rule(Protocol):
    """Decides at any time; learns from each step that is over."""

    def decide(self, view: View, now: float) -> Change: ...
    def learn(self, step: StepTimes) -> None: ...


NOTHING = Change()


class Never:
    """The rule "off": sides change between steps alone."""

    def decide(self, view: View, now: float) -> Change:
        return NOTHING

    def learn(self, step: StepTimes) -> None:
        """There is nothing to decide."""


FIRST_LOOK, LAST_LOOK, LOOK_EVERY = 0.2, 0.5, 0.05  # responses finished, of those launched
LAST_LOOK_AGAIN = 0.95
SLOTS_AGAIN = 0.2  # of those that stay may be used when more than the first half go


@dataclass
class ScaleDown:
    """Half of the devices train while responses still run: what both rules do without preemptible
    nodes.

    RollPacker's stream trainer (arXiv 2509.21009, algorithm 1): once in a round, evaluated whenever
    another 5 % of the responses have finished, between 20 and 50 %, and only if the other half has
    slots and cache for the rest. `again` releases halves of the rest, too, while few responses run
    on the nodes that stay.
    """

    again: bool = False
    _opened_at: float = float("nan")
    _next_look: float = FIRST_LOOK

    def decide(self, view: View) -> Change:
        if view.opened_at != self._opened_at:
            self._opened_at, self._next_look = view.opened_at, FIRST_LOOK
        if not view.in_parts or view.finished < self._next_look:
            return NOTHING
        if view.released and not self.again:
            return NOTHING
        while self._next_look <= view.finished:
            self._next_look += LOOK_EVERY
        last = LAST_LOOK_AGAIN if self.again else LAST_LOOK
        if view.finished >= last + LOOK_EVERY:  # the last look may have come late
            return NOTHING
        going = view.emptiest(len(view.sampling) // 2)
        staying = view.without(going)
        room = (SLOTS_AGAIN if view.released else 1.0) * sum(node.slots for node in staying)
        if not going or view.num > room or not view.fits(staying):
            return NOTHING
        return Change(release=tuple(o.node.name for o in going))


ETA = 3.0  # as in the authors' code
CONSTANT = 0.05  # of the nodes there are now: so far from that their mean is in a quiet step


class Window:
    """The rule "window": all shared nodes sample for T_seed seconds of each step, then train.

    RLBoost's algorithm 1 (arXiv 2510.19225). After each step

        T_seed += (w_train - w_remote) / eta          who waited longer, trainer or other nodes
        M[n]    = T_seed           if n was the same all through the step
        T_seed  = M[n']            if n' nodes take part now and M has them

    Kept by kind of round, as short and long rounds differ several times over. Where M has nothing,
    T_seed starts from T* with the work of the last round of its kind; `first_guess` off, as
    published: it stays what it was. As published, caches of the others are not looked at. The
    published cap of preemptible nodes is left out: `cost_model` decides how many are worth having.
    """

    def __init__(self, first_guess: bool = True, remembers: bool = True) -> None:
        self._first_guess = first_guess
        self._remembers = remembers
        self._seeds: dict[str, float] = {}  # T_seed
        self._memory: dict[tuple[int, str], float] = {}
        self._work: dict[str, tuple[float, float]] = {}  # (W, t_train)
        self._scale_down = ScaleDown()
        self._opened_at = math.nan
        self._window_s: float | None = None  # of the round at hand

    def window_s(self, kind: str, shared: int, others: int) -> float | None:
        """T_seed of a round of this kind that begins with so many; None = nothing is known."""
        if (others, kind) in self._memory:
            return self._memory[others, kind]
        if self._first_guess and kind in self._work and shared + others > 0:
            return best_window_s(*self._work[kind], shared, others)
        return self._seeds.get(kind)

    def decide(self, view: View, now: float) -> Change:
        if view.opened_at != self._opened_at:
            self._opened_at = view.opened_at
            shared = view.num_shared + view.shared_loading
            self._window_s = self.window_s(view.kind, shared, view.num_others)
        if not view.num_others:
            stranded = view.released and not view.sampling
            names = tuple(node.name for node in view.released)
            return Change(take_back=names) if stranded else self._scale_down.decide(view)
        if self._window_s is None or not (view.sampling and view.others):
            return NOTHING
        elapsed = max(0.0, now - view.opened_at)
        if elapsed < self._window_s:
            return Change(look_at=now + self._window_s - elapsed)
        return Change(release=tuple(o.node.name for o in view.sampling))

    def learn(self, step: StepTimes) -> None:
        kind = step.kind
        self._work[kind] = (step.work_s, step.train_s)
        if not step.others or (self._window_s is None and self._first_guess):
            return  # there was none to be corrected, and the equation begins nearer
        # A window beyond the end of the rollout has been as long as that.
        window = self._window_s if self._window_s is not None else step.rollout_s
        window = min(window, step.rollout_s)
        window += (step.trainer_waited_s - step.others_waited_s) / ETA
        self._seeds[kind] = window = max(0.0, window)
        is_quiet = abs(step.others - step.others_now) <= CONSTANT * step.others_now
        if is_quiet and self._remembers:
            self._memory[step.others_now, kind] = window

    def memory(self) -> WindowMemory:
        known = tuple((others, kind, s) for (others, kind), s in self._memory.items())
        return WindowMemory(dict(self._seeds), known)

    def recall(self, memory: WindowMemory, work: Mapping[str, tuple[float, float]]) -> None:
        """As it was; `work` of the last steps, by kind: engine seconds, seconds of training."""
        self._seeds, self._work = dict(memory.seeds), dict(work)
        self._memory = {(others, kind): seconds for others, kind, seconds in memory.known}


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


class ForecastRule:
    """The rule "foreseen": devices change sides when the step is predicted to end soonest.

    Compared are, each from now on: no change; releasing half of the shared nodes that sample; all
    of them, if others sample; and if nodes have left since a release, taking back half of the
    released ones, or all. Known are the seconds that those who sample need for the rest
    (`View.rest_s`), and what the trainer still has to do at its measured rate. A release waits
    while those who stay need longer than the trainer will, so that it would run dry:

        R(t) <= s + M / f

    R falls by `pace` a second while everybody samples, s is a switch, M what the trainer has to do,
    f its share of the devices. In a fluid that is T*; here it holds also for a tail that one device
    finishes as soon as eight (pace 1), and for a fleet that has just changed. Nothing is stored
    from step to step.
    """

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
        """Measured by `sharing_policy`, for both rules."""


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
