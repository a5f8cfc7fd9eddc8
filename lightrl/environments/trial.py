"""Trial of the environment before a run: an episode of a row is played twice, in turns of a fixed
text, which call no tool. Worker process and chat template are those of a run.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightrl.config.schema import Config
from lightrl.config.values import shortened
from lightrl.core.rounds.rounds import sample_seed
from lightrl.data.template import template_kwargs
from lightrl.environments.calls import EnvironmentRaised, Returned, WorkerLost
from lightrl.environments.pool import WorkerPool
from lightrl.environments.rendering import Renderer
from lightrl.errors import ConfigError
from lightrl.rewards.trial import Tried

TURNS = 5  # most turns of a trial
TEXTS = ("12", "1", "Yes.")  # of each turn; the one that is answered most often is replayed


@dataclass(frozen=True, slots=True)
class _Played:
    """What `reset` and each step returned. `fault`: why there is no further one."""

    text: str
    returned: list[Returned]
    fault: str = ""


async def try_row(config: Config, tokenizer: Any, row: dict[str, Any], folder: Path) -> list[Tried]:
    """Return lines on resumption, tools, chat template and length. `folder`: of the worker's log.
    Raises LightRLError, one line, if no episode would begin."""
    settings = config.environment.model_copy(update={"workers": 1})
    pool = WorkerPool(settings, folder, lambda _: None, config.data.prompt_key)
    kwargs = template_kwargs(config.data)
    renderer = Renderer(Path(config.model.path), settings.tool_format, kwargs)
    try:
        await pool.start()
        renderer.prove(pool.tools, not pool.is_stateless)
        play = partial(_play, pool, row, config)
        played = [await play(TEXTS[0])]
        for text in TEXTS[1:] if len(played[0].returned) <= TURNS and not pool.is_stateless else ():
            played.append(await play(text))  # noqa: PERF401
        best = max(played, key=lambda p: len(p.returned))
        tried = [_resumption(config, pool, best, await play(best.text, best.returned))]
    finally:
        await pool.stop()
    tools = [*pool.tools, *best.returned[0].tools]
    if tools:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        first = json.dumps(tools[0]["function"], ensure_ascii=False)
        tried.append(Tried("ok", f"tools: {names}; the first: {first}"))
    return [*tried, *_rendering(config, renderer, tokenizer, best, tools)]


async def _play(
    pool: WorkerPool,
    row: dict[str, Any],
    config: Config,
    text: str,
    recorded: list[Returned] | None = None,
) -> _Played:
    """Play an episode of turns of `text`; with `recorded` as many, as it is resumed. Raises
    LightRLError if it does not begin, or takes too long."""
    seed = sample_seed(config.run.seed, "trial") >> 31  # as large as those of a run
    settings = config.environment
    turn = {"role": "assistant", "content": text}
    num = min(settings.max_turns, TURNS) if recorded is None else len(recorded) - 1
    returned = [await pool.reset(text, row, seed)]
    try:
        while not pool.is_stateless and len(returned) <= num and not returned[-1].done:
            if recorded is not None and settings.resume == "snapshot":
                await pool.load(text, row, recorded[len(returned) - 1].state)
            returned.append(await pool.step(text, turn))
    except (EnvironmentRaised, WorkerLost) as e:
        return _Played(text, returned, str(e))
    finally:
        pool.close(text)
    return _Played(text, returned)


def _resumption(config: Config, pool: WorkerPool, played: _Played, again: _Played) -> Tried:
    settings = config.environment
    name = settings.source.rpartition(":")[2] or "tools"
    if pool.is_stateless:
        return Tried("ok", f"{name}: results of calls are recorded: resumable")
    num, fault, how = len(played.returned) - 1, played.fault, "replayed"
    if settings.resume == "snapshot":
        how = "loaded"
    lost = "an episode whose environment is lost ends without a score"
    pairs = zip_longest(played.returned, again.returned)
    differs = [k for k, (a, b) in enumerate(pairs) if not a or not b or a.digest != b.digest]
    equal = f"{num} turn{'s' * (num != 1)} {how} with equal digests"
    if differs:
        what = f"turn {differs[0]}" if differs[0] else "the first observation"
        advice = 'draw from random.Random(seed), or set environment.resume = "snapshot"'
        advice = advice if how == "replayed" else "`load` must set back all that `step` uses"
        line = f"{what} differs when it is {how}: {lost}; {advice}"
    elif settings.resume == "once":
        line = f"{equal}, but environment.resume = once: {lost}"
    else:
        line = f"{equal}: resumable" if num else "no turn was played"
    if fault:
        line += f"; the turn {shortened(played.text)} failed: {fault}"
    return Tried("warn" if differs or fault else "ok", f"{name}: {line}")


def _rendering(
    config: Config, renderer: Renderer, tokenizer: Any, played: _Played, tools: list[dict[str, Any]]
) -> Iterator[Tried]:
    """Raises LightRLError if an observation cannot be appended, or the first one does not fit."""
    said = list(tokenizer(played.text, add_special_tokens=False)["input_ids"])
    held = renderer.first(played.returned[0].messages, tools)
    num, limit = len(held), config.max_trained_length
    if num >= limit:
        first = f"the first observation has {num:,} tokens"
        raise ConfigError(f"environment.max_length = {limit:,}: {first}, and leaves none to sample")
    for each in played.returned[1:]:
        if not each.done:
            start = len(held)
            held += said
            held += renderer.append(held, start, each.messages, tools)
    roles = "user turns and tool results" if tools else "user turns"
    how = "appends" if tokenizer.chat_template else "none: appends the texts of"
    yield Tried("ok", f"chat template: {how} {roles}")
    line = f"length: {num:,} token{'s' * (num != 1)} of the first observation"
    if turns := len(played.returned) - 1:
        line += f", {len(held):,} with {turns} turns of {shortened(played.text)}"
    yield Tried("ok" if len(held) < limit else "warn", f"{line}; at most {limit:,}")
