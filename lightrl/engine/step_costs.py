"""Measure the step costs of an engine when it starts: with one response and with as many as it has
slots, with short and with long contexts.

Like RollPacker's profiling of engines before a run (arXiv 2509.21009, section 4.2). Takes a few
dozen steps of the engine, which serves nothing yet; its weights are arbitrary, and so are the
texts.
"""

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from lightrl.engine.base import Engine, EngineSpec
from lightrl.engine.requests import vocabulary_size
from lightrl.messages.load import StepCosts
from lightrl.messages.responses import ResponseRequest, Sampling
from lightrl.wire import pack_i32

SHORT, LONG = 16, 8192  # tokens of a prompt
STEPS = 8  # after the first token
LONG_BATCH = 8
LEAST_S = 1e-6  # no step takes no time


@dataclass(frozen=True, slots=True)
class _Measured:
    batch: int
    prompt: int
    # until all have a token; and of a step after that
    first_s: float
    step_s: float


def measure(engine: Engine, spec: EngineSpec) -> StepCosts:
    """Measure an idle engine. Raises EngineError."""
    vocabulary, capacity = vocabulary_size(Path(spec.model_dir)), engine.load().kv_tokens
    steps = min(STEPS, spec.max_model_length // 4)
    long = min(LONG, spec.max_model_length - steps - 2)
    short = min(SHORT, long)

    def batch(most: int, prompt: int) -> int:
        fits = capacity // (prompt + steps + 2) if capacity else most
        return max(1, min(most, spec.slots, fits))

    _run(engine, 1, short, steps, vocabulary)  # what is compiled at first is compiled now
    one = _run(engine, 1, short, steps, vocabulary)
    many = _run(engine, batch(spec.slots, short), short, steps, vocabulary)
    deep = _run(engine, batch(LONG_BATCH, long), long, steps, vocabulary)
    more = max(0.0, many.step_s - one.step_s) / max(1, many.batch - 1)
    base = max(LEAST_S, one.step_s - more)
    tokens = deep.batch * deep.prompt
    return StepCosts(
        base_s=base,
        response_s=more,
        token_s=max(0.0, deep.step_s - base - more * deep.batch) / tokens,
        prefill_s=max(0.0, deep.first_s - deep.step_s) / tokens,
    )


def _run(engine: Engine, batch: int, prompt: int, steps: int, vocabulary: int) -> _Measured:
    rng = random.Random(batch)
    names = [f"measured-{k}" for k in range(batch)]
    begun = time.perf_counter()
    for seed, name in enumerate(names):
        text = pack_i32([rng.randrange(vocabulary) for _ in range(prompt)])
        request = ResponseRequest(name, 1, seed, text, b"", steps + 1)
        engine.add(request, Sampling())
    silent = set(names)
    while silent and engine.num_unfinished():
        silent -= {delta.response for delta in engine.step() if delta.token_ids}
    first = time.perf_counter()
    seconds: list[float] = []
    while engine.num_unfinished():
        before = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - before)
    return _Measured(batch, prompt, first - begun, statistics.median(seconds or [LEAST_S]))
