"""A response as an engine holds it, and the check that it can be run: the same for every engine.

Must be importable without torch.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from lightrl.errors import EngineError
from lightrl.messages.responses import FinishReason, ResponseRequest, Sampling
from lightrl.wire import unpack_i32


@dataclass(slots=True)
class Running:
    """A response in an engine. `tokens` = prompt + prefix + what this engine sampled."""

    response: str
    seed: int
    sampling: Sampling
    tokens: list[int]
    # tokens of the longest this response may get, prompt included
    end: int
    stop: frozenset[int] = field(default=frozenset())
    # tokens before the turn that is sampled: the prompt, and the prefix up to there
    num_given: int = 0
    # a turn of an episode: another request may begin with its tokens
    is_turn: bool = False
    # tokens whose KV was there when it first started; None: it has not started
    num_cached: int | None = None

    def grow(self, token: int) -> FinishReason | None:
        """Append a sampled token and return whether the response ends with it."""
        self.tokens.append(token)
        if token in self.stop:
            return "stop"
        return "length" if len(self.tokens) >= self.end else None


def accept(
    request: ResponseRequest, sampling: Sampling, vocabulary: int, max_model_length: int
) -> Running:
    """Return the request as a `Running`. Raises EngineError, one line, if it cannot be run."""
    tokens = unpack_i32(request.prompt)
    num_given = len(tokens) + request.turn_start
    tokens += unpack_i32(request.prefix)
    if not tokens:
        raise EngineError(f"{request.response}: prompt and prefix are empty")
    if request.turn_start < 0 or num_given > len(tokens):
        raise EngineError(
            f"{request.response}: turn_start = {request.turn_start}: must be within the prefix"
        )
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise EngineError(f"{request.response}: token ids must be in 0..{vocabulary - 1}")
    if request.max_new_tokens < 1:
        raise EngineError(
            f"{request.response}: max_new_tokens = {request.max_new_tokens}: must be above 0"
        )
    end = len(tokens) + request.max_new_tokens
    if end > max_model_length:
        raise EngineError(
            f"{request.response}: {end} tokens exceed the engine's {max_model_length}"
        )
    if not 0 <= request.seed < 1 << 63:
        raise EngineError(f"{request.response}: seed = {request.seed}: must be in 0..2**63-1")
    if not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        raise EngineError(
            f"{request.response}: temperature = {sampling.temperature}: must be 0 or more"
        )
    if not 0 < sampling.top_p <= 1:
        raise EngineError(
            f"{request.response}: top_p = {sampling.top_p}: must be above 0 and at most 1"
        )
    if sampling.top_k < 0:
        raise EngineError(f"{request.response}: top_k = {sampling.top_k}: must be 0 (off) or more")
    stop = frozenset(sampling.stop_token_ids)
    is_turn = request.turn_start > 0 or not request.prompt
    return Running(request.response, request.seed, sampling, tokens, end, stop, num_given, is_turn)


def num_reusable(held: list[int], tokens: list[int]) -> int:
    """Return how many keys and values of a response that ended with `held` are those of `tokens`.

    The last of `held` was sampled and never fed to the model; the last of `tokens` must be.
    """
    most = min(len(held), len(tokens)) - 1
    if held[:most] == tokens[:most]:
        return most
    return next(i for i in range(most) if held[i] != tokens[i])


def check_text(token_ids: list[int], vocabulary: int, max_model_length: int) -> None:
    """Raise EngineError, one line, for a text that cannot be scored."""
    if not 2 <= len(token_ids) <= max_model_length:
        raise EngineError(f"a text of {len(token_ids)} tokens: must be 2 to {max_model_length}")
    if min(token_ids) < 0 or max(token_ids) >= vocabulary:
        raise EngineError(f"a text's token ids must be in 0..{vocabulary - 1}")


def vocabulary_size(model_dir: Path) -> int:
    """Return the size in config.json. Raises EngineError if there is none or it names no
    vocabulary."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise EngineError(f"{model_dir}/config.json cannot be read: {e}") from None
    text = config.get("text_config", config)
    size = text.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise EngineError(f"{model_dir}/config.json: vocab_size = {size!r}")
    return size
