"""Rules that decide when devices change between sampling and training; their input and output.

Reserved nodes may share their devices with the trainer; other nodes only sample. Let a step have W
engine-seconds of sampling, N shared engines that sample for a window T, n other engines that sample
all the time, and t_train seconds of training after the window. No device waits if

    n (T + t_train) + N T = W        so        T* = max(0, (W - n t_train) / (n + N))

which is 0 for n = W / t_train: more nodes save nothing. (RLBoost, arXiv 2510.19225, corrects T from
step to step; the equation is ours.) Pure arithmetic over a `View`, which `sharing_policy` makes of
its measurements.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightrl.core.log_entries import WindowMemory
from lightrl.core.responses.placement import PREFILL_TOKENS_PER_STEP, Outlook
from lightrl.core.state import Node, RoundKind

KV_SHARE = 0.95  # of the caches, available to plans


@dataclass(frozen=True, slots=True)
class Change:
    """The nodes to release for training, and the nodes to take back for sampling."""

    release: tuple[str, ...] = ()
    take_back: tuple[str, ...] = ()
    # when to decide again if no event comes before
    look_at: float | None = None


@dataclass(slots=True)
class View:
    """The state of a training round, with predictions of its unfinished responses."""

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
    # training left in this step, in seconds of all shared devices; None = unknown
    train_s: float | None
    # the part of `train_s` for complete groups
    ready_s: float
    # of open groups, in equal shares: when each is complete, as fractions of the tokens left to
    # the longest response and of the engine steps left of all
    arrivals: Sequence[tuple[float, float]]
    # seconds from a decision until the devices work on the other side
    switch_s: float
    # engine steps left of each unfinished response, fewest first
    left: Sequence[float]
    # peak of the context of all until they end, and size of the caches by node, in tokens; a
    # node without an entry has no limit
    kv_tokens: float = 0.0
    caches: dict[str, int] = field(default_factory=dict[str, int])
    # nodes of both kinds that load the version of this round
    shared_loading: int = 0
    others_loading: int = 0
    # some shared nodes can train without the others
    in_parts: bool = True
    # share of the trainer's devices that no engine uses
    unused: float = 0.0

    @property
    def num(self) -> int:
        return len(self.left)

    @property
    def num_shared(self) -> int:
        return len(self.sampling) + len(self.released)

    @property
    def num_others(self) -> int:
        """The number of other nodes, loading ones included."""
        return len(self.others) + self.others_loading

    def now_sampling(self) -> list[Node]:
        return [o.node for o in (*self.sampling, *self.others)]

    def without(self, going: Sequence[Outlook]) -> list[Node]:
        """Return the nodes that sample after the release of `going`."""
        names = {o.node.name for o in going}
        return [node for node in self.now_sampling() if node.name not in names]

    def emptiest(self, count: int) -> list[Outlook]:
        """Return at most `count` sampling shared nodes, those with fewest responses; see
        `in_whole_parts`."""
        running = {o.node.name: o.running for o in self.sampling}
        nodes = in_whole_parts([o.node for o in self.sampling], count, running)
        looks = {o.node.name: o for o in self.sampling}
        return [looks[node.name] for node in nodes]

    def fits(self, nodes: Sequence[Node]) -> bool:
        """Return whether the caches of `nodes` hold all unfinished responses until they end."""
        caches = [self.caches.get(node.name, 0) for node in nodes]
        return not all(caches) or self.kv_tokens <= KV_SHARE * sum(caches)

    def rest_s(self, nodes: Sequence[Node]) -> float:
        """Return seconds until `nodes` finish all responses; infinite without nodes.

        The harmonic mean, since fast nodes do more, of the seconds that each node needs for an
        equal share of the responses and the longest of them.
        """
        if not self.left:
            return 0.0
        if not nodes:
            return math.inf
        count = len(nodes)
        # One of each `count` responses in order: the middle ones, and the longest of all.
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
        """Return the share of `rest_s` due to the longest response, not to the number of all."""
        rest = self.rest_s(nodes)
        if not nodes or not rest:
            return 1.0
        step_s = sum(node.speed.step_s(1) for node in nodes) / len(nodes)
        return min(1.0, step_s * self.left[-1] / rest)


def in_whole_parts(nodes: Sequence[Node], count: int, running: Mapping[str, int]) -> list[Node]:
    """Return at most `count` of these nodes, fewest responses first; nodes that use the same part
    of the devices are taken together."""
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
    """Return seconds of the staying nodes to prefill the responses of the going ones."""
    if not staying:
        return 0.0
    held = sum(o.node.context for o in going)
    step_s = sum(node.speed.step_s(1) for node in staying) / len(staying)
    return step_s * held / PREFILL_TOKENS_PER_STEP / len(staying)


def best_window_s(work_s: float, train_s: float, shared: int, others: float) -> float:
    """Return T* of the equation above; infinite without nodes."""
    nodes = shared + others
    return max(0.0, (work_s - others * train_s) / nodes) if nodes else math.inf


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measurements of a finished step, in seconds."""

    kind: RoundKind
    # number of nodes that share nothing: mean of the step, and now
    others: float
    others_now: int
    # until its last response arrived
    rollout_s: float
    # sum over all nodes that sampled
    work_s: float
    # of the trainer, with all shared devices
    train_s: float
    # the trainer had devices and no work
    trainer_waited_s: float
    # the other nodes had no work
    others_waited_s: float


