"""The canary: a text whose logprobs the trainer sends with each version, and which every engine
computes once it has loaded the version.

Digests verify the bytes that arrived, the canary the weights that are served: a head that was not
loaded, a layer that a reload missed. Pure: engines and ranks compute the logprobs.
"""

import hashlib
import math
from collections.abc import Sequence

from lightrl.errors import WeightsError

NUM_TOKENS = 32

# By how much the logprob of a token may differ, by the dtype that rounds most. With texts that the
# model itself writes, on CPU, the largest differences of nine models (trained and random ones of
# Qwen2, Qwen3 and Llama, the smallest of half a million parameters) were, to the trainer's pass:
#   float32   vLLM 9e-5 (of all but one model 2e-5), torch engine 0
#   bfloat16  vLLM 0.13, torch engine 0; in a model made to be chaotic (logits of hundreds) 0.77
# A decoder layer of dummy weights instead of its own: 0.4 to 19, so that some pass in bfloat16; one
# of the quickstart's trained model at least 3.9. What is a step old shows in float32 only.
TOLERANCES = {"float32": 1e-3, "bfloat16": 1.0, "float16": 1.0}


def noise(i: int) -> float:
    """A number in [0, 1), the same on every machine."""
    digest = hashlib.blake2b(i.to_bytes(4, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32


def arbitrary_text(vocabulary: int, max_length: int) -> list[int]:
    """A canary where no model can write one."""
    return [int(noise(i) * vocabulary) for i in range(min(NUM_TOKENS, max_length))]


def tolerance(wanted: float | None, *dtypes: str) -> float:
    """`wanted`: weights.canary. Without it, infinite for a dtype that was never measured, as of
    quantized weights."""
    if wanted is not None:
        return wanted
    return max(TOLERANCES.get(dtype, math.inf) for dtype in dtypes)


def compare(expected: Sequence[float], found: Sequence[float], tolerance: float) -> float:
    """Return the largest difference of a token's logprob. Raises WeightsError, one line, if it is
    more than `tolerance`, or if a logprob is not finite."""
    for whose, logprobs in (("trainer", expected), ("engine", found)):
        if not all(map(math.isfinite, logprobs)):
            raise WeightsError(f"the {whose}'s logprobs of the canary are not finite")
    difference = max((abs(a - b) for a, b in zip(expected, found, strict=False)), default=0.0)
    if len(expected) != len(found) or not difference <= tolerance:
        raise WeightsError(
            "the engine does not serve these weights: its logprobs of the canary differ by up to "
            f"{difference:.4g} from the trainer's, more than {tolerance:g} (weights.canary)"
        )
    return difference
