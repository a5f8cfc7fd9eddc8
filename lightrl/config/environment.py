"""The section `environment` of a config: where episodes of several turns come from."""

from typing import Any, Literal, cast

from pydantic import Field

from lightrl.config.sections import Count, Names, Positive, Seconds, Section
from lightrl.config.values import TASKS, VERIFIERS

PROGRAMS = 16  # processes of agents on a node


class McpSection(Section):
    """A table of `environment.mcp`."""

    command: Names = ()
    """program and arguments of a server over stdio"""
    url: str = ""
    """of a server over HTTP, in place of a command"""
    per_episode: bool = False
    """each episode has a server of its own; else those of a worker share one"""


class Environment(Section):
    source: str = ""
    """FILE.py:CLASS or package.module:CLASS with reset and step, or a name for an adapter:
    gym:ID, textarena:ID, reasoning_gym:TASK, skyrl:CLASS, trl:CLASS, verifiers:ENVIRONMENT; empty
    = single turns, unless there are tools"""
    args: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments of the class"""
    tools: Names = ()
    """functions that the model may call, FILE.py:FUNCTION or package.module:FUNCTION; their types
    and docstrings describe them"""
    mcp: tuple[McpSection, ...] = ()
    """servers whose tools the model may call"""
    program: str = ""
    """command line of an agent, started for each episode, which talks to the endpoint of its
    environment node; {column} is what the row has there"""
    endpoint: str = ""
    """HOST:PORT where agents reach an environment node, * = any port; by default that of loopback;
    without a program, agents open sessions there with the environment key"""
    tool_format: str = "auto"
    """how the model writes tool calls: a name of vLLM's parsers; auto = by the chat template"""
    command: Names = ()
    """interpreter of the workers, with options: environments may need packages that conflict with
    LightRL's; default: this one. `program` finds its folder in PATH"""
    workers: Count = 2
    """worker processes of the node that `lightrl up` starts here; 0 = environment nodes join"""
    slots: Positive = Field(default=512, le=1 << 16)
    """episodes that an environment node holds at most; 16 by default if each is a program"""
    episodes: Count = 0
    """open at the same time; 0 = computed from the measured times of turns and environments"""
    timeout_s: Seconds = 60.0
    """of one reset or step; the worker is then killed"""
    max_turns: Positive = 16
    """turns of an episode"""
    max_turn_length: Count = 0
    """sampled tokens of one turn; 0 = rollout.max_response_length, which limits those of an episode
    in any case"""
    max_length: Count = 0
    """tokens of an episode with its observations; 0 = data.max_prompt_length +
    rollout.max_response_length"""
    resume: Literal["replay", "snapshot", "once"] = "replay"
    """what happens to an episode whose environment is lost: it is reset and stepped again through
    the recorded turns; it is loaded from what `save` returned; or it gets no score"""
    tasks: Positive = 1000
    """rows {"index": k} that are made to train on where there is no data.path"""
    eval_tasks: Count = 0
    """further rows, which are made to evaluate on; 0 = none"""

    @property
    def enabled(self) -> bool:
        return bool(self.has_first_messages or self.tools or self.mcp)

    @property
    def named(self) -> str:
        """What it is called in messages."""
        which = self.source or self.program or ", ".join(self.tools)
        return which or ("environment.endpoint" if self.endpoint else "environment.mcp")

    @property
    def has_first_messages(self) -> bool:
        """An episode does not begin with the prompt of its row."""
        return bool(self.source) or self.has_agents

    @property
    def has_agents(self) -> bool:
        """Programs talk to the endpoint, and call no environment."""
        return bool(self.program or self.endpoint)

    @property
    def may_have_agents(self) -> bool:
        """Of verifiers, environments are programs since release 0.4."""
        return self.has_agents or self.source.startswith(VERIFIERS)


def completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill in what follows from an environment: it gives the reward unless there are functions, and
    its rows are made unless there are data."""
    tables: list[Any] = [tree.get(name, {}) for name in ("environment", "reward", "data", "eval")]
    if not all(isinstance(table, dict) for table in tables):
        return tree  # validation refuses it
    environment, reward, data, evaluation = cast("list[dict[str, Any]]", tables)
    if not any(environment.get(key) for key in ("source", "tools", "mcp", "program", "endpoint")):
        return tree
    if environment.get("program"):
        tree = {**tree, "environment": {"slots": PROGRAMS, **environment}}
    tree = {**tree, "reward": {"functions": [], **reward}}
    fields = Environment.model_fields
    num, more = (environment.get(key, fields[key].default) for key in ("tasks", "eval_tasks"))
    are_numbers = isinstance(num, int) and isinstance(more, int)
    makes_rows = any(environment.get(key) for key in ("source", "program", "endpoint"))
    if are_numbers and makes_rows and _has_no_data(data):
        if not evaluation.get("checkpoint"):
            tree["data"] = {**data, "path": f"{TASKS}0-{num - 1}"}
        if _has_no_data(evaluation):
            path = f"{TASKS}{num}-{num + more - 1}" if more else ""
            tree["eval"] = {**evaluation, "path": path}
    return tree


def split_endpoint(endpoint: str) -> tuple[str, int] | None:
    """Return host and port of `environment.endpoint`, 0 = any port; None if it is malformed."""
    host, colon, port = (endpoint or "127.0.0.1:*").rpartition(":")
    port = "0" if port == "*" else port
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        return None
    return host.strip("[]"), int(port)


def _has_no_data(section: dict[str, Any]) -> bool:
    """Return whether a section names no rows but those that are made."""
    return not section.get("sets") and str(section.get("path") or TASKS).startswith(TASKS)
