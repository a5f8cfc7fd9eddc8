"""tokens/s through LightRL's engine process against the engine's bare library, same requests, in
one run.

With vLLM: `LLM.generate`, and `LLM.generate` with its own ngram and suffix speculation. Without:
the torch engine against a bare transformers loop, which drops finished rows and has no process,
pipe or chunks.

    python -m gpu_lib.speed_engine 0.5b|3b
"""

import asyncio
import gc
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_lib.notes import figure
from gpu_lib.shapes import SHAPES, make_config, make_model, make_module, on_device, shape_for

IS_GPU = on_device() == "cuda"
BATCHES = (64, 256) if IS_GPU else (8,)
PROMPT_TOKENS, NEW_TOKENS = (128, 256) if IS_GPU else (8, 24)
TORCH_NEW_TOKENS = 96 if IS_GPU else 16  # one kernel launch after the other: as slow for both
MAX_LENGTH = 512
REPEAT = 2  # the first time warms up
LIMIT_S = 140
NEEDED_BYTES = 24 << 30  # three times 3B in bfloat16, with room

BARE_VLLM = """
import json, sys, time
job = json.loads(open(sys.argv[1]).read())
from vllm import LLM, SamplingParams
llm = LLM(**job["args"])
for run in range(job["repeat"]):
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": p} for p in job["prompts"][:batch]]
        # Without seeds, which would cost it a generator each.
        params = SamplingParams(temperature=1.0, max_tokens=job["num"], ignore_eos=True, logprobs=0,
                                detokenize=False)
        started = time.perf_counter()
        out = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(o.outputs[0].token_ids) for o in out)
        print("RESULT", json.dumps([run, batch, tokens / seconds]), flush=True)
"""


def main() -> None:
    shape = shape_for(sys.argv[1])
    has_vllm = IS_GPU and importlib.util.find_spec("vllm") is not None
    with tempfile.TemporaryDirectory(prefix="lightrl-gpu-", dir=memory_folder()) as scratch:
        folder = Path(scratch)
        if has_vllm:
            with_vllm(shape, folder)
        else:
            with_transformers(shape, folder)


def memory_folder() -> str | None:
    """Where versions of the weights go: into memory, as a rank puts them, if there is room."""
    shared = Path("/dev/shm")
    return (
        str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > NEEDED_BYTES else None
    )


def prompts_of(shape: str, num: int) -> list[list[int]]:
    import random

    rng = random.Random(0)
    size = SHAPES[shape]["vocab_size"]
    return [[rng.randrange(2, size) for _ in range(PROMPT_TOKENS)] for _ in range(num)]


def with_vllm(shape: str, folder: Path) -> None:
    model = make_model(folder / "model", shape, on_device())
    free_memory()
    prompts = prompts_of(shape, max(BATCHES))
    ours = through_lightrl("vllm", model, version_of(model), prompts, NEW_TOKENS)
    common = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": MAX_LENGTH + 1,
        "max_num_seqs": max(BATCHES),
    }
    common |= {"gpu_memory_utilization": 0.5, "skip_tokenizer_init": True, "seed": 0}
    ways = {
        "vLLM LLM.generate": {},
        "vLLM with ngram speculation": {
            "method": "ngram",
            "num_speculative_tokens": 8,
            "prompt_lookup_max": 4,
        },
        "vLLM with suffix speculation": {"method": "suffix", "num_speculative_tokens": 8},
    }
    for name, speculative in ways.items():
        args = common | ({"speculative_config": speculative} if speculative else {})
        try:
            bare = bare_vllm(folder, args, prompts)
        except (subprocess.SubprocessError, OSError) as e:
            figure(f"{shape}: {name}", f"failed: {last_line(e)}")
            continue
        report(shape, "vllm", ours, name, bare)


def last_line(e: Exception) -> str:
    text = getattr(e, "stderr", "") or str(e)
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return (text.strip().splitlines() or [""])[-1][:160]


def bare_vllm(folder: Path, args: dict[str, Any], prompts: list[list[int]]) -> dict[int, float]:
    job = {
        "args": args,
        "prompts": prompts,
        "num": NEW_TOKENS,
        "batches": BATCHES,
        "repeat": REPEAT,
    }
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-c", BARE_VLLM, str(folder / "job.json")],
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    rates: dict[int, float] = {}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            _, batch, rate = json.loads(line.removeprefix("RESULT "))
            rates[batch] = rate
    return rates


