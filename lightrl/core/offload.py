"""When devices that sample and train change sides: what the rules see, what they answer.

Reserved nodes may share their devices with the trainer; others only sample. With W engine-seconds
of sampling in a step, N shared engines that sample for a window T, n others that sample all the
time, and t_train seconds of training behind the window, nobody waits if

    n (T + t_train) + N T = W        so        T* = max(0, (W - n t_train) / (n + N))

and with n = W / t_train it is 0: more nodes save nothing. (RLBoost, arXiv 2510.19225, finds T by
correcting it from step to step; the equation is ours.) Pure arithmetic over a `View`; who decides
is in `foreseen` and `window`, what is measured for them in `sides`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightrl.core.placement import PREFILL_TOKENS_PER_STEP, Outlook
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
