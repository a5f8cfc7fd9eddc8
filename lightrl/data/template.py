"""Text and tokens of the prompt of a row: the chat template, and the tokenizer.

Owns the rules for a prompt; an error is one line with file and row. Must not import transformers,
which load_tokenizer does.
"""

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any

from lightrl.config.data import Data
from lightrl.data.layouts import TOOLS, is_message, messages_of, tools_of
from lightrl.errors import DataError, first_line

# Errors of a chat template, which is code of the model's, beside jinja2's own.
TEMPLATE_ERRORS = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
# Roles of the last message before the answer.
LAST_ROLES = ("user", "tool")
ASSISTANT = "assistant"
TEXT_PARTS = ("text", "input_text", "output_text")  # of a message whose content is a list
DATE = "strftime_now"  # by which templates write the date
# A tag at the end of a prompt that begins a thought.
THINKS = re.compile(r"[<\[◁][\w|:]*(think|thought|reason)[\w|:]*[>\]▷]$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Templated:
    """A prompt with the chat template applied."""

    text: str
    # int32
    token_ids: "array[int]"


class Template:
    """Makes text and tokens of the prompts of a run."""

    def __init__(self, data: Data, tokenizer: Any, vocabulary: int = 0) -> None:
        """`vocabulary`: of the model; 0 = not known."""
        self._data = data
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._bos = _expected_bos(tokenizer)
        given = tokenizer.chat_template or ""
        self._source = "\n".join(given.values()) if isinstance(given, dict) else given
        self._kwargs = dict(data.chat_template_kwargs)
        if DATE in self._source:
            day = datetime.combine(data.date or date.today(), time())
            self._kwargs.setdefault(DATE, day.strftime)
        # of the prompts so far
        self._has_texts = self._ignores_tools = False
        self._begins_answer: bool | None = None  # None: no chat so far
        self._tag = ""  # with which one ends
        self._acted: set[str] = set()  # keys of the config

    def apply(self, prompts: Sequence[tuple[str, Any, Any]]) -> list[Templated]:
        """Apply the template to (where, text or messages, descriptions of functions or None) of
        each prompt. Raises DataError."""
        texts = [self._text(*prompt) for prompt in prompts]
        encoded = self._tokenizer([t for t, _ in texts], add_special_tokens=False)["input_ids"]
        templated: list[Templated] = []
        for (where, *_), (text, is_chat), ids in zip(prompts, texts, encoded, strict=True):
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
        """Return whether the prompt is dropped. Raises DataError with data.too_long = "error"."""
        num, most = len(templated.token_ids), self._data.max_prompt_length
        if num > most and self._data.too_long == "error":
            raise DataError(
                f"{where}: the prompt has {num} tokens, more than data.max_prompt_length = {most}; "
                "raise it, or set data.too_long = 'drop'"
            )
        return num > most

    def _text(self, where: str, prompt: Any, tools: Any) -> tuple[str, bool]:
        """The text, and whether it is a chat."""
        prompt = messages_of(where, prompt)
        if not prompt:
            raise DataError(f"{where}: the prompt is empty")
        if isinstance(prompt, str):
            if not self._data.as_chat:
                self._has_texts = True
                self._look_at(prompt, bool(tools))
                return prompt, False
            self._acted.add("as_chat")
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
            self._acted.add("system_prompt")
            messages = [{"role": "system", "content": system}, *messages]
        descriptions = tools_of(tools)
        text = self._apply_chat_template(where, messages, descriptions, continues)
        self._look_at(text, bool(tools) and (not descriptions or TOOLS not in self._source))
        if self._begins_answer is None and not continues:
            bare = self._apply_chat_template(where, messages, descriptions, False, begins=False)
            self._begins_answer = bare != text
        return text, True

    def _look_at(self, text: str, ignores_tools: bool) -> None:
        self._ignores_tools |= ignores_tools
        if not self._tag and (tag := THINKS.search(text[-64:].rstrip())):
            self._tag = tag[0]

    def notes(self) -> Iterator[str]:
        """Probable mistakes in the prompts so far, one line each."""
        kwargs = self._data.chat_template_kwargs
        parts = {
            "the model's chat template": self._source,
            "data.system_prompt": self._data.system_prompt,
            "data.chat_template_kwargs": kwargs,
        }
        for name in (name for name, given in parts.items() if given and self._has_texts):
            yield f"{name} does nothing to plain-text prompts; data.as_chat makes them chats"
        idle = {"as_chat", "system_prompt"} - self._acted
        for key in sorted(idle) if self._begins_answer is not None and not self._has_texts else ():
            if getattr(self._data, key):
                what = "text" if key == "as_chat" else "a chat without a system message"
                yield f"data.{key} does nothing: no prompt so far is {what}"
        for key in kwargs if self._source else ():
            if not re.search(rf"\b{re.escape(key)}\b", self._source):
                yield f"data.chat_template_kwargs: the model's chat template does not use {key!r}"
        if self._ignores_tools:
            yield "the column 'tools' does nothing: the chat template has no place for it"
        if self._tag:
            yield (
                f"a prompt ends with {self._tag}, of the chat template or the data: responses and "
                "what reward functions get begin after it"
            )
        if self._begins_answer is False:
            yield (
                "the model's chat template begins no answer (add_generation_prompt does nothing): "
                "responses begin behind the last message"
            )
        if self._begins_answer is not None and DATE in self._source:
            day = self._data.date or date.today()
            yield f"the chat template writes the date: {day} during the whole run (data.date)"

    def _require_last(self, where: str, last: dict[str, Any]) -> bool:
        """Return whether the response continues `last`. Raises DataError if it cannot be last."""
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
        self,
        where: str,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        continues: bool,
        begins: bool = True,
    ) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=begins and not continues,
                continue_final_message=continues,
                **{TOOLS: tools, **self._kwargs},
            )
        except (TemplateError, *TEMPLATE_ERRORS) as e:
            raise DataError(
                f"{where}: the chat template refuses the prompt: {first_line(e)}"
            ) from None
        if not isinstance(text, str):
            raise DataError(f"{where}: data.chat_template_kwargs: the template returns no text")
        return text


def chat_of(where: str, prompt: Any, system_prompt: str) -> list[dict[str, Any]]:
    """Return text or messages as the messages that an episode begins with. Raises DataError."""
    prompt = messages_of(where, prompt)
    if not prompt:
        raise DataError(f"{where}: the prompt is empty")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = [_message(where, m) for m in prompt]
    if system_prompt and all(m["role"] != "system" for m in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _message(where: str, message: Any) -> dict[str, Any]:
    """Return a message without the keys whose value is None, which other messages have."""
    if not is_message(message):
        raise DataError(
            f"{where}: a chat message looks like {{'role': ..., 'content': ...}}, not "
            f"{str(message)[:80]!r}"
        )
    kept = {k: v for k, v in message.items() if v is not None or k == "content"}
    return {**kept, "content": _text_of(where, message["content"])}


def _text_of(where: str, content: Any) -> str | None:
    """Return the text of a message; parts of a list are joined by line ends, as in vLLM."""
    if content is None or isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") or "text" if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) and kind in TEXT_PARTS else part
        if not isinstance(text, str):
            raise DataError(
                f"{where}: the content of a chat message has a part of the type {kind!r}; models "
                "here read text alone"
            )
        texts.append(text)
    return "\n".join(texts)


def _expected_bos(tokenizer: Any) -> int | None:
    """The BOS id if the tokenizer starts plain text with it; else None."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else None
