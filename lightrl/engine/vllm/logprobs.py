"""Logprobs of a given text from vLLM: a request of its own through the engine core that serves.

All use of vLLM's prompt logprobs is in this file. Other requests are hidden from the scheduler
meanwhile, so that the text runs alone: in a batch of its own, immediately, and without a token for
any other.
"""

import time
from collections.abc import Sequence
from typing import Any

from lightrl.engine.base import Scores
from lightrl.errors import EngineError

MAX_STEPS = 64  # of one text; it is put into the KV cache by pieces of max_num_batched_tokens


def scores_of(core: Any, api: Any, request_id: str, token_ids: Sequence[int]) -> Scores:
    """Return the scores of all tokens but the first. Nothing may be running; waiting requests
    keep waiting. Raises EngineError if vLLM does not finish it."""
    scheduler = core.scheduler
    hidden, scheduler.waiting = scheduler.waiting, type(scheduler.waiting)()
    try:
        core.add_request(*core.preprocess_add_request(_request(api, request_id, token_ids)))
        for _ in range(MAX_STEPS):
            outputs, executed = core.step_fn()
            core.post_step(executed)
            for out in outputs[0].outputs if outputs and 0 in outputs else ():
                if out.request_id == request_id and out.new_prompt_logprobs_tensors is not None:
                    return _scores(out.new_prompt_logprobs_tensors)
        core.abort_requests([request_id])
        raise EngineError(
            f"vLLM has not computed the logprobs of {len(token_ids)} tokens in {MAX_STEPS} steps"
        )
    finally:
        scheduler.waiting = hidden


def _scores(found: Any) -> Scores:
    """The columns of vLLM's tensors are the token of the text, then the likeliest one."""
    logprobs, ids = found.logprobs, found.logprob_token_ids
    return Scores(logprobs[:, 0].tolist(), ids[:, 1].tolist(), logprobs[:, 1].tolist())


def computing_dtype(config: Any) -> str:
    """Return the dtype with which vLLM computes, as `base.Engine.dtype` defines it."""
    keys_and_values = config.cache_config.cache_dtype
    if keys_and_values not in ("auto", "float16", "bfloat16", "float32"):
        return f"{keys_and_values} keys and values"
    model = config.model_config
    return model.quantization or str(model.dtype).removeprefix("torch.")


def _request(api: Any, request_id: str, token_ids: Sequence[int]) -> Any:
    params = api.SamplingParams(
        max_tokens=1,  # one is sampled and dropped
        ignore_eos=True,
        prompt_logprobs=1,  # those of the prompt's own tokens, and of the likeliest
        detokenize=False,
        extra_args={api.seed_key: 0},
    )
    return api.EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(token_ids),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=api.lora_request,
        cache_salt=request_id,  # neither finds keys and values of others, nor do they find its own
        data_parallel_rank=None,
    )
