"""The versions of one trainer that its node serves, and the messages that announce them.

The supervisor sends these messages; the coordinator decides who pulls a version.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from lightrl.core.weights.weight_sources import MAX_CHAIN
from lightrl.errors import WeightsError
from lightrl.messages.weights import DeltaOffer, PublishWeights, WeightsBase
from lightrl.system.child import LACKING, retry_on_resource_limit
from lightrl.system.threads import in_thread
from lightrl.trainer.protocol import Published, VersionDelta
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile

logger = logging.getLogger(__name__)

GRACE_S = 0.5  # for a bucket that is being sent of a version that is retired


class PointTo(Protocol):
    def __call__(self, file: VersionFile, *, stays: bool = False) -> None: ...


class ServedVersions:
    """Serves at most two versions: the newest, and the one before until its file is needed. Ranks
    own the files, and do not reuse one that the server reads. Differences between the last versions
    are removed here."""

    def __init__(self, server: WeightServer, point_to: PointTo | None = None) -> None:
        """`point_to` announces files to the nodes of this machine; called in a thread."""
        self._server = server
        self._point_to = point_to
        self._base: VersionFile | None = None
        self._files: dict[int, VersionFile] = {}  # by version
        self._deltas: list[VersionFile] = []  # oldest first

    async def serve(
        self,
        published: Published,
        portions: Sequence[int] = (),
        replicas: Sequence[int] = (),
    ) -> PublishWeights:
        """Serve a version unless a newer one is served, or an equal one. Return its
        announcement."""
        file = published.file
        version, known = file.policy_version, self._files.get(file.policy_version)
        if published.base is not None:
            await self._serve_base(published.base)
        is_served = known is not None and known.digest == file.digest
        if version >= max(self._files, default=0) and not is_served:
            if known is not None:
                await self._retire(version)
            await self._publish(file, f"version {version}")
            self._files[version] = file
            for delta in self._deltas:  # tickets are for this version
                self._server.publish(replace(delta, policy_version=version))
            await self._announce_here(file)
        message = _message(published, self._base)
        return replace(message, portions=tuple(portions), replicas=tuple(replicas))

    async def _serve_base(self, file: VersionFile) -> None:
        """Serve the model beside adapters, from its first file: engines have mapped it. Restarted
        ranks write another one."""
        if self._base is None:
            await self._publish(file, "the base")
            self._base = file
            await self._announce_here(file, stays=True)
        elif self._base.path != file.path:
            await in_thread(_remove, [file])

    async def _announce_here(self, file: VersionFile, *, stays: bool = False) -> None:
        if self._point_to is not None:
            try:
                await in_thread(partial(self._point_to, file, stays=stays))
            except OSError as e:
                logger.warning("nodes of this machine pull version %d: %s", file.policy_version, e)

    async def serve_delta(self, made: VersionDelta) -> DeltaOffer | None:
        """Serve a difference that leads to the newest version, as long as it and those after it are
        no larger together than a version. Return its announcement."""
        newest, file = self._files[max(self._files)], made.file
        known = next((delta for delta in self._deltas if delta.digest == file.digest), None)
        if known is not None or made.target != newest.digest:
            await in_thread(_remove, [file])
            return _offer(made, known) if known is not None else None
        try:
            await self._publish(file, "a difference")
        except WeightsError as e:  # the version itself is served
            logger.warning("%s", e)
            await in_thread(_remove, [file])
            return None
        self._deltas.append(file)
        gone: list[VersionFile] = []
        while len(self._deltas) > MAX_CHAIN or _size(self._deltas) > newest.num_bytes:
            gone.append(self._deltas.pop(0))
            await self._server.retire(gone[-1].digest, GRACE_S)
        if gone:
            await in_thread(_remove, gone)
        return _offer(made, file)

    async def make_room(self) -> None:
        """Serve the newest version alone: the ranks need the other's file."""
        for version in sorted(self._files)[:-1]:
            await self._retire(version)

    async def close(self) -> None:
        for version in list(self._files):
            await self._retire(version)
        if self._base is not None:
            await self._server.retire(self._base.digest, 0.0)
        for delta in self._deltas:
            await self._server.retire(delta.digest, 0.0)
        self._deltas.clear()

    async def _retire(self, version: int) -> None:
        file = self._files.pop(version)
        if not any(other.digest == file.digest for other in self._files.values()):
            await self._server.retire(file.digest, GRACE_S)

    async def _publish(self, file: VersionFile, what: str) -> None:
        """Serve a file, waiting while the machine lacks resources for it."""

        async def publish() -> None:
            try:
                self._server.publish(file)
            except WeightsError as e:
                lacks = isinstance(e.__cause__, OSError) and e.__cause__.errno in LACKING
                raise (e.__cause__ if lacks and e.__cause__ else e) from None

        await retry_on_resource_limit(publish, f"serving {what}", logger.warning)


def _size(files: list[VersionFile]) -> int:
    return sum(file.num_bytes for file in files)


def _remove(files: list[VersionFile]) -> None:
    """Slow: it frees memory."""
    for file in files:
        for path in (file.path, file.manifest_path):
            Path(path).unlink(missing_ok=True)


def _offer(made: VersionDelta, file: VersionFile) -> DeltaOffer:
    size = file.manifest_bytes()
    return DeltaOffer(made.base, made.target, file.digest, size, file.num_bytes)


def _message(published: Published, base: VersionFile | None) -> PublishWeights:
    file = published.file
    return PublishWeights(
        file.policy_version,
        file.digest,
        file.num_bytes,
        file.manifest_bytes(),
        canary=published.canary,
        base=WeightsBase(base.digest, base.num_bytes, base.manifest_bytes()) if base else None,
    )
