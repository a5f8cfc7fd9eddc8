"""The section `environment` of a config: where episodes of several turns come from."""

from typing import Any, Literal

from pydantic import Field

from lightrl.config.sections import Count, Names, Positive, Seconds, Section


class McpServer(Section):
    """A table of `environment.mcp`."""

    command: Names = ()
    """program and arguments of a server over stdio"""
    url: str = ""
    """of a server over HTTP, in place of a command"""
    per_episode: bool = False
    """each episode has a server of its own; else those of a worker share one"""


class Environment(Section):
    source: str = ""
    """FILE.py:CLASS or package.module:CLASS with reset and step, or one that an adapter knows:
    gym:ID, textarena:ID, reasoning_gym:TASK, skyrl:CLASS, trl:CLASS, verifiers:ENVIRONMENT; empty
    = single turns, unless there are tools"""
    args: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments of the class"""
    tools: Names = ()
    """functions that the model may call, FILE.py:FUNCTION or package.module:FUNCTION; their types
    and docstrings describe them"""
    mcp: tuple[McpServer, ...] = ()
    """servers whose tools the model may call"""
    tool_format: str = "auto"
    """how the model writes tool calls, a name of vLLM's tool parsers; auto = by the template"""
    command: Names = ()
    """interpreter of the workers, with options: environments may need packages that conflict with
    LightRL's; default: this one"""
    workers: Count = 2
    """worker processes of the environment node that `lightrl up` starts here; 0 = none, such nodes
    join"""
    slots: Positive = Field(default=512, le=1 << 16)
    """episodes that an environment node holds at most"""
    episodes: Count = 0
    """open at once; 0 = as many as keep the engines busy, from measured times"""
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
    """rows {"index": k} that are made where there is no data.path"""

    @property
    def enabled(self) -> bool:
        return bool(self.source or self.tools or self.mcp)
