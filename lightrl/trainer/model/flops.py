"""FLOPs of training and of devices, whose ratio is MFU. What is recomputed to save memory does not
count.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightrl.adapters import is_adapter

# dense bfloat16 FLOP/s of data sheets; the first name that is part of the device's
PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("A40", 150e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("T4", 65e12),
)


def peak_flops(device: str) -> float | None:
    """Look up a device by the name of its driver; None if it is not in the table."""
    return next((peak for name, peak in PEAKS if name in device), None)


class TrainingFlops:
    """FLOPs of forward and backward passes, as in PaLM (Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B): 6 a parameter and token (4 where only adapters learn), and for attention 12 a layer
    and channel for each pair of tokens, half of which a causal mask leaves out. Of experts only
    those count that a token goes to."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        """`config`: the model's `text_config`. Sharded parameters have their whole shape."""
        named = [(name, p.numel()) for name, p in module.named_parameters()]
        experts = sum(n for name, n in named if ".experts." in name)
        used = getattr(config, "num_experts_per_tok", None) or 1
        there = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        parameters = sum(n for _, n in named) - experts + experts * used / (there or used)
        of_a_parameter = 4 if any(is_adapter(name) for name, _ in named) else 6
        channels = getattr(config, "head_dim", None) or config.hidden_size // (
            config.num_attention_heads
        )
        self._of_a_token = of_a_parameter * parameters
        self._of_a_pair = 6 * config.num_hidden_layers * config.num_attention_heads * channels

    def of(self, lengths: Iterable[int]) -> float:
        """Count for sequences of these lengths."""
        return sum(self._of_a_token * n + self._of_a_pair * n * n for n in lengths)
