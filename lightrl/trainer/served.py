"""The versions of one trainer as other nodes may pull them, and the messages that publish them.

Owns which versions this node's weight server has from its trainer, and which message stands for
which. Whether and when such a message is sent is `trainer.supervisor`'s business, who may pull a
version the coordinator's.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightrl.errors import WeightsError
from lightrl.messages import PublishWeights
from lightrl.system.child import LACKING, retry_on_resource_limit
from lightrl.system.threads import in_thread
from lightrl.trainer.protocol import Published
from lightrl.weights.manifest import VersionFile
from lightrl.weights.serve import WeightServer

logger = logging.getLogger(__name__)

GRACE_S = 0.5  # for a bucket that a node is just being sent of a version that goes


class ServedVersions:
    """At most two: the newest, and the one before until it is in the way. Files are the ranks', who
    take no file again that the server reads."""

    def __init__(
        self, server: WeightServer, point_to: Callable[[VersionFile], None] | None = None
    ) -> None:
        """`point_to` tells the nodes of this machine where a version lies; called in a thread."""
        self._server = server
        self._point_to = point_to
        self._files: dict[int, VersionFile] = {}  # by version

    async def serve(self, published: Published, portions: tuple[int, ...] = ()) -> PublishWeights:
        """The message that publishes this version. One that was computed again with the same result
        is served from where it was.

        Versions that were overtaken are not served once more: nobody loads them, and the newest one
        must not have to go for them.
        """
        file = published.file
        version, known = file.policy_version, self._files.get(file.policy_version)
        if version >= max(self._files, default=0) and (
            known is None or known.digest != file.digest
        ):
            if known is not None:
                await self._retire(version)
            publish = partial(self._publish, file)
            await retry_on_resource_limit(publish, f"serving version {version}", logger.warning)
            self._files[version] = file
            await self._tell_this_machine(file)
        return _message(published, portions)

    async def _tell_this_machine(self, file: VersionFile) -> None:
        if self._point_to is not None:
            try:
                await in_thread(self._point_to, file)
            except OSError as e:
                logger.warning("nodes of this machine pull version %d: %s", file.policy_version, e)

    async def make_room(self) -> None:
        """Only the newest version is served from now on: the ranks will need the other's file."""
        for version in sorted(self._files)[:-1]:
            await self._retire(version)

    async def close(self) -> None:
        for version in list(self._files):
            await self._retire(version)

    async def _retire(self, version: int) -> None:
        file = self._files.pop(version)
        if not any(other.digest == file.digest for other in self._files.values()):
            await self._server.retire(file.digest, GRACE_S)

    async def _publish(self, file: VersionFile) -> None:
        try:
            self._server.publish(file)
        except WeightsError as e:
            lacks = isinstance(e.__cause__, OSError) and e.__cause__.errno in LACKING
            raise (e.__cause__ if lacks and e.__cause__ else e) from None


def _message(published: Published, portions: tuple[int, ...]) -> PublishWeights:
    file = published.file
    return PublishWeights(
        file.policy_version,
        file.digest,
        file.num_bytes,
        Path(file.manifest_path).stat().st_size,
        canary=published.canary,
        portions=portions,
    )
