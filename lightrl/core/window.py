"""The rule "window": all shared nodes sample for T_seed seconds of each step, then train.

RLBoost's algorithm 1 (arXiv 2510.19225). After each step

    T_seed += (w_train - w_remote) / eta              who waited longer, trainer or other nodes
    M[n]    = T_seed           if n was the same all through the step
    T_seed  = M[n']            if n' nodes are there now and M knows them

Kept by kind of round too, as short and long rounds differ several times over. Where M knows
nothing, T_seed starts from T* of `offload` with the work of the last round of its kind, and memory
corrects; `first_guess` off = as published, where it stays what it was. As published, nobody asks
whether the caches of the others hold the rest: what does not fit waits there. Without preemptible
nodes there is no window: see `scale_down`. Its cap of preemptible nodes is left out: how many are
worth having is `worth`'s business.
"""

import math
from collections.abc import Mapping

from lightrl.core.offload import NOTHING, Change, StepTimes, View, best_window_s
from lightrl.core.scale_down import ScaleDown
from lightrl.core.sides_memory import WindowMemory

ETA = 3.0  # as in the authors' code
CONSTANT = 0.05  # of the nodes there are now: so far from that their mean is in a quiet step


class Window:
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
