"""Run one daemon: the roles of a node in one event loop, started together and stopped by a signal.

Owns which roles run here. Their work is in coordinator/daemon.py and, for a client of the
coordinator, in connection.py beside this file. Each is imported where its role starts, which saves
half a second for all others.
"""

import asyncio
import gc
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from lightrl import log
from lightrl.config.schema import Config
from lightrl.daemon.parent import describe_reason
from lightrl.devices.assign import Part
from lightrl.errors import LightRLError, first_error
from lightrl.keys import ENVIRONMENT
from lightrl.messages.nodes import Role
from lightrl.system import open_files
from lightrl.system.process import stop_signals
from lightrl.transport.zeromq import leave

if TYPE_CHECKING:
    from lightrl.coordinator.daemon import CoordinatorDaemon
    from lightrl.daemon.connection import NodeConnection

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DaemonOptions:
    """The options of a daemon: the coordinator role needs `config` and `run_dir`, any other
    `join`."""

    name: str
    roles: tuple[Role, ...]
    run_dir: Path | None = None
    config: Config | None = None
    join: str = ""
    # 0 = the value of the run's config
    slots: int = 0
    # of the run, as text
    key: str = ""
    # the coordinator continues from the journal in `run_dir`
    resume: bool = False
    # assigned by the process that started this daemon; None: it asks the driver
    gpus: Part | None = None
    # may be taken away at any moment
    is_preemptible: bool = False
    # the trainer node whose devices its engine uses; "" = its own
    shares: str = ""
    # which part of those
    part: int = 0
    # devices of its engine, which takes turns with engines of other sizes; 0 = it takes no turns
    parallel: int = 0
    # processes of an environment node; 0 = the value of the run's config
    workers: int = 0


def run(options: DaemonOptions) -> int:
    """Run a daemon until it ends and return the exit status. Raises LightRLError, one line, if it
    fails."""
    _configure_log(options)
    open_files.raise_limit()
    os.environ.pop(ENVIRONMENT, None)  # no child that runs others' code inherits the key
    try:
        return uvloop.run(_main(options))
    finally:
        leave()


def _configure_log(options: DaemonOptions) -> None:
    """Set up logging. A node that joins from elsewhere gets level and format from its welcome."""
    role, given = ",".join(options.roles), log.inherited()
    level, as_json = given.level, given.json
    if options.config is not None:
        level, as_json = options.config.logging.level, options.config.logging.json_
    log.configure(log.LogSettings(role, options.name, level, as_json))


async def _main(options: DaemonOptions) -> int:
    head: CoordinatorDaemon | None = None
    address = options.join
    if "coordinator" in options.roles:
        head = _coordinator(options)
        address = head.address
    connection = _connection(options, address, is_alone=head is None) if address else None

    def stop(reason: str) -> None:
        if head is not None:
            head.stop(reason)
        elif connection is not None:
            connection.drain(reason)

    gc.collect()
    # objects of libraries and data live as long as the process: scanning them delays the loop
    gc.freeze()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop, number.name)
    try:
        async with asyncio.TaskGroup() as tasks:
            if head is not None:
                tasks.create_task(head.run())
            if connection is not None:
                tasks.create_task(_stay_connected(connection, beside=head))
    except* LightRLError as errors:
        raise first_error(errors) from None
    return 0 if head is None or head.succeeded else 1


def _coordinator(options: DaemonOptions) -> "CoordinatorDaemon":
    from lightrl.coordinator.daemon import CoordinatorDaemon

    assert options.config is not None
    assert options.run_dir is not None
    return CoordinatorDaemon(
        options.config, options.run_dir, options.name, options.key, options.resume
    )


def _connection(options: DaemonOptions, address: str, is_alone: bool) -> "NodeConnection | None":
    """Return a client of the coordinator; None if there is no role besides the coordinator's."""
    if options.roles == ("coordinator",):
        return None
    from lightrl.daemon.connection import NodeConnection

    return NodeConnection(options, address, is_alone)


async def _stay_connected(connection: "NodeConnection", beside: "CoordinatorDaemon | None") -> None:
    """Run the connection. A failure, already reported to the coordinator, ends this daemon unless
    the coordinator is `beside` it."""
    try:
        await connection.run()
        logger.info("left: %s", describe_reason(connection.reason))
    except LightRLError as e:
        if beside is None:
            raise
        logger.error("%s", e)
