"""Addresses of coordinators: how users write them, where runs store them, which can be bound or
reached.

Speaks no protocol: a reachable address is one that accepts a TCP connection.
"""

import errno
import os
import socket
from pathlib import Path

from lightrl.errors import ConfigError, PeerUnreachable
from lightrl.system.addresses import host_and_port

CONNECT_S = 3.0


def find(target: str | None, runs: Path = Path("runs")) -> tuple[str | None, Path | None]:
    """Resolve ADDR: an address, a run directory, the name of a run, or the latest run.

    Returns the address to ask and the run directory, as far as they are known.
    """
    if target is not None and (
        target.startswith("tcp://") or (":" in target and not Path(target).exists())
    ):
        host_and_port(target)
        return "tcp://" + target.removeprefix("tcp://"), None
    folder = run_folder(str(runs / "latest") if target is None else target, runs)
    if folder is None:
        wanted = "no run here yet" if target is None else f"{target}: no such run"
        raise ConfigError(f"{wanted}; give a run's name or directory, or tcp://HOST:PORT")
    return listening(folder), folder.resolve()


def find_folder(target: str | None, why: str) -> Path:
    """Resolve ADDR to a run directory. `why`: the reason in the error for an address."""
    if target is not None and run_folder(target) is None and ":" not in target:
        raise ConfigError(f"{target}: no such run; give a run's name or directory")
    _, folder = find(target)
    if folder is None:
        raise ConfigError(f"{target}: is an address; {why}")
    return folder


def run_folder(target: str, runs: Path = Path("runs")) -> Path | None:
    """Return the directory of a run, by its path or name; None if there is none."""
    try:
        return next((f for f in (Path(target), runs / target) if f.is_dir()), None)
    except OSError:  # no directory has such a name
        return None


def listening(run_dir: Path) -> str | None:
    """Return the address that the coordinator of a run has stored; None after its end."""
    try:
        return (run_dir / "address").read_text().strip() or None
    except FileNotFoundError:
        return None


def listening_since(run_dir: Path, before: float | None) -> str | None:
    """Likewise, but None for an address stored at `before` (see `left_at`), which is an old one."""
    return None if left_at(run_dir) == before else listening(run_dir)


def left_at(run_dir: Path) -> float | None:
    """Return when the coordinator stored its address; None if there is none."""
    try:
        return (run_dir / "address").stat().st_mtime
    except FileNotFoundError:
        return None


def relative(path: Path) -> str:
    """Return `path` relative to the working directory if it lies inside."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def require_free(bind: str) -> None:
    """Raise ConfigError if the coordinator could not listen on `bind`."""
    host, port = host_and_port(bind)
    if problem := _problem_listening(host, port):
        more = ", or * for any" if problem.endswith("another one") else ""
        raise ConfigError(f"run.bind = {bind}: {problem}{more}")


def require_weights_port(port: int, bind: str) -> None:
    """Raise ConfigError if a trainer on the machine of the coordinator could not serve weights on
    `port`.

    0 is any port that is free.
    """
    require_other_port(port, bind)
    host, _ = host_and_port(bind)
    if port and (problem := _problem_listening(host, port)):
        raise ConfigError(f"node.weights_port = {port}: {problem}, or 0 for any")


def require_other_port(port: int, bind: str) -> None:
    """Likewise, without binding the port."""
    if port and port == host_and_port(bind)[1]:
        raise ConfigError(
            f"node.weights_port = {port}: is the port of run.bind; choose another one, or 0 for any"
        )


def _problem_listening(host: str, port: int) -> str:
    """Return why the address cannot be bound; "" if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return f"port {port} is in use; choose another one"
            return f"cannot listen there: {e.strerror or e}"
    return ""


def accepts(address: str) -> bool:
    """Return whether `address` accepts connections. True also without a free descriptor to try
    with."""
    try:
        require_reachable(address)
    except PeerUnreachable as e:
        return isinstance(e.__context__, OSError) and e.__context__.errno in {
            errno.EMFILE,
            errno.ENFILE,
        }
    return True


def require_reachable(address: str) -> None:
    """Raise PeerUnreachable if `address` accepts no connection within CONNECT_S seconds."""
    host, port = host_and_port(address)
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as e:
        why = "timed out" if isinstance(e, TimeoutError) else (e.strerror or str(e)).lower()
        raise PeerUnreachable(
            f"{address}: no answer ({why}); is the coordinator running, and is this its address?"
        ) from None
