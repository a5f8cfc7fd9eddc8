"""Arguments and timing of the emulated engine and training rank, and the logprobs of a text by
weights that are only a digest.

The arguments are in `rollout.engine_args`, where a resumed run may change them.
"""

import math
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

# The factor on all times of this machine: an environment variable, because the config is the same
# on all nodes.
SLOWNESS = "LIGHTRL_EMULATED_SLOWNESS"

RESTART_CHANGE = 0.6

DEFAULTS = {
    "t0_ms": 0.0,  # of a decode step at batch 1; 0 = no waiting
    "half_batch": 107.0,  # at which a step takes twice t0, as measured on an H100 with a 7B model
    # of an engine that spans twice as many devices (rollout.parallel): by how much it is faster
    "faster": 1.4,
    "prefill_ms": 0.0,  # of a token whose KV is recomputed, as after a preemption
    "kv_tokens": 0.0,  # that the KV cache of an engine on one device holds; 0 = what slots need
    # in the place of the weights, which an engine over several devices holds once
    "weights_kv_tokens": 0.0,
    "mean_length": 0.0,  # of a response, tokens; 0 = always to the length limit
    # share of responses that run to the limit: a long tail
    "runaway_share": 0.0,
    # probability p that a version samples another response than the seed gives: two versions agree
    # in (1 - p)^2 of the responses, by default in 16 %, as a real model did for 1,000 tokens after
    # one optimizer step (core/README.md)
    "restart_change": RESTART_CHANGE,
    "train_token_ms": 0.0,  # of a trained token, on its rank
    "train_step_ms": 0.0,  # of an optimizer step
    "version_mb": 0.0,  # size of a version of the weights, at least 4 KiB
    "start_ms": 0.0,  # until an engine takes orders
    "load_ms": 0.0,  # of a version, by an engine
    "sleep_ms": 0.0,  # until an engine has given its devices back
    "sleep_mb": 0.0,  # what that sets free
    "wake_ms": 0.0,  # until an engine that slept can load a version
    # of a rank whose device is shared: what it parks, and how long that and fetching it takes
    "parked_mb": 0.0,
    "park_ms": 0.0,
    "fetch_ms": 0.0,
    # by which an engine's logprobs of a text are wrong, as if it served other weights
    "score_error": 0.0,
}


def arguments(engine_args: Mapping[str, Any]) -> dict[str, float]:
    """Return the arguments with defaults. Raise ValueError, one line, for an unknown key or a value
    that is no number."""
    args = dict(DEFAULTS)
    for key, value in engine_args.items():
        if key not in args or not isinstance(value, int | float) or value < 0:
            raise ValueError(
                f"engine_args.{key} = {value!r}: known are {', '.join(args)}, all numbers"
            )
        args[key] = float(value)
    if not args["faster"]:
        raise ValueError("engine_args.faster = 0: the speed-up by twice the devices is positive")
    return args


def slowness() -> float:
    """Return the factor of this machine. Raise ValueError, one line."""
    value = os.environ.get(SLOWNESS) or "1"
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not 0 < factor < math.inf:
        raise ValueError(f"{SLOWNESS} = {value}: a positive number is needed")
    return factor


def kv_capacity(args: Mapping[str, float], size: int) -> int:
    """Return the tokens in the KV cache of an engine over `size` devices; 0 = what slots need."""
    alone = args["kv_tokens"]
    return round(size * alone + (size - 1) * args["weights_kv_tokens"]) if alone else 0


def step_factor(args: Mapping[str, float], size: int) -> float:
    """Return the time of a decode step on `size` devices, relative to one device."""
    return args["faster"] ** -math.log2(size)


def logprobs(digest: str, token_ids: Sequence[int]) -> list[float]:
    """Return arbitrary logprobs of each token but the first, which depend on the weights."""
    chance = random.Random(f"{digest} {token_ids}")
    return [math.log1p(-chance.random()) for _ in token_ids[1:]]