def with_transformers(shape: str, folder: Path) -> None:
    """Both in bfloat16 with the same weights; the bare loop runs in this process."""
    model = make_config(folder / "model", shape)
    import torch

    from lightrl.weights.version.tensors import write_tensors

    module = make_module(model, on_device(), torch.bfloat16)
    version = write_tensors(folder / "v1.bin", 1, module.named_parameters())
    prompts = prompts_of(shape, max(BATCHES))
    bare = dict.fromkeys(BATCHES, 0.0)
    for _ in range(REPEAT):
        for batch in BATCHES:
            bare[batch] = bare_loop(module, prompts[:batch], TORCH_NEW_TOKENS)
    del module
    free_memory()
    ours = through_lightrl("torch", model, version, prompts, TORCH_NEW_TOKENS)
    report(shape, "torch", ours, "bare transformers loop", bare)


def version_of(model: Path) -> Any:
    from safetensors.torch import load_file

    from lightrl.weights.version.tensors import write_tensors

    tensors = load_file(model / "model.safetensors")
    return write_tensors(model / "v1.bin", 1, tensors.items())


def through_lightrl(
    kind: Any, model: Path, version: Any, prompts: list[list[int]], num: int
) -> dict[int, float]:
    """By the engine's process: requests and chunks travel through its pipe as in a rollout
    daemon."""
    from lightrl.engine.base import EngineSpec

    args: dict[str, Any] = {"gpu_memory_utilization": 0.5} if kind == "vllm" else {}
    spec = EngineSpec(kind, str(model), "bfloat16", MAX_LENGTH, max(BATCHES), engine_args=args)
    return asyncio.run(_through_lightrl(spec, version, prompts, num))


async def _through_lightrl(
    spec: Any, version: Any, prompts: list[list[int]], num: int
) -> dict[int, float]:
    from lightrl.engine.base import EngineFailed, EngineLoaded, EngineStarted, LoadWeights
    from lightrl.engine.start import start_engine
    from lightrl.messages.responses import Generate, ResponseRequest, Sampling, TokenChunk
    from lightrl.wire import pack_i32

    engine = await start_engine(spec, threads=1, log=Path(spec.model_dir) / "engine.log")
    rates = {}
    try:
        started = await engine.receive()
        assert isinstance(started, EngineStarted), started
        figure(f"{spec.kind} engine: start, s", round(started.start_s, 2))
        engine.send(LoadWeights(version))
        while not isinstance(event := await engine.receive(), EngineLoaded):
            assert not isinstance(event, EngineFailed), event
        for run in range(REPEAT):
            for batch in BATCHES:
                requests = tuple(
                    ResponseRequest(f"{run}-{batch}-{i}#0", 1, i, pack_i32(p), b"", num)
                    for i, p in enumerate(prompts[:batch])
                )
                begun = time.perf_counter()
                engine.send(Generate(1, Sampling(1.0), requests))
                left, tokens = batch, 0
                while left:
                    event = await engine.receive()
                    assert not isinstance(event, EngineFailed), event
                    if isinstance(event, TokenChunk):
                        left -= sum(r.finish_reason is not None for r in event.responses)
                        tokens += sum(len(r.token_ids) // 4 for r in event.responses)
                rates[batch] = tokens / (time.perf_counter() - begun)
    finally:
        await engine.stop()
    return rates


def bare_loop(module: Any, prompts: list[list[int]], num: int) -> float:
    """tokens/s of the shortest loop that samples with logprobs."""
    import torch
    from transformers import DynamicCache

    tokens, cache = torch.tensor(prompts, device=module.device), DynamicCache()
    started = time.perf_counter()
    rows: list[Any] = []
    with torch.inference_mode():
        for _ in range(num):
            logits = module(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[
                :, -1
            ]
            logprobs = logits.float().log_softmax(-1)
            tokens = torch.multinomial(logprobs.exp(), 1)
            rows.append((tokens[:, 0].tolist(), logprobs.gather(-1, tokens)[:, 0].tolist()))
    return len(prompts) * len(rows) / (time.perf_counter() - started)


def report(
    shape: str, kind: str, ours: dict[int, float], name: str, bare: dict[int, float]
) -> None:
    for batch, rate in ours.items():
        figure(f"{shape}, {kind} engine, batch {batch}: tokens/s", round(rate, 1))
        figure(f"{shape}, {name}, batch {batch}: tokens/s", round(bare[batch], 1))
        figure(f"{shape}, {kind} engine / {name}, batch {batch}", round(rate / bare[batch], 3))


def free_memory() -> None:
    import torch

    gc.collect()
    if IS_GPU:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
