"""The reward "math": finds the two answers; math-verify compares them.

Imported only where the reward "math" is chosen: the library is optional and heavy.
"""

import re
from typing import Any

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

from lightrl.rewards.answers import GSM8K, after_thinking, answer_text, last_boxes
from lightrl.rewards.base import Sample

_CURRENCY = re.compile(r"(?:\bUS)?\\\$|\\text\{\s*\\?\$\s*\}|[€£¥]")
_DELIMITER = re.compile(r"\$(?!\s?\.?\d)")  # of a formula, not a dollar before an amount
_DELIMITED = re.compile(r"\\boxed|\$|\\\(|\\\[")


def math_reward(sample: Sample) -> float | None:
    """1 if the response's final answer equals the reference, else 0.

    The final answer is the last \\boxed after the last </think>, or the one that math-verify finds
    there if nothing is boxed; a thought that is not closed has none. A reference of several values
    may be boxed one by one, with commas between the boxes.

    None if there is no reference or it cannot be parsed. The reference may be plain ("42",
    "\\frac{1}{2}", "\\$18"), boxed, or GSM8K's text that ends in "#### 42".
    """
    if (answer := answer_text(sample.answer)) is None:
        return None
    if found := GSM8K.search(answer):
        answer = found[1].replace(",", "")
    answer = _amounts(_CURRENCY.sub("", answer))
    if boxed := last_boxes(answer):
        answer = _in_box(boxed)
    elif not _DELIMITED.search(answer):
        answer = _in_box([answer])
    gold = _parse(answer)
    if not gold:
        return None
    text = _CURRENCY.sub("", after_thinking(sample.prompt, sample.response) or "")
    if boxed := last_boxes(text):
        text = _in_box(boxed if getattr(gold[0], "is_FiniteSet", False) else boxed[-1:])
    return float(verify(gold, _parse(text), timeout_seconds=None))


def _amounts(text: str) -> str:
    is_formula = text.count("$") > 1 and _DELIMITER.search(text)
    return text if is_formula else re.sub(r"(?:\bUS)?\$", "", text)


def _in_box(parts: list[str]) -> str:
    return ", ".join(f"\\boxed{{{_amounts(part)}}}" for part in parts)


def _parse(text: str) -> list[Any]:
    # The pool limits the time of a call; the library's own limits need signals.
    return parse(text, parsing_timeout=0)
