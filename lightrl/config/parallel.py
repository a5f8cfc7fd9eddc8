"""`rollout.parallel`: engines of several sizes over the same devices, what cannot go with them; and
in how many parts devices that sample and train can change sides.

Owns when such a config is refused; core/sharing/planner.py has the rule by which sizes change. Must
stay importable without torch.
"""

from lightrl.config.sections import MAX_SLOTS, Rollout, Train

PARALLEL_ARGS = frozenset({"tensor_parallel_size", "pipeline_parallel_size"})  # of vLLM
SIZED_ENGINES = ("vllm", "emulated")  # that can span more than one GPU


def sized_gpus(rollout: Rollout) -> int:
    """That they lie over; 0 = there is one size."""
    return rollout.nodes * rollout.parallel[0] if rollout.parallel else 0


def why_no_sizes(rollout: Rollout, max_staleness: int, is_deterministic: bool) -> str | None:
    """In one line, or None: there is one size, or several that can take turns."""
    if not (sizes := rollout.parallel):
        return None
    if len(sizes) == 1:
        return (
            "one size takes no turns; leave it out, and set tensor_parallel_size in "
            "rollout.engine_args"
        )
    if any(n & (n - 1) for n in sizes) or list(sizes) != sorted(set(sizes)):
        return "must be powers of two, each larger than the one before"
    if args := sorted(PARALLEL_ARGS.intersection(rollout.engine_args)):
        return f"is in conflict with {args[0]} of rollout.engine_args; leave one of them out"
    if rollout.engine not in SIZED_ENGINES:
        known = " or ".join(map(repr, SIZED_ENGINES))
        return f"needs rollout.engine = {known}, which spans several GPUs, not {rollout.engine!r}"
    return _why_no_turns(rollout, max_staleness, is_deterministic) or _why_no_room(rollout)


def _why_no_turns(rollout: Rollout, max_staleness: int, is_deterministic: bool) -> str | None:
    if rollout.placement == "shared":
        return (
            "these engines take turns with each other, and those of rollout.placement = 'shared' "
            "with the trainer; leave one of them out"
        )
    if max_staleness:
        return (
            "sizes change while nothing is sampled, and with async.max_staleness = "
            f"{max_staleness} something always is; leave one of them out"
        )
    if is_deterministic and rollout.engine != "emulated":
        return (
            "engines of another size round otherwise, and with run.deterministic a run repeats bit "
            "for bit; leave one of them out"
        )
    return None


def _why_no_room(rollout: Rollout) -> str | None:
    least, most = rollout.parallel[0], rollout.parallel[-1]
    width = most // least
    if not rollout.nodes or rollout.nodes % width:
        return (
            f"rollout.nodes = {rollout.nodes}, the engines of {least}, must be a multiple of "
            f"{width}: one of {most} lies over so many of them"
        )
    if rollout.slots * width > MAX_SLOTS:
        return (
            f"an engine of {most} has {width} times rollout.slots = {rollout.slots}, and at most "
            f"{MAX_SLOTS} are possible"
        )
    if rollout.devices and len(rollout.devices) != sized_gpus(rollout):
        return (
            f"rollout.nodes = {rollout.nodes} engines of {least} take {sized_gpus(rollout)} GPUs, "
            f"and rollout.devices names {len(rollout.devices)}"
        )
    return None


def num_parts(train: Train, rollout: Rollout, gpus_per_engine: int) -> int:
    """The replicas, if no node and no engine has devices of two of them; else 1."""
    if train.replicas % train.nodes:
        return 1
    each, size = train.world // train.replicas, gpus_per_engine
    devices = list(train.devices or range(train.ranks))
    used = [k for k, d in enumerate(devices) if d in (rollout.devices or devices)]
    engines = (used[i : i + size] for i in range(0, len(used) - size + 1, size))
    are_apart = all(k[0] // each == k[-1] // each for k in engines)
    return train.replicas if are_apart and size <= each else 1
