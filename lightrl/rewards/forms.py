"""What a right response to a row may look like, and a wrong one of the same form: the answer as it
stands, and as functions commonly want it wrapped.

Pure. Which forms are tried with which functions is decided here; what they are worth is trial.py's.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.config.reward import Reward
from lightrl.rewards.answers import GSM8K, answer_text, last_boxes
from lightrl.rewards.builtin import BUILTIN

# Around an answer, as instructions for mathematics, GSM8K, and the formats of R1 and `verifiers`
# have it.
BOXED = "\\boxed{@}"
WRAPPED = (
    BOXED,
    "#### @",
    "<answer>@</answer>",
    "Answer: @",
    "<think>\nSo it is.\n</think>\n<answer>\n@\n</answer>",
    "<think>\nSo it is.\n</think>\n\\boxed{@}",
)
# Columns with a program that passes the tests of its row, in APPS, HumanEval, MBPP and others.
PROGRAM_COLUMNS = (
    "canonical_solution",
    "gold_standard_solution",
    "reference_solution",
    "solutions",
    "solution",
    "code",
)
WRONG_PROGRAM = "```python\nraise SystemExit(1)\n```"
NOTHING = "I do not know."
ANSWER_KEYS = ("target", "answer", "ground_truth", "value")  # of an answer that is a table

_LAST = re.compile(r"[A-Za-z0-9](?=[^A-Za-z0-9]*$)")
# What may stand in a pattern beside its group, and text that it fits.
_BESIDE = (
    (r"\\s[*?]", ""),
    (r"\\s\+?", " "),
    (r"\.[*+]\??", ""),
    (r"^\(\?[a-z]+\)", ""),
    (r"^\^|\$$", ""),
    (r"\(\?:([^()|]*)\)\??", r"\1"),
    (r"(?<=[^\\(])\?", ""),
    (r"\\(\W)", r"\1"),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two responses of one form. `right` None: nobody knows one."""

    right: str | None
    wrong: str


def pairs(
    functions: Sequence[str],
    reward: Reward,
    row: Mapping[str, Any],
    answer: Any,
    others: Sequence[Any],
) -> tuple[Pair, ...]:
    """At least one, the likeliest first. `others`: answers of other rows, of which the first that
    differs makes the wrong response.

    Example: pairs(("math",), Reward(), {}, "4", ["7"]) is (Pair("\\\\boxed{4}", "\\\\boxed{7}"),).
    """
    found: list[Pair] = []
    names = dict.fromkeys(functions)
    if "code" in names:
        found.append(Pair(program_of_row(row), WRONG_PROGRAM))
        if len(names) == 1:
            return tuple(found)
    right = text_of(answer)
    if right is None:
        return (*found, Pair(None, NOTHING))
    differing = (text for other in others if (text := text_of(other)) is not None)
    wrong = next((text for text in differing if _final(text) != _final(right)), None)
    both = right, wrong if wrong is not None else altered(right)
    for name in names:
        found += _of_function(name, reward, *both)
    return tuple(dict.fromkeys(found))


def _of_function(name: str, reward: Reward, right: str, wrong: str) -> list[Pair]:
    plain = Pair(right, wrong)
    ends = _final(right), _final(wrong)
    if name == "math":
        return [_wrapped(BOXED, *ends)]
    if name == "regex":
        fitting = [form for form in _fitting(reward.regex) if _is_found(reward.regex, form, right)]
        return [_wrapped(form, right, wrong) for form in fitting] or [plain]
    if name in BUILTIN:
        return [] if name == "code" else [plain]
    return [plain, _wrapped("@", *ends), *(_wrapped(form, *ends) for form in WRAPPED)]


def _wrapped(form: str, right: str, wrong: str) -> Pair:
    return Pair(form.replace("@", right), form.replace("@", wrong))


def text_of(answer: Any) -> str | None:
    """What a model would write for it: of several answers the first, of a table the one under a
    usual name. None if there is no such text."""
    if isinstance(answer, Mapping):
        return text_of(next((answer[key] for key in ANSWER_KEYS if key in answer), None))
    if isinstance(answer, list | tuple):
        return text_of(answer[0]) if answer else None
    if isinstance(answer, str | int | float):
        return answer_text(answer) or None
    return None


def _final(text: str) -> str:
    """What an answer with its derivation ends in: after "####", or in its last box."""
    if found := GSM8K.search(text):
        return found[1].replace(",", "")
    return next((box for box in last_boxes(text)[-1:] if box), text)


def altered(answer: str) -> str:
    """Another answer that looks alike: its last letter or digit is the next one. Example:
    altered("(A) 19") is "(A) 10"."""

    def following(found: re.Match[str]) -> str:
        old = found[0]
        return {"9": "0", "z": "a", "Z": "A"}.get(old, chr(ord(old) + 1))

    text, count = _LAST.subn(following, answer)
    return text if count else f"{answer} 1"


def program_of_row(row: Mapping[str, Any]) -> str | None:
    """A program that passes, in a fenced block, if a column has one."""
    extra = row.get("extra_info")
    for place in (row, extra if isinstance(extra, Mapping) else {}):
        for column in PROGRAM_COLUMNS:
            if (program := _first_text(place.get(column))) is None:
                continue
            head, name = row.get("prompt"), row.get("entry_point")
            if isinstance(head, str) and name and f"def {name}" not in program:
                program = head + program  # HumanEval's is the body of a function alone
            return program if "```" in program else f"```python\n{program}\n```"
    return None


def _first_text(value: Any) -> str | None:
    """APPS keeps a list, written as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, str) and value.strip() else None


def _fitting(pattern: str) -> list[str]:
    """Forms that a pattern with a group may fit: those that are usual, and what stands beside its
    group, as text."""
    own = []
    if group := re.search(r"(?<!\\)\((?!\?)(?:[^()\\]|\\.)*\)", pattern):
        own = [_as_text(pattern[: group.start()]) + "@" + _as_text(pattern[group.end() :])]
    return ["@", *own, *WRAPPED]


def _as_text(part: str) -> str:
    for old, new in _BESIDE:
        part = re.sub(old, new, part)
    return part


def _is_found(pattern: str, form: str, answer: str) -> bool:
    """Whether the reward "regex" would find the answer there; without a group, anything."""
    matches = list(re.finditer(pattern, form.replace("@", answer)))
    if not matches or not matches[-1].re.groups:
        return bool(matches)
    return (matches[-1][1] or "").strip() == answer.strip()
