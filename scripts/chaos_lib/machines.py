"""A run on several machines: network namespaces with lines between them, each with shared memory of
its own, so that versions are pulled and relayed. Machine 0 has the coordinator and the trainer.

Owns the far nodes, which it starts again when they end, and the lines. Root on Linux.
"""

import asyncio
import contextlib
import ctypes
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos_lib.weights_plan import nodes
from lightrl.client.address import listening
from lightrl.errors import LightRLError
from lightrl.keys import JOIN_FILE
from lightrl.system.addresses import host_and_port
from lightrl.weights.machine.store import PREFIX
from tests.support.lines import Star

# bytes/s in each direction: an emulated version of three buckets takes 1 s, and so do those of real
# ranks, to one node
LINE = 16e6
LINES: dict[str, float] = {"pull": 1.5e6, "delta": 6e6, "broadcast": 6e6}
DIFFERENCE_BYTES = 4 << 20  # a version has more, a difference between two has less
CLONE_NEWNET = 0x40000000
LOOK_S, LOOK_SOON_S = 0.1, 0.003
JUST_S = 1.0
FORMS = ("", "::ffff:")  # of an address
# What `ip netns exec` mounts is its own already. Names as on a cluster: who has another name than
# the trainer's machine is sent versions, and torch looks for the names of addresses.
HOSTS = 'mount --bind "$0" /etc/hosts && exec "$@"'
PRIVATE = f'hostname "$1" && shift && mount -t tmpfs -o size=1g lightrl-chaos /dev/shm && {HOSTS}'


class Machines:
    """Use: `with Machines(mark, LINE).up() as machines`, then `keep` as a task."""

    def __init__(self, mark: str, line: float) -> None:
        """`line`: bytes/s in each direction of each machine."""
        self.names = nodes()
        self._line = line
        self._star = Star(mark, 1 + len(self.names))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._hosts = ""  # a file

    @contextlib.contextmanager
    def up(self) -> Iterator["Machines"]:
        """This process is on machine 0 from then on, if it has no other threads yet."""
        with self._star.up(), tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts:
            names = [socket.gethostname(), *self.names]
            lines = [f"{p}{self._star.address(k)} {n}" for k, n in enumerate(names) for p in FORMS]
            hosts.write("\n".join(["127.0.0.1 localhost", *lines, ""]))
            hosts.flush()
            self._hosts = hosts.name
            for k in range(1 + len(self.names)):
                self._star.set_rate(k, self._line, self._line)
            _enter(self._star.space(0))
            yield self

    @property
    def here(self) -> tuple[str, ...]:
        """The words before the command line of a process on machine 0."""
        return ("unshare", "--mount", "sh", "-c", HOSTS, self._hosts)

    async def keep(self, run_dir: Path, environment: dict[str, str]) -> None:
        """Nodes that have ended are started again, as a scheduler would. Until cancelled; then the
        next run may begin."""
        self._running.clear()
        while True:
            with contextlib.suppress(LightRLError, OSError):
                for k, name in enumerate(self.names, 1):
                    running = self._running.get(name)
                    if running is None or running.poll() not in (None, 0):
                        self._begin(k, name, run_dir, environment)
            await asyncio.sleep(LOOK_S)

    def cut(self, target: str) -> Callable[[], None]:
        """The line of that node, or of machine 0; returns what mends it."""
        k = self.names.index(target) + 1 if target in self.names else 0
        self._star.cut(k)
        return lambda: self._star.cut(k, is_cut=False)

    async def until_patching(self, target: str) -> None:
        """Returns when that node, or any if it is none, makes a version of its difference: that has
        just come, and the version is not complete. It is soon over, so nobody is asked."""
        meant = [target] if target in self.names else self.names
        while True:
            if any(self._patches(name) for name in meant):
                return
            await asyncio.sleep(LOOK_SOON_S)

    def _patches(self, name: str) -> bool:
        running = self._running.get(name)
        sizes: dict[str, list[int]] = {".part": [], ".bin": []}
        with contextlib.suppress(OSError):  # it comes and goes
            shared = Path(f"/proc/{running.pid if running else 0}/root/dev/shm")
            for path in shared.glob(f"{PREFIX}*/*"):
                found = path.stat()
                if path.suffix == ".part" or found.st_mtime > time.time() - JUST_S:
                    sizes.setdefault(path.suffix, []).append(found.st_size)
        is_here = any(size < DIFFERENCE_BYTES for size in sizes[".bin"])
        return is_here and any(size >= DIFFERENCE_BYTES for size in sizes[".part"])

    def _begin(self, k: int, name: str, run_dir: Path, environment: dict[str, str]) -> None:
        if (address := listening(run_dir)) is None:
            return
        _, port = host_and_port(address)
        (folder := run_dir.parent / name).mkdir(exist_ok=True)
        words = (sys.executable, "-m", "lightrl.cli", "up", "--name", name)
        join = ("--join", f"tcp://{self._star.address(0)}:{port}")
        key = ("--key", str(run_dir / JOIN_FILE))
        apart = ("unshare", "--uts", "sh", "-c", PRIVATE)
        with (run_dir.parent / f"{name}.log").open("ab") as out:
            self._running[name] = subprocess.Popen(
                self._star.command(k, *apart, self._hosts, name, *words, *join, *key),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**environment, "TMPDIR": str(folder)},
                start_new_session=True,
            )


def _enter(space: str) -> None:
    with open(f"/var/run/netns/{space}", "rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
