"""The reward's section of a run's config: which functions score a response, and what they run in.

The functions are in rewards/. Must stay importable without torch.
"""

import re
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, field_validator

from lightrl.config.sections import Count, Names, Place, Positive, Seconds, Section
from lightrl.config.values import VERIFIERS, one_or_many

Form = Literal["auto", "verl", "verl_batch", "verl_sequence", "trl", "verifiers"]
Places = Annotated[tuple[Place, ...], BeforeValidator(one_or_many)]
LONGEST_TEST_S = 30.0  # of the reward "code"


class Code(Section):
    """Settings of the reward "code"."""

    partial: bool = False
    """reward the share of tests that pass, not only all of them"""
    memory_mb: Positive = 1024
    """of all processes of a program"""
    disk_mb: Positive = 64
    """of files that a program may write"""
    processes: Positive = 32
    """of a program, threads included"""
    packages: Places = ()
    """folders that programs may import from beside the standard library"""
    unisolated: bool = False
    """run programs without a sandbox, as your user, where the kernel refuses one"""


OF_OWN_FUNCTIONS = ("kwargs", "form")  # keys of [reward]


def is_own_function(name: str) -> bool:
    """Return whether it is a "path.py:function"."""
    return name.rpartition(":")[0].endswith(".py")


class Judge(Section):
    """Settings of the reward "judge"."""

    url: str = ""
    """OpenAI-compatible endpoint, up to its /v1, as http://127.0.0.1:8000/v1"""
    model: str = ""
    """its name there"""
    prompt: str = ""
    """what is asked, with {prompt}, {response} and {answer}; it must ask for a line `Score: X`;
    empty = grade the response by the answer, from 0 to 1"""
    concurrency: Positive = 16
    """concurrent calls, of all workers"""
    retries: Count = 5
    """further tries of a call, after overload"""
    key_env: str = ""
    """variable of the environment that holds its key"""
    options: dict[str, Any] = Field(default_factory=dict)
    """further fields of a request, as max_tokens"""


class Reward(Section):
    functions: Names = ("exact_match",)
    """exact_match, regex, math, code, judge, "verifiers:ENV" or "path.py:function" of your own"""
    weights: tuple[float, ...] = ()
    """one for each function; default all 1"""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """further keyword arguments of every call of your functions that take them, e.g. {max_length =
    2048}"""
    form: Form = "auto"
    """whose arguments your functions get; auto = by the names of their parameters; verl_sequence =
    as in its first versions, the prompt in front of the response"""
    batch: Literal["group", "response"] = "group"
    """what one call of a function of lists (TRL's, verl's batch form) gets: all responses of a
    prompt, once they have finished, or one response, as soon as it has"""
    regex: str = ""
    """pattern of the reward "regex": its first group is compared with the answer; without a group
    it is searched for"""
    source: Literal["kept", "files"] = "kept"
    """of your functions on a resume: as it was when the run began (a copy in RUN_DIR/rewards), or
    as the files are now"""
    workers: Positive = 1
    """reward processes"""
    timeout_s: Seconds = 10.0
    """limit of one call, counted from its start"""
    env: Names = ()
    """variables that the functions need besides the usual ones; "OPENAI_*" works, too"""
    command: tuple[str, ...] = ()
    """put before the command line of a worker: ["bwrap", ...], ["nice", "-n", "5"]"""
    on_failure: float | Literal["skip", "drop"] = "skip"
    """for a response without a score: train its siblings without it, where two are left; drop its
    group; or give it this reward"""

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
