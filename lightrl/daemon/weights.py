"""What a daemon has for the weights, whatever its roles: the one server from which others pull, and
the folder that it shares with the other nodes of this machine.

Owns when both begin and end, the message that announces the server, and the estimate of the room
that versions of this run need.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from lightrl.config.schema import Config
from lightrl.devices import memory
from lightrl.keys import coordinator_public_key
from lightrl.messages.weights import WeightsEndpoint
from lightrl.system.threads import in_thread
from lightrl.transport.link import own_address
from lightrl.weights.machine.store import Store
from lightrl.weights.serve.server import WeightServer


@dataclass(frozen=True, slots=True)
class MachineWeights:
    store: Store
    server: WeightServer

    @property
    def endpoint(self) -> WeightsEndpoint:
        """Return the message to send after each welcome, before all others that depend on it."""
        return WeightsEndpoint(self.server.addresses, self.server.secret)


@contextlib.asynccontextmanager
async def machine_weights(
    config: Config, coordinator: str, key: str, port: int
) -> AsyncIterator[MachineWeights]:
    """Open server and folder of a node of the run that `key` belongs to. Serves on `port`, 0 = any.
    Raises WeightsError."""
    server = WeightServer()
    store = Store(coordinator_public_key(key))
    try:
        await server.start(config.weights.addresses or own_address(coordinator), port)
        await in_thread(store.open)
        yield MachineWeights(store, server)
    finally:
        await server.close()
        await in_thread(store.close)


def version_bytes(config: Config, model_files: Mapping[str, bytes], on_gpu: bool) -> int:
    """Estimate the size of a version from the model's config.json; 0 = not known. `on_gpu`: whether
    the training ranks are."""
    stored = model_files.get("config.json", b"")
    shape = memory.shape_of_file(stored)
    if shape is None:
        return 0
    return memory.version_size(shape, stored, config.model.dtype, on_gpu).num_bytes
