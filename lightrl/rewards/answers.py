"""Reference answers as text, the part of a response that counts as its final answer, and the reward
"math", for which the library math-verify compares the two: it is optional and heavy.
"""

import math
import re
from decimal import Decimal
from typing import Any

from lightrl.rewards.base import Sample

GSM8K = re.compile(r"####\s*(.+?)\s*$")  # how its answers end

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Also [THINK], ◁think▷, <|begin_of_thought|> and the like. The first group is of those that close.
_THOUGHT = re.compile(
    r"(?i)(?:<|◁|\[(?=/?think]))(\|?(?:/|end_))?[\w|:]{,16}(?:think|thought|reason)[\w|:]{,9}[]>▷]"
)
_CURRENCY = re.compile(r"(?:\bUS)?\\\$|\\text\{\s*\\?\$\s*\}|[€£¥]")
_DELIMITER = re.compile(r"\$(?!\s?\.?\d)")  # of a formula, not a dollar before an amount
_DELIMITED = re.compile(r"\\boxed|\$|\\\(|\\\[")
_TOGETHER = re.compile(r"(?:[\s$}]|\\text\s*\{)*(?:,|,?\s*(?:\\text\s*\{\s*)?(?:and|or))[\s$}]*")


def answer_text(answer: Any) -> str | None:
    """A reference answer as a response would spell it; None for a missing one, NaN included.

    A column of a table with one missing or fractional value holds floats: its 9 is 9.0, and 1e-07
    is spelled 0.0000001.
    """
    if isinstance(answer, float) and math.isfinite(answer):
        return str(int(answer)) if answer.is_integer() else format(Decimal(repr(answer)), "f")
    is_missing = answer is None or (isinstance(answer, float) and math.isnan(answer))
    return None if is_missing else str(answer).strip()


def is_answer(text: str, answer: Any) -> bool:
    """Return whether `text` equals a reference answer, which must not be missing, character by
    character; both spellings of a float match, 9 and 9.0."""
    return text.strip() in (answer_text(answer), str(answer).strip())


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of each \\boxed{...}, in order. The content of one that is never
    closed is empty. The box inside another one is left out."""
    found: list[tuple[int, int, str]] = []
    end = 0
    while match := _BOX.search(text, end):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += (text[end] == "{") - (text[end] == "}")
            end += 2 if text[end] == "\\" else 1
        found.append((match.start(), end, "" if depth else text[match.end() : end - 1]))
    return found


def last_boxes(text: str) -> list[str]:
    """The content of the last box, and of those before it with only commas, "and" or "or" between,
    in order; empty if there is none."""
    found = boxes(text)
    first = len(found) - 1
    while first > 0 and _TOGETHER.fullmatch(text[found[first - 1][1] : found[first][0]]):
        first -= 1
    return [content for _, _, content in found[max(first, 0) :]]


def after_thinking(prompt: str, response: str) -> str | None:
    """The text after the last </think>, or its like; the whole response if none was opened. None
    where the thought is not closed, if the response or the end of its prompt opened it."""
    marks = list(_THOUGHT.finditer(response))
    if marks:
        return response[marks[-1].end() :] if marks[-1][1] else None
    prompt = prompt[-64:].rstrip()
    opened = list(_THOUGHT.finditer(prompt))[-1:]
    is_open = any(not mark[1] and mark.end() == len(prompt) for mark in opened)
    return None if is_open else response


def math_reward(sample: Sample) -> float | None:
    """1 if the response's final answer equals the reference, else 0.

    The final answer is the last \\boxed after the last </think>, or the one that math-verify finds
    there if nothing is boxed; a thought that is not closed has none. A reference of several values
    may be boxed one by one, with commas between the boxes.

    None if there is no reference or it cannot be parsed. The reference may be plain ("42",
    "\\frac{1}{2}", "\\$18"), boxed, or GSM8K's text that ends in "#### 42".
    """
    from math_verify import verify  # pyright: ignore[reportMissingImports]

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
    from math_verify import parse  # pyright: ignore[reportMissingImports]

    # The pool limits the time of a call; the library's own limits need signals.
    return parse(text, parsing_timeout=0)
