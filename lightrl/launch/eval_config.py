"""The config of an evaluation alone: that of a run, without training and without trackers.

Owns what stays of the user's config and what does not. Starts nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrl.config.reward import OF_OWN_FUNCTIONS, is_own_function
from lightrl.config.run_file import load_config, parse_config, toml_value
from lightrl.config.schema import Config
from lightrl.errors import ConfigError
from lightrl.launch.eval_target import EvalTarget

NAME = "eval"  # of the run
# Sections that have their defaults: nothing is saved or paid for, all is on-policy.
_DROPPED = ("checkpoint", "prices", "scale", "async", "round", "offload")


def evaluation(
    target: EvalTarget,
    file: Path | None,
    overrides: Sequence[str],
    names: Sequence[str],
    folder: Path,
) -> Config:
    """Of the sets with these `names`, all without any, in a run directory below `folder`. `file`:
    None = the config of the run that the checkpoint is of. Raises ConfigError, one line."""
    file = file or target.config
    if file is None:
        raise ConfigError(f"{target.path}: is of no run whose config is here; give a CONFIG, too")
    given = load_config(
        file,
        [*overrides, f"eval.checkpoint={toml_value(target.path)}", f"eval.step={target.step}"],
    )
    sets = _chosen(given, file, names)
    tree: dict[str, Any] = given.model_dump(mode="json", exclude_none=True)
    for name in _DROPPED:
        tree.pop(name, None)
    tree["run"] |= {"dir": str(folder), "name": NAME, "bind": "tcp://127.0.0.1:*"}
    tree["checkpoint"] = {"export": "never"}
    tree["journal"] = {"enabled": False}
    tree["node"]["weights_port"] = 0
    tree["weights"] |= {"broadcast": "off", "delta": "off", "canary": 0.0}
    tree["logging"] |= {"backends": ["jsonl"], "prometheus": ""}
    tree["model"] = _model(given, target)
    tree["train"] = _untrained(tree["train"])
    tree["rollout"] |= {"placement": "own", "parallel": []}
    tree["rollout"]["nodes"] = max(1, given.rollout.nodes)
    tree["data"] |= {"path": "", "subset": "", "split": "", "sets": []}
    tree["eval"] |= {"path": "", "sets": sets}
    used = {function for one in sets for function in one["reward"] or given.reward.functions}
    for name in {"code", "judge"} - used:
        tree["reward"].pop(name, None)
    if not any(map(is_own_function, used)):
        for name in OF_OWN_FUNCTIONS:
            tree["reward"].pop(name, None)
    return parse_config(tree)


def _chosen(config: Config, file: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    there = {one.name: one for one in config.eval_sets}
    if not there:
        raise ConfigError(f"{file}: has no set to evaluate on; give eval.path or [[eval.sets]]")
    for name in names:
        if name not in there:
            raise ConfigError(
                f"--set {name}: no such set to evaluate on; there are {', '.join(there)}"
            )
    chosen = [one for name, one in there.items() if not names or name in names]
    return [one.model_dump(mode="json", exclude_none=True) for one in chosen]


def _model(config: Config, target: EvalTarget) -> dict[str, Any]:
    """The model that is evaluated, with the adapters that it has, whatever was to be trained."""
    model: dict[str, Any] = {"path": target.model or config.model.path, "dtype": config.model.dtype}
    if model["dtype"] == "auto" and target.dtype:
        model["dtype"] = target.dtype
    if (adapters := target.adapters) is not None:
        model["lora"] = {
            "rank": adapters.rank,
            "alpha": adapters.alpha,
            "targets": list(adapters.targets),
        }
    return model


def _untrained(train: dict[str, Any]) -> dict[str, Any]:
    """One process reads the weights; the other keys stay, for reward functions that read them."""
    alone = {"nodes": 1, "ranks": 1, "replicas": 1, "devices": [], "offload": "none"}
    return train | alone | {"optim": train["optim"] | {"name": "adamw"}}
