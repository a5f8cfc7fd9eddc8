"""From what a row has for a prompt to text and tokens: the chat template, and the tokenizer.

Owns what a prompt may be and what is refused, one line each with file and row. Must not import
transformers: whoever loads the tokenizer does.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.config.data import Data
from lightrl.errors import DataError
from lightrl.model_files import first_line

# What a chat template, which is code of the model's, can fail with beside jinja2's own errors.
TEMPLATE_ERRORS = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
# Whoever speaks last before the assistant answers.
LAST_ROLES = ("user", "tool")
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Templated:
    """A prompt as the model sees it, its chat template applied."""

    text: str
    # int32
    token_ids: "array[int]"


class Template:
    """How the prompts of a run become text and tokens."""

    def __init__(self, data: Data, tokenizer: Any, vocabulary: int = 0) -> None:
        """`vocabulary`: of the model; 0 = not known."""
        self._data = data
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._bos = _expected_bos(tokenizer)

    def apply(self, prompts: Sequence[tuple[str, Any]]) -> list[Templated]:
        """Of (where, text or messages) each; the tokens of many at once. Raises DataError."""
        texts = [self._text(where, prompt) for where, prompt in prompts]
        encoded = self._tokenizer([t for t, _ in texts], add_special_tokens=False)["input_ids"]
        templated: list[Templated] = []
        for (where, _), (text, is_chat), ids in zip(prompts, texts, encoded, strict=True):
            # a template writes its own
            if self._bos is not None and not is_chat and ids[:1] != [self._bos]:
                ids = [self._bos, *ids]
            if not ids:
                raise DataError(f"{where}: the prompt is empty")
            if 0 < self._vocabulary <= (largest := max(ids)):
                raise DataError(
                    f"{where}: the tokenizer's token {largest} is outside the model's vocabulary "
                    f"of {self._vocabulary}"
                )
            templated.append(Templated(text, array("i", ids)))
        return templated

    def is_too_long(self, where: str, templated: Templated) -> bool:
        """Whether it is to be left out. Raises DataError if that is an error."""
        num, most = len(templated.token_ids), self._data.max_prompt_length
        if num > most and self._data.too_long == "error":
            raise DataError(
                f"{where}: the prompt has {num} tokens, more than data.max_prompt_length = {most}; "
                "raise it, or set data.too_long = 'drop'"
            )
        return num > most

    def _text(self, where: str, prompt: Any) -> tuple[str, bool]:
        """And whether it is a chat."""
        if not prompt:
            raise DataError(f"{where}: the prompt is empty")
        if isinstance(prompt, str):
            if not self._data.as_chat:
                return prompt, False
            prompt = [{"role": "user", "content": prompt}]
        messages = [_message(where, m) for m in prompt]
        if self._tokenizer.chat_template is None:
            why = "" if not self._data.as_chat else " (data.as_chat)"
            raise DataError(
                f"{where}: the prompt is chat messages{why}, but the model's tokenizer has no chat "
                "template"
            )
        continues = self._require_last(where, messages[-1])
        system = self._data.system_prompt
        if system and all(m["role"] != "system" for m in messages):
            messages = [{"role": "system", "content": system}, *messages]
        return self._apply_chat_template(where, messages, continues), True

    def _require_last(self, where: str, last: dict[str, Any]) -> bool:
        """Whether its message is to be continued. Raises DataError if it cannot be the last."""
        role = last["role"]
        if role == ASSISTANT and not self._data.continue_final:
            raise DataError(
                f"{where}: the last message is the assistant's, so the answer would be part of the "
                "prompt; use a column without it, or set data.continue_final = true to have that "
                "message continued"
            )
        if role != ASSISTANT and role not in LAST_ROLES:
            raise DataError(
                f"{where}: the last message is from {role!r}, so there is no user message to answer"
            )
        if not last["content"] and role in LAST_ROLES:
            raise DataError(f"{where}: the prompt is empty")
        return role == ASSISTANT

    def _apply_chat_template(
        self, where: str, messages: list[dict[str, Any]], continues: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **self._data.chat_template_kwargs,
            )
        except (TemplateError, *TEMPLATE_ERRORS) as e:
            raise DataError(
                f"{where}: the chat template refuses the prompt: {first_line(e)}"
            ) from None
        if not isinstance(text, str):
            raise DataError(f"{where}: data.chat_template_kwargs: the template returns no text")
        return text


def _message(where: str, message: Any) -> dict[str, Any]:
    """Without what is only there because another message of the file has it."""
    if (
        not isinstance(message, dict)
        or not isinstance(message.get("role"), str)
        or "content" not in message
    ):
        raise DataError(
            f"{where}: a chat message looks like {{'role': ..., 'content': ...}}, not "
            f"{str(message)[:80]!r}"
        )
    return {k: v for k, v in message.items() if v is not None or k == "content"}


def _expected_bos(tokenizer: Any) -> int | None:
    """The BOS id if the tokenizer starts plain text with it; nothing else it adds belongs in a
    prompt."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else None
