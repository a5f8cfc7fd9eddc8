"""The versions of one trainer as other nodes may pull them, and the messages that publish them.

Owns the weight server and which message stands for which version. Whether and when such a message
is sent is `trainer.supervisor`'s business.
"""

import logging
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightrl.errors import WeightsError
from lightrl.messages import Manifest, PublishWeights
from lightrl.system.child import LACKING, retry_on_resource_limit
from lightrl.weights.serve import KEPT_VERSIONS, WeightServer

logger = logging.getLogger(__name__)


class ServedVersions:
    """`await start(...)` once, always `await close()`."""

    def __init__(self) -> None:
        self._server = WeightServer()
        self._holder = ""
        self._messages: dict[int, PublishWeights] = {}  # by version, as many as the server keeps

    async def start(self, host: str, port: int) -> None:
        self._holder = await self._server.start(host, port)

    async def close(self) -> None:
        await self._server.close()

    async def serve(
        self, manifest: Manifest, path: Path, portions: tuple[int, ...] = ()
    ) -> PublishWeights:
        """The message that publishes this version. Of a version computed again the old one stays
        valid.

        Versions that were overtaken are not served once more: nobody loads them, and the newest one
        must not have to go for them.
        """
        version = manifest.policy_version
        known = self._messages.get(version)
        if known is not None and known.manifest == manifest:
            return replace(known, portions=portions)
        message = PublishWeights(manifest, (self._holder,), secrets.token_hex(16), portions)
        if version >= max(self._messages, default=0):
            publish = partial(self._publish, manifest, path, message.ticket)
            await retry_on_resource_limit(publish, f"serving version {version}", logger.warning)
            self._messages[version] = message
            for old in sorted(self._messages)[:-KEPT_VERSIONS]:
                del self._messages[old]
        return message

    async def _publish(self, manifest: Manifest, path: Path, secret: str) -> None:
        try:
            self._server.publish(manifest, path, secret)
        except WeightsError as e:
            lacks = isinstance(e.__cause__, OSError) and e.__cause__.errno in LACKING
            raise (e.__cause__ if lacks and e.__cause__ else e) from None
