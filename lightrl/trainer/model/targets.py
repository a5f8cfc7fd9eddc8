"""Whether a model has the layers that LoRA targets name, as transformers builds it: without memory,
and without its weights.

A process of its own, `python -m lightrl.trainer.model.targets FOLDER TARGET ...`, for whoever must
not import torch. Its exit status is UNFIT, and its output the line, if it does not.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

from lightrl.adapters import require_layers
from lightrl.errors import ConfigError
from lightrl.trainer.model import loading

UNFIT = 3  # as in launch/model_check.py, which must not import this


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
