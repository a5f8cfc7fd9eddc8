"""Rules by which the devices of compared systems change sides, where the core's own are not meant.

Owns what RLBoost's rows need beside `core/sharing/sharing_rules.py`; they are no rules of LightRL.
"""

from statistics import fmean

from lightrl.core.sharing.sharing_rules import NOTHING, Change, StepTimes, View, WindowRule


class NoWindow:
    """RLBoost without seeding: shared devices do nothing but train, while others are there."""

    def decide(self, view: View, now: float) -> Change:
        if not view.others or not view.sampling:
            return NOTHING
        return Change(release=tuple(node.name for node in view.sampling))

    def learn(self, step: StepTimes) -> None:
        """There is nothing to decide."""


class Held:
    """RLBoost's window where the number of instances never changes, after it was found."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s

    def decide(self, view: View, now: float) -> Change:
        if not (view.sampling and view.others):
            return NOTHING
        if (elapsed := max(0.0, now - view.opened_at)) < self._window_s:
            return Change(look_at=now + self._window_s - elapsed)
        return Change(release=tuple(node.name for node in view.sampling))

    def learn(self, step: StepTimes) -> None:
        """It is known."""


class Settled:
    """The same where nobody has published it: learned for some steps, then the mean of that is
    held. Learning on, the window swings with the work of single steps."""

    def __init__(self, steps: int) -> None:
        self._learning = WindowRule()
        self._steps = steps
        self._learned: list[float] = []
        self._num = 0
        self._held: Held | None = None

    def decide(self, view: View, now: float) -> Change:
        return (self._held or self._learning).decide(view, now)

    def learn(self, step: StepTimes) -> None:
        self._num += 1
        if self._num <= self._steps:
            self._learning.learn(step)
            self._learned += self._learning.memory().seeds.values()
        if self._num == self._steps and self._learned:
            self._held = Held(fmean(self._learned))
