"""LoRA adapters of a policy: the model without them, and whether a model has the layers of
`model.lora.targets`.

Also a process, `python -m lightrl.trainer.model.lora FOLDER TARGET ...`, for callers that must not
import torch: it builds the model without memory or weights, and exits with UNFIT and one line of
output if a target is missing. Their structure is in `lightrl/adapters.py`.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from lightrl.adapters import require_layers
from lightrl.errors import ConfigError
from lightrl.trainer.model import loading

UNFIT = 3  # as in launch/checks/model.py, which must not import this


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Compute the model as it was before training: the reference.

    peft's own switch takes the gradient from adapters meanwhile; FSDP2 keeps from the first pass
    which parameters have one.
    """
    layers: list[Any] = [part for part in module.modules() if hasattr(part, "_disable_adapters")]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def main(folder: Path, targets: Sequence[str]) -> int:
    module = loading.build(AutoConfig.from_pretrained(folder, local_files_only=True))
    try:
        require_layers(module, targets)
    except ConfigError as e:
        print(e)
        return UNFIT
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
