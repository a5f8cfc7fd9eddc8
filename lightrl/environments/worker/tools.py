"""Tools that the model calls: functions of the run, and those of MCP servers.

Owns what a call answers. Whatever a tool does wrong is a text for the model, "error: ..."; only a
server that cannot be started again raises, since that is no answer.

Plain functions are called one at a time while the event loop does not run, so that they can use
`asyncio.run`, signals and `redirect_stdout`; asynchronous ones and servers overlap.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightrl.environments.worker.base import Message, Observation, ToolSchema, UserError
from lightrl.environments.worker.frames import log_traceback
from lightrl.environments.worker.load import import_object
from lightrl.environments.worker.mcp_servers import McpServer
from lightrl.environments.worker.schemas import ArgumentError, describe, fit

MAX_RESULT = 1 << 16  # characters of a result
_ERROR = "error: "


class FunctionTool:
    """A function of the user, "FILE.py:FUNCTION" or "package.module:FUNCTION"."""

    def __init__(self, reference: str) -> None:
        """Raises UserError, one line."""
        self.named = f"environment.tools: {reference}"
        try:
            self._function = import_object(reference)
        except (Exception, SystemExit) as e:
            kind = "" if isinstance(e, UserError) else f"cannot be imported: {type(e).__name__}: "
            raise UserError(f"{self.named}: {kind}{e}") from e
        if not inspect.isroutine(self._function):
            raise UserError(f"{self.named}: is no function")
        self.is_plain = not inspect.iscoroutinefunction(inspect.unwrap(self._function))
        name = reference.rpartition(":")[2]
        self.schema, self._hints = describe(self._function, name, self.named)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Raises ArgumentError, and what the function raises."""
        result = self._function(**fit(arguments, self.schema, self._hints))
        if not self.is_plain:
            result = await result
        elif inspect.isawaitable(result):
            raise TypeError(f"{name} returned an awaitable, but is no `async def`")
        if isinstance(result, str):
            return result
        return json.dumps(result, ensure_ascii=False, default=str)


Source: TypeAlias = FunctionTool | McpServer


@dataclass(frozen=True)
class ToolBox:
    """The tools of a worker or, where servers are `per_episode`, of one episode. Always `close`."""

    schemas: list[ToolSchema]
    sources: dict[str, Source]  # by name of the tool
    owned: Sequence[McpServer]  # `close` ends them
    limit_s: float  # of a call

    def for_episode(self) -> "ToolBox":
        """The same tools, with servers of its own where they are `per_episode`; those start at
        the first call."""
        own: dict[Source, McpServer] = {}
        for source in self.sources.values():
            if isinstance(source, McpServer) and source.table.get("per_episode"):
                own.setdefault(source, McpServer(source.table, source.limit_s))
        sources = {name: own.get(source, source) for name, source in self.sources.items()}
        return ToolBox(self.schemas, sources, [*own.values()], self.limit_s)

    def is_plain(self, name: str) -> bool:
        """Return whether `call` needs no event loop."""
        return name not in self.sources or self.sources[name].is_plain

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the result as text, at most MAX_RESULT characters.

        Raises UserError, one line, if a server cannot be started again.
        """
        work = self._answer(name, arguments)
        try:
            text = await (work if self.is_plain(name) else asyncio.wait_for(work, self.limit_s))
        except asyncio.TimeoutError:  # noqa: UP041, in Python 3.10 it is no TimeoutError
            text = f"{_ERROR}{name} gave no result within {self.limit_s:g} s"
        text = text.encode(errors="replace").decode()  # halves of surrogate pairs
        if len(text) > MAX_RESULT:
            text = f"{text[:MAX_RESULT]}\n[cut: the result has {len(text)} characters]"
        return text

    async def _answer(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self.sources:
            return f"{_ERROR}no tool {name!r}; there are: {', '.join(self.sources)}"
        try:
            return await self.sources[name].call(name, arguments)
        except UserError:
            raise
        except (Exception, SystemExit) as e:  # noqa: BLE001 - user code may raise anything
            if not isinstance(e, ArgumentError):
                log_traceback(e)
            return f"{_ERROR}{type(e).__name__}: {e}"

    async def close(self) -> None:
        """End the servers."""
        await asyncio.gather(*(server.close() for server in self.owned))


async def load_tools(
    references: Sequence[str], mcp: Sequence[Mapping[str, Any]] = (), limit_s: float = 60.0
) -> ToolBox:
    """Import the functions and start the servers, tables {"command", "url", "per_episode"}.

    `limit_s`: of a call; less than that of a step, so that a call that hangs costs no worker.
    Raises UserError, one line.
    """
    functions = [FunctionTool(reference) for reference in references]
    servers = [McpServer(table, limit_s) for table in mcp]
    found: list[tuple[ToolSchema, Source]] = [(each.schema, each) for each in functions]
    box = ToolBox([], {}, servers, limit_s)
    try:
        for server, schemas in zip(servers, await asyncio.gather(*(s.start() for s in servers))):  # noqa: B905
            found += [(schema, server) for schema in schemas]
        for schema, source in found:
            name = schema["function"]["name"]
            if name in box.sources:
                raise UserError(f"{source.named}: there is another tool {name!r}")
            box.sources[name] = source
            box.schemas.append(schema)
    except BaseException:
        await box.close()
        raise
    # one of an episode has only listed its tools
    await asyncio.gather(*(s.close() for s in servers if s.table.get("per_episode")))
    return box


class ToolEpisode:
    """An episode without an environment of its own: the model calls tools until it answers
    without a call. Reward functions score it."""

    def __init__(self, tools: ToolBox, prompt_key: str = "prompt") -> None:
        self.tools = tools.for_episode()
        self._prompt_key = prompt_key
        self._num_errors = 0

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Return the row's prompt, messages or text. Raises UserError."""
        prompt = row.get(self._prompt_key)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not prompt or not isinstance(messages, list):
            raise UserError(f"its column {self._prompt_key!r} has neither text nor messages")
        return Observation(messages)

    def step(self, message: Message) -> Observation | Awaitable[Observation]:
        """Call the tools of a turn: plain functions now, the others then all at once. A turn
        without calls ends the episode."""
        calls = message.get("tool_calls") or []
        if not calls:
            return Observation([], done=True)
        answers = [self._answer(call) for call in calls]
        are_plain = [self.tools.is_plain(call["function"]["name"]) for call in calls]
        begun: list[Any] = [_result(a) if p else a for a, p in zip(answers, are_plain, strict=True)]
        return self._observed(begun) if all(are_plain) else self._awaited(begun)

    async def _awaited(self, begun: list[Any]) -> Observation:
        later = iter(await asyncio.gather(*filter(inspect.isawaitable, begun)))
        return self._observed([next(later) if inspect.isawaitable(a) else a for a in begun])

    def _observed(self, answers: list[Message]) -> Observation:
        self._num_errors += sum(each["content"].startswith(_ERROR) for each in answers)
        metrics = {"tool_errors": float(self._num_errors)}
        return Observation(answers, metrics=metrics, num_tool_calls=len(answers))

    async def _answer(self, call: dict[str, Any]) -> Message:
        name, call_id = call["function"]["name"], call.get("id", "")
        text = await self.tools.call(name, call["function"]["arguments"])
        return {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}

    async def close(self) -> None:
        await self.tools.close()


def _result(work: Coroutine[Any, Any, Message]) -> Message:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as returned:
        return returned.value
    raise AssertionError("a plain function waits")
