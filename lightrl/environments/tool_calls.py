"""Assistant messages from the text that a model sampled: its thinking and its tool calls.

The format of tool calls is a name of vLLM's tool parsers (`environment.tool_format`). "hermes" is
read here, so that Qwen models need no vLLM on an environment node; importing vLLM takes seconds.
Owns no tokenizer and renders nothing.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from lightrl.errors import ConfigError, first_line

HERMES = "hermes"
# Text of a chat template, and the format of tool calls that follows. The first match counts.
FORMATS = (
    (r"<function=", "qwen3_coder"),
    (r"<arg_key>", "glm45"),
    (r"<tool_call>", HERMES),
    (r"<\|tool_call>call:", "gemma4"),
    (r"<\|tool_(call|list)_start\|>", "lfm2"),
    (r"(?s)<｜tool▁calls▁begin｜>.*```json", "deepseek_v3"),
    (r"<｜tool▁calls▁begin｜>", "deepseek_v31"),
    (r"<\|tool_calls_section_begin\|>", "kimi_k2"),
    (r"<minimax:tool_call>", "minimax_m2"),
    (r"<seed:tool_call>", "seed_oss"),
    (r"<atem:function_calls>", "muse_glimmer"),
    (r"<\|START_ACTION\|>", "cohere_command3"),
    (r"<function_calls>", "olmo3"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"functools\[", "phi4_mini_json"),
    (r"<\|start\|>.*<\|channel\|>", "openai"),
    (r"ipython", "llama3_json"),
)
# Of vLLM's parsers, which raise whatever their text makes them raise.
PARSER_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
PARSER_ERRORS += (AssertionError, OSError)
BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
THINK, THOUGHT = "<think>", "</think>"

# (id or "", name, arguments); an id is kept only if the model wrote it
Call: TypeAlias = tuple[str, str, dict[str, Any]]


def split_thinking(text: str, begins_inside: bool) -> tuple[str | None, str]:
    """Return (thinking or None, answer). `begins_inside`: the prompt ends within a thought. A
    thought that does not end leaves no answer; thoughts after the first are part of the answer."""
    bare = text.lstrip()
    if bare.startswith(THINK):
        bare, begins_inside = bare.removeprefix(THINK), True
    thought, end, answer = bare.partition(THOUGHT)
    if not begins_inside and (not end or THINK in thought):
        return None, text
    return thought.strip("\n"), answer.lstrip("\n")


def format_of(template: str) -> str:
    """Return the format of tool calls that a chat template prescribes. Raises
    ConfigError if there is none that is known."""
    for pattern, name in FORMATS:
        if re.search(pattern, template):
            return name
    raise ConfigError(
        "environment.tool_format = 'auto': the model's chat template does not tell how the model "
        "writes tool calls; set environment.tool_format to the name of one of vLLM's tool parsers"
    )


class ToolCallParser:
    """Finds tool calls in a text. Making one imports vLLM, unless the format is hermes."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Raises ConfigError if there is no such parser here."""
        self._name, self._tokenizer = name, tokenizer
        # what the parser was made for, and the parser with its request
        self._made: tuple[Any, Any, Any] = (None, None, None)
        if name != HERMES:
            self._parsers = _vllm_parsers(name)
            try:
                self._vllm("", [])
            except PARSER_ERRORS as e:
                raise ConfigError(
                    f"environment.tool_format = {name!r}: vLLM's parser cannot be used: "
                    f"{first_line(e)}; pip install lightrl[renderers] may know the model"
                ) from None

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[Call]]:
        """Return (text before the calls, calls). If one call is malformed, there are none and the
        text is the whole one."""
        try:
            content, found = self._hermes(text) if self._name == HERMES else self._vllm(text, tools)
        except PARSER_ERRORS:
            return text, []
        if not found or not all(n and isinstance(n, str) and is_table(a) for _, n, a in found):
            return text, []
        return content.rstrip(), found

    def _hermes(self, text: str) -> tuple[str, list[Call]]:
        found = [json.loads(block[1]) for block in BLOCK.finditer(text)]
        content = text.partition("<tool_call>")[0]
        return content, [("", call["name"], call.get("arguments", {})) for call in found]

    def _vllm(self, text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[Call]]:
        if tools != self._made[0]:
            self._made = (tools, *self._vllm_parser(tools))
        _, parser, request = self._made
        found = parser.extract_tool_calls(text, request)
        if not found.tools_called:
            return text, []
        calls: list[Call] = []
        for call in found.tool_calls:
            # most ids are drawn at random, and a replay must find the same
            id = call.id if call.id and call.id in text else ""
            calls.append((id, call.function.name, json.loads(call.function.arguments or "{}")))
        return found.content or "", calls

    def _vllm_parser(self, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        asked = {"messages": [], "model": "", "tools": tools or None}
        request = ChatCompletionRequest.model_validate(asked)
        try:
            return self._parsers(self._tokenizer, request.tools), request
        except TypeError:  # parsers of some releases take the tools from the request alone
            return self._parsers(self._tokenizer), request


def is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _vllm_parsers(name: str) -> Any:
    """Return the class of a parser. Raises ConfigError."""
    try:
        from vllm.tool_parsers import ToolParserManager

        return ToolParserManager.get_tool_parser(name)
    except ImportError:
        raise ConfigError(
            f"environment.tool_format = {name!r} is a parser of vLLM, which is not installed here; "
            "pip install vllm or lightrl[renderers]; only 'hermes' needs neither"
        ) from None
    except KeyError:
        raise ConfigError(
            f"environment.tool_format = {name!r}: this release of vLLM has no such tool parser; "
            f"it has {', '.join(ToolParserManager.list_registered())}"
        ) from None
