"""Answers requests from the engines of `lightrl serve`: each by itself, rendered anew, with the
sampling that it asks for. Owns the rules for what a request may ask.
"""

import asyncio
import hmac
import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TypeVar

from lightrl.endpoints.api import (
    Answered,
    ApiError,
    Asked,
    EpisodeReport,
    SamplingLimits,
)
from lightrl.engine.stop_strings import StopStrings, decoder
from lightrl.environments.rendering import Message, Renderer
from lightrl.errors import EngineError, LightRLError
from lightrl.launch.serving.engines import ServedEngine
from lightrl.messages.responses import Sampling
from lightrl.model_files import vocabulary_size

T = TypeVar("T")

MAX_STOPS = 16
SEEDS = 1 << 63
LEAST_TEMPERATURE = 1e-6  # a smaller one is greedy: logits divided by it are infinite


class ServingBackend:
    """Implements `TextBackend`."""

    def __init__(
        self,
        limits: SamplingLimits,
        renderer: Renderer,
        model_dir: Path,
        engines: Sequence[ServedEngine],
        key: str,
    ) -> None:
        """`key`: that clients must send; "" = any."""
        self.limits = limits
        self._renderer, self._engines, self._key = renderer, engines, key
        self._decode = decoder(str(model_dir))
        self._vocabulary = vocabulary_size(str(model_dir))
        # one thread: tokenizers of transformers refuse to be used by two at once
        self._thread = ThreadPoolExecutor(1, "render")

    async def ask(self, key: str, asked: Asked) -> Answered:
        self.require(key)
        if asked.messages is None:
            prompt = list(asked.token_ids or ())
        else:
            messages, tools = asked.messages, asked.tools
            prompt = await self._in_thread(lambda: self._renderer.whole(messages, tools))
        room = self._room(prompt)
        if room < 1:
            most = f"of at most {self.limits.max_length:,} with the turn; shorten it"
            why = f"the prompt has {len(prompt):,} tokens, {most}"
            raise ApiError(400, why, "context_length_exceeded")
        sampling = self._sampling(asked)
        stop = StopStrings(asked.stop, self._decode) if asked.stop else None
        seed = secrets.randbelow(SEEDS) if asked.seed is None else asked.seed % SEEDS
        most = room if asked.max_tokens is None else min(room, asked.max_tokens)
        try:
            turn = await self._engine().sample(prompt, sampling, seed, most, stop)
        except EngineError as e:
            raise ApiError(500, str(e), "server_error") from None
        message: Message = {}
        if asked.messages is not None:
            tools, ids = asked.tools, turn.token_ids
            message = await self._in_thread(lambda: self._renderer.parse(ids, tools))
            message["content"] = _cut(message["content"], asked.stop)
        finish = "length" if turn.ended.result() == "length" else "stop"
        return Answered(message, prompt, turn.token_ids, turn.logprobs, finish, turn.version)

    async def encode(self, text: str) -> list[int]:
        return await self._in_thread(lambda: self._renderer.ids_of(text))

    async def decode(self, answered: Answered, stop: Sequence[str]) -> str:
        ids = answered.token_ids
        return _cut(await self._in_thread(lambda: self._renderer.text_of(ids)), stop)

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return await self._in_thread(lambda: [self._decode([id]) for id in token_ids])

    async def score(self, token_ids: Sequence[int]) -> tuple[list[float], list[tuple[int, float]]]:
        if len(token_ids) < 2:
            return [], []
        try:
            found = await self._engine().score(token_ids)
        except EngineError as e:
            raise ApiError(400, str(e)) from None
        return found.logprobs, list(zip(found.best, found.best_logprobs, strict=True))

    async def episode(self, key: str) -> NoReturn:
        raise _no_episodes()

    async def report(self, key: str, report: EpisodeReport) -> NoReturn:
        raise _no_episodes()

    async def open(self, key: str) -> NoReturn:
        raise _no_episodes()

    def require(self, key: str) -> None:
        if self._key and not hmac.compare_digest(key.encode(), self._key.encode()):
            raise ApiError(401, "the API key is not that of --key", "invalid_api_key")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _engine(self) -> ServedEngine:
        return min(self._engines, key=lambda engine: engine.num_running)

    def _room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens a turn may have. Raises ApiError (400)."""
        if not prompt:
            raise ApiError(400, "the prompt is empty", param="prompt")
        if max(prompt) >= self._vocabulary or min(prompt) < 0:
            raise ApiError(400, f"token ids must be in 0..{self._vocabulary - 1}")
        return self.limits.max_length - len(prompt)

    def _sampling(self, asked: Asked) -> Sampling:
        """Raises ApiError (400)."""
        temperature = 1.0 if asked.temperature is None else asked.temperature
        top_p = 1.0 if asked.top_p is None else asked.top_p
        for name, value, is_right, why in (
            ("temperature", f"{temperature:g}", 0 <= temperature < math.inf, "must be 0 or more"),
            ("top_p", f"{top_p:g}", 0 < top_p <= 1, "must be above 0 and at most 1"),
            ("top_k", asked.top_k, (asked.top_k or 0) >= 0, "must be 0 (off) or more"),
            ("stop", [*asked.stop], all(asked.stop), "must have no empty text"),
            ("stop", "...", len(asked.stop) <= MAX_STOPS, f"at most {MAX_STOPS} are possible"),
        ):
            if not is_right:
                raise ApiError(400, f"{name} = {value}: {why}", param=name)
        stops = tuple(sorted(self._renderer.stops))
        top_k = min(asked.top_k or 0, self._vocabulary)  # more is no number of a message
        heat = temperature if temperature >= LEAST_TEMPERATURE else 0.0
        return Sampling(heat, top_p, top_k, stops)

    async def _in_thread(self, act: Callable[[], T]) -> T:
        """Raises ApiError (400) for messages that cannot be rendered."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, act)
        except LightRLError as e:
            raise ApiError(400, str(e)) from None


def _cut(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    return text[: min((at for each in stop if (at := text.find(each)) >= 0), default=None)]


def _no_episodes() -> ApiError:
    return ApiError(404, "lightrl serve has no episodes", "not_found")
