"""Families of models that the package `renderers` knows, an optional extra.

A model's name says little about its chat template, so a family is recognised by its tokens: those
of the template, for conversations of every kind. Earlier thinking stays, whatever the template does
with it. Raises nothing of the package's: what it cannot do is None.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias, get_args

from lightrl.data.template import DATE
from lightrl.environments.tool_calls import PARSER_ERRORS, Call, is_table

# (messages, tools, ids)
Probe: TypeAlias = tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]


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

    def bridge(
        self,
        prompt: list[int],
        sampled: list[int],
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        """Return the ids that follow prompt + sampled; None if the family cannot tell, as after a
        turn that ended within a thought."""
        try:
            given = self._renderer.bridge_to_next_turn(
                prompt, sampled, messages, tools=list(tools) or None
            )
        except PARSER_ERRORS:
            return None
        ids = list(getattr(given, "token_ids", given) or [])
        num = len(prompt) + len(sampled)
        return ids[num:] if len(ids) > num and ids[:num] == prompt + sampled else None

    def parse(
        self, prompt: list[int], sampled: Sequence[int], tools: Sequence[dict[str, Any]]
    ) -> tuple[str | None, str, list[Call]] | None:
        """Return (thinking, content, tool calls); None if a call is malformed. `prompt`: the end of
        the prompt, from a tag of thinking on."""
        try:
            found = self._renderer.parse_response(
                list(sampled), tools=list(tools) or None, prompt_ids=prompt or None
            )
        except PARSER_ERRORS:
            return None
        calls = [(call.id or "", call.name, call.arguments) for call in found.tool_calls]
        if not all(c.status == "ok" and is_table(c.arguments) for c in found.tool_calls):
            return None
        return found.reasoning_content, found.content, calls


def find_family(
    tokenizer: Any, template_kwargs: Mapping[str, Any], probes: list[Probe], begins: list[Probe]
) -> Family | None:
    """Return the family that gives the ids of every probe, and with `template_kwargs` those of
    `begins`, which hold no turn of the model."""
    if (package := renderers()) is None:
        return None
    kwargs = {k: v for k, v in template_kwargs.items() if k != DATE}
    for config in get_args(get_args(package.RendererConfig)[0]):
        if config.model_fields["name"].default in ("auto", "default", "custom"):
            continue
        try:
            if not _gives(package.create_renderer(tokenizer, config()), probes):
                continue
            keeping = config(thinking_retention="all")
            renderer = package.create_renderer(tokenizer, keeping, chat_template_kwargs=kwargs)
            if _gives(renderer, begins):
                return Family(renderer)
        except PARSER_ERRORS:
            continue
    return None


def _gives(renderer: Any, probes: list[Probe]) -> bool:
    return bool(probes) and all(
        renderer.render_ids(messages, tools=tools, add_generation_prompt=True) == ids
        for messages, tools, ids in probes
    )
