"""The reward's section of a run's config: which functions score a response, and what they run in.

The functions are in rewards/. Must stay importable without torch.
"""

import re
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, field_validator

from lightrl.config.sections import Names, Place, Positive, Seconds, Section
from lightrl.config.values import VERIFIERS, one_or_many

Form = Literal["auto", "verl", "verl_batch", "verl_sequence", "trl", "verifiers"]
Places = Annotated[tuple[Place, ...], BeforeValidator(one_or_many)]
LONGEST_TEST_S = 30.0  # of the reward "code"


class Code(Section):
    """Of the reward "code"."""

    partial: bool = Field(
        default=False,
        description="reward the share of tests that pass, not only all of them",
    )
    memory_mb: Positive = Field(default=1024, description="of all processes of a program")
    disk_mb: Positive = Field(default=64, description="of files that a program may write")
    processes: Positive = Field(default=32, description="of a program, threads included")
    packages: Places = Field(
        default=(), description="folders that programs may import from beside the standard library"
    )
    unisolated: bool = Field(
        default=False,
        description="run programs without a sandbox, as your user, where the kernel refuses one",
    )


OF_OWN_FUNCTIONS = ("kwargs", "form")  # keys of [reward]


def is_own_function(name: str) -> bool:
    """Whether it is a "path.py:function"."""
    return name.rpartition(":")[0].endswith(".py")


class Judge(Section):
    """Of the reward "judge"."""

    url: str = Field(
        default="",
        description='OpenAI-compatible endpoint, up to its /v1: "http://127.0.0.1:8000/v1"',
    )
    model: str = Field(default="", description="its name there")
    prompt: str = Field(
        default="",
        description="what is asked, with {prompt}, {response} and {answer}; it must ask for a line "
        "`Score: X`; empty = grade the response by the answer, from 0 to 1",
    )
    concurrency: Positive = Field(default=16, description="calls under way at once, of all workers")
    retries: int = Field(default=5, ge=0, description="further tries of a call, after overload")
    key_env: str = Field(default="", description="variable of the environment that holds its key")
    options: dict[str, Any] = Field(
        default_factory=dict, description="further fields of a request, as max_tokens"
    )


class Reward(Section):
    functions: Names = Field(
        default=("exact_match",),
        description='"path.py:function", a built-in name or "verifiers:ENV"',
    )
    weights: tuple[float, ...] = Field(
        default=(), description="one for each function; default all 1"
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="further keyword arguments of every call of your functions that take them, "
        "e.g. {max_length = 2048}",
    )
    form: Form = Field(
        default="auto",
        description="whose arguments your functions get; auto = by the names of their parameters; "
        "verl_sequence = as in its first versions, the prompt in front of the response",
    )
    batch: Literal["group", "response"] = Field(
        default="group",
        description="what functions of lists (TRL's, verl's batch form) get at once: all responses "
        "of a prompt, once they have finished, or each as soon as it has",
    )
    regex: str = Field(
        default="",
        description='pattern of the reward "regex": its first group is compared with the answer; '
        "without a group it is searched for",
    )
    source: Literal["kept", "files"] = Field(
        default="kept",
        description="of your functions on a resume: as it was when the run began (a copy in "
        "RUN_DIR/rewards), or as the files are now",
    )
    workers: Positive = Field(default=1, description="reward processes")
    timeout_s: Seconds = Field(
        default=10.0, description="limit of one call, counted from its start"
    )
    env: Names = Field(
        default=(),
        description='variables that the functions need besides the usual ones; "OPENAI_*" '
        "works, too",
    )
    command: tuple[str, ...] = Field(
        default=(),
        description='put before the command line of a worker: ["bwrap", ...], ["nice", "-n", "5"]',
    )
    on_failure: float | Literal["skip", "drop"] = Field(
        default="skip",
        description="for a response without a score: train its siblings without it, where two are "
        "left; drop its group; or give it this reward",
    )

    code: Code = Code()
    judge: Judge = Judge()

    @property
    def environment(self) -> tuple[str, ...]:
        """Variables that workers see beside the usual ones."""
        return (*self.env, self.judge.key_env) if self.judge.key_env else self.env

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as e:
            raise ValueError(f"reward.regex = {value!r}: is no regular expression: {e}") from None
        return value


def with_environment(tree: dict[str, Any]) -> dict[str, Any]:
    """A config whose reward is an environment of `verifiers` has the environment's data, unless it
    names other data."""
    reward, data = tree.get("reward"), tree.get("data", {})
    functions = cast("Any", reward).get("functions") if isinstance(reward, dict) else None
    names = cast("list[Any] | None", one_or_many(functions))
    first = names[0] if isinstance(names, list | tuple) and names else None
    if not isinstance(first, str) or not first.startswith(VERIFIERS) or not isinstance(data, dict):
        return tree
    given = cast("dict[str, Any]", data)
    return tree if "sets" in given else {**tree, "data": {"path": first, **given}}
