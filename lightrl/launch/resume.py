"""`lightrl resume RUN`: whether a run can continue, and with which config.

Refuses in one line what would lose or falsify something. Starts nothing.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from lightrl.client.address import (
    accepts,
    find_folder,
    listening,
    relative,
    require_free,
    require_weights_port,
)
from lightrl.client.find_run import ask, final_snapshot, is_same
from lightrl.config.run_file import load_config
from lightrl.config.schema import Config
from lightrl.config.sections import Train
from lightrl.config.values import flat
from lightrl.core.state import RunState
from lightrl.errors import ConfigError, JournalError, LightRLError
from lightrl.journal.disk import FOLDER, is_in_use, segments
from lightrl.keys import KEY_FILE, read_key, restore_keys
from lightrl.launch.folder import CONFIG_FILE, rewrite_config
from lightrl.launch.preflight import require_files
from lightrl.metrics import sinks
from lightrl.system.output import print_lines
from lightrl.trainer.checkpoint.checksums import find_corruption
from lightrl.trainer.checkpoint.saved import (
    CHECKPOINTS,
    REWOUND,
    by_step,
    latest,
    newest_sound,
    set_aside,
    step_of,
)

# how a model and its batches lie on devices: the same result, up to rounding
HOW_IT_LIES = (
    *("max_tokens_per_gpu", "activation_checkpointing", "offload", "replicas", "sync"),
    "deterministic",
)
# Steps that are saved do not depend on these: see `_require_all_saved`. All else was promised when
# the run began.
MAY_CHANGE = (
    *("train.steps", "checkpoint.", "node.", "journal.", "logging.", "run.bind"),
    *("rollout.nodes", "rollout.slots", "rollout.engine_args", "rollout.devices"),
    "rollout.parallel",
    *("train.devices", "train.nodes", "train.ranks", *(f"train.{key}" for key in HOW_IT_LIES)),
    "train.optim.",
    *("speculation.", "weights.", "prices.", "scale."),
    *("reward.env", "reward.command", "reward.source"),
)
# a run that stops to be recorded could not be resumed again, checkpoints stay where they are, what
# a run began with is past, and the state of one optimizer is none of another
FIXED = ("journal.enabled", "checkpoint.dir", "checkpoint.initial_load_path", "train.optim.name")


def prepare(
    target: str | None, overrides: Sequence[str] = (), from_checkpoint: bool = False
) -> Config:
    """The config of the run in a directory, of a name, or the latest one, ready to continue.

    `from_checkpoint`: what came after the newest checkpoint is forgotten, for a journal or data
    that cannot be trusted. Raises LightRLError, one line; the run is then as it was, but for
    damaged checkpoints, which may have been moved aside.
    """
    run_dir = find_folder(target, "resume a run by its directory or name")
    before = load_config(run_dir / CONFIG_FILE)
    config, changed = _changed(run_dir, before, overrides)
    _require_unfinished(run_dir, config)
    if not from_checkpoint and (change := _rounds_otherwise(before.train, config, changed)):
        _require_all_saved(run_dir, change)
    if config.train.steps != before.train.steps:
        _require_steps_left(run_dir, config.train.steps, from_checkpoint)
    if not has_journal(run_dir):
        why = "" if before.journal.enabled else " (journal.enabled = false)"
        raise JournalError(f"{relative(run_dir)}: has no journal to resume from{why}")
    _require_dead(run_dir)
    require_files(config)
    moves = config.run.bind != before.run.bind
    left = None if moves else listening(run_dir)
    _require_free(config, left)
    # From here on something is changed.
    if moves:
        (run_dir / "address").unlink(missing_ok=True)  # the coordinator would listen there again
    if from_checkpoint:
        print_lines(_rewind(run_dir))
    if optim := [config.key_value(key) for key in changed if key.startswith("train.optim.")]:
        done = newest_checkpoint(run_dir) or 0
        print_lines(f"from step {done + 1} on: {', '.join(optim)}; those before stay as they are")
    try:
        restore_keys(run_dir)
    except OSError as e:
        raise ConfigError(
            f"{relative(run_dir)}: its keys cannot be written: {e.strerror}"
        ) from None
    rewrite_config(config)
    return config


def has_journal(run_dir: Path) -> bool:
    return bool(segments(run_dir / FOLDER))


def _changed(
    run_dir: Path, before: Config, overrides: Sequence[str]
) -> tuple[Config, Sequence[str]]:
    """The config with overrides, of this directory wherever it lies now, and the keys with other
    values. Raises ConfigError."""
    after = load_config(run_dir / CONFIG_FILE, overrides)
    old = dict(flat(before.model_dump(mode="json", by_alias=True)))
    new = dict(flat(after.model_dump(mode="json", by_alias=True)))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    for key in changed:
        if key in FIXED or not key.startswith(MAY_CHANGE):
            may = ", ".join(f"{k}*" if k.endswith(".") else k for k in MAY_CHANGE)
            raise ConfigError(
                f"{key}: cannot change on a resume; these can: {may} (except {', '.join(FIXED)})"
            )
    place = {"dir": str(run_dir.parent), "name": run_dir.name}
    return after.model_copy(update={"run": after.run.model_copy(update=place)}), changed


def _require_unfinished(run_dir: Path, config: Config) -> None:
    last, steps = final_snapshot(run_dir), config.train.steps
    records = sinks.read(run_dir, newest=1)
    done = int(records[-1]["step"]) if records else 0
    if last is not None and last.state == RunState.FINISHED and last.step >= steps:
        raise LightRLError(
            f"{relative(run_dir)}: finished; to extend it: lightrl resume {relative(run_dir)} "
            f"train.steps=N, with N above {last.step}"
        )
    if steps < done:
        raise ConfigError(f"train.steps = {steps}: {done} steps are done already")


def _rounds_otherwise(then: Train, config: Config, changed: Sequence[str]) -> str:
    """The first change that makes other bits of the same steps; "" if there is none."""
    rounding = ("train.optim.", *(f"train.{key}" for key in HOW_IT_LIES))
    if keys := [key for key in changed if key.startswith(rounding)]:
        return config.key_value(keys[0])
    if config.train.world != then.world:
        return f"train.nodes x train.ranks = {config.train.world}"
    if config.train.steps != then.steps and config.train.optim.schedule != "constant":
        return f"train.steps = {config.train.steps} (train.optim.schedule)"
    return ""


def _require_all_saved(run_dir: Path, change: str) -> None:
    """What is trained again must come out as it did, to the bit; `change` rounds otherwise."""
    from lightrl.replay.log import interrupted  # numpy comes with it

    records = sinks.read(run_dir, newest=1)
    done, saved = int(records[-1]["step"]) if records else 0, newest_checkpoint(run_dir) or 0
    if (last := interrupted(run_dir)) is not None:  # a version may be known before its step is done
        done = max(done, last.policy_version or 0)
    if done > saved:
        raise ConfigError(
            f"{change}: the steps after {saved}, of which there is no checkpoint, would be trained "
            f"again and come out different; --from-checkpoint forgets them"
        )


def _require_steps_left(run_dir: Path, steps: int, from_checkpoint: bool) -> None:
    """The round of the next step is open as soon as one is done: a run cannot be made to end just
    here."""
    done = max((s.step for s in segments(run_dir / FOLDER)), default=0)
    if from_checkpoint:
        done = newest_checkpoint(run_dir) or 0
    if steps <= done:
        raise ConfigError(f"train.steps = {steps}: step {done + 1} has begun already; give more")


def _require_dead(run_dir: Path) -> None:
    """Raises LightRLError if a coordinator still has this run."""
    alive = f"{relative(run_dir)}: this run is alive; lightrl top {relative(run_dir)} shows it"
    address = listening(run_dir)
    if address is not None and (run_dir / KEY_FILE).exists() and accepts(address):
        try:
            snapshot = asyncio.run(ask(address, read_key(run_dir / KEY_FILE)))
        except LightRLError:
            pass  # another program
        else:
            if is_same(snapshot, run_dir):
                raise LightRLError(alive)
    if is_in_use(run_dir / FOLDER):
        raise LightRLError(
            f"{relative(run_dir)}: its coordinator is still shutting down, or hangs; try "
            "again in a moment"
        )


def _require_free(config: Config, left: str | None) -> None:
    """A coordinator that was killed left its address: nodes that wait look for it there."""
    require_weights_port(config.node.weights_port, left or config.run.bind)
    if left is None:
        require_free(config.run.bind)
        return
    try:
        require_free(left)
    except ConfigError:
        raise ConfigError(
            f"{left}: taken by another program now; run.bind=tcp://HOST:PORT lets the run "
            "continue elsewhere"
        ) from None


def _rewind(run_dir: Path) -> str:
    """Cut the journal back to the newest sound checkpoint. Returns a line that names it, and where
    the rest is."""
    from lightrl.journal.read import LOG, rewind  # numpy comes with it

    try:
        path = newest_sound(run_dir / CHECKPOINTS, find_corruption, print_lines)
        if path is None:
            raise LightRLError(f"{relative(run_dir)}: has no undamaged checkpoint")
        step = step_of(path)
        rewind(run_dir / FOLDER, LOG, step)
        # `latest` does not name them
        newer = [p for p in by_step(path.parent) if step_of(p) > step]
        for checkpoint in newer:
            set_aside(checkpoint, REWOUND)
    except OSError as e:
        raise LightRLError(f"{e.filename or run_dir}: {e.strerror}") from None
    folders = " and ".join(
        relative(f) for f in [run_dir / FOLDER, *([path.parent] if newer else [])]
    )
    return (
        f"from the checkpoint of step {step}; what came later is set aside as *.{REWOUND} in "
        f"{folders}"
    )


def newest_checkpoint(run_dir: Path) -> int | None:
    """Steps done in it."""
    path = latest(run_dir / CHECKPOINTS)
    return step_of(path) if path is not None else None
