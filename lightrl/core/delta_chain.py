"""The differences between the newest versions, and which of them lead from one to another.

Owns what the trainer has announced, for as many versions as a chain may span. Where they are to be
had and how they are applied: weights/delta/encoding.py.
"""

from collections.abc import Iterable

from lightrl.messages.weights import DeltaOffer

MAX_CHAIN = 8  # steps that a node may be behind and still get differences
MAX_SHARE = 0.75  # of the version's bytes: what a chain may have at most


class DeltaChain:
    def __init__(self) -> None:
        self._leading_to: dict[str, DeltaOffer] = {}  # by the version's digest, oldest first

    def add(self, version: str, offers: Iterable[DeltaOffer]) -> bool:
        """What the trainer has announced with this version; of what leads elsewhere nobody is
        told. Whether one of them is news."""
        is_news = False
        for offer in offers:
            if offer.target == version != offer.base:
                is_news |= self._leading_to.pop(version, None) != offer
                self._leading_to[version] = offer
        while len(self._leading_to) > MAX_CHAIN:
            del self._leading_to[next(iter(self._leading_to))]
        return is_news

    def between(self, base: str, version: str, num_bytes: int) -> tuple[DeltaOffer, ...]:
        """Oldest first; none where one is missing or the whole version, of `num_bytes`, is about as
        small."""
        links: list[DeltaOffer] = []
        most = MAX_SHARE * num_bytes
        while version != base:
            link = self._leading_to.get(version)
            if link is None or len(links) == MAX_CHAIN:
                return ()
            most -= link.num_bytes + link.manifest_bytes
            if most < 0:
                return ()
            links.append(link)
            version = link.base
        return tuple(reversed(links))
