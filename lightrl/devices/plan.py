"""Assign the GPUs of this machine to the processes of a config.

Combines driver.py, memory.py and assign.py. Must not import torch.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.devices import memory
from lightrl.devices.assign import Assignment, DeviceRequest, TooLittleMemory, arithmetic, assign
from lightrl.devices.driver import Machine, look
from lightrl.devices.sizes import describe_sizes, slots_of
from lightrl.errors import ConfigError
from lightrl.messages.nodes import Role

PATIENCE_S = 15.0  # for killed processes to release their memory
PAUSE_S = 1.0


def wanted(
    config: Config,
    ranks: int,
    engines: int,
    shape: memory.Shape | None = None,
    slots: int = 0,
    parallel: tuple[int, ...] = (),
) -> DeviceRequest:
    """Return what `ranks` training ranks and `engines` engines need on this machine.

    `slots`: of this node; 0 means as configured. `parallel`: sizes of these engines, if engines of
    several sizes share GPUs.
    """
    train, rollout = config.train, config.rollout
    if train.engine == "emulated" or config.eval.checkpoint:
        ranks = 0
    if rollout.engine == "emulated":
        engines = 0
    args = rollout.engine_args
    items: tuple[memory.Item, ...] = ()
    least = 0
    if shape is not None:
        items = rank_items(config, shape)
        of_sizes = {k: slots or slots_of(config, k) for k in parallel}
        least = max(
            memory.engine_bytes(shape, num, config.max_model_length, size)
            for size, num in (of_sizes or {config.gpus_per_engine: slots or rollout.slots}).items()
        )
        kv = args.get("kv_cache_memory_bytes") or rollout.kv_cache_gib * memory.GIB
        least += int(kv) if isinstance(kv, int | float) else 0
    utilization = args.get("gpu_memory_utilization")
    return DeviceRequest(
        ranks=ranks,
        engines=engines,
        per_engine=config.gpus_per_engine,
        train_devices=train.devices if ranks else (),
        rollout_devices=rollout.devices if engines else (),
        rank_items=items,
        rank_bytes=memory.trainer_bytes(items),
        least=least,
        utilization=float(utilization) if isinstance(utilization, int | float) else None,
        asleep=len(rollout.parallel) - 1 if parallel and engines else 0,
    )


def rank_items(config: Config, shape: memory.Shape) -> tuple[memory.Item, ...]:
    return tuple(memory.trainer_items(shape, training(config, shape)))


def training(config: Config, shape: memory.Shape) -> memory.Training:
    train, lora = config.train, config.model.lora
    return memory.Training(
        world=train.world,
        tokens=train.max_tokens_per_gpu,  # no sequence is longer
        replicas=train.replicas,
        checkpointing=train.activation_checkpointing is not False,  # auto: on GPUs
        has_reference=config.algorithm.kl_coef > 0,
        optimizer=train.optim.name,
        offload=train.offload,
        sums_late=train.sync == "last",
        holds_start=train.mini_batches > 1,
        adapters=memory.adapter_parameters(shape, lora.rank, lora.targets),
        is_shared=config.rollout.placement == "shared",
    )


def for_run(config: Config) -> Assignment:
    """Assign GPUs to all daemons that `lightrl up` starts here. Blocks; raises ConfigError."""
    return _patiently(_of_run(config)[1])


def assigned(
    config: Config, machine: Machine, roles: Sequence[Role] = (), slots: int = 0
) -> Assignment:
    """Assign devices as `for_run` for a known machine; with `roles`, for one such daemon."""
    return assign(machine, os.environ, _here(config, roles, slots)[1])


def _here(
    config: Config, roles: Sequence[Role], slots: int
) -> tuple[memory.Shape | None, DeviceRequest]:
    """Return what one daemon with these roles needs; without roles, all daemons of a run."""
    return _of_roles(config, roles, slots) if roles else _of_run(config)


def _of_run(config: Config) -> tuple[memory.Shape | None, DeviceRequest]:
    shape = memory.shape_of_folder(Path(config.model.path))
    train = config.train
    sizes = config.rollout.parallel
    some = wanted(config, train.world, config.rollout.nodes, shape, parallel=sizes)
    if train.nodes > 1 and some.train_devices:
        raise ConfigError(
            f"train.devices = {list(train.devices)}: applies to each of {train.nodes} trainer "
            "nodes, and all of them are started here: leave it out"
        )
    is_shared = config.rollout.placement == "shared"
    return shape, replace(some, trainers=train.nodes, is_shared=is_shared, parallel=sizes)


def for_daemon(
    config: Config,
    roles: Sequence[Role],
    model_files: Mapping[str, bytes],
    slots: int,
    has_coordinator: bool,
    is_shared: bool = False,
    parallel: int = 0,
) -> Assignment:
    """Assign GPUs to one daemon.

    `is_shared`: ranks of another node use the same GPUs in turn. `parallel`: the size of its
    engine, if engines of other sizes use the same GPUs in turn. Blocks; raises ConfigError.
    """
    shape = memory.shape_of_file(model_files.get("config.json", b""))
    ranks = config.train.ranks if "trainer" in roles else 0
    sizes = (parallel,) if parallel else ()
    some = wanted(config, ranks, int("rollout" in roles), shape, slots, sizes)
    if not has_coordinator:  # rollout.devices applies to the machine that started the run
        some = replace(some, rollout_devices=(), is_shared=is_shared or bool(parallel))
    if parallel:
        some = replace(some, per_engine=parallel)
    return _patiently(some)


def for_trainer_node(config: Config, engines: int) -> Assignment:
    """Assign GPUs to one trainer node with a machine or Slurm job of its own, and to `engines` that
    use them in turn with it. Blocks; raises ConfigError."""
    shape = memory.shape_of_folder(Path(config.model.path))
    some = wanted(config, config.train.ranks, engines, shape)
    return _patiently(replace(some, is_shared=True))


def for_sizes(config: Config) -> Assignment:
    """Assign GPUs to the engines of all sizes of a run, beside one trainer node, in one Slurm job.
    Blocks; raises ConfigError."""
    shape, sizes = memory.shape_of_folder(Path(config.model.path)), config.rollout.parallel
    some = wanted(config, config.train.ranks, config.rollout.nodes, shape, parallel=sizes)
    return _patiently(replace(some, parallel=sizes))


def engines_of(config: Config, node: int) -> int:
    """Return how many of rollout.nodes use the devices of trainer node `node` (from 0 on): equal
    parts, with the remainder on the first nodes."""
    each, more = divmod(config.rollout.nodes, config.train.nodes)
    return each + (node < more)


def require_room(config: Config, roles: Sequence[Role], slots: int) -> None:
    """Check, before anything is started, what `for_daemon` would refuse for these roles.

    Blocks; raises ConfigError.
    """
    _patiently(_of_roles(config, roles, slots)[1])


def _of_roles(
    config: Config, roles: Sequence[Role], slots: int
) -> tuple[memory.Shape | None, DeviceRequest]:
    shape = memory.shape_of_folder(Path(config.model.path))
    ranks = config.train.ranks if "trainer" in roles else 0
    return shape, wanted(config, ranks, int("rollout" in roles), shape, slots)


def describe(config: Config, roles: Sequence[Role] = (), slots: int = 0) -> list[str]:
    """Return lines on how a run, or a daemon with `roles`, uses the GPUs, and the arithmetic.

    Raises ConfigError as `for_run`.
    """
    shape, some = _here(config, roles, slots)
    found = assign(look(), os.environ, some)
    nodes = [] if roles else [*_nodes(config), *_shared(config, found), *describe_sizes(config)]
    lines = [*nodes, *found.notes] or ["no GPU here: everything runs on the CPU"]
    if config.train.engine == "emulated" or (roles and "trainer" not in roles):
        return lines
    if shape is None:
        away = "its files are not on this machine, so its memory needs are unknown"
        return [*lines, f"{config.model.path}: {away}"]
    return [*lines, *arithmetic(some.rank_items, some.rank_bytes, bool(found.ranks))]


def _nodes(config: Config) -> list[str]:
    """Return a line on the ranks of each node, if several nodes train."""
    nodes, ranks = config.train.nodes, config.train.ranks
    if nodes == 1:
        return []
    firsts = range(0, nodes * ranks, ranks)
    each = (f"trainer-{k}: ranks {r} to {r + ranks - 1}" for k, r in enumerate(firsts))
    return ["; ".join(each) if ranks > 1 else f"trainer-k: rank k, for k < {nodes}"]


def shared_with(config: Config, found: Assignment, engine: int) -> str:
    """Return the trainer node with which an engine shares devices."""
    each = len(found.ranks) // config.train.nodes
    if engine < len(found.engines) and each and (tokens := found.engines[engine].tokens):
        return f"trainer-{found.ranks.index(tokens[0]) // each}"
    return f"trainer-{engine % config.train.nodes}"


def part_with(config: Config, found: Assignment, engine: int, nodes: int) -> int:
    """Return the part of that node's devices that an engine shares; `found` has `nodes` nodes."""
    parts, each = config.device_parts_each, len(found.ranks) // nodes
    if engine < len(found.engines) and each and (tokens := found.engines[engine].tokens):
        return found.ranks.index(tokens[0]) % each // (each // parts)
    return engine // nodes % parts


def _shared(config: Config, found: Assignment) -> list[str]:
    """Return lines on the engines that share the devices of each trainer node."""
    if config.rollout.placement != "shared":
        return []
    nodes, parts = config.train.nodes, config.device_parts_each
    whose = [f"trainer-{k}" for k in range(nodes)]
    if config.device_parts > 1:
        whose = [f"part {part} of {trainer}" for trainer in whose for part in range(parts)]
    users: dict[str, list[str]] = {who: [] for who in whose}
    for k in range(config.rollout.nodes):
        who = shared_with(config, found, k)
        if config.device_parts > 1:
            who = f"part {part_with(config, found, k, nodes)} of {who}"
        users[who].append(f"rollout-{k}")
    lines = [f"{', '.join(names)}: in turn with {who}" for who, names in users.items() if names]
    unused = [who for who, names in users.items() if not names]
    return [*lines, f"only trains, for no engine uses it: {', '.join(unused)}"] if unused else lines


def _patiently(some: DeviceRequest) -> Assignment:
    if not some.ranks and not some.engines:
        return Assignment()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        machine: Machine = look()
        try:
            return assign(machine, os.environ, some)
        except TooLittleMemory:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
