"""The section of the model: what is trained, and in which form it is served.

Owns what can be said of its keys alone; which of them go together is in schema.py. Must stay
importable without torch.
"""

from pydantic import Field

from lightrl.config.sections import Dtype, Names, Section


class Lora(Section):
    rank: int = Field(
        default=0,
        ge=0,
        le=512,  # the largest that vLLM serves
        description="of the adapters that are trained in place of the model; 0 = it is itself",
    )
    alpha: float = Field(
        default=32.0, gt=0, description="what adapters add is scaled by alpha / rank"
    )
    targets: Names = Field(
        default=(),
        description="linear layers that get one, by the ends of their names; default: all but "
        "the head",
    )


class Model(Section):
    path: str = Field(description="HF model directory or hub id")
    dtype: Dtype = Field(
        default="auto",
        description="of the engines and of what is published for them; auto = as stored on "
        "CPU, bfloat16 on GPU",
    )

    lora: Lora = Lora()
