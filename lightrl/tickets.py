"""Tickets: with one a node may pull a version of the weights from its holders.

Pure. Owns how a ticket follows from the secret of the holders of a version.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache


def pull_ticket(secret: str, node: str, policy_version: int) -> str:
    """The ticket of one node for one version; `secret`: of its holders.

    Example: pull_ticket("c0ffee...", "rollout-0", 4) is 32 hexadecimal digits.
    """
    return pull_tickets([secret], node, policy_version)[0]


def pull_tickets(secrets: Iterable[str], node: str, policy_version: int) -> list[str]:
    """The same, of several holders: of a thousand nodes each gets seventeen at a publication."""
    subject = f"{policy_version} {node}".encode()
    tickets: list[str] = []
    for hasher in map(_keyed, secrets):
        ticket = hasher.copy()
        ticket.update(subject)
        tickets.append(ticket.hexdigest())
    return tickets


@lru_cache(maxsize=4096)  # more than a run has holders
def _keyed(secret: str) -> "hashlib.blake2b":
    key = hashlib.blake2b(secret.encode(), digest_size=32).digest()  # a secret of any length
    return hashlib.blake2b(key=key, digest_size=16)
