"""LightRL's changes inside vLLM's worker: the sampler, and weights replaced in place.

Imported by vLLM in every worker process (`worker_extension_cls`), and importing it installs the
sampler, so it must not be imported outside one. Works with the V1 model runner of the releases in
`versions.py`; tried on a CPU, and with 0.26 on one H200.
"""

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from lightrl import log
from lightrl.engine.base import LoraSpec, ReceiveWeights
from lightrl.engine.member import Member
from lightrl.engine.model_dir import Layouts
from lightrl.engine.sampling import keys, sample
from lightrl.engine.vllm import lora as adapters
from lightrl.engine.vllm import versions
from lightrl.engine.vllm.speculation import DraftRows, let_verify
from lightrl.errors import WeightsError
from lightrl.system.child import die_with
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.tensors import map_tensors

# in SamplingParams.extra_args, because that reaches workers in other processes too
SEED = "lightrl_seed"
SLEEP_LEVEL = 2

_stock_sample = GPUModelRunner._sample


def _coupled_sample(
    runner: Any, logits: torch.Tensor, spec_decode_metadata: Any = None
) -> SamplerOutput:
    """Replace GPUModelRunner._sample: draw all rows together, by `sampling.sample`.

    Also cheaper than the stock sampler, which keeps a torch.Generator for each request and ranks
    all logprobs. Verifies drafted tokens, too. vLLM's own dummy runs (warm-up, graph capture) have
    no requests and keep the stock one.
    """
    batch = runner.input_batch
    num = batch.num_reqs
    if num == 0:
        return _stock_sample(runner, logits, spec_decode_metadata)
    ids = batch.req_ids
    if getattr(runner, "lightrl_ids", None) != ids:  # the batch changed: look the seeds up again
        runner.lightrl_ids = list(ids)
        runner.lightrl_seeds = np.array(
            [runner.requests[i].sampling_params.extra_args[SEED] for i in ids], np.uint64
        )
    if spec_decode_metadata is None:
        rows, request, position = None, slice(num), batch.num_tokens_no_spec[:num]
    else:
        rows = DraftRows(spec_decode_metadata)
        request, position = rows.request, batch.num_tokens_no_spec[rows.request] + rows.offset
    top_k = batch.top_k_cpu[request]
    tokens, logprobs = sample(
        logits,
        keys(runner.lightrl_seeds[request], position),
        batch.temperature_cpu[request].astype(np.float64),
        batch.top_p_cpu[request].astype(np.float64),
        # vLLM writes "off" as the size of the vocabulary
        np.where(top_k >= batch.vocab_size, 0, top_k),
    )
    tokens = tokens.to(torch.int32)
    if rows is None:
        tokens = tokens[:, None]
    else:
        tokens, logprobs = rows.accepted(tokens, logprobs)
    num_chances = logprobs.shape[0]
    ranks = torch.zeros(num_chances, dtype=torch.int64, device=logits.device)  # unused
    return SamplerOutput(tokens, LogprobsTensors(tokens.view(-1, 1), logprobs[:, None], ranks))


GPUModelRunner._sample = _coupled_sample  # pyright: ignore[reportAttributeAccessIssue]
let_verify(GPUModelRunner)

# It warns at every reload of modules that have nothing to load, such as tied heads. A filter:
# levels are reset when vLLM configures its loggers.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: record.levelno >= logging.ERROR
)

# a tensor-parallel worker must not outlive its engine
if multiprocessing.parent_process() is not None:
    die_with(os.getppid())
    log.configure(log.inherited())


_layouts = Layouts()
_member = Member()


class WorkerExtension:
    """Methods that `collective_rpc` can call in every worker; vLLM mixes this class into its
    own."""

    vllm_config: Any
    rank: int
    model_runner: Any
    device: torch.device
    sleep: Callable[..., None]
    wake_up: Callable[..., None]

    def lightrl_load(
        self,
        file: VersionFile,
        base: VersionFile | None = None,
        lora: LoraSpec | None = None,
    ) -> None:
        """Replace all weights in place from a file that is verified and fits the model; or the
        adapters, and their base if it is another one than before.

        vLLM keeps what it is given until a layer is complete: views into the file, which stay as
        long as it does. Raises WeightsError before anything changed if there is no such file.
        """
        if lora is None or base is None:
            self._reload(map_tensors(file, _layouts.read(file)))
            return
        tensors = map_tensors(file, Layouts().read(file, base.digest))
        if base.digest != self.model_runner.__dict__.get("lightrl_base"):
            self.model_runner.lightrl_base = ""
            self._reload(map_tensors(base, _layouts.read(base)))
            self.model_runner.lightrl_base = base.digest
        adapters.load(self.model_runner, tensors, lora)

    def lightrl_is_batch_invariant(self) -> bool:
        return versions.has_batch_invariant_kernels()

    def lightrl_sleep(self) -> int:
        """Free weights and KV cache, and return how many bytes that is on this worker's GPU.

        Level 2, which keeps no weights. Most sleeps end with another version. When one does not,
        level 1 would save no time: the version's file is in the host's memory all the while, so
        both copy from there, and level 1 would have it there twice.
        """
        free = torch.cuda.mem_get_info(self.device)[0]
        self.sleep(level=SLEEP_LEVEL)
        self.model_runner.lightrl_base = ""
        return max(0, torch.cuda.mem_get_info(self.device)[0] - free)

    def lightrl_wake(self, tag: str) -> None:
        """Allocate "weights", with arbitrary values; when they are loaded, "kv_cache"."""
        self.wake_up(tags=[tag])

    def lightrl_leave(self, why: str) -> None:
        _member.leave(why)

    def lightrl_receive(self, command: ReceiveWeights, is_unwanted: IsUnwanted | None) -> str:
        """As `lightrl_load`, by a broadcast. Returns why the version must not be served, or "": an
        exception of a worker in another process would end the engine.

        A reload that an exception ends leaves layers behind that count what they have got so far
        as part of the next one, which would be served with holes. So it is brought to its end.
        """
        failures: list[str] = []

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            try:
                yield from _member.receive(command, self.rank, self.device, is_unwanted)
            except (WeightsError, OSError) as e:
                failures.append(str(e))

        self._reload(tensors())
        return failures[0] if failures else ""

    def _reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        # layers look up there how their weights are laid out
        with set_current_vllm_config(self.vllm_config):
            self._forget_packed_experts()
            if getattr(self.model_runner, "lora_manager", None) is not None:
                tensors = adapters.base_layer_names(self.model_runner.model, tensors)
            self.model_runner.reload_weights(weights_iterator=tensors)
            self._refresh_tied_head()
        # what goes wrong does so here, and the time is that of the load
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forget_packed_experts(self) -> None:
        """Drop the kernel of packed experts on CPU. Experts are padded and packed only when it is
        made: without this, reloaded ones would be copied over them unpacked."""
        if self.device.type != "cpu":
            return
        for module in self.model_runner.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _refresh_tied_head(self) -> None:
        """Renew lm_head on CPU, which multiplies with a copy of the embeddings, packed at build
        time.

        Reloading renews the embeddings only; without this, tied models silently keep their old
        head.
        """
        model = self.model_runner.model
        head = getattr(model, "lm_head", None)
        tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
        if self.device.type == "cpu" and tied and head is not None:
            head.quant_method.process_weights_after_loading(head)
