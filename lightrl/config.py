"""The run's configuration: its sections, and which of their values go together.

Knows nothing of what they are used for, nor of files (run_file.py). Must stay importable without
torch.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, Field, model_validator

from lightrl.config_sections import (
    AlgorithmSection,
    AsyncSection,
    Checkpoint,
    Data,
    Eval,
    Journal,
    Logging,
    Model,
    NodeSection,
    Reward,
    Rollout,
    RoundSection,
    Run,
    Section,
    Speculation,
    Train,
    Weights,
)
from lightrl.config_values import not_plain

DEFAULT_TIS_CAP = 2.0  # of asynchronous training


class Config(Section):
    run: Run = Run()
    model: Model
    data: Data
    rollout: Rollout = Rollout()
    train: Train = Train()
    algorithm: AlgorithmSection = AlgorithmSection()
    round: RoundSection = RoundSection()
    async_: AsyncSection = Field(default=AsyncSection(), alias="async")
    speculation: Speculation = Speculation()
    reward: Reward = Reward()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    node: NodeSection = NodeSection()
    weights: Weights = Weights()
    journal: Journal = Journal()
    logging: Logging = Logging()

    @model_validator(mode="before")
    @classmethod
    def _weigh_stale_tokens(cls, tree: Any) -> Any:
        """Asynchronous training has importance weights unless they are refused by name."""
        if not isinstance(tree, dict):
            return tree
        sections = cast("dict[str, Any]", tree)
        asynchronous, algorithm = sections.get("async"), sections.get("algorithm", {})
        if not isinstance(asynchronous, dict) or not isinstance(algorithm, dict):
            return sections
        if cast("dict[str, Any]", asynchronous).get("max_staleness", 0) in (0, "0"):
            return sections
        return {
            **sections,
            "algorithm": {"tis_cap": DEFAULT_TIS_CAP, **cast("dict[str, Any]", algorithm)},
        }

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.run.name == "latest":
            raise ValueError(
                "run.name = 'latest': is the link to the newest run; choose another name"
            )
        if problem := not_plain(self.rollout.engine_args):
            raise ValueError(f"rollout.engine_args: {problem}")
        if self.rollout.engine_args.get("trust_remote_code"):
            raise ValueError(
                "rollout.engine_args: trust_remote_code: LightRL runs no code of a model directory"
            )
        weights, functions = self.reward.weights, self.reward.functions
        if weights and len(weights) != len(functions):
            raise ValueError(
                f"reward.weights: {len(weights)} weights for {len(functions)} reward.functions"
            )
        if not functions:
            raise ValueError("reward.functions: at least one is needed")
        if self.node.lease_s < 2 * self.node.heartbeat_s:
            raise ValueError(
                f"node.lease_s = {self.node.lease_s}: must be at least twice "
                f"node.heartbeat_s = {self.node.heartbeat_s}, or healthy nodes are lost"
            )
        return self

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        prompts, responses = self.train.prompts_per_step, self.rollout.group_size
        mode = self.round.tail_batching
        if mode != "off" and self.launched == (prompts, responses):
            raise ValueError(
                f"round.eta = {self.round.eta}: with round.tail_batching = {mode!r} this "
                f"over-provisions nothing: {prompts} prompts x {responses} responses are needed "
                "and launched; raise it"
            )
        if self.train.engine == "emulated" and self.rollout.engine != "emulated":
            raise ValueError(
                f"rollout.engine = {self.rollout.engine!r}: only 'emulated' can load what "
                "train.engine = 'emulated' publishes, which is no model"
            )
        if self.weights.broadcast == "always" and self.rollout.engine == "emulated":
            raise ValueError(
                "weights.broadcast = 'always': rollout.engine = 'emulated' has no memory to "
                "receive weights in; leave it out"
            )
        if self.async_.max_staleness and not self.algorithm.tis_cap:
            raise ValueError(
                f"algorithm.tis_cap = 0: async.max_staleness = {self.async_.max_staleness} trains "
                "tokens of older versions, which is biased without importance weights; leave it "
                "out"
            )
        limit = self.rollout.max_response_length
        if self.algorithm.overlong_buffer > limit:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.algorithm.overlong_buffer}: is more than "
                f"rollout.max_response_length = {limit}"
            )
        if self.algorithm.dynamic_sampling and (responses == 1 or self.rollout.temperature == 0):
            equal = f"group_size = {responses}" if responses == 1 else "temperature = 0"
            raise ValueError(
                f"algorithm.dynamic_sampling = true: with rollout.{equal} the rewards of a group "
                "are always equal, so that every group would be replaced"
            )
        return self

    @model_validator(mode="after")
    def _devices(self) -> Self:
        for key, devices in (
            ("train.devices", self.train.devices),
            ("rollout.devices", self.rollout.devices),
        ):
            twice = [d for d in devices if devices.count(d) > 1]
            if twice:
                raise ValueError(f"{key} = {list(devices)}: names GPU {twice[0]} twice")
        if self.train.devices and len(self.train.devices) != self.train.ranks:
            raise ValueError(
                f"train.devices = {list(self.train.devices)}: one GPU for each of train.ranks = "
                f"{self.train.ranks} is needed"
            )
        size = self.gpus_per_engine
        if len(self.rollout.devices) % size:
            raise ValueError(
                f"rollout.devices = {list(self.rollout.devices)}: an engine takes {size} GPUs "
                "(tensor_parallel_size of rollout.engine_args), so a multiple of that is needed"
            )
        return self

    @property
    def gpus_per_engine(self) -> int:
        sizes = map(
            self.rollout.engine_args.get, ("tensor_parallel_size", "pipeline_parallel_size")
        )
        return math.prod(n for n in sizes if isinstance(n, int) and n > 0)

    @property
    def launched(self) -> tuple[int, int]:
        """Prompts of a short round, and responses of each."""
        prompts, responses = self.round.etas
        return round(prompts * self.train.prompts_per_step), round(
            responses * self.rollout.group_size
        )

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @property
    def speculates(self) -> bool:
        """How much is drafted depends on the clock, and so do the shapes of batches and their
        rounding."""
        return self.speculation.enabled and not self.run.deterministic

    @property
    def broadcast(self) -> Literal["auto", "always", "off"]:
        """`weights.broadcast` as far as it acts. An asynchronous run has other idle nodes at each
        boundary: a group would form for each version, and the trainer wait for it, while busy nodes
        that pull go on."""
        mode = self.weights.broadcast
        return "off" if mode == "auto" and self.async_.max_staleness else mode

    @property
    def max_model_length(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.data.max_prompt_length + self.rollout.max_response_length


SECTIONS = tuple(info.alias or name for name, info in Config.model_fields.items())


def keys() -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, description) of every key, in file order: the config reference."""
    yield from _keys(Config, "")


def _keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for attribute, info in section.model_fields.items():
        kind, name = info.annotation, info.alias or attribute
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            default = (
                "(required)"
                if info.is_required()
                else json.dumps(info.get_default(call_default_factory=True))
            )
            yield f"{prefix}{name}", default, info.description or ""
