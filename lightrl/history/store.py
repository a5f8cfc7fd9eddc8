"""What the prompts of a run were answered before: the tokens of their newest responses, in bounded memory.

Owns the bytes; what they are good for is decided by who reads them. A prompt keeps what its newest epoch
brought: trained, surplus and put-off responses alike, finished or not. When the limit is reached, the
prompt that was answered longest ago is forgotten.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lightrl.core.state import Group, Round
from lightrl.wire import pack_i32

MAX_BYTES = 256 << 20  # of tokens; the objects around them come on top, some 300 bytes for a response


@dataclass(frozen=True, slots=True)
class Past:
    """One earlier response. Example: Past(3, pack_i32([7, 9]), finished=True, reward=1.0)."""

    epoch: int
    tokens: bytes  # int32
    finished: bool  # False: it was given up, and these are its first tokens
    reward: float | None = None  # None: it has no score


class History:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self.num_responses = 0
        self._max_bytes = max_bytes
        self._prompts: dict[str, dict[int, Past]] = {}  # prompt -> index -> response; oldest prompt first

    def of(self, prompt: str) -> tuple[Past, ...]:
        """What is known of a prompt, by the responses' numbers in its group; () if nothing is."""
        known = self._prompts.get(prompt, {})
        return tuple(known[index] for index in sorted(known))

    def learn(self, round: Round) -> dict[str, float]:
        """Takes in a round that has closed; returns the figures of the store.

        hit_rate is the share of the round's prompts of which something was known before.
        """
        groups = round.groups.values()
        hits = sum(group.prompt.id in self._prompts for group in groups)
        for group in groups:
            self.add(group.prompt.id, group.prompt.epoch, _responses(group))
        return {
            "history/bytes": float(self.num_bytes),
            "history/responses": float(self.num_responses),
            "history/prompts": float(len(self._prompts)),
            "history/hit_rate": hits / len(groups) if groups else 0.0,
        }

    def add(self, prompt: str, epoch: int, responses: Iterable[tuple[int, Past]]) -> None:
        """(index in its group, response) of one epoch: in place of those of earlier ones, beside those of
        the same (a prompt that was put off comes twice in an epoch). Empty responses are left out, and
        so is what comes of an epoch that is older than what is known.
        """
        fresh = {index: past for index, past in responses if past.tokens}
        known = self._prompts.get(prompt, {})
        if not fresh or any(past.epoch > epoch for past in known.values()):
            return
        self._forget(prompt)
        self._prompts[prompt] = {**{i: past for i, past in known.items() if past.epoch == epoch}, **fresh}
        self._count(self._prompts[prompt], 1)
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._prompts)))

    def _forget(self, prompt: str) -> None:
        self._count(self._prompts.pop(prompt, {}), -1)

    def _count(self, responses: dict[int, Past], sign: int) -> None:
        self.num_responses += sign * len(responses)
        self.num_bytes += sign * sum(len(past.tokens) for past in responses.values())


def _responses(group: Group) -> Iterable[tuple[int, Past]]:
    for r in group.responses:
        yield r.index, Past(group.prompt.epoch, pack_i32(r.tokens), r.finish_reason is not None, r.reward)
