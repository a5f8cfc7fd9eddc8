"""The sections of what nodes cost, how many preemptible ones are asked for, and when shared devices
change sides.

Owns these keys; the decisions are in core/.
Must stay importable without torch.
"""

import shlex
from typing import Literal

from pydantic import Field, field_validator

from lightrl.config.sections import NotNegative, Seconds, Section

MAX_WANTED = 4096


class Offload(Section):
    rule: Literal["foreseen", "window", "off"] = "foreseen"
    """when shared devices change sides within a step: foreseen = by what is predicted of it; window
    = RLBoost's, corrected from step to step; off = never, they train when all responses have come
    """


class PriceSection(Section):
    reserved_per_hour: NotNegative | None = None
    """US$ of a node that is not preemptible, trainer nodes too; those that share their devices are
    paid for with them; 0 = free; default: not known"""
    preemptible_per_hour: NotNegative | None = None
    """US$ of a node that joined with --preemptible; likewise"""


class ScaleSection(Section):
    max: int = Field(default=0, ge=0, le=MAX_WANTED)
    """preemptible nodes that are asked for, at most; 0 = none are"""
    command: str = ""
    """run with the number of preemptible nodes worth having as its last word, and in
    LIGHTRL_WANTED, when that changes"""
    every_s: Seconds = 60.0
    """between two starts of it, at least"""
    timeout_s: Seconds = 60.0
    """after which it is killed, with what it has started"""
    drain: bool = False
    """true: preemptible nodes beyond that number are sent away"""

    @field_validator("command")
    @classmethod
    def _is_command(cls, value: str) -> str:
        try:
            words = shlex.split(value)
        except ValueError as e:
            raise ValueError(f"scale.command = {value!r}: {str(e).lower()}") from None
        if value and not words:
            raise ValueError(f"scale.command = {value!r}: names no program")
        return value

    @property
    def words(self) -> list[str]:
        """The command's, split as a shell would."""
        return shlex.split(self.command)
