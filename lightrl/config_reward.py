"""The reward's section of a run's config: which functions score a response, and what they run in.

The functions are in rewards/. Must stay importable without torch.
"""

import re
from typing import Any, Literal, cast

from pydantic import Field, field_validator

from lightrl.config_sections import Names, Positive, Seconds, Section
from lightrl.config_values import one_or_many

VERIFIERS = "verifiers:"  # before the name of an environment


class Reward(Section):
    functions: Names = Field(
        default=("exact_match",),
        description='"path.py:function", a built-in name or "verifiers:ENV"',
    )
    weights: tuple[float, ...] = Field(
        default=(), description="one for each function; default all 1"
    )
    batch: Literal["group", "response"] = Field(
        default="group",
        description="what functions of lists get at once (TRL's, verl's batch form): all responses "
        "of a prompt, when they have finished, or each when it has: group, response",
    )
    regex: str = Field(
        default="",
        description='pattern of the reward "regex": its first group is compared with the answer; '
        "without a group it is searched for",
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
    says otherwise."""
    reward, data = tree.get("reward"), tree.get("data", {})
    functions = cast("Any", reward).get("functions") if isinstance(reward, dict) else None
    names = cast("list[Any] | None", one_or_many(functions))
    first = names[0] if isinstance(names, list | tuple) and names else None
    if not isinstance(first, str) or not first.startswith(VERIFIERS) or not isinstance(data, dict):
        return tree
    given = cast("dict[str, Any]", data)
    return tree if "sets" in given else {**tree, "data": {"path": first, **given}}
