"""The keys of a run, which authenticate its nodes and tools, and how a node joins with one.

There are three, each in a file of the run directory that only its owner can read (mode 0600). They
are never sent: both ends of a connection compute their key pairs from them (transport/zeromq.py).

- `key`, 32 random bytes as 64 hexadecimal digits, is for the operator, the trainer and tools.
- `join`, "join-" and 128 digits, is for rollout nodes. It holds the secret of a node's key pair and
  the *public* key of the coordinator. It is derived from `key`, which does not follow from it.
- `environment`, "environment-" and 128 digits, is the same for environment nodes, with another
  secret.

An address that only this machine reaches is never offered to other machines.
"""

import contextlib
import hashlib
import os
import re
import secrets
import socket
import stat
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from lightrl.errors import ConfigError
from lightrl.system.addresses import ALL_HOSTS, host_and_port, is_loopback, own_host
from lightrl.system.files import sync

KEY_BYTES = 32
KEY_FILE = "key"  # in the run directory
JOIN_FILE = "join"  # beside it
ENVIRONMENT_FILE = "environment"
ENVIRONMENT = "LIGHTRL_KEY"  # a key itself, not a file
MAX_FILE_BYTES = 256
# Purposes of derived keys.
_OPERATOR, _NODE, _COORDINATOR = "lightrl operator", "lightrl node", "lightrl coordinator"
_ENVIRONMENT = "lightrl environment"
_DIGITS = rf"[0-9a-f]{{{2 * KEY_BYTES}}}"
_FULL = re.compile(_DIGITS)
_LIMITED = re.compile(rf"(join|environment)-({_DIGITS})({_DIGITS})")


class Access(StrEnum):
    """The access that a key gives: any, or that of a rollout node or of an environment node."""

    FULL = "full"
    JOIN = "join"
    ENVIRONMENT = "environment"


FILES = {
    Access.FULL: KEY_FILE,
    Access.JOIN: JOIN_FILE,
    Access.ENVIRONMENT: ENVIRONMENT_FILE,
}
# what the holder of a limited key may be
NODE_OF = {Access.JOIN: "a rollout node", Access.ENVIRONMENT: "an environment node"}


def new_key() -> str:
    """Return a random key. Example: "5f0c..." of 64 digits."""
    return secrets.token_hex(KEY_BYTES)


def join_key(key: str) -> str:
    """Return the text of `join` for a `key`. Example: "join-81a9..." of 128 digits."""
    return f"join-{_for_node(key, _NODE)}"


def environment_key(key: str) -> str:
    """Return the text of `environment` for a `key`, or that text itself. Example:
    "environment-77c0..."."""
    if key.startswith(f"{ENVIRONMENT_FILE}-"):
        return key
    return f"environment-{_for_node(key, _ENVIRONMENT)}"


def access_of(key: str) -> Access:
    """Return the access that a key of any form gives."""
    return Access(parts[1]) if (parts := _LIMITED.fullmatch(key)) else Access.FULL


def write_key(path: Path, key: str | None = None) -> str:
    """Write `key`, or a random one, to a new file that only its owner can read; return it. Raises
    OSError."""
    key = key or new_key()
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii"
    ) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(key + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)
    return key


def write_keys(run_dir: Path) -> str:
    """Write the keys of a new run; return the full one. Raises OSError."""
    key = write_key(run_dir / KEY_FILE)
    write_key(run_dir / JOIN_FILE, join_key(key))
    write_key(run_dir / ENVIRONMENT_FILE, environment_key(key))
    return key


def restore_keys(run_dir: Path) -> None:
    """Write a key that is missing, and a `join` or `environment` that does not fit. Raises OSError,
    and ConfigError if `key` cannot be used."""
    path = run_dir / KEY_FILE
    key = read_key(path) if path.exists() else write_key(path)
    _restore(run_dir / JOIN_FILE, join_key(key))
    _restore(run_dir / ENVIRONMENT_FILE, environment_key(key))


def _restore(path: Path, fitting: str) -> None:
    try:
        if read_key(path) == fitting:
            return
    except ConfigError:
        pass
    path.unlink(missing_ok=True)
    write_key(path, fitting)


