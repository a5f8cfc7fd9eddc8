"""The holder's side of a weight pull (signatures; the code follows)."""

import asyncio
from collections.abc import Sequence

from lightrl.weights.manifest import VersionFile


class Partial:
    """A version that is being pulled here and served as far as it is proved. Methods may be called
    from any thread."""

    def getting(self, bucket: int) -> None:
        """It has been asked of a complete source: peers had better wait for it here."""
        raise NotImplementedError

    def proved(self, bucket: int) -> None:
        """It is in the file, and right: served from now on."""
        raise NotImplementedError

    def complete(self) -> None:
        """All of it is; the file may be renamed, the open one goes on being served."""
        raise NotImplementedError


class WeightServer:
    """Serves versions to nodes with a ticket. `await start(hosts)` once; `await close()` at the end.

    One for each daemon. Names of things are digests; a difference between versions is published
    like a version. While a file is served, the server holds `flock LOCK_SH` on it.
    """

    def __init__(
        self, max_connections: int = 4096, max_bytes_per_s: float | None = None
    ) -> None:
        """`max_bytes_per_s`: what all peers together get, None = what the line can take."""
        raise NotImplementedError

    @property
    def secret(self) -> str:
        """From which tickets are made (tickets.pull_ticket); new in every process."""
        raise NotImplementedError

    @property
    def addresses(self) -> tuple[str, ...]:
        """"host:port" of each host listened on, for WeightsEndpoint."""
        raise NotImplementedError

    async def start(self, hosts: str | Sequence[str], port: int = 0) -> tuple[str, ...]:
        """Listens on `port` of each of `hosts`, 0 = any; returns `addresses`. Raises WeightsError."""
        raise NotImplementedError

    def publish(self, file: VersionFile) -> None:
        """From now on serves the version in `file`, which is complete and proved; its name may go.

        The same digest again, as another policy_version, adds that version's tickets. Opens two
        files, reads nothing. Raises WeightsError: the file is not there or has another size, it is
        being overwritten (LOCK_EX), too many (MAX_HELD) are served.
        """
        raise NotImplementedError

    def serve_partial(self, file: VersionFile) -> Partial:
        """Serves what is marked as proved of a file (of full size, at `file.path`) that is being
        filled; its manifest is there. `Pull` does this when it is given a server."""
        raise NotImplementedError

    def retire(self, digest: str, grace_s: float = 2.0) -> "asyncio.Future[None]":
        """Nothing of it is served from now on; one that is not served is retired already.

        The future is done when nobody reads the file any more and its lock is released: requests
        under way have `grace_s` to end, then are cut. Files are closed in a thread.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Stops serving at once; transfers under way are cut."""
        raise NotImplementedError
