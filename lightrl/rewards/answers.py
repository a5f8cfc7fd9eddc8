"""Reference answers as text, and the part of a response that counts as its final answer. Pure."""

import math
import re
from decimal import Decimal
from typing import Any

GSM8K = re.compile(r"####\s*(.+?)\s*$")  # how its answers end

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Also [THINK], ◁think▷, <|begin_of_thought|> and the like. The first group is of those that close.
_THOUGHT = re.compile(
    r"(?i)(?:<|◁|\[(?=/?think]))(\|?(?:/|end_))?[\w|:]{,16}(?:think|thought|reason)[\w|:]{,9}[]>▷]"
)
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
    """Whether `text` is a reference answer, which is not missing, letter by letter; of a float
    either spelling is right, 9 and 9.0."""
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