class Rule(Protocol):
    """Decides on changes within a step; learns from each finished step."""

    def decide(self, view: View, now: float) -> Change: ...
    def learn(self, step: StepTimes) -> None: ...


NOTHING = Change()


class Never:
    """The rule "off": sides change only between steps."""

    def decide(self, view: View, now: float) -> Change:
        return NOTHING

    def learn(self, step: StepTimes) -> None:
        """Ignore the step."""


FIRST_LOOK, LAST_LOOK, LOOK_EVERY = 0.2, 0.5, 0.05  # responses finished, of those launched
LAST_LOOK_AGAIN = 0.95
SLOTS_AGAIN = 0.2  # of the staying nodes, the most in use for a further release


@dataclass
class ScaleDown:
    """Releases half of the devices while responses still run; used by both rules without other
    nodes.

    RollPacker's stream trainer (arXiv 2509.21009, algorithm 1): once in a round, evaluated whenever
    another 5 % of the responses have finished, between 20 and 50 %, and only if the other half has
    slots and cache for the unfinished responses. `again` also releases halves of the staying nodes,
    while few responses run there.
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
        if view.finished >= last + LOOK_EVERY:  # the last evaluation may be late
            return NOTHING
        going = view.emptiest(len(view.sampling) // 2)
        staying = view.without(going)
        room = (SLOTS_AGAIN if view.released else 1.0) * sum(node.slots for node in staying)
        if not going or view.num > room or not view.fits(staying):
            return NOTHING
        return Change(release=tuple(o.node.name for o in going))


ETA = 3.0  # as in the authors' code
CONSTANT = 0.05  # of the current nodes: the most that their mean differs in a quiet step


class Window:
    """The rule "window": all shared nodes sample for T_seed seconds of each step, then train.

    RLBoost's algorithm 1 (arXiv 2510.19225). After each step

        T_seed += (w_train - w_remote) / eta          waiting times of the trainer and other nodes
        M[n]    = T_seed           if n was constant during the step
        T_seed  = M[n']            if n' nodes take part now and M has an entry for n'

    State is kept by kind of round, as short and long rounds differ several times over. Without an
    entry in M, T_seed starts from T* with the work of the last round of its kind; with
    `first_guess` off it is unchanged, as published. As published, caches of the other nodes are not
    checked. The published cap of preemptible nodes is left out: `cost_model` limits their number.
    """

    def __init__(self, first_guess: bool = True, remembers: bool = True) -> None:
        self._first_guess = first_guess
        self._remembers = remembers
        self._seeds: dict[str, float] = {}  # T_seed
        self._memory: dict[tuple[int, str], float] = {}
        self._work: dict[str, tuple[float, float]] = {}  # (W, t_train)
        self._scale_down = ScaleDown()
        self._opened_at = math.nan
        self._window_s: float | None = None  # of the current round

    def window_s(self, kind: str, shared: int, others: int) -> float | None:
        """Return T_seed of a round of this kind and these numbers of nodes; None = unknown."""
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
            return  # no window to correct; T* is a better start
        # A window ends with the rollout at the latest.
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
        """Restore stored state. `work`: (W, t_train) in seconds of the last step, by kind."""
        self._seeds, self._work = dict(memory.seeds), dict(work)
        self._memory = {(others, kind): seconds for others, kind, seconds in memory.known}


# of the time left: the least saving by a plan, to outweigh the error of its forecast
WORTH = 0.01


@dataclass(frozen=True, slots=True)
class Plan:
    going: Sequence[Outlook]
    coming: Sequence[Node]
    # seconds from now until `going` are released
    window_s: float
    # seconds from now until the step ends; and by how much later if released now
    ends_in: float
    haste_s: float = 0.0


class ForecastRule:
    """The rule "foreseen": devices change sides when the step is predicted to end soonest.

    Compares these plans: no change; releasing half of the sampling shared nodes; releasing all of
    them, if other nodes sample; and, if nodes have left since a release, taking back half or all of
    the released ones. Inputs are the seconds R that the sampling nodes need for the unfinished
    responses (`View.rest_s`), and the training left at its measured rate. A release is delayed
    until the trainer would not run out of work before the staying nodes finish:

        R(t) <= s + M / f

    R falls by `pace` a second while all nodes sample, s is the time of a switch, M the training
    left, f the trainer's share of the devices. In a fluid model that is T*; it also holds for a
    tail that one device finishes as fast as eight (pace 1), and for a fleet that has just changed.
    No state is kept between steps.
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
        """Ignore the step: `View` has the measurements."""


def plans_of(view: View, may_return: bool) -> list[Plan]:
    """Return the possible plans, beginning with no change."""
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
    rest = max(now_s, view.rest_s(staying))  # estimates of single nodes are noisy
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
    """Return (seconds until the step is trained, idle seconds of the trainer), with all devices
    from `begins_s` on, while other nodes sample for `rest_s`; groups arrive as in the last round.
    """
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
    """Return seconds until the step is trained with `share` of the devices, and with all after the
    rollout. Only complete groups are trained before: later releases may add more."""
    assert view.train_s is not None
    trained = min(share * max(0.0, rest_s - begins_s), view.ready_s)
    left = view.train_s - trained
    if left <= 0:
        return rest_s
    if math.isinf(rest_s) or share * view.switch_s >= left:  # a switch of others costs more
        return rest_s + left / max(share, 1e-9)
    return rest_s + left + (1 - share) * view.switch_s


def _is_no_loss(view: View, change: Change) -> bool:
    """Return whether the step is predicted to end no later by this change; True if unknown. The
    rollout takes longer without the released nodes, which concurrent training has to outweigh."""
    if view.train_s is None:
        return True
    going = [o for o in view.sampling if o.node.name in change.release]
    staying, count = view.without(going), len(view.released)
    stay_s = _train_beside(view, view.now_sampling(), 0.0, _share(view, count))
    moved = moved_s(going, staying)
    return _train_beside(view, staying, moved, _share(view, count + len(going))) <= stay_s


def _train_beside(view: View, nodes: Sequence[Node], more_s: float, share: float) -> float:
    """Return seconds until the step is trained if `nodes` sample for `more_s` longer, and `share`
    of the devices trains groups as they arrive, until the other devices join after the rollout."""
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
    """Return the share of the trainer's devices that train after `count` nodes are released."""
    if count == view.num_shared:
        return 1.0 if count else view.unused
    return view.unused + (1.0 - view.unused) * count / view.num_shared
