"""Which entry of the list of metrics describes a name that a run has written."""

import re

from lightrl.metrics.names import METRICS, Metric


def described(name: str) -> Metric | None:
    """The entry of a name; the most particular one. None for a name that is not described."""
    exact = next((m for m in METRICS if m.name == name), None)
    return exact or next((m for m in METRICS if _pattern(m.name).fullmatch(name)), None)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, re.split(r"<[a-z]+>", name))))
