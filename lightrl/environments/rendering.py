"""Messages of an episode as token ids, appended to the ids that are held.

What the model sampled stays as it was sampled: nothing is rendered or tokenised a second time. New
messages become ids with the package `renderers`, where it knows the model; else as the difference
of two renderings of a base conversation, which `prove` rehearses with this template and tokenizer.
Without a chat template, the contents of the messages are concatenated as they are.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightrl.data.template import DATE, TEMPLATE_ERRORS, expected_bos, plain_message
from lightrl.environments.families import Family, find_family, renderers
from lightrl.environments.tool_calls import (
    THINK,
    THOUGHT,
    ToolCallParser,
    format_of,
    split_thinking,
)
from lightrl.errors import ConfigError, LightRLError, first_line
from lightrl.model_files import load_tokenizer, stop_token_ids

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
    """Messages that cannot be made ids; one line that says why."""


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
        self._stops = frozenset(stop_token_ids(str(model_dir), self._tokenizer))
        special = (t.content for t in self._tokenizer.added_tokens_decoder.values() if t.special)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._tool_format = tool_format
        self._parser: ToolCallParser | None = None
        self._kwargs = dict(template_kwargs or {})
        given = self._tokenizer.chat_template or ""
        self._source = "\n".join(given.values()) if isinstance(given, dict) else str(given)
        # roles whose messages can be appended, by `prove`
        self._roles: set[str] = set()
        self._family: Family | None = None
        # the end of the text before a turn, from a tag of thinking on
        self._begun = ""

    def prove(self, tools: Tools, user_turns: bool = True) -> None:
        """Find out what can be appended, before anything else is called. Raises ConfigError, one
        line that says what to do, if user turns cannot, or tool results although there are tools.
        `user_turns` = False: the environment adds nothing but tool results."""
        if not self._source:
            if tools:
                raise ConfigError("tools need a chat template, and the model's tokenizer has none")
            return
        try:
            prompt = self._text([USER], tools)
        except CannotAppend as e:
            raise ConfigError(str(e)) from None
        at = prompt.rfind(THINK)
        if at >= 0 and not prompt[at + len(THINK) :].strip():
            self._begun = prompt[at:]
        self._family = self._find_family(tools)
        reasons: dict[str, str] = {}
        for role in ("tool", "user"):
            if self._family is None or not self._bridges(role, tools):
                reasons[role] = self._reason(role, tools)
            if not reasons.get(role):
                self._roles.add(role)
        if tools and self._text([USER], []) == prompt:
            reasons["tool"] = "has no place for the descriptions of tools"
        for role in (["user"] if user_turns else []) + (["tool"] if tools else []):
            if reason := reasons.get(role):
                raise ConfigError(self._refusal(role, reason, tools))
        if tools:
            self._tool_parser()

    def first(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids of a chat so far, with what begins the model's turn. Raises CannotAppend,
        DataError."""
        plain = [plain_message("the first observation", m) for m in messages]
        if self._source:
            if tools and "tool" not in self._roles:
                raise CannotAppend("the model's chat template cannot append tool results")
            ids = self._ids(self._text(plain, tools))
        else:
            ids = self._ids("".join(m["content"] or "" for m in plain))
            bos = expected_bos(self._tokenizer)
            ids = ids if bos is None or ids[:1] == [bos] else [bos, *ids]
        if not ids:
            raise CannotAppend("the first observation is empty")
        return ids

    def append(
        self, held: Sequence[int], turn_start: int, messages: Sequence[Message], tools: Tools
    ) -> list[int]:
        """Return the ids that follow `held`: what closes the sampled turn held[turn_start:], the
        new messages, and what begins the next turn. A turn that was cut gets its end-of-turn token
        first. Raises CannotAppend, DataError."""
        plain = [plain_message("the observation", m) for m in messages]
        if not self._source:
            return self._ids("".join(m["content"] or "" for m in plain))
        strange = {str(m["role"]) for m in plain} - self._roles
        if strange or not plain:
            raise CannotAppend(
                "the observation has no messages"
                if not plain
                else f"the model's chat template cannot append a message of {sorted(strange)[0]!r}"
            )
        sampled = list(held[turn_start:])
        if self._family is not None:
            bridged = self._family.bridge(list(held[:turn_start]), sampled, plain, tools)
            if bridged is not None:
                return bridged
        close, tail = self._tail(plain, tools)
        return tail if sampled[-1:] == close[-1:] else close + tail

    def parse(self, sampled: Sequence[int], tools: Tools) -> Message:
        """Return the assistant message: role, content, and where there are some reasoning_content
        and tool_calls, whose arguments are a dict. A malformed call stays in the content. Raises
        ConfigError if tools come without a format that is known."""
        ids = list(sampled)
        if ids and ids[-1] in self._stops:
            ids.pop()
        found = None
        if self._family is not None:
            found = self._family.parse(self._ids(self._begun), sampled, tools)
        if found is None:
            thinking, content = split_thinking(self._tokenizer.decode(ids), bool(self._begun))
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

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

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
        try:
            return self._tail_after(results, messages, tools)
        except CannotAppend:
            if len(results) < 2:
                raise
            # as in Llama's templates, which take a single call a turn
            return self._tail_after(results[:1], messages, tools)

    def _tail_after(
        self, results: list[Message], messages: list[Message], tools: Tools
    ) -> tuple[list[int], list[int]]:
        answer = _asks(results) if results else PLAIN
        parts = self._text([USER, answer, *messages], tools).split(ANSWER, len(results) or 1)
        if len(parts) <= len(results):
            raise CannotAppend("the model's chat template leaves out what the model said")
        # Tokens behind a special token do not depend on the text before it.
        ids = self._ids(ANSWER + parts[-1])
        ends = (k for k, i in enumerate(ids) if i in self._stops)
        if (at := next(ends, None)) is None:
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
        asking = [(_asks(RESULTS[:num]), RESULTS[:num]) for num in (1, 2)]
        kinds: list[list[Turn]]
        if role == "tool":
            tools = tools or [TOOL]
            kinds = [[turn] * 2 for asks in asking for turn in self._thoughts(*asks, tools)]
        else:
            kinds = [[turn] * 2 for turn in self._thoughts(PLAIN, [REPLY], tools)]
            if tools and "tool" in self._roles:
                mixed = (turn for asks in asking for turn in self._thoughts(*asks, tools))
                kinds += [[turn, kinds[0][0]] for turn in mixed]
        for kind in kinds:
            for start in ([USER], [SYSTEM, USER]):
                if start[0] is USER or self._takes([SYSTEM, USER], tools):
                    yield start, kind, tools

    def _thoughts(self, answer: Message, messages: list[Message], tools: Tools) -> Iterator[Turn]:
        """The turns of an assistant message without thinking and with it."""
        if not self._takes([USER, answer, *messages], tools):
            if len(messages) == 1:
                yield answer, messages  # refused there
            return  # as by Llama's templates, which take a single call a turn
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
            if self._ids(text)[-len(tail) - 1 :] != [*close[-1:], *tail]:
                return f"writes a {what} in another way later in the conversation"
            if self._tokenizer.decode(tail).count(RESULT) != len(messages):
                return f"leaves out the content of a {what}"
            held = text
        return ""

    def _takes(self, messages: list[Message], tools: Tools) -> bool:
        try:
            return bool(self._text(messages, tools))
        except CannotAppend:
            return False

    def _refusal(self, role: str, reason: str, tools: Tools) -> str:
        fix = "pip install lightrl[renderers], which knows many models"
        if renderers() is not None:
            fix = "the package renderers does not know this one, either"
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

    def _find_family(self, tools: Tools) -> Family | None:
        """Recognise the family by the ids of conversations. Arguments of the template change what
        its families write of earlier turns, so these are compared without them."""
        tools, kwargs = list(tools) or [TOOL], self._kwargs
        starts = [chat for chat in ([USER], [SYSTEM, USER]) if self._takes(chat, tools)]
        begins = [(chat, tools, self._ids(self._text(chat, tools))) for chat in starts]
        self._kwargs = {k: v for k, v in kwargs.items() if k == DATE}
        chats = [
            [*start, *(m for answer, new in turns for m in (answer, *new))]
            for role in ("user", "tool")
            for start, turns, _ in self._rehearsals(role, tools)
        ]
        taken = (chat for chat in chats if self._takes(chat, tools))
        probes = [(chat, tools, self._ids(self._text(chat, tools))) for chat in taken]
        self._kwargs = kwargs
        return find_family(self._tokenizer, kwargs, probes, begins)

    def _bridges(self, role: str, tools: Tools) -> bool:
        """Return whether the family continues each kind of conversation, and whether what it cannot
        continue has a difference."""
        thought = f"{THINKING}\n{THOUGHT}\n\n{ANSWER}"
        said = [thought] if self._begun else [ANSWER, f"{THINK}\n{thought}"]
        for start, turns, given in self._rehearsals(role, tools):
            messages = turns[0][1]
            try:
                prompt, tail = self._ids(self._text(start, given)), self._tail(messages, given)[1]
            except CannotAppend:
                return False
            bridged = (
                self._family and self._family.bridge(prompt, self._ids(text), messages, given)
                for text in said
            )
            if not all(RESULT in self._tokenizer.decode(ids or []) for ids in (tail, *bridged)):
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
