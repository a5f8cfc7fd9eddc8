"""The optimizer of one rank, and the learning rate: a function of the step alone, so that a resumed
run needs no state of a schedule.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn

from lightrl.config.sections import Optim
from lightrl.errors import TrainerError


def new_optimizer(parameters: Iterable[nn.Parameter], optim: Optim) -> torch.optim.Optimizer:
    """Return AdamW with decoupled weight decay. Raises TrainerError, one line, without torchao."""
    if optim.name == "adamw8bit":
        return _adamw8bit(parameters, optim)
    return torch.optim.AdamW(
        parameters,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Of optimizer step `step` of `steps`, from 0: up linearly, then as the schedule has it, which
    comes to `min_lr_ratio` of the rate with the last step.

    Example: 6 steps, 3 of them warm-up, linear to 0: 1/3, 2/3, 1, 2/3, 1/3, 0 of `lr`.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    full = max(0, optim.warmup_steps - 1)  # the step with the whole rate
    done = min(1.0, (step - full) / max(1, steps - 1 - full))
    left = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)


def _adamw8bit(parameters: Iterable[nn.Parameter], optim: Optim) -> torch.optim.Optimizer:
    try:
        from lightrl.trainer.learner.adamw8bit import AdamW8bit
    except ImportError as e:
        raise TrainerError(
            f"train.optim.name = 'adamw8bit': torchao cannot be imported ({e}); install it with "
            "scripts/setup adamw8bit"
        ) from None
    return AdamW8bit(parameters, optim.lr, optim.betas, optim.eps, optim.weight_decay)
