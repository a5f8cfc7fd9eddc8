"""`lightrl resume RUN`: whether a run can continue, and with which config."""

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
from lightrl.config.run_file import CONFIG_FILE, load_config
from lightrl.config.schema import Config
from lightrl.config.sections import Train
from lightrl.config.values import flat
from lightrl.core.state import RunState
from lightrl.errors import ConfigError, JournalError, LightRLError
from lightrl.journal.disk import FOLDER, is_in_use, segments
from lightrl.keys import KEY_FILE, read_key, restore_keys
from lightrl.launch.checks.files import require_files
from lightrl.launch.folder import rewrite_config
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

# The layout of a model and its batches on devices: the same result, up to rounding.
LAYOUT = (
    *("train.max_tokens_per_gpu", "train.activation_checkpointing", "train.offload"),
    *("train.replicas", "train.sync", "train.deterministic"),
)
# Steps that are saved do not depend on these keys: see `_require_all_saved`.
MAY_CHANGE = (
    *("train.steps", "checkpoint.", "node.", "journal.", "logging.", "run.bind"),
    *("rollout.nodes", "rollout.slots", "rollout.engine_args", "rollout.devices"),
    *("rollout.parallel", "train.devices", "train.nodes", "train.ranks", *LAYOUT, "train.optim."),
    *("speculation.", "weights.", "prices.", "scale."),
    *("reward.env", "reward.command", "reward.source"),
)
FIXED = ("journal.enabled", "checkpoint.dir", "checkpoint.initial_load_path", "train.optim.name")


def prepare(
    target: str | None, overrides: Sequence[str] = (), from_checkpoint: bool = False
) -> Config:
    """Return the config of a run, by directory or name, or of the latest one, ready to continue.

    `from_checkpoint`: forget what came after the newest checkpoint. Raises LightRLError, one line;
    the run is then unchanged, except that damaged checkpoints may have been set aside.
    """
    run_dir = find_folder(target, "resume a run by its directory or name")
    before = load_config(run_dir / CONFIG_FILE)
    config, changed = _changed(run_dir, before, overrides)
    records = sinks.read(run_dir, newest=1)
    done = int(records[-1]["step"]) if records else 0
    _require_unfinished(run_dir, config.train.steps, done)
    saved = newest_checkpoint(run_dir) or 0
    if not from_checkpoint and (change := _rounds_otherwise(before.train, config, changed)):
        _require_all_saved(run_dir, change, done, saved)
    if (steps := config.train.steps) != before.train.steps:
        # a step has begun once the one before is done
        begun = max((segment.step for segment in segments(run_dir / FOLDER)), default=0)
        last = saved if from_checkpoint else begun
        if steps <= last:
            raise ConfigError(
                f"train.steps = {steps}: step {last + 1} has begun already; give more"
            )
    if not has_journal(run_dir):
        why = "" if before.journal.enabled else " (journal.enabled = false)"
        raise JournalError(f"{relative(run_dir)}: has no journal to resume from{why}")
    _require_dead(run_dir)
    require_files(config)
    moves = config.run.bind != before.run.bind
    left = None if moves else listening(run_dir)
    _require_free(config, left)
    if moves:
        (run_dir / "address").unlink(missing_ok=True)  # else the coordinator listens there again
    if from_checkpoint:
        print_lines(_rewind(run_dir))
    if optim := [config.key_value(key) for key in changed if key.startswith("train.optim.")]:
        done = newest_checkpoint(run_dir) or 0
        print_lines(f"from step {done + 1} on: {', '.join(optim)}; those before stay as they are")
    try:
        restore_keys(run_dir)
    except OSError as e:
        raise ConfigError(f"{relative(run_dir)}: cannot write its keys: {e.strerror}") from None
    rewrite_config(config)
    return config


def has_journal(run_dir: Path) -> bool:
    return bool(segments(run_dir / FOLDER))


def _changed(
    run_dir: Path, before: Config, overrides: Sequence[str]
) -> tuple[Config, Sequence[str]]:
    """Return the config with overrides, of the directory at its present place, and the keys that
    have changed. Raises ConfigError."""
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


def _require_unfinished(run_dir: Path, steps: int, done: int) -> None:
    last = final_snapshot(run_dir)
    if last is not None and last.state == RunState.FINISHED and last.step >= steps:
        raise LightRLError(
            f"{relative(run_dir)}: finished; to extend it: lightrl resume {relative(run_dir)} "
            f"train.steps=N, with N above {last.step}"
        )
    if steps < done:
        raise ConfigError(f"train.steps = {steps}: {done} steps are done already")


def _rounds_otherwise(then: Train, config: Config, changed: Sequence[str]) -> str:
    """Return the first change that rounds the same steps otherwise; "" if there is none."""
    if keys := [key for key in changed if key.startswith(("train.optim.", *LAYOUT))]:
        return config.key_value(keys[0])
    if config.train.world != then.world:
        return f"train.nodes x train.ranks = {config.train.world}"
    if config.train.steps != then.steps and config.train.optim.schedule != "constant":
        return f"train.steps = {config.train.steps} (train.optim.schedule)"
    return ""


def _require_all_saved(run_dir: Path, change: str, done: int, saved: int) -> None:
    """Raise ConfigError if steps would be trained again, with the other rounding of `change`."""
    from lightrl.replay.log import interrupted  # numpy comes with it

    if (last := interrupted(run_dir)) is not None:  # a version may exist before its step is done
        done = max(done, last.policy_version or 0)
    if done > saved:
        raise ConfigError(
            f"{change}: the steps after {saved}, of which there is no checkpoint, would be trained "
            f"again and come out different; --from-checkpoint forgets them"
        )


def _require_dead(run_dir: Path) -> None:
    """Raise LightRLError if a coordinator still has this run."""
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
    """Check the ports. Nodes wait at `left`, the address of a coordinator that was killed."""
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
    """Cut the journal back to the newest sound checkpoint. Return a line that names it and the
    place of the rest."""
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
    folders = [run_dir / FOLDER, *([path.parent] if newer else [])]
    where = f"*.{REWOUND} in {' and '.join(map(relative, folders))}"
    return f"from the checkpoint of step {step}; what came later is set aside as {where}"


def newest_checkpoint(run_dir: Path) -> int | None:
    """Return the steps done in it."""
    path = latest(run_dir / CHECKPOINTS)
    return step_of(path) if path is not None else None