def read_key(path: Path) -> str:
    """Return the key in a file. Raises ConfigError if it has none, or if others may read it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES)
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the key of the run: {e.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{path}: others can read this key (mode {mode & 0o777:o}); chmod 600 {path}"
        )
    return _checked(data.decode("ascii", errors="replace"), str(path))


def find_key(explicit: Path | None, run_dir: Path | None) -> str:
    """Return the key in --key FILE, the environment or the run directory. Raises ConfigError."""
    if explicit is not None:
        return read_key(explicit)
    if text := os.environ.get(ENVIRONMENT):
        return _checked(text, ENVIRONMENT)
    if run_dir is not None:
        return read_key(run_dir / KEY_FILE)
    raise ConfigError(
        f"this needs a key of the run: pass --key FILE (a copy of RUN_DIR/{JOIN_FILE} to add a "
        f"node, of RUN_DIR/{KEY_FILE} for anything else), or set {ENVIRONMENT} to its text"
    )


def require_full(key: str, what: str) -> str:
    """Return `key` if it gives full access, else raise ConfigError. `what`: needs it."""
    return require_access(key, Access.FULL, what)


def access_for(roles: Sequence[str]) -> Access:
    """Return the least access that a node of these roles needs."""
    least = {"rollout": Access.JOIN, "environment": Access.ENVIRONMENT}
    return least.get(",".join(roles), Access.FULL)


def require_access(key: str, access: Access, what: str) -> str:
    """Return `key` if it gives this access, or full access, else raise ConfigError. `what`: needs
    it."""
    given = access_of(key)
    if given not in {access, Access.FULL}:
        only = f"this key only lets {NODE_OF[given]} join"
        raise ConfigError(f"{only}; {what} RUN_DIR/{FILES[access]}")
    return key


def derived(key: str, purpose: str) -> bytes:
    """Return 32 bytes that follow from the full key, different ones for each purpose."""
    return hashlib.blake2b(purpose.encode(), key=bytes.fromhex(key), digest_size=32).digest()


def secret_of(key: str) -> bytes:
    """Return the secret of the Curve25519 pair with which the holder of a key connects."""
    if (parts := _LIMITED.fullmatch(key)) is not None:
        return bytes.fromhex(parts[2])
    return derived(key, _OPERATOR)


def coordinator_public_key(key: str) -> bytes:
    """Return the public Curve25519 key by which the holder of a key verifies the coordinator."""
    if (parts := _LIMITED.fullmatch(key)) is not None:
        return bytes.fromhex(parts[3])
    return _public(derived(key, _COORDINATOR))


def coordinator_secret(key: str) -> bytes:
    """Return the secret of the coordinator. Raises ConfigError without the full key."""
    return derived(require_full(key, "a coordinator needs"), _COORDINATOR)


def _for_node(key: str, purpose: str) -> str:
    """Return the digits of a limited key: the node's secret, the coordinator's public key."""
    return derived(key, purpose).hex() + _public(derived(key, _COORDINATOR)).hex()


def _public(secret: bytes) -> bytes:
    import zmq  # here: --help must not load it
    from zmq.utils import z85

    return z85.decode(zmq.curve_public(z85.encode(secret)))


def _checked(text: str, where: str) -> str:
    """The error does not quote the text, which may be nearly a key."""
    text = text.strip().lower()
    if not (_FULL.fullmatch(text) or _LIMITED.fullmatch(text)):
        digits = 2 * KEY_BYTES
        forms = (
            f'{digits} hexadecimal digits, or "join-" or "environment-" and {2 * digits} of them'
        )
        raise ConfigError(f"{where}: not a key; one has {forms}")
    return text


def reachable(address: str) -> str:
    """Return the address to connect to: of "all of this machine's" its own. Example:
    "tcp://10.0.0.1:5600" for "tcp://0.0.0.0:5600"."""
    host, port = host_and_port(address)
    return f"tcp://{own_host()}:{port}" if host in ALL_HOSTS else address


def join_command(address: str, key: str | Path) -> str:
    """Return the command that adds a node. `key`: a file, so that no list of processes shows it."""
    return f"lightrl up --join {address} --key {key}"


def is_here_only(address: str) -> bool:
    """Return whether the address is loopback, or a name of it."""
    host, _ = host_and_port(address)
    if is_loopback(host):
        return True
    with contextlib.suppress(OSError):
        return is_loopback(socket.gethostbyname(host))
    return False


def why_here_only(address: str, bind: str) -> str:
    """Return why other machines cannot join, and what to set; "" if they can. `bind`: run.bind."""
    if not is_here_only(address):
        return ""
    host, port = host_and_port(bind)
    if host in ALL_HOSTS:
        return "other machines cannot join: this one has no address but loopback"
    everywhere = f'run.bind = "tcp://0.0.0.0:{port or "*"}"'
    return f"other machines cannot join: run.bind is loopback; set {everywhere}"


def join_hint(address: str, bind: str, key: Path) -> str:
    """Return in one line how to add a node to the coordinator that listens at `address`."""
    seen = reachable(address)
    why = why_here_only(seen, bind)
    where = "here" if why else "on another machine"
    return f"add one {where} with: {join_command(seen, key)}" + (f" ({why})" if why else "")
