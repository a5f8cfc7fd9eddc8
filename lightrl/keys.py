"""The keys of a run: who has one may take part, who has none gets nothing. Made, kept, found,
derived from.

Owns the form of the keys and of what is derived from them. Opens no connection.

There are two, each in a file of the run directory that only its owner can read (mode 0600). They
never travel: both ends of a connection compute their key pairs from them (transport/zeromq.py).

- `key`, 32 random bytes as 64 hexadecimal digits, is for the operator, the trainer and tools. All
  else is derived from it.
- `join`, "join-" and 128 digits, lets one be a rollout node, no more. It holds the secret of a
  node's key pair and the *public* key of the coordinator: neither `key` nor the coordinator's
  secret follows from it.

`join` is derived from `key`, not random: there is one secret to keep and to make durable, and a run
directory that lacks `join` gets the same one again, which copies elsewhere are equal to.
"""

import hashlib
import os
import re
import secrets
import stat
from enum import StrEnum
from pathlib import Path

from lightrl.errors import ConfigError
from lightrl.system.files import sync

KEY_BYTES = 32
KEY_FILE = "key"  # in the run directory
JOIN_FILE = "join"  # beside it
ENVIRONMENT = "LIGHTRL_KEY"  # a key itself, not a file
MAX_FILE_BYTES = 256  # of which a key has at most 133 characters and an end of line
# Purposes. "lightrl node" is also that of older releases: their nodes get that answer, not one as
# strangers.
_OPERATOR, _NODE, _COORDINATOR = "lightrl operator", "lightrl node", "lightrl coordinator"
_FULL = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_JOIN = re.compile(rf"join-([0-9a-f]{{{2 * KEY_BYTES}}})([0-9a-f]{{{2 * KEY_BYTES}}})")


class Access(StrEnum):
    """What a key is good for."""

    FULL = "full"
    # to be a rollout node
    JOIN = "join"


def new_key() -> str:
    """A fresh key. Example: "5f0c..." of 64 digits."""
    return secrets.token_hex(KEY_BYTES)


def join_key(key: str) -> str:
    """The text of `join` that belongs to `key`. Example: "join-81a9..." of 128 digits."""
    return f"join-{derived(key, _NODE).hex()}{_public(derived(key, _COORDINATOR)).hex()}"


def access_of(key: str) -> Access:
    """What this key, as `read_key` and `find_key` return it, is good for."""
    return Access.JOIN if _JOIN.fullmatch(key) else Access.FULL


def write_key(path: Path, key: str | None = None) -> str:
    """Leaves `key`, or a fresh one, in a new file that only its owner can read; returns it.

    Raises OSError, FileExistsError included: a key is never replaced unawares.
    """
    key = key or new_key()
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii"
    ) as file:
        os.fchmod(file.fileno(), 0o600)  # whatever the umask is
        file.write(key + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)
    return key


def write_keys(run_dir: Path) -> str:
    """Both keys of a new run; returns the full one. Raises OSError, FileExistsError included."""
    key = write_key(run_dir / KEY_FILE)
    write_key(run_dir / JOIN_FILE, join_key(key))
    return key


def restore_keys(run_dir: Path) -> None:
    """Writes what is missing, as in a run that began before there was a `join`, or does not fit
    together.

    Raises OSError, and ConfigError if `key` is there but cannot be used.
    """
    key, join = run_dir / KEY_FILE, run_dir / JOIN_FILE
    text = read_key(key) if key.exists() else write_key(key)
    fitting = join_key(text)
    try:
        if read_key(join) == fitting:
            return
    except ConfigError:
        pass
    join.unlink(missing_ok=True)
    write_key(join, fitting)


def read_key(path: Path) -> str:
    """The key, of either form, in `path`. Raises ConfigError: no such file, no key in it, or others
    may read it, too."""
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
    """From --key FILE, else from the environment, else from the run directory. Raises
    ConfigError."""
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
    """Returns `key` if it is good for everything, else raises ConfigError; `what` names what needs
    that."""
    if access_of(key) is not Access.FULL:
        raise ConfigError(f"this key only lets a rollout node join; {what} RUN_DIR/{KEY_FILE}")
    return key


def derived(key: str, purpose: str) -> bytes:
    """32 bytes that only who has the full key can compute, other ones for each purpose."""
    return hashlib.blake2b(purpose.encode(), key=bytes.fromhex(key), digest_size=32).digest()


def secret_of(key: str) -> bytes:
    """The secret, 32 bytes, of the Curve25519 pair with which the holder of a key of either form
    connects."""
    if (parts := _JOIN.fullmatch(key)) is not None:
        return bytes.fromhex(parts[1])
    return derived(key, _OPERATOR)


def coordinator_public_key(key: str) -> bytes:
    """The public Curve25519 key, 32 bytes, by which a holder of either key recognises the
    coordinator."""
    if (parts := _JOIN.fullmatch(key)) is not None:
        return bytes.fromhex(parts[2])
    return _public(derived(key, _COORDINATOR))


def coordinator_secret(key: str) -> bytes:
    """That of the coordinator itself. Raises ConfigError: it takes the full key to be one."""
    return derived(require_full(key, "a coordinator needs"), _COORDINATOR)


def _public(secret: bytes) -> bytes:
    """The public half of a Curve25519 pair."""
    import zmq  # here: --help must not load it
    from zmq.utils import z85

    return z85.decode(zmq.curve_public(z85.encode(secret)))


def _checked(text: str, where: str) -> str:
    """Says nothing of the text itself, which may be nearly a key."""
    text = text.strip().lower()
    if not (_FULL.fullmatch(text) or _JOIN.fullmatch(text)):
        digits = 2 * KEY_BYTES
        raise ConfigError(
            f'{where}: not a key; one has {digits} hexadecimal digits, or "join-" and '
            f"{2 * digits} of them"
        )
    return text
