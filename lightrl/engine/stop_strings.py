"""Texts that end a response (`rollout.stop`), the same for every engine.

Whether a token ends a response depends only on the tokens up to it: not on how many came together,
nor on which node sampled the ones before. So it ends at the same token wherever it is resumed, and
whatever was drafted. A text lies within one turn. Owns no engine; must not import torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

from lightrl.engine.base import Delta, Engine, EngineSpec
from lightrl.errors import ConfigError, EngineUnusable
from lightrl.messages.responses import ResponseRequest, Sampling
from lightrl.model_files import load_tokenizer
from lightrl.wire import unpack_i32

Decode: TypeAlias = Callable[[list[int]], str]

# Tokens that are looked at beyond those that a text can be made of, one byte each: what decoding
# makes of a text whose beginning is missing is wrong in its first character.
MARGIN = 4
UNDECIDED = "\N{REPLACEMENT CHARACTER}"  # a token that is a part of a character


class StopStrings:
    """Finds the token of a response that completes one of some texts."""

    def __init__(self, stop: tuple[str, ...], decode: Decode) -> None:
        self._stop = stop
        self._decode = decode
        self.num_tokens = max(len(text.encode()) for text in stop) + MARGIN
        self._last = {text[-1] for text in stop}
        # decoding may leave spaces out at the edges of a text
        self._any_may_end = any(character.isspace() for character in self._last)
        self._may_end: dict[int, bool] = {}

    def first(self, tail: list[int], token_ids: list[int]) -> int | None:
        """Return the index of the first of `token_ids` that completes a text; None if none does.
        `tail`: the tokens of the response before these, the last `num_tokens` at least, or all."""
        tokens = tail + token_ids
        for k, token in enumerate(token_ids):
            if not self._can_end(token):
                continue
            end = len(tail) + k + 1
            text = self._decode(tokens[max(0, end - self.num_tokens) : end])
            if any(stop in text for stop in self._stop):
                return k
        return None

    def _can_end(self, token: int) -> bool:
        if self._any_may_end:
            return True
        if (known := self._may_end.get(token)) is None:
            text = self._decode([token])
            known = not text or UNDECIDED in text or not self._last.isdisjoint(text)
            self._may_end[token] = known
        return known


class StoppingEngine:
    """An engine whose responses end with a stop string, too. Delegates the rest to the wrapped
    engine."""

    def __init__(self, engine: Engine, stop: StopStrings) -> None:
        self._engine = engine
        self._stop = stop
        self._tails: dict[str, list[int]] = {}  # the last tokens of each response that runs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: ResponseRequest, sampling: Sampling) -> None:
        self._engine.add(request, sampling)
        turn = unpack_i32(request.prefix)[request.turn_start :]
        self._tails[request.response] = turn[-self._stop.num_tokens :]

    def abort(self, response: str) -> None:
        self._tails.pop(response, None)
        self._engine.abort(response)

    def step(self) -> list[Delta]:
        deltas = self._engine.step()
        for delta in deltas:
            self._end(delta)
        return deltas

    def _end(self, delta: Delta) -> None:
        """Cut the tokens behind the one that ends the response, if one does."""
        tail = self._tails[delta.response]
        at = self._stop.first(tail, delta.token_ids)
        if at is not None:
            del delta.token_ids[at + 1 :], delta.logprobs[at + 1 :]
            if delta.finish_reason is None:
                self._engine.abort(delta.response)
            delta.finish_reason = "stop"
        if delta.finish_reason is not None:
            del self._tails[delta.response]
        else:
            self._tails[delta.response] = (tail + delta.token_ids)[-self._stop.num_tokens :]


def with_stop_strings(engine: Engine, spec: EngineSpec) -> Engine:
    """Wrap the engine if there are stop strings. Raises EngineUnusable if the model's tokens cannot
    be read as text."""
    if not spec.stop:
        return engine
    return cast(Engine, StoppingEngine(engine, StopStrings(spec.stop, decoder(spec.model_dir))))


def decoder(model_dir: str) -> Decode:
    """Return the decoder of tokens, special ones included."""
    file = Path(model_dir) / "tokenizer.json"
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(file))
            return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        slow = load_tokenizer(model_dir)
        return lambda ids: slow.decode(ids, skip_special_tokens=False)
    except ConfigError as e:
        raise EngineUnusable(f"rollout.stop: {e}") from None
    except Exception as e:  # tokenizers raises plain Exception for a broken file
        raise EngineUnusable(f"rollout.stop: {file} cannot be loaded: {e}") from e
