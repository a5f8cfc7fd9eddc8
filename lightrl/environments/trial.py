"""Trial of the environment before a run: an episode of a row is played twice, in turns of a fixed
text, which call no tool. Worker process and chat template are those of a run.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from secrets import token_hex
from typing import Any

from lightrl.config.schema import Config
from lightrl.config.values import shortened
from lightrl.core.rounds.rounds import sample_seed
from lightrl.data.template import template_kwargs
from lightrl.environments.calls import (
    EnvironmentRaised,
    Environments,
    Returned,
    TurnTokens,
    WorkerLost,
)
from lightrl.environments.programs import environments_of
from lightrl.environments.rendering import Renderer
from lightrl.errors import ConfigError
from lightrl.rewards.trial import Tried

TURNS = 5  # most turns of a trial
TEXTS = ("12", "1", "Yes.")  # of each turn; the one that is answered most often is replayed


@dataclass(frozen=True, slots=True)
class _Played:
    """What `reset` and each step returned, and the tokens of it all. `fault`: why there is no
    further one."""

    text: str
    returned: list[Returned]
    ids: list[int]
    num_first: int  # tokens of the first observation
    fault: str = ""


async def try_row(config: Config, tokenizer: Any, row: dict[str, Any], folder: Path) -> list[Tried]:
    """Return lines on resumption, tools, chat template and length. `folder`: of the worker's log.
    Raises LightRLError, one line, if no episode would begin."""
    settings = config.environment.model_copy(update={"workers": 1})
    place = config.model.path, folder
    pool = environments_of(config, settings, token_hex(16), *place, report=lambda _: None)
    kwargs = template_kwargs(config.data)
    renderer = Renderer(Path(config.model.path), settings.tool_format, kwargs)
    trial = _Trial(config, tokenizer, row, pool, renderer)
    try:
        await pool.start()
        renderer.prove(pool.tools, pool.has_user_turns)
        played = [await trial.play(TEXTS[0])]
        for text in TEXTS[1:] if len(played[0].returned) <= TURNS and not pool.is_stateless else ():
            played.append(await trial.play(text))  # noqa: PERF401
        best = max(played, key=lambda p: len(p.returned))
        tried = [_resumption(config, pool, best, await trial.play(best.text, best.returned))]
    finally:
        await pool.stop()
    tools = [*pool.tools, *best.returned[0].tools]
    if tools:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        first = json.dumps(tools[0]["function"], ensure_ascii=False)
        tried.append(Tried("ok", f"tools: {names}; the first: {first}"))
    return [*tried, *_rendering(config, tokenizer, best, tools)]


@dataclass(frozen=True, slots=True)
class _Trial:
    config: Config
    tokenizer: Any
    row: dict[str, Any]
    pool: Environments
    renderer: Renderer

    async def play(self, text: str, recorded: list[Returned] | None = None) -> _Played:
        """Play an episode of turns of `text`; with `recorded` as many, as it is resumed. Raises
        LightRLError if it does not begin, takes too long or cannot be appended."""
        pool, settings = self.pool, self.config.environment
        seed = sample_seed(self.config.run.seed, "trial") >> 31  # as large as those of a run
        turn = {"role": "assistant", "content": text}
        said = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        num = min(settings.max_turns, TURNS) if recorded is None else len(recorded) - 1
        returned = [await pool.reset(text, self.row, seed)]
        ids = self._first(returned[0])
        num_first, fault = len(ids), ""
        try:
            while not pool.is_stateless and len(returned) <= num and not returned[-1].done:
                if recorded is not None and settings.resume == "snapshot":
                    await pool.load(text, self.row, recorded[len(returned) - 1].state)
                tokens = TurnTokens(list(ids), said, [0.0] * len(said), "stop", 0)
                returned.append(await pool.step(text, turn, tokens))
                ids += said
                if not returned[-1].done:
                    ids = self._appended(ids, len(said), returned)
        except (EnvironmentRaised, WorkerLost) as e:
            fault = str(e)
        finally:
            pool.close(text)
        return _Played(text, returned, ids, num_first, fault)

    def _first(self, returned: Returned) -> list[int]:
        """Return the tokens of the first observation. Raises LightRLError if they do not fit."""
        if returned.done:
            why = "it ended before its first turn"
            if self.config.environment.has_agents:
                why = "it ended without a request to the URL in OPENAI_BASE_URL"
            raise ConfigError(f"{self.config.environment.named}: {why}")
        ids = list(returned.token_ids or ())
        if returned.token_ids is None:
            ids = self.renderer.first(returned.messages, [*self.pool.tools, *returned.tools])
        if (num := len(ids)) >= (limit := self.config.max_trained_length):
            key, first = f"environment.max_length = {limit:,}", "the first observation has"
            raise ConfigError(f"{key}: {first} {num:,} tokens, and leaves none to sample")
        return ids

    def _appended(self, ids: list[int], num_said: int, returned: list[Returned]) -> list[int]:
        newest, tools = returned[-1], [*self.pool.tools, *returned[0].tools]
        if newest.token_ids is not None:
            return list(newest.token_ids)
        return ids + self.renderer.append(ids, len(ids) - num_said, newest.messages, tools)


def _resumption(config: Config, pool: Environments, played: _Played, again: _Played) -> Tried:
    settings = config.environment
    name = settings.source.rpartition(":")[2] or ("agent" if settings.has_agents else "tools")
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
        if settings.has_agents:
            advice = "draw from LIGHTRL_SEED, and send requests in a fixed order"
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
    config: Config, tokenizer: Any, played: _Played, tools: list[dict[str, Any]]
) -> Iterator[Tried]:
    roles = "user turns and tool results" if tools else "user turns"
    how = "appends" if tokenizer.chat_template else "none: appends the texts of"
    yield Tried("ok", f"chat template: {how} {roles}")
    num, limit = played.num_first, config.max_trained_length
    line = f"length: {num:,} token{'s' * (num != 1)} of the first observation"
    if turns := len(played.returned) - 1:
        line += f", {len(played.ids):,} with {turns} turns of {shortened(played.text)}"
    yield Tried("ok" if len(played.ids) < limit else "warn", f"{line}; at most {limit:,}")
