"""The section [logging]: what is written of a run, and where to.

Knows none of the places. Must stay importable without torch.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from lightrl.config.sections import Count, Names, Section
from lightrl.config.values import one_or_many, shortened
from lightrl.system.addresses import split_address

Backend = Literal["jsonl", "tensorboard", "wandb", "mlflow"]


class Logging(Section):
    backends: Annotated[tuple[Backend, ...], BeforeValidator(one_or_many)] = ("jsonl",)
    """where metrics go"""
    project: str = "lightrl"
    """of wandb; the experiment of mlflow"""
    group: str = ""
    """of wandb; a tag of mlflow"""
    tags: Names = ()
    """of wandb and mlflow"""
    prometheus: str = ""
    """"127.0.0.1:9109": serve the newest figures there, for Prometheus; empty = no"""
    samples: Count | Literal["all"] = 16
    """responses of each step that are written to samples.jsonl as text; those of evaluations always
    are"""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level that is logged"""
    json_: bool = Field(default=False, alias="json")
    """logs for machines: a JSON object on each line"""

    @field_validator("prometheus")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value and split_address(value) is None:
            raise ValueError(
                f"logging.prometheus = {shortened(value)}: expected host:port, such as "
                "127.0.0.1:9109, or *:9109 for all interfaces"
            )
        return value
