"""Comparison of output and results with the expected ones. Must not run anything."""

import math
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-9  # of numbers with a point, as problem statements usually allow


def same_text(written: str, expected: str) -> bool:
    """Line by line, without white space at the ends and blank lines; numbers with a point as
    numbers."""
    ours, theirs = ([line for line in t.splitlines() if line.strip()] for t in (written, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: str, theirs: str) -> bool:
    left, right = ours.split(), theirs.split()
    return len(left) == len(right) and all(map(_same_word, left, right))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    if not {".", "e", "E"} & {*ours, *theirs}:  # whole numbers are exact, "07" is not "7"
        return False
    try:
        return _close(float(ours), float(theirs))
    except ValueError:
        return False


def same_value(returned: Any, expected: Any) -> bool:
    """Both as JSON; the expected value may be in a list of one, as in APPS."""
    return _same(returned, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _same(returned, expected[0])
    )


def _same(ours: Any, theirs: Any) -> bool:
    """Both as JSON."""
    if {float} <= {type(ours), type(theirs)} <= {float, int, bool}:
        try:
            return _close(float(ours), float(theirs))
        except OverflowError:  # a whole number that no float comes near
            return False
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
    return ours == theirs


def _close(ours: float, theirs: float) -> bool:
    return math.isclose(ours, theirs, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
