"""OpenAI's completions of texts and of token ids, with the logprobs of the prompt (`echo`), by
which harnesses score the choices of a question. For backends with a tokenizer, not for episodes.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from lightrl.endpoints.api import Answered, Asked, Backend
from lightrl.endpoints.fields import Body, Fields, max_tokens, new_id, refuse_others, sampling

DEFAULT_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 4096


@runtime_checkable
class TextBackend(Backend, Protocol):
    """A backend that has the model's tokenizer, and scores texts."""

    async def encode(self, text: str) -> list[int]:
        """Raises ApiError."""
        ...

    async def decode(self, answered: Answered, stop: Sequence[str]) -> str:
        """Return the sampled text, without special tokens and the stop string that ended it."""
        ...

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[list[float], list[tuple[int, float]]]:
        """Return the logprob of each token but the first, and the likeliest one with its logprob.
        Raises ApiError."""
        ...


async def complete(backend: TextBackend, key: str, values: Body) -> Body:
    """Return the completion of every prompt of a request. Raises ApiError."""
    body = Fields(values)
    echoes, want = body.get("echo", bool) or False, body.get("logprobs", int)
    if (want or 0) not in (0, 1):
        raise body.refused("logprobs", "only 0 or 1 is possible")
    refuse_others(Fields({**values, "echo": None}))
    most = 0 if values.get("max_tokens") == 0 else max_tokens(body, "max_tokens") or DEFAULT_TOKENS
    if not most and not echoes:
        raise body.refused("max_tokens", "0 is possible with echo only")
    fields = sampling(body, backend.limits)

    async def one(prompt: Any) -> tuple[str, Answered, Body | None]:
        ids = await backend.encode(prompt) if isinstance(prompt, str) else prompt
        scored = await backend.score(ids) if echoes and want is not None else ([], [])
        answered = Answered({}, ids, [], [], "length", 0)
        if most:
            answered = await backend.ask(key, Asked(token_ids=ids, max_tokens=most, **fields))
        text = await backend.decode(answered, fields.get("stop", ()))
        if echoes:
            text = (
                prompt if isinstance(prompt, str) else "".join(await backend.pieces(ids))
            ) + text
        found = None if want is None else await _logprobs(backend, answered, echoes, *scored)
        return text, answered, found

    return _whole(values, await asyncio.gather(*map(one, _prompts(body))))


def _prompts(body: Fields) -> list[Any]:
    """Return texts, or lists of token ids. Raises ApiError (400)."""
    given = body.values.get("prompt")
    if isinstance(given, str) or _is_ids(given):
        return [given]
    several = given if isinstance(given, list) and len(given) <= MAX_PROMPTS else []
    if several and (all(isinstance(each, str) for each in several) or all(map(_is_ids, several))):
        return several
    raise body.refused(
        "prompt", f"must be a text, token ids, or a list of at most {MAX_PROMPTS} such"
    )


def _is_ids(given: Any) -> bool:
    if not isinstance(given, list) or not given:
        return False
    return all(type(id) is int and 0 <= id < 1 << 31 for id in given)


async def _logprobs(
    backend: TextBackend,
    answered: Answered,
    echoes: bool,
    of_prompt: list[float],
    best: list[tuple[int, float]],
) -> Body:
    """Return the tokens with their logprobs: those of the prompt, whose first has none, and the
    sampled ones, whose likeliest are not known."""
    ids, found = list(answered.token_ids), list[float | None](answered.logprobs)
    tops: list[tuple[int, float]] = list(zip(ids, answered.logprobs, strict=True))
    if echoes:
        ids, found = [*answered.prompt_token_ids, *ids], [None, *of_prompt, *found]
        tops = [*best, *tops]
    pieces = await backend.pieces(ids)
    likeliest = zip(await backend.pieces([id for id, _ in tops]), tops, strict=True)
    top: list[Body | None] = [{piece: logprob} for piece, (_, logprob) in likeliest]
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    return {
        "tokens": pieces,
        "token_logprobs": found,
        "top_logprobs": [None, *top] if echoes else top,
        "text_offset": ends[:-1],
    }


def _whole(body: Body, done: Sequence[tuple[str, Answered, Body | None]]) -> Body:
    choices = [
        {"index": at, "text": text, "finish_reason": answered.finish_reason, "logprobs": logprobs}
        for at, (text, answered, logprobs) in enumerate(done)
    ]
    prompt = sum(len(answered.prompt_token_ids) for _, answered, _ in done)
    sampled = sum(len(answered.token_ids) for _, answered, _ in done)
    return {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": str(body.get("model") or ""),
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        },
        "weight_version": max(answered.weight_version for _, answered, _ in done),
    }


def events(found: Body) -> Iterator[Body]:
    """Iterate over the chunks of a completion that is streamed: one for each choice."""
    choices = found.pop("choices")
    for choice in choices:
        yield {**found, "choices": [choice]}
