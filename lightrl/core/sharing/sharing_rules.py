"""Rules that decide when devices change between sampling and training; their input and output.

Reserved nodes may share their devices with the trainer; other nodes only sample. Pure arithmetic
over a `View`, which `sharing_policy` makes of its measurements.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lightrl.core.log_entries import WindowMemory
from lightrl.core.responses.placement import PREFILL_TOKENS_PER_STEP
from lightrl.core.state import Node, RoundKind

KV_SHARE = 0.95  # of the caches, available to plans


@dataclass(frozen=True, slots=True)
class Change:
    """The nodes to release for training, and the nodes to take back for sampling."""

    release: tuple[str, ...] = ()
    take_back: tuple[str, ...] = ()
    # when to decide again if no event comes before
    look_at: float | None = None


NOTHING = Change()


@dataclass(slots=True)
class View:
    """The state of a training round, with predictions of its unfinished responses."""

    kind: RoundKind
    opened_at: float
    # share of the responses launched
    finished: float
    # shared nodes that sample
    sampling: list[Node]
    # nodes that share nothing
    others: list[Node]
    # shared nodes that train
    released: list[Node]
    # training left that may overlap with the rollout, in seconds of all shared devices; None =
    # unknown
    train_s: float | None
    # the part of `train_s` for complete groups
    ready_s: float
    # seconds from a decision until the devices work on the other side
    switch_s: float
    # tokens left of each unfinished response, fewest first
    left: Sequence[float]
    # peak of the context of all until they end, in tokens
    kv_tokens: float = 0.0
    # nodes of `others` that load the version of this round
    others_loading: int = 0
    # some shared nodes can train without the others
    in_parts: bool = True
    # share of the trainer's devices that no engine uses
    unused: float = 0.0

    @property
    def num_others(self) -> int:
        """The number of other nodes, loading ones included."""
        return len(self.others) + self.others_loading

    def now_sampling(self) -> list[Node]:
        return [*self.sampling, *self.others]

    def emptiest(self, count: int) -> list[Node]:
        """Return at most `count` sampling shared nodes, fewest responses first; nodes that use the
        same part of the devices are taken together."""
        parts: dict[tuple[str, int], list[Node]] = {}
        for node in sorted(self.sampling, key=lambda node: node.name):
            parts.setdefault((node.shares, node.part), []).append(node)
        chosen: list[Node] = []
        for part in sorted(parts.values(), key=lambda part: sum(len(n.running) for n in part)):
            if len(chosen) + len(part) <= count:
                chosen += part
        return chosen

    def without(self, going: Sequence[Node]) -> list[Node]:
        """Return the nodes that sample after the release of `going`."""
        return [node for node in self.now_sampling() if node not in going]

    def fits(self, nodes: Sequence[Node]) -> bool:
        """Return whether the caches of `nodes` hold all unfinished responses until they end; caches
        of unknown size hold everything."""
        caches = [node.load.kv_tokens for node in nodes]
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
            turns = node.slots
            mine = share
            if len(share) > turns:
                mine = sorted(sum(share[k::turns]) for k in range(turns))
            per_s += 1.0 / max(1e-9, node.speed.finishes_in(mine))
        return count / per_s

    def share(self, num_released: int) -> float:
        """Return the share of the trainer's devices that train after so many nodes are released."""
        num_shared = len(self.sampling) + len(self.released)
        return self.unused + (1.0 - self.unused) * num_released / max(1, num_shared)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measurements of a finished step, in seconds."""

    kind: RoundKind
    # number of nodes that share nothing: mean of the step, and now
    others: float
    others_now: int
    # until its last response arrived
    rollout_s: float
    # the trainer had devices and no work
    trainer_waited_s: float
    # the other nodes had no work
    others_waited_s: float


class Rule(Protocol):
    """Decides on changes within a step; learns from each finished step."""

    def decide(self, view: View, now: float) -> Change: ...
    def learn(self, step: StepTimes) -> None: ...


class OffRule:
    """The rule "off": sides change only between steps."""

    def decide(self, view: View, now: float) -> Change:
        return NOTHING

    def learn(self, step: StepTimes) -> None:
        """Ignore the step."""


FIRST_LOOK, LAST_LOOK = 0.2, 0.5  # responses finished, of those launched


def half_of(view: View) -> list[Node]:
    """Return the half of the sampling nodes that RollPacker's stream trainer (arXiv 2509.21009,
    algorithm 1) releases while 20 to 50 % of the responses have finished, once in a round and only
    if the other half has slots and cache for the unfinished ones; else no node."""
    if view.released or not view.in_parts or not FIRST_LOOK <= view.finished <= LAST_LOOK:
        return []
    going = view.emptiest(len(view.sampling) // 2)
    staying = view.without(going)
    has_slots = len(view.left) <= sum(node.slots for node in staying)
    return going if has_slots and view.fits(staying) else []


ETA = 3.0  # as in the authors' code
CONSTANT = 0.05  # of the current nodes: the most that their mean differs in a quiet step


class WindowRule:
    """The rule "window": all shared nodes sample for T_seed seconds of each step, then train.

    RLBoost's algorithm 1 (arXiv 2510.19225). After each step

        T_seed += (w_train - w_remote) / eta          waiting times of the trainer and other nodes
        M[n]    = T_seed           if n was constant during the step
        T_seed  = M[n']            if n' nodes take part now and M has an entry for n'

    State is kept by kind of round, as short and long rounds differ several times over. The first
    window of a kind is its whole round. As published, caches of the other nodes are not checked.
    `Scaling.decide` limits the preemptible nodes, instead of the published cap. Without other nodes
    half of the devices are released, see `half_of`.
    """

    def __init__(self, remembers: bool = True) -> None:
        """`remembers`: keep M; off for comparison."""
        self._remembers = remembers
        self._seeds: dict[str, float] = {}  # T_seed
        self._memory: dict[tuple[int, str], float] = {}  # M
        self._opened_at = math.nan
        self._window_s: float | None = None  # of the current round

    def window_s(self, kind: str, others: int) -> float | None:
        """Return T_seed of a round of this kind with so many other nodes; None = unknown."""
        return self._memory.get((others, kind), self._seeds.get(kind))

    def decide(self, view: View, now: float) -> Change:
        if view.opened_at != self._opened_at:
            self._opened_at = view.opened_at
            self._window_s = self.window_s(view.kind, view.num_others)
        if not view.num_others:
            return Change(release=tuple(node.name for node in half_of(view)))
        if self._window_s is None or not (view.sampling and view.others):
            return NOTHING
        elapsed = max(0.0, now - view.opened_at)
        if elapsed < self._window_s:
            return Change(look_at=now + self._window_s - elapsed)
        return Change(release=tuple(node.name for node in view.sampling))

    def learn(self, step: StepTimes) -> None:
        if not step.others:
            return
        # A window ends with the rollout at the latest.
        window = step.rollout_s if self._window_s is None else min(self._window_s, step.rollout_s)
        window = max(0.0, window + (step.trainer_waited_s - step.others_waited_s) / ETA)
        self._seeds[step.kind] = window
        is_quiet = abs(step.others - step.others_now) <= CONSTANT * step.others_now
        if is_quiet and self._remembers:
            self._memory[step.others_now, step.kind] = window

    def memory(self) -> WindowMemory:
        known = tuple((others, kind, s) for (others, kind), s in self._memory.items())
        return WindowMemory(dict(self._seeds), known)

    def recall(self, memory: WindowMemory) -> None:
        """Restore stored state."""
        self._seeds = dict(memory.seeds)
        self._memory = {(others, kind): seconds for others, kind, seconds in memory.known}


class ForecastRule:
    """The rule "foreseen": release devices once the staying nodes need no longer than the trainer.

    With R the predicted seconds of the staying nodes for the unfinished responses, M the training
    left, and s the seconds of a switch, all shared nodes are released where

        R <= s + M

    so that the trainer does not run out of work. While other nodes do not suffice, or where there
    are none, half of the shared nodes is released, once. Either must save more than a switch,
    though only complete groups count as work that is trained beside the rollout. All released
    devices are taken back if the step then ends earlier: nodes have left.
    """

    def decide(self, view: View, now: float) -> Change:
        if view.train_s is None:  # no step was trained yet
            return NOTHING
        now_s, num_released = view.rest_s(view.now_sampling()), len(view.released)
        ends_in = _ends_in(view, now_s, view.share(num_released))
        if view.released:
            all_s = view.rest_s([*view.now_sampling(), *view.released])
            if _ends_in(view, 2 * view.switch_s + all_s, view.unused) < ends_in:
                return Change(take_back=tuple(node.name for node in view.released))
        look_at: float | None = None
        half = view.emptiest(len(view.sampling) // 2) if view.in_parts and not view.released else []
        for going in (view.sampling if view.others else [], half):
            staying = view.without(going)
            if not going or not view.fits(staying):
                continue
            rest_s = max(now_s, view.rest_s(staying)) + _moved_s(going, staying)
            early_s = rest_s - view.switch_s - view.train_s
            if going is not half and early_s > 0:
                look_at = now + early_s * now_s / rest_s
                continue
            share = view.share(num_released + len(going))
            if _ends_in(view, rest_s, share) + view.switch_s < ends_in:
                return Change(release=tuple(node.name for node in going))
        return Change(look_at=look_at)

    def learn(self, step: StepTimes) -> None:
        """Ignore the step: `View` has the measurements."""


def _moved_s(going: Sequence[Node], staying: Sequence[Node]) -> float:
    """Return seconds of the staying nodes to prefill the responses of the going ones."""
    if not staying:
        return 0.0
    step_s = sum(node.speed.step_s(1) for node in staying) / len(staying)
    held = sum(node.context for node in going)
    return step_s * held / PREFILL_TOKENS_PER_STEP / len(staying)


def _ends_in(view: View, rest_s: float, share: float) -> float:
    """Return seconds until the step is trained if nodes sample for `rest_s`, while `share` of the
    devices trains what is complete after a switch; then all train."""
    assert view.train_s is not None
    left_s = view.train_s - min(view.ready_s, share * max(0.0, rest_s - view.switch_s))
    return rest_s + left_s + (view.switch_s if share < 1 and left_s > 0 else 0.0)
