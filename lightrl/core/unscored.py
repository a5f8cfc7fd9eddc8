"""Steps without any score: after how many a run ends, since nothing can be learned from them.

Owns that rule alone. What one response without a score costs its group is decided in `judge` and
`race`.

A run in which nothing was ever scored ends with its first such step, or evaluation: its reward is
wrong, and no later step will differ. Once rewards have worked, whatever they need may be gone for a
while, a judge that is overloaded, say: then it takes `max_unscored_steps` in a row.
"""

from lightrl.core.commands import Outbox
from lightrl.core.settings import Settings
from lightrl.core.state import Round


class _Tally:
    """Of a round that is open."""

    def __init__(self) -> None:
        self.num_scored = 0
        self.num_failed = 0
        self.failure = ""  # the first


class UnscoredSteps:
    def __init__(self, settings: Settings, outbox: Outbox) -> None:
        # why the run must end, in one line
        self.trouble: str | None = None
        self._max = settings.max_unscored_steps
        self._outbox = outbox
        self._open: dict[tuple[int, bool], _Tally] = {}  # (step, is evaluation)
        self._has_scored = False
        self._in_a_row = 0

    def count(self, round: Round, response: str, failure: str | None) -> None:
        """What the reward functions said of a response; `failure` None: it has a score. The first
        failure of a round is told: hundreds may fail for the same reason."""
        tally = self._open.setdefault((round.step, round.is_eval), _Tally())
        if failure is None:
            tally.num_scored += 1
            self._has_scored = True
            return
        tally.num_failed += 1
        if tally.num_failed == 1:
            tally.failure = failure
            self._outbox.warn(f"no reward for {response}: {failure}")

    def close(self, round: Round, num_trained: int) -> None:
        """A round has closed; `num_trained` responses were trained in the run before."""
        tally = self._open.pop((round.step, round.is_eval), _Tally())
        if tally.num_scored or not tally.num_failed:
            self._in_a_row = 0 if tally.num_scored and not round.is_eval else self._in_a_row
            return
        self._in_a_row += not round.is_eval
        what = f"evaluation at step {round.step}" if round.is_eval else f"step {round.step + 1}"
        text = f"{what}: none of {tally.num_failed} responses has a score: {tally.failure}"
        if self._max and not self._has_scored and not num_trained:
            self.trouble = text
        elif self._max and self._in_a_row >= self._max:
            self.trouble = f"{text} ({self._in_a_row} such steps in a row)"
        else:
            self._outbox.warn(text)

    def forgive(self) -> None:
        """The run is resumed: whatever was wrong may have been mended."""
        self.trouble, self._in_a_row = None, 0
