"""How long that takes which is only emulated: the arguments of the emulated engine and training
rank.

They stand in `rollout.engine_args`, where a resumed run may change them. Owns their names and
defaults.
"""

from collections.abc import Mapping
from typing import Any

DEFAULTS = {
    "t0_ms": 0.0,  # of a decode step at batch 1; 0 = no waiting
    "half_batch": 107.0,  # at which a step takes twice t0, as measured on an H100 with a 7B model
    "mean_length": 0.0,  # of a response, tokens; 0 = always to the length limit
    # of responses that run to the limit whatever mean_length says: a long tail
    "runaway_share": 0.0,
    "train_token_ms": 0.0,  # of a trained token, on its rank
    "train_step_ms": 0.0,  # of an optimizer step
}


def arguments(engine_args: Mapping[str, Any]) -> dict[str, float]:
    """With the defaults. Raises ValueError, one line, for one that is unknown or no number."""
    args = dict(DEFAULTS)
    for key, value in engine_args.items():
        if key not in args or not isinstance(value, int | float) or value < 0:
            raise ValueError(
                f"engine_args.{key} = {value!r}: known are {', '.join(args)}, all numbers"
            )
        args[key] = float(value)
    return args
