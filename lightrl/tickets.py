"""What lets a node pull a version of the weights from whoever holds it.

Pure. Owns how a ticket follows from the secret that the holders of a version were told.
"""

import hashlib


def pull_ticket(secret: str, node: str, policy_version: int) -> str:
    """What lets just this node pull just this version; `secret` is what its holders were told.

    Example: pull_ticket("c0ffee...", "rollout-0", 4) is 32 hexadecimal digits.
    """
    key = hashlib.blake2b(secret.encode(), digest_size=32).digest()  # a secret of any length
    return hashlib.blake2b(f"{policy_version} {node}".encode(), key=key, digest_size=16).hexdigest()
