"""The nodes of a job beside its trainer node: rollout nodes that use its devices in turn with it,
or engines of several sizes, which take turns with each other; and the environment node.

They end with the trainer node: when it restarts it needs the memory of their engines. Each is a
`lightrl daemon` with a log in the run directory.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightrl.client.address import left_at, listening_since
from lightrl.config.schema import Config
from lightrl.devices.plan import engines_of, for_sizes, for_trainer_node, part_with
from lightrl.devices.sizes import sized_options
from lightrl.keys import reachable
from lightrl.launch import daemons
from lightrl.launch.daemons import Daemon, Daemons
from lightrl.system.child import retry_on_resource_limit
from lightrl.system.threads import cancel, in_thread

logger = logging.getLogger(__name__)

POLL_S = 0.2  # of the address of the coordinator
KILL_S = 3.0
ENVIRONMENT = "environment-0"
RESTARTS = replace(daemons.RESTARTS, settled_s=120.0)


async def sharing(
    config: Config, run_dir: Path, trainer: str, number: int, address: str = ""
) -> "SharingNodes | None":
    """Return the nodes beside a trainer node, the `number`th of train.nodes from 0 on, or None.
    `address`: of the coordinator; "" = it will store one in the run directory.

    Raises ConfigError, one line, if the devices here do not suffice.
    """
    is_shared = config.rollout.placement == "shared"
    num = engines_of(config, number) if is_shared else 0
    has_sizes = bool(config.rollout.parallel) and number == 0
    nodes: dict[str, tuple[str, ...]] = {}
    if num or has_sizes:
        nodes = await _over_devices(config, trainer, num)
    if number == 0 and config.environment.enabled and config.environment.workers:
        nodes[ENVIRONMENT] = ()
    return SharingNodes(run_dir, trainer, nodes, config.node.grace_s, address) if nodes else None


async def _over_devices(config: Config, trainer: str, num: int) -> dict[str, tuple[str, ...]]:
    """Return the options of each rollout node, by name. `num`: of those that share devices."""
    find = partial(for_trainer_node, config, num) if num else partial(for_sizes, config)
    gpus = await retry_on_resource_limit(
        lambda: in_thread(find), "the search for devices", logger.warning
    )
    for note in gpus.notes:
        logger.info(note)
    nodes = sized_options(config, gpus)
    for k in range(num):
        part = part_with(config, gpus, k, nodes=1)
        of_part = ("--part", str(part)) if part else ()
        nodes[f"rollout-{k}"] = ("--shares", trainer, *gpus.options(f"rollout-{k}"), *of_part)
    return nodes


class SharingNodes:
    """The nodes beside one start of the trainer node. Call `start` after it; `await end()`."""

    def __init__(
        self,
        run_dir: Path,
        trainer: str,
        nodes: Mapping[str, tuple[str, ...]],
        grace_s: float,
        address: str,
    ) -> None:
        """`nodes`: the options of each, by name."""
        self._run_dir = run_dir
        self._trainer = trainer
        self._nodes = nodes
        self._grace_s = grace_s
        self._address = address
        self._before = left_at(run_dir)  # the time of an old address
        self._daemons = Daemons(run_dir, lambda _: None, RESTARTS)
        self._keepers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._keepers = [asyncio.create_task(self._keep(name)) for name in self._nodes]

    def leave(self) -> None:
        """Ask all of them to send their last tokens and end."""
        self._daemons.over.set()
        self._daemons.send(signal.SIGTERM)

    async def end(self, is_heard: bool) -> None:
        """End them. `is_heard`: the coordinator may still receive their last tokens."""
        self._daemons.over.set()
        await cancel(*self._keepers)
        steps = ((signal.SIGTERM, self._grace_s), (signal.SIGKILL, KILL_S))
        await self._daemons.end(*(steps if is_heard else steps[1:]))

    async def _keep(self, node: str) -> None:
        """Start one, and restart it when it crashes."""
        name = f"{self._trainer}-{node}"
        options = (*self._nodes[node], "--join", await self._listening())
        role = "environment" if node == ENVIRONMENT else "rollout"
        start = partial(self._daemons.start, name, role, *options)
        try:
            daemon = await self._daemons.keep(await start(), start, _has_crashed)
        except OSError as e:
            logger.error("%s cannot be started: %s", name, e.strerror or e)
            return
        if daemon.has_failed and not self._daemons.over.is_set():
            logger.error("%s; it is not started again in this job", daemon.exit_reason())

    async def _listening(self) -> str:
        """Return the address of the coordinator, once it has stored one."""
        while not self._address:
            if (found := listening_since(self._run_dir, self._before)) is not None:
                self._address = reachable(found)
            else:
                await asyncio.sleep(POLL_S)
        return self._address


async def _has_crashed(daemon: Daemon) -> bool:
    return daemon.has_crashed
