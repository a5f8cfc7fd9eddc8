"""Compute how many sequences and logits of drafts fit onto a GPU beside the weights.

Owns no numbers of its own but one: the needs of a forward pass are in devices/memory.py. vLLM
measures for itself.
"""

from typing import Any

import torch

from lightrl.devices import memory
from lightrl.engine.base import EngineSpec
from lightrl.errors import EngineError

DRAFT_LOGITS = 1 << 26  # of one forward pass with drafts, at most


def fitting(spec: EngineSpec, config: Any, sequence_bytes: int) -> tuple[int, int]:
    """Return how many of the slots have room for their KV cache beside the weights, which are
    loaded, and the logits that a step with drafts may have then. Raises EngineError."""
    free, total = torch.cuda.mem_get_info()
    room = 0.9 * free
    if spec.gpu_memory:
        room = min(room, spec.gpu_memory * total - torch.cuda.memory_allocated())
    shape = memory.shape_of(config.to_dict())
    room -= memory.working_bytes(shape, spec.slots) if shape else memory.CONTEXT_BYTES
    # transformers repeats a layer's keys and values for each head
    if shape and shape.q_width > shape.kv_width:
        sequence_bytes += sequence_bytes * shape.q_width // (shape.kv_width * shape.layers)
    if room < sequence_bytes:
        gib = memory.GIB
        raise EngineError(
            f"the GPU has room for {max(0, room) / gib:.1f} GiB of KV cache, and one sequence "
            f"needs {sequence_bytes / gib:.1f}; see lightrl up --dry-run"
        )
    slots = min(spec.slots, int(room // sequence_bytes))
    left = (
        room - slots * sequence_bytes + (memory.sampling_bytes(shape, spec.slots) if shape else 0)
    )
    return slots, memory.draftable_values(left, DRAFT_LOGITS)
