"""Steps that left the weights as they were, since their gradient was not finite: that of each of
their updates, if they have several.

Owns the count of those in a row. One such step may be bad luck; a run that goes on and on with them
learns nothing and would not say so. Must not import torch: the daemon imports this file.
"""

import logging
from collections.abc import Mapping

from lightrl.errors import TrainerError

logger = logging.getLogger(__name__)

MAX_IN_A_ROW = 5


class NonfiniteSteps:
    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns at the first in a row. Raises TrainerError, which ends the run, at the last that is
        borne."""
        if not metrics.get("train/skipped_nonfinite") or metrics.get("train/updates"):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        what = f"the gradient of step {step} is not finite: the weights stay as they were"
        if self._in_a_row == 1:
            logger.warning("%s", what)
        if self._in_a_row == MAX_IN_A_ROW:
            raise TrainerError(
                f"{what}, as in the {MAX_IN_A_ROW - 1} steps before: look at rewards, at "
                "train_rollout_logprob_abs_diff and at train.optim.lr"
            )
