"""The files of the versions that a rank has published: each appears whole, the newest ones stay.

Owns the names in the folder of published versions. Must not import torch.
"""

from collections.abc import Callable
from pathlib import Path

from lightrl.messages import Manifest

VERSIONS_KEPT = 2  # a node may still be pulling the one before


class Versions:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: list[Path] = []  # by this process; others are served from before

    def publish(
        self, policy_version: int, write: Callable[[Path], Manifest]
    ) -> tuple[Manifest, str]:
        """What `write` makes of the file that it is given: its manifest, and where it is then."""
        self._folder.mkdir(parents=True, exist_ok=True)
        draft, path = self._folder / ".draft", self._folder / f"version_{policy_version}.bin"
        manifest = write(draft)
        draft.replace(path)
        self._written = [*self._written[1 - VERSIONS_KEPT :], path]  # a version may come again
        for old in set(self._folder.glob("version_*.bin")) - set(self._written):
            old.unlink()
        return manifest, str(path)
