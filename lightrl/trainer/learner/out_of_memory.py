"""Out of memory on a device: the cause and the keys that help, in one line that ends the run, as
restarted ranks would need as much memory.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence

import torch

from lightrl.config.schema import Config
from lightrl.errors import TrainerError
from lightrl.trainer.batch import num_tokens
from lightrl.trainer.protocol import TrainSample

GIB = 1 << 30
# of libraries that allocate without torch, whose allocator has its own class of error
SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
OTHERS_BYTES = GIB  # of other processes: less is not mentioned


@contextlib.contextmanager
def final(config: Config, when: str, samples: Sequence[TrainSample] = ()) -> Iterator[None]:
    """Raise TrainerError, one line, for an error of memory inside. `when`: as in "out of memory in
    the optimizer step"; `samples`: of the micro-batch, if it is one."""
    try:
        yield
    except RuntimeError as e:
        if not _is_out_of_memory(e):
            raise
        wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(e))
        facts = [f"{wanted[1]} more were wanted"] if wanted else []
        facts += _device()
        facts.append(f"what helps: {', '.join(_remedies(config, bool(samples)))}")
        where = _described(samples) if samples else when
        raise TrainerError(f"out of memory {where}: {'; '.join(facts)}") from e


def _described(samples: Sequence[TrainSample]) -> str:
    lengths = [num_tokens(sample) for sample in samples]
    return (
        f"in a micro-batch of {sum(lengths):,} tokens in {len(samples):,} sequences, the longest "
        f"of {max(lengths):,}"
    )


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


def _device() -> Iterator[str]:
    """Memory of the device, and its users."""
    if not torch.cuda.is_available():
        return
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # the context itself found no room
        return
    ours = torch.cuda.memory_reserved()
    yield f"the device has {total / GIB:.1f} GiB, {ours / GIB:.1f} of them held by this rank"
    if (others := total - free - ours) > OTHERS_BYTES:
        yield f"{others / GIB:.1f} by CUDA and other processes"


def _remedies(config: Config, is_batch: bool) -> Iterator[str]:
    train = config.train
    if is_batch:
        yield f"a smaller train.max_tokens_per_gpu (is {train.max_tokens_per_gpu})"
        if train.activation_checkpointing is False:
            yield "train.activation_checkpointing = true"
    if train.sync == "last" and train.world > train.replicas:
        yield "train.sync = 'each'"
    if train.offload == "none":
        yield "train.offload = 'optimizer' or 'all'"
    if train.optim.name == "adamw" and not config.model.lora.rank:
        yield "train.optim.name = 'adamw8bit' in a new run"
    if train.replicas > 1:
        yield f"fewer train.replicas (are {train.replicas})"
    yield "more train.ranks"
    yield "engines on other GPUs (rollout.devices)"
