"""The config of an evaluation alone: that of a run, without training and trackers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrl.config.reward import OF_OWN_FUNCTIONS, is_own_function
from lightrl.config.run_file import load_config, parse_config, toml_value
from lightrl.config.schema import Config
from lightrl.errors import ConfigError
from lightrl.launch.evaluation.target import EvalTarget

# Sections that get their defaults: nothing is paid for, everything is on-policy.
DROPPED = ("prices", "scale", "async", "round", "offload")


def evaluation(
    target: EvalTarget,
    file: Path | None,
    overrides: Sequence[str],
    names: Sequence[str],
    folder: Path,
) -> Config:
    """Return the config of a run below `folder` that evaluates the sets with these `names`, or all.
    `file`: None = the config of the checkpoint's run. Raises ConfigError, one line."""
    file = file or target.config
    if file is None:
        raise ConfigError(f"{target.path}: the config of its run is not here; give a CONFIG, too")
    given = load_config(file, [*overrides, *_at(target)])
    return _of_weights(given, target, _chosen(given, file, names), folder)


def serving(target: EvalTarget, overrides: Sequence[str], folder: Path) -> Config:
    """Return the config of engines that serve the target, which evaluates nothing: that of its run,
    else the defaults with the target as the model. Raises ConfigError, one line."""
    file = target.config
    if file is None:
        base = target.adapters.base if target.adapters else ""
        if not (model := target.model or base):
            raise ConfigError(f"{target.path}: the config of its run is not here, nor its model")
        file = folder / "defaults.toml"
        file.write_text(f"[model]\npath = {toml_value(model)}\n", encoding="utf-8")
    return _of_weights(load_config(file, [*overrides, *_at(target)]), target, [], folder)


def _at(target: EvalTarget) -> tuple[str, str]:
    return f"eval.checkpoint={toml_value(target.path)}", f"eval.step={target.step}"


def _of_weights(
    given: Config, target: EvalTarget, sets: list[dict[str, Any]], folder: Path
) -> Config:
    tree: dict[str, Any] = given.model_dump(mode="json", exclude_none=True)
    for name in DROPPED:
        tree.pop(name, None)
    tree["checkpoint"] = {"export": "never"}
    tree["journal"] = {"enabled": False}
    tree["model"] = _model(given, target)
    tree["train"]["optim"]["name"] = "adamw"
    for section, values in {
        "run": {"dir": str(folder), "name": "eval", "bind": "tcp://127.0.0.1:*"},
        "node": {"weights_port": 0},
        "weights": {"broadcast": "off", "delta": "off", "canary": 0.0},
        "logging": {"backends": ["jsonl"], "prometheus": ""},
        # one process reads the weights; reward functions may read the other keys
        "train": {"nodes": 1, "ranks": 1, "replicas": 1, "devices": [], "offload": "none"},
        "rollout": {"placement": "own", "parallel": [], "nodes": max(1, given.rollout.nodes)},
        "data": {"path": "", "subset": "", "split": "", "sets": []},
        "eval": {"path": "", "sets": sets},
    }.items():
        tree[section] |= values
    used = {function for one in sets for function in one["reward"] or given.reward.functions}
    unused = {"code", "judge"} - used
    if not any(map(is_own_function, used)):
        unused |= set(OF_OWN_FUNCTIONS)
    for name in unused:
        tree["reward"].pop(name, None)
    return parse_config(tree)


def _chosen(config: Config, file: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    there = {one.name: one for one in config.eval_sets}
    if not there:
        raise ConfigError(f"{file}: has no set to evaluate; give eval.path or [[eval.sets]]")
    if missing := [name for name in names if name not in there]:
        raise ConfigError(f"--set {missing[0]}: no such set; there are {', '.join(there)}")
    chosen = [one for name, one in there.items() if not names or name in names]
    return [one.model_dump(mode="json", exclude_none=True) for one in chosen]


def _model(config: Config, target: EvalTarget) -> dict[str, Any]:
    """Return the section of the model to evaluate, with its own adapters."""
    dtype = config.model.dtype
    if dtype == "auto" and target.dtype:
        dtype = target.dtype
    model: dict[str, Any] = {"path": target.model or config.model.path, "dtype": dtype}
    if (found := target.adapters) is not None:
        lora = {"rank": found.rank, "alpha": found.alpha, "targets": list(found.targets)}
        model["lora"] = lora
    return model
