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


@contextlib.contextmanager
def final(config: Config, when: str, samples: Sequence[TrainSample] = ()) -> Iterator[None]:
    """Raise TrainerError, one line, for an error of memory inside. `when`: as in "out of memory in
    the optimizer step"; `samples`: of the micro-batch, if it is one."""
    try:
        yield
    except RuntimeError as e:
        if not isinstance(e, torch.OutOfMemoryError) and not any(sign in str(e) for sign in SIGNS):
            raise
        wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(e))
        facts = [f"{wanted[1]} more were wanted"] if wanted else []
        with contextlib.suppress(RuntimeError):  # the context itself found no room
            if torch.cuda.is_available():
                free, total = (size / GIB for size in torch.cuda.mem_get_info())
                facts.append(f"the device has {total:.1f} GiB, {free:.1f} of them free")
        facts.append(f"what helps: {', '.join(_remedies(config, bool(samples)))}")
        if lengths := [num_tokens(sample) for sample in samples]:
            when = (
                f"in a micro-batch of {sum(lengths):,} tokens in {len(lengths):,} sequences, the "
                f"longest of {max(lengths):,}"
            )
        raise TrainerError(f"out of memory {when}: {'; '.join(facts)}") from e


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
