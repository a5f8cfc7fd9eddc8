"""A policy with LoRA adapters: the model without them, and the files that peft reads.

Owns what the trainer alone needs of adapters; their structure is `lightrl/adapters.py`'s.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightrl.adapters import is_adapter


def has_adapters(module: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in module.named_parameters())


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """The model as it was before training: the reference.

    Not by peft's own switch, which takes the gradient from adapters meanwhile; FSDP2 remembers of
    the first pass whether they have one.
    """
    layers: list[Any] = [part for part in module.modules() if hasattr(part, "_disable_adapters")]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
