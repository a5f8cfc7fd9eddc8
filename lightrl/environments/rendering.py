"""Messages of an episode as token ids, appended to the ids that are held.

What the model sampled stays as it was sampled: nothing is rendered or tokenised a second time. New
messages become ids with the package `renderers`, where it supports the model; else as the
difference of two renderings of a base conversation, which `prove` rehearses with this template and
tokenizer. Without a chat template, the contents of the messages are concatenated as they are.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightrl.data.template import TEMPLATE_ERRORS, expected_bos, plain_message
from lightrl.environments.families import Family, families, renderers
from lightrl.environments.tool_calls import (
    THINK,
    THOUGHT,
    ToolCallParser,
    format_of,
    split_thinking,
)
from lightrl.errors import ConfigError, LightRLError, first_line
from lightrl.model_files import load_tokenizer, stop_token_ids, vocabulary_size

Message: TypeAlias = dict[str, Any]
Tools: TypeAlias = Sequence[dict[str, Any]]
# A turn of a rehearsal: the assistant message, and the messages that follow.
Turn: TypeAlias = tuple[Message, list[Message]]

# Contents of the base conversation. No template, tool or environment writes these words.
QUESTION, ANSWER, RESULT, THINKING = "qzquestion", "qzanswer", "qzresult", "qzthinking"
SYSTEM = {"role": "system", "content": QUESTION}
USER = {"role": "user", "content": QUESTION}
REPLY = {"role": "user", "content": RESULT}
PLAIN = {"role": "assistant", "content": ANSWER}
QUERY = {"type": "object", "properties": {"q": {"type": "string", "description": QUESTION}}}
TOOL = {
    "type": "function",
    "function": {"name": "qztool", "description": QUESTION, "parameters": QUERY},
}
CALL_ID = "call{:05}"  # nine letters and digits, as some templates want it
RESULTS = [
    {"role": "tool", "content": RESULT, "name": "qztool", "tool_call_id": CALL_ID.format(k)}
    for k in range(2)
]
# Arguments of chat templates that keep earlier thinking if they have these values.
KEEPS_THINKING = {
    "preserve_thinking": True,
    "truncate_history_thinking": False,
    "clear_thinking": False,
}


class CannotAppend(LightRLError):
    """Messages that cannot be converted to ids; the reason in one line."""


class Renderer:
    """Makes ids of messages and messages of ids, for one model.

    The tokens of a conversation are: `first`, then in turn what the model samples and `append`.
    """

    def __init__(
        self,
        model_dir: Path,
        tool_format: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`template_kwargs`: see lightrl.data.template.template_kwargs. Raises ConfigError."""
        self._tokenizer = load_tokenizer(str(model_dir))
        self.stops = frozenset(stop_token_ids(str(model_dir), self._tokenizer))
        self._vocabulary = vocabulary_size(str(model_dir))
        special = (t.content for t in self._tokenizer.added_tokens_decoder.values() if t.special)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._tool_format = tool_format
        self._parser: ToolCallParser | None = None
        self._kwargs = {**(template_kwargs or {})}
        self._source = str(self._tokenizer.chat_template or "")  # or all of them
        # roles whose messages can be appended, by `prove`
        self._roles: set[str] = set()
        self._family: Family | None = None
        # the end of the text before a turn, from a tag of thinking on
        self._begun = ""

    def prove(self, tools: Tools, user_turns: bool = True) -> None:
        """Find out what can be appended, before anything else is called. Raises ConfigError, one
        line with what to do, if tool results cannot although there are tools, or user turns;
        `user_turns` = False: the environment has none."""
        if not self._source:
            if tools:
                raise ConfigError("tools need a chat template, and the model's tokenizer has none")
            return
        try:
            prompt = self._text([USER], tools)
            ignores_tools = bool(tools) and self._text([USER], []) == prompt
        except CannotAppend as e:
            raise ConfigError(str(e)) from None
        if begun := re.search(rf"{THINK}\s*$", prompt):
            self._begun = begun[0]
        for family in families(self._tokenizer, self._kwargs):
            if roles := {role for role in ("tool", "user") if self._bridges(family, role, tools)}:
                self._family, self._roles = family, roles
                break
        for role, is_needed in (("tool", bool(tools)), ("user", user_turns)):
            reason = "" if role in self._roles else self._reason(role, tools)
            if ignores_tools and role == "tool":
                reason = "has no place for the descriptions of tools"
            if not reason:
                self._roles.add(role)
            elif is_needed:
                raise ConfigError(self._refusal(role, reason, tools))
        if tools:
            self._tool_parser()

    def first(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids of a chat so far, with what begins the model's turn. Raises CannotAppend,
        DataError."""
        if self._source and tools and "tool" not in self._roles:
            raise CannotAppend("the model's chat template cannot append tool results")
        return self.whole(messages, tools, "the first observation")

    def whole(self, messages: Sequence[Message], tools: Tools, name: str = "the chat") -> list[int]:
        """As `first`, for a chat to which nothing is appended: it is rendered anew each time."""
        plain = [plain_message(name, m) for m in messages]
        if self._source:
            ids = self._ids(self._text(plain, tools))
        else:
            ids = self.ids_of("".join(m["content"] or "" for m in plain))
        if not ids:
            raise CannotAppend(f"{name} is empty")
        return ids

    def ids_of(self, text: str) -> list[int]:
        """Return the ids of a text that is no chat. Raises CannotAppend."""
        ids, bos = self._ids(text), expected_bos(self._tokenizer)
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def text_of(self, sampled: Sequence[int]) -> str:
        """Return the text without special tokens and what ends a turn."""
        return self.text(self._unended(sampled))

    def append(
        self, held: Sequence[int], turn_start: int, messages: Sequence[Message], tools: Tools
    ) -> list[int]:
        """Return the ids that follow `held`: what closes the sampled turn held[turn_start:], the
        new messages, and what begins the next turn. A turn that was cut gets its end-of-turn token
        first. Raises CannotAppend, DataError."""
        plain = [plain_message("the observation", m) for m in messages]
        if not self._source:
            return self._ids("".join(m["content"] or "" for m in plain))
        if not plain:
            raise CannotAppend("the observation has no messages")
        for role in (m["role"] for m in plain):
            if role not in self._roles:
                raise CannotAppend(f"the model's chat template cannot append a message of {role!r}")
        sampled = list(held[turn_start:])
        if self._family is not None:
            bridged = self._family.bridge(list(held[:turn_start]), sampled, plain, tools)
            if bridged is not None:
                return self._known(bridged)
        close, tail = self._tail(plain, tools)
        return tail if sampled[-1:] == close[-1:] else close + tail

    def text(self, ids: Sequence[int]) -> str:
        """Return ids as text, without special tokens. Raises CannotAppend for an unknown one."""
        return self._special.sub("", self._tokenizer.decode(self._known(ids)))

    def parse(self, sampled: Sequence[int], tools: Tools) -> Message:
        """Return the assistant message: role, content, and where there are some reasoning_content
        and tool_calls, whose arguments are a dict. A malformed call stays in the content. Raises
        ConfigError if tools come without a format that is known."""
        found = None
        if self._family is not None:
            found = self._family.parse(self._ids(self._begun), sampled, tools)
        if found is None:
            text = self._tokenizer.decode(self._unended(sampled))
            thinking, content = split_thinking(text, bool(self._begun))
            found = thinking, content, []
            if tools and (parser := self._tool_parser()):
                found = thinking, *parser.parse(content, tools)
        thinking, content, calls = found
        message: Message = {"role": "assistant", "content": self._special.sub("", content)}
        if thinking is not None:
            message["reasoning_content"] = self._special.sub("", thinking)
        if calls and tools:
            message["tool_calls"] = [
                _call(id or CALL_ID.format(k), name, given)
                for k, (id, name, given) in enumerate(calls)
            ]
        return message

    def _tool_parser(self) -> ToolCallParser | None:
        """Load the parser once; None if the family parses. Raises ConfigError."""
        if self._parser is None and self._family is None:
            is_auto = self._tool_format == "auto"
            name = format_of(self._source) if is_auto else self._tool_format
            self._parser = ToolCallParser(name, self._tokenizer)
        return self._parser

    def _unended(self, sampled: Sequence[int]) -> Sequence[int]:
        return sampled[:-1] if sampled and sampled[-1] in self.stops else sampled

    def _ids(self, text: str) -> list[int]:
        return self._known(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _known(self, ids: Sequence[int]) -> list[int]:
        if (most := max(ids, default=0)) >= self._vocabulary:
            raise CannotAppend(f"the model has no token {self._tokenizer.decode([most])!r}")
        return list(ids)

    def _text(self, messages: Sequence[Message], tools: Tools) -> str:
        """Raises CannotAppend."""
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=True,
                **{"tools": list(tools) or None, **self._kwargs},
            )
        except (TemplateError, *TEMPLATE_ERRORS) as e:
            raise CannotAppend(
                f"the model's chat template refuses the messages: {first_line(e)}"
            ) from None

    def _tail(self, messages: list[Message], tools: Tools) -> tuple[list[int], list[int]]:
        """Return what closes a turn of the base conversation, which ends with the end-of-turn
        token, and what follows when the next are `messages`. Raises CannotAppend."""
        results = [m for m in messages if m["role"] == "tool"]
        answer = _asks(results) if results else PLAIN
        num = len(results)
        if num > 1 and not self._takes([USER, answer, *messages], tools, num):
            del results[1:]  # as Llama's templates, which take a single call a turn
            answer = _asks(results)
        parts = self._text([USER, answer, *messages], tools).split(ANSWER, len(results) or 1)
        if len(parts) <= len(results):
            raise CannotAppend("the model's chat template leaves out what the model said")
        # Tokens behind a special token do not depend on the text before it.
        ids = self._ids(ANSWER + parts[-1])
        at = next((k for k, i in enumerate(ids) if i in self.stops), None)
        if at is None:
            raise CannotAppend("the model's chat template ends no turn with a stop token")
        begin = at if results else len(self._ids(ANSWER))
        return ids[begin : at + 1], ids[at + 1 :]

    def _reason(self, role: str, tools: Tools) -> str:
        """Return why messages of a role cannot be appended; "" if they can."""
        try:
            found = (self._rehearse(*kind) for kind in self._rehearsals(role, tools))
            return next(filter(None, found), "")
        except CannotAppend as e:
            return str(e).removeprefix("the model's chat template ")

    def _rehearsals(
        self, role: str, tools: Tools
    ) -> Iterator[tuple[list[Message], list[Turn], Tools]]:
        """Conversations of two turns each, of every kind that an episode may have: how they begin,
        their turns, and the tools."""
        asking, plain = list[Turn](), list[Turn]()
        if role == "tool":
            tools = tools or [TOOL]
        if role == "tool" or (tools and "tool" in self._roles):
            for results in (RESULTS[:1], RESULTS):
                asking += self._thoughts(_asks(results), results, tools)
        if role == "user":
            plain += self._thoughts(PLAIN, [REPLY], tools)
        for turn in (*plain, *asking):
            for start in ([USER], [SYSTEM, USER]):
                if start[0] is USER or self._takes(start, tools):
                    yield start, [turn, *(plain[:1] if turn in asking and plain else [turn])], tools

    def _thoughts(self, answer: Message, messages: list[Message], tools: Tools) -> Iterator[Turn]:
        """The turns of an assistant message without thinking and with it; none of several calls if
        the template takes a single one."""
        if len(messages) > 1 and not self._takes([USER, answer, *messages], tools):
            return
        if not self._begun:
            yield answer, messages
        apart = {**answer, "reasoning_content": THINKING}
        if THINKING in self._text([USER, apart], tools):
            yield apart, messages
            return
        # The template has no place for it but the content.
        for begin, end in ((THINK, f"\n{THOUGHT}\n\n"), ("<|channel>", "<channel|>")):
            if answer is PLAIN or begin in self._source:
                said = f"{begin}\n{THINKING}{end}{answer['content']}"
                yield {**answer, "content": said}, messages

    def _rehearse(self, history: list[Message], turns: list[Turn], tools: Tools) -> str:
        """Render a conversation anew after each turn. Return "" if it is what would be held and
        appended, else what the template does. Raises CannotAppend."""
        held = self._text(history, tools)
        for answer, messages in turns:
            thinks, is_tool = THINKING in str(answer), messages[0]["role"] == "tool"
            what = "tool result" if is_tool else "user turn"
            drops = "drops earlier thinking" if thinks else "changes earlier turns"
            history = [*history, answer, *messages]
            text = self._text(history, tools)
            close, tail = self._tail(messages, tools)
            said = text[len(held) :].partition(self._tokenizer.decode(close[-1:]))[0]
            changes = THINKING not in said if thinks else THINK in said and not is_tool
            if changes or ANSWER not in said or not text.startswith(held):
                return f"{drops} when a {what} follows"
            is_whole = self._tokenizer.decode(tail).count(RESULT) == len(messages)
            if not is_whole or self._ids(text)[-len(tail) - 1 :] != [*close[-1:], *tail]:
                return f"writes a {what} in another way later, or not at all"
            held = text
        return ""

    def _takes(self, messages: list[Message], tools: Tools, answers: int = 0) -> bool:
        try:
            return self._text(messages, tools).count(ANSWER) >= answers
        except CannotAppend:
            return False

    def _refusal(self, role: str, reason: str, tools: Tools) -> str:
        fix = "the package renderers does not know this one, either"
        if renderers() is None:
            fix = "pip install lightrl[renderers], which knows many models"
        kwargs = self._kwargs
        for name, value in KEEPS_THINKING.items():
            self._kwargs = {**kwargs, name: value}
            if name in self._source and not self._reason(role, tools):
                fix = f"set data.chat_template_kwargs = {{ {name} = {str(value).lower()} }}"
        self._kwargs = kwargs
        return (
            f"an episode cannot be continued: the model's chat template {reason}; {fix}, or write "
            "another template into chat_template.jinja of the model's directory"
        )

    def _bridges(self, family: Family, role: str, tools: Tools) -> bool:
        """Return whether a family begins and continues conversations with what the template writes
        there, whatever the template makes of earlier turns."""
        thought = f"{THINKING}\n{THOUGHT}\n\n{ANSWER}"
        said = [thought] if self._begun else [ANSWER, f"{THINK}\n{thought}"]
        try:
            for start, turns, given in self._rehearsals(role, tools):
                messages, prompt = turns[0][1], self._ids(self._text(start, given))
                close, tail = self._tail(messages, given)
                sampled = [[*self._ids(text), close[-1]] for text in said]
                bridged = [family.bridge(prompt, ids, messages, given) for ids in sampled]
                if family.first(start, given) != prompt or any(ids != tail for ids in bridged):
                    return False
        except CannotAppend:
            return False
        return True


def _call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _asks(results: list[Message]) -> Message:
    """Return an assistant message with the calls that `results` answer."""
    calls = [
        _call(m.get("tool_call_id") or CALL_ID.format(k), m.get("name") or "qztool", {"q": ANSWER})
        for k, m in enumerate(results)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
