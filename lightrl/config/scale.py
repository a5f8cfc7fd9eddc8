"""The sections of what nodes cost, how many preemptible ones are asked for, and when shared devices
change sides.

Owns what can be said of these keys; knows nothing of the decisions (core/cost_model.py and
core/sharing_policy.py). Must stay importable without torch.
"""

import shlex
from typing import Literal, Self

from pydantic import Field, model_validator

from lightrl.config.sections import NotNegative, Seconds, Section

MAX_WANTED = 4096


class Offload(Section):
    rule: Literal["foreseen", "window", "off"] = Field(
        default="foreseen",
        description="when shared devices change sides within a step: foreseen = by what is "
        "predicted of it; window = RLBoost's, corrected from step to step; off = never, they train "
        "when all responses have come",
    )


class Prices(Section):
    reserved_per_hour: NotNegative | None = Field(
        default=None,
        description="US$ of a node that is not preemptible, trainer nodes too; those that share "
        "their devices are paid for with them; 0 = free; default: not known",
    )
    preemptible_per_hour: NotNegative | None = Field(
        default=None, description="US$ of a node that joined with --preemptible; likewise"
    )

    @model_validator(mode="after")
    def _both(self) -> Self:
        for key, other in (
            ("reserved_per_hour", "preemptible_per_hour"),
            ("preemptible_per_hour", "reserved_per_hour"),
        ):
            if getattr(self, key) is not None and getattr(self, other) is None:
                raise ValueError(
                    f"prices.{key} = {getattr(self, key):g}: no cost can be told without "
                    f"prices.{other}; give it, too (0 = free)"
                )
        return self


class ScaleSection(Section):
    max: int = Field(
        default=0,
        ge=0,
        le=MAX_WANTED,
        description="preemptible nodes that are asked for, at most; 0 = none are",
    )
    command: str = Field(
        default="",
        description="run with the number of preemptible nodes worth having as its last word, and "
        "in LIGHTRL_WANTED, when that changes",
    )
    every_s: Seconds = Field(default=60.0, description="between two starts of it, at least")
    timeout_s: Seconds = Field(
        default=60.0, description="after which it is killed, with what it has started"
    )
    drain: bool = Field(
        default=False, description="true: preemptible nodes beyond that number are sent away"
    )

    @model_validator(mode="after")
    def _acts(self) -> Self:
        if self.command and not self.words:
            raise ValueError(f"scale.command = {self.command!r}: names no program")
        fields = type(self).model_fields
        for key in ("command", "drain"):
            if getattr(self, key) and not self.max:
                raise ValueError(
                    f"scale.{key} = {getattr(self, key)!r}: no number of nodes is ever wanted with "
                    "scale.max = 0; raise it"
                )
        for key in ("every_s", "timeout_s"):
            if getattr(self, key) != fields[key].default and not self.command:
                raise ValueError(
                    f"scale.{key} = {getattr(self, key):g}: there is no scale.command to run"
                )
        if self.max and not (self.command or self.drain):
            raise ValueError(
                f"scale.max = {self.max}: nobody acts on it without scale.command or scale.drain"
            )
        return self

    @property
    def words(self) -> list[str]:
        """The command's, split as a shell would. Raises ValueError, one line."""
        try:
            return shlex.split(self.command)
        except ValueError as e:
            raise ValueError(f"scale.command = {self.command!r}: {str(e).lower()}") from None
