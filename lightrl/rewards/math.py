"""Is a mathematical answer right? The judgement is math-verify's; this file only hands it both
sides.

Imported only where the reward "math" is chosen, as the library is optional and heavy.
"""

import re

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

from lightrl.rewards.base import Sample

_GSM8K_ANSWER = re.compile(r"####\s*(.+?)\s*$")


def math_reward(sample: Sample) -> float | None:
    """1 if the response's final answer equals the reference, else 0.

    None if there is no reference or it cannot be parsed: that is not the response's fault. The
    reference may be plain ("42", "\\frac{1}{2}"), boxed, or GSM8K's text that ends in "#### 42".
    """
    if sample.answer is None:
        return None
    answer = str(sample.answer).strip()
    if found := _GSM8K_ANSWER.search(answer):
        answer = found[1].replace(",", "")
    # The pool limits the time of a call; the library's own limits need signals.
    delimited = "\\boxed" in answer or "$" in answer
    gold = parse(answer if delimited else f"\\boxed{{{answer}}}", parsing_timeout=0)
    if not gold:
        return None
    return float(verify(gold, parse(sample.response, parsing_timeout=0), timeout_seconds=None))
