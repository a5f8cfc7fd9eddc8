"""The one rank of an evaluation (`lightrl eval`): it trains nothing, and publishes weights as they
are.

Owns which weights these are, by what lies in `eval.checkpoint`: a checkpoint of LightRL, adapters
that peft reads, or a Hugging Face model. They are read on the processor, for the devices are the
engines'. There is no canary: what this rank would compute of it takes minutes for a large model.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from lightrl.adapters import AdapterSettings, is_adapter, public_name
from lightrl.config.schema import Config
from lightrl.devices.cuda import has_cuda
from lightrl.errors import ProtocolError, TrainerError
from lightrl.model_files import ADAPTERS, weights_folder
from lightrl.trainer.checkpoint.contents import read_adapters, read_model
from lightrl.trainer.checkpoint.layout import MODEL, read_layout
from lightrl.trainer.checkpoint.saved import SavedStep, read_step
from lightrl.trainer.model.forward import Way
from lightrl.trainer.model.loading import cast
from lightrl.trainer.model.policy import Policy, load_policy, shards
from lightrl.trainer.protocol import Published, RankCommand, RankEvent, RankStarted, StartRank
from lightrl.trainer.rank.main import serve
from lightrl.trainer.rank.rank import BASE_FOLDER
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.publish.buffers import Buffers
from lightrl.weights.publish.publisher import Publisher, Shard
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.tensors import dtype_name, served_dtype


def main(sock: socket.socket) -> None:
    """The child process: serves commands until the daemon closes the pipe."""
    disable_progress_bar()
    with contextlib.suppress(EOFError):  # it holds nothing that must be saved
        serve(sock, lambda start, _: EvaluatedRank(start))


class EvaluatedRank:
    """Implements `rank.main.AnyRank`: what there is to do is done when it has started."""

    def __init__(self, start: StartRank) -> None:
        """Raises TrainerError, one line, for weights that are not there or fit no model."""
        begun = time.monotonic()
        config = Config.model_validate_json(start.config_json)
        torch.set_num_threads(config.train.threads)
        folder, step = Path(start.publish_dir), start.start_step
        checkpoint = Path(config.eval.checkpoint)
        saved = _saved_step(checkpoint)
        base: VersionFile | None = None
        if config.model.lora.rank:
            policy = _with_adapters(config, start.model_dir, checkpoint)
            base = _publish(folder / BASE_FOLDER, 0, shards(policy, of_base=True))
            served, found = policy.served, shards(policy)
        elif saved is not None:
            served = _served_dtype(config, checkpoint / MODEL)
            found = _of_checkpoint(checkpoint, served)
        else:
            model_dir = weights_folder(start.model_dir)
            served = _served_dtype(config, model_dir)
            found = shards(_load(model_dir, served))
        file = _publish(folder, step, found, base.digest if base else "")
        if saved is not None and saved.dtype == dtype_name(served) and saved.digest != file.digest:
            # in another dtype the digest is another one, too
            why = f"it was trained beside another model than {start.model_dir}, or " if base else ""
            raise TrainerError(f"{checkpoint}: {why}is not what was saved: another digest")
        published = Published(file, base=base)
        self.started = RankStarted("cpu", time.monotonic() - begun, published)

    def perform(
        self, command: RankCommand, is_unwanted: IsUnwanted | None = None
    ) -> Iterator[RankEvent]:
        raise TrainerError(f"{type(command).__name__}, but nothing is trained in an evaluation")


def _saved_step(checkpoint: Path) -> SavedStep | None:
    """Return the saved step, or None if this is no LightRL checkpoint."""
    try:
        return read_step(checkpoint)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ProtocolError) as e:
        raise TrainerError(f"{checkpoint}: no complete checkpoint: {e}") from None


def _served_dtype(config: Config, model_dir: Path) -> torch.dtype:
    """Return the dtype that the engines of this machine derive from `model.dtype`."""
    kind = "cuda" if has_cuda() else "cpu"
    return served_dtype(config.model.dtype, _hf_config(model_dir), kind)


def _hf_config(model_dir: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as e:
        reason = " ".join(str(e).split()) or type(e).__name__  # it may need several lines
        raise TrainerError(f"{model_dir}: cannot be read: {reason}") from e


def _of_checkpoint(checkpoint: Path, served: torch.dtype) -> list[Shard]:
    """All that ranks which restore it would publish, under the names that they use."""
    module = read_model(checkpoint, lambda module: cast(module, served))
    return shards(Policy(module, {}, served, Way(), torch.device("cpu")))


def _load(model_dir: Path, served: torch.dtype, lora: AdapterSettings | None = None) -> Policy:
    name = dtype_name(served)
    return load_policy(model_dir, torch.device("cpu"), served=name, lora=lora, use="served")


def _with_adapters(config: Config, model_path: str, checkpoint: Path) -> Policy:
    """The model with those adapters."""
    model_dir = weights_folder(model_path)
    served = _served_dtype(config, model_dir)
    policy = _load(model_dir, served, config.model.lora)
    named = policy.module.named_parameters()
    targets = {public_name(name): p for name, p in named if is_adapter(name)}
    given = _adapters(checkpoint)
    for name in sorted(targets.keys() | given.keys()):
        there, here = given.get(name), targets.get(name)
        if there is None or here is None or there.shape != here.shape:
            what = "is missing" if there is None else f"has shape {tuple(there.shape)}"
            wanted = "has no such layer" if here is None else f"needs {tuple(here.shape)}"
            raise TrainerError(f"{checkpoint}: {name} {what}, the model in {model_dir} {wanted}")
        with torch.no_grad():
            here.copy_(there)
    return policy


def _adapters(checkpoint: Path) -> dict[str, Tensor]:
    """Under peft's names."""
    file = checkpoint / ADAPTERS
    if not file.is_file():
        return read_adapters(checkpoint, read_layout(checkpoint))
    try:
        return load_file(file)
    except (OSError, SafetensorError) as e:
        raise TrainerError(f"{file}: cannot be read: {e}") from None


def _publish(folder: Path, version: int, found: list[Shard], base: str = "") -> VersionFile:
    with contextlib.closing(Publisher(Buffers(folder))) as publisher:
        file = publisher.publish(version, found, base)
    assert file is not None  # there is no rank but this one
    return file
