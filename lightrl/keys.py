"""The key of a run: who has it may take part, who does not gets nothing. Made, kept, found, derived from.

Owns the form of the key and of what is derived from it. Only the standard library; opens no connection.

A key is 32 random bytes, written as 64 hexadecimal digits. It is kept in the run directory for its owner
alone (mode 0600) and never travels: both ends of a connection derive their key pairs from it (node/link.py).
"""

import hashlib
import os
import secrets
import stat
from pathlib import Path

from lightrl.errors import ConfigError

KEY_BYTES = 32
KEY_FILE = "key"  # in the run directory
ENVIRONMENT = "LIGHTRL_KEY"  # the key itself, not a file


def new_key() -> str:
    """A fresh key. Example: "5f0c..." of 64 digits."""
    return secrets.token_hex(KEY_BYTES)


def write_key(path: Path, key: str | None = None) -> str:
    """Leaves `key`, or a fresh one, in a new file that only its owner can read; returns it.

    Raises OSError, FileExistsError included: a key is never replaced unawares.
    """
    key = key or new_key()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), 0o600)  # whatever the umask says
        file.write(key + "\n")
    return key


def read_key(path: Path) -> str:
    """The key in `path`. Raises ConfigError: no such file, no key in it, or others may read it, too."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(4 * KEY_BYTES)
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the key of the run: {e.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path}: others can read this key (mode {mode & 0o777:o}); chmod 600 {path}")
    return _checked(data.decode("ascii", errors="replace"), str(path))


def find_key(explicit: Path | None, run_dir: Path | None) -> str:
    """From --key FILE, else from the environment, else from the run directory. Raises ConfigError."""
    if explicit is not None:
        return read_key(explicit)
    if text := os.environ.get(ENVIRONMENT):
        return _checked(text, ENVIRONMENT)
    if run_dir is not None:
        return read_key(run_dir / KEY_FILE)
    raise ConfigError(
        f"the key of the run is needed: --key FILE, a copy of RUN_DIR/{KEY_FILE}, or {ENVIRONMENT}=<its text>"
    )


def derived(key: str, purpose: str) -> bytes:
    """32 bytes that only who has the key can compute, other ones for each purpose."""
    return hashlib.blake2b(purpose.encode(), key=bytes.fromhex(key), digest_size=32).digest()


def pull_ticket(secret: str, node: str, policy_version: int) -> str:
    """What lets just this node pull just this version; `secret` is what its holders were told.

    Example: pull_ticket("c0ffee...", "rollout-0", 4) is 32 hexadecimal digits.
    """
    key = hashlib.blake2b(secret.encode(), digest_size=32).digest()  # a secret of any length
    return hashlib.blake2b(f"{policy_version} {node}".encode(), key=key, digest_size=16).hexdigest()


def _checked(text: str, where: str) -> str:
    """Says nothing of the text itself, which may be nearly a key."""
    text = text.strip().lower()
    if len(text) != 2 * KEY_BYTES or not set(text) <= set("0123456789abcdef"):
        raise ConfigError(f"{where}: not a key; one has {2 * KEY_BYTES} hexadecimal digits")
    return text
