"""Families of models that the package `renderers` supports, an optional extra.

A model's name does not determine its chat template, so a family is recognised by what it writes. It
keeps earlier thinking, whatever the template does. Raises nothing of the package's: what it cannot
do is None.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias, get_args

from lightrl.data.template import DATE
from lightrl.environments.tool_calls import PARSER_ERRORS, Call, is_table

Messages: TypeAlias = Sequence[dict[str, Any]]


def renderers() -> Any:
    """Return the package; None if it is not installed."""
    try:
        return import_module("renderers")
    except ImportError:
        return None


class Family:
    """A renderer of the package."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def first(self, messages: Messages, tools: Messages) -> list[int] | None:
        """Return the ids of a chat, with what begins the model's turn."""
        act = self._renderer.render_ids
        return self._ids(act, messages, tools=list(tools) or None, add_generation_prompt=True)

    def bridge(
        self, prompt: list[int], sampled: list[int], messages: Messages, tools: Messages
    ) -> list[int] | None:
        """Return the ids that follow prompt + sampled; None if the family cannot append, as after a
        turn that ended within a thought."""
        act, held = self._renderer.bridge_to_next_turn, prompt + sampled
        ids = self._ids(act, prompt, sampled, messages, tools=list(tools) or None)
        return ids[len(held) :] if ids and ids[: len(held)] == held else None

    def parse(
        self, prompt: list[int], sampled: Sequence[int], tools: Messages
    ) -> tuple[str | None, str, list[Call]] | None:
        """Return (thinking, content, tool calls); None if a call is malformed. `prompt`: the end of
        the prompt, from a tag of thinking on."""
        try:
            found = self._renderer.parse_response(
                list(sampled), tools=list(tools) or None, prompt_ids=prompt or None
            )
        except PARSER_ERRORS:
            return None
        if not all(c.status == "ok" and is_table(c.arguments) for c in found.tool_calls):
            return None
        calls = [(call.id or "", call.name, call.arguments) for call in found.tool_calls]
        return found.reasoning_content, found.content, calls

    def _ids(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> list[int] | None:
        try:
            given = act(*args, **kwargs)
        except PARSER_ERRORS:
            return None
        return list(getattr(given, "token_ids", given) or [])


def families(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> Iterator[Family]:
    """Yield all that can be made of a tokenizer; none without the package."""
    if (package := renderers()) is None:
        return
    kwargs = {k: v for k, v in template_kwargs.items() if k != DATE}
    for config in get_args(get_args(package.RendererConfig)[0]):
        if config.model_fields["name"].default not in ("auto", "default", "custom"):
            try:
                keeping = config(thinking_retention="all")
                made = package.create_renderer(tokenizer, keeping, chat_template_kwargs=kwargs)
            except PARSER_ERRORS:
                continue
            yield Family(made)
