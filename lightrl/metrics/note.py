"""What a coordinator that is started again must find of what was shown so far: the shell's note in
the journal.

Owns its form. A run whose note lacks something is of another version, and refused in one line: see
`noted` in `coordinator/journaling.py`.
"""

from dataclasses import dataclass

from lightrl.messages.snapshot import WarningRow
from lightrl.metrics.evaluation import Scores
from lightrl.metrics.selection_bias import BiasNote
from lightrl.metrics.speculation import SpeculationNote
from lightrl.metrics.weights import WeightsNote


@dataclass(frozen=True, slots=True)
class RecordsNote:
    """Of all steps before it, so that nobody has to read what they have left."""

    digest: str
    evals: list[tuple[int, Scores]]
    rl_wall_s: float
    elapsed_s: float
    # set -> digest of its rows: see `coordinator/prompts.py`
    data: dict[str, str]
    bias: BiasNote
    # that are not over, and whose rounds are in it
    bias_steps: list[int]
    # of the training data
    num_prompts: int
    # of each set to evaluate on
    eval_sizes: dict[str, int]
    speculation: SpeculationNote
    weights: WeightsNote
    warnings: tuple[WarningRow, ...]
