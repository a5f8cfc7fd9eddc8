"""Warnings of a run: the latest of each kind, and how often it occurred."""

import re
from collections.abc import Iterable

from lightrl.log import WARNING
from lightrl.messages.fields import MAX_TEXT
from lightrl.messages.snapshot import WarningRow
from lightrl.metrics.display import duration

MAX_KINDS = 32  # stored
MAX_REPEATED = 5  # kinds that are shown at the end of a run
_VARIES = re.compile(r"\S*\d\S*|'[^']*'|\"[^\"]*\"")


def kind(text: str) -> str:
    """Return `text` without quotations, numbers and names that contain a digit.

    Example: kind("rollout-0: version 3 failed") == kind("rollout-1: version 4 failed")
    """
    return _VARIES.sub("#", text)


class Warnings:
    def __init__(self) -> None:
        self._rows: dict[str, WarningRow] = {}  # by kind, the latest last

    def add(self, text: str, elapsed_s: float) -> None:
        text = text.removeprefix(WARNING)[:MAX_TEXT]
        before = self._rows.pop(kind(text), None)
        num = before.num + 1 if before is not None else 1
        self._rows[kind(text)] = WarningRow(text, num, elapsed_s)
        if len(self._rows) > MAX_KINDS:
            del self._rows[next(iter(self._rows))]

    def rows(self) -> tuple[WarningRow, ...]:
        """Return all warnings, the latest last."""
        return tuple(self._rows.values())

    def recall(self, rows: Iterable[WarningRow]) -> None:
        self._rows = {kind(row.text): row for row in rows}


def warning_text(row: WarningRow) -> str:
    """Example: nothing was learned in this step: its gradient is not finite (3 times, last 0:12)"""
    return row.text + (f" ({row.num} times, last {duration(row.elapsed_s)})" * (row.num > 1))


def last_warnings(rows: Iterable[WarningRow], but: str = "") -> list[str]:
    """Return lines for the end of a run. `but`: the reason of the end, which is shown anyway."""
    found = [f"{WARNING}{warning_text(row)}" for row in rows if not _is_in(row.text, but)]
    more = len(found) - MAX_REPEATED
    rest = [f"{WARNING}{more} other kinds, see logs/head.log"] if more > 0 else []
    return rest + found[-MAX_REPEATED:]


def _is_in(text: str, reason: str) -> bool:
    """Return whether `text` is the reason, perhaps after a prefix of its own."""
    why = text.partition(": ")[2]
    return text == reason or (bool(why) and why in reason)
