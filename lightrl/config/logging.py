"""The section [logging]: what is written of a run, and where to.

Knows none of the places. Must stay importable without torch.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from lightrl.config.sections import Names, Section
from lightrl.config.values import one_or_many, shortened
from lightrl.system.addresses import split_address

Backend = Literal["jsonl", "tensorboard", "wandb", "mlflow"]


class Logging(Section):
    backends: Annotated[tuple[Backend, ...], BeforeValidator(one_or_many)] = Field(
        default=("jsonl",), description="where metrics go"
    )
    project: str = Field(default="lightrl", description="of wandb; the experiment of mlflow")
    group: str = Field(default="", description="of wandb; a tag of mlflow")
    tags: Names = Field(default=(), description="of wandb and mlflow")
    prometheus: str = Field(
        default="",
        description='"127.0.0.1:9109": serve the newest figures there, for Prometheus; empty = no',
    )
    samples: Annotated[int, Field(ge=0)] | Literal["all"] = Field(
        default=16,
        description="responses of each step that are written to samples.jsonl as text; those of "
        "evaluations always are",
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level that is logged"
    )
    json_: bool = Field(
        default=False, alias="json", description="logs for machines: a JSON object on each line"
    )

    @field_validator("prometheus")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value and split_address(value) is None:
            raise ValueError(
                f"logging.prometheus = {shortened(value)}: expected host:port, such as "
                "127.0.0.1:9109, or *:9109 for all interfaces"
            )
        return value
