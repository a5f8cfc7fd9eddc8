"""Store the newest responses to each prompt, in bounded memory.

A prompt keeps the responses of its newest epoch: trained, surplus and deferred ones, finished or
not. Prompts of evaluations are stored, too, each evaluation counting as an epoch. When the limit is
reached, the training prompt answered last is evicted: it is not drawn again for an epoch, while the
one answered longest ago is drawn next.

Arrays are shared with the closed rounds and must not be changed. The limit counts tokens, 4 bytes
each. Python objects take some 330 bytes more for a response: 4 % for responses of 2,000 tokens, so
that 10,000 prompts with 8 of these take 670 MB.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightrl.core.state import Group, Round

MAX_BYTES = 1024 << 20  # of tokens


@dataclass(frozen=True, slots=True)
class PastResponse:
    """One earlier response. Example: PastResponse(3, array("i", [7, 9]), finished=True,
    reward=1.0)."""

    epoch: int
    # int32
    tokens: "array[int]"
    # False: it was aborted after these tokens
    finished: bool
    # None: not scored
    reward: float | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tokens."""
        return 4 * len(self.tokens)


@dataclass(frozen=True, slots=True)
class PromptAnswers:
    """The responses of one group. Example: PromptAnswers("p7", 1, ((0, PastResponse(1, ...)),))."""

    # as `Group.key`
    prompt: str
    epoch: int
    # (index in its group, response)
    responses: tuple[tuple[int, PastResponse], ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tokens of all responses."""
        return sum(past.num_bytes for _, past in self.responses)


class History:
    """Earlier responses by prompt."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self.num_responses = 0
        self.num_evicted = 0  # prompts
        self._max_bytes = max_bytes
        self._prompts: dict[
            str, dict[int, PastResponse]
        ] = {}  # key -> index -> response; oldest prompt first

    def of(self, prompt: str) -> tuple[PastResponse, ...]:
        """Return the responses to a prompt, in the order of their index; () if there are none."""
        known = self._prompts.get(prompt, {})
        return tuple(known[index] for index in sorted(known))

    def all(self) -> Iterator[PromptAnswers]:
        """Yield all answers, oldest first: adding them in this order restores the history."""
        for prompt, known in self._prompts.items():
            epoch = next(iter(known.values())).epoch  # all have the same
            yield PromptAnswers(prompt, epoch, tuple(known.items()))

    def learn(self, answers: Iterable[PromptAnswers]) -> dict[str, float]:
        """Add the answers of a closed round, and return the figures of the store.

        hit_rate: share of the round's prompts that had a history; evicted: number of prompts.
        """
        answers, num_evicted = list(answers), self.num_evicted
        hits = sum(answered.prompt in self._prompts for answered in answers)
        for answered in answers:
            self.add(answered)
        return {
            "history/bytes": float(self.num_bytes),
            "history/responses": float(self.num_responses),
            "history/prompts": float(len(self._prompts)),
            "history/evicted": float(self.num_evicted - num_evicted),
            "history/hit_rate": hits / len(answers) if answers else 0.0,
        }

    def add(self, answered: PromptAnswers) -> None:
        """Add the answers of one group: they replace those of earlier epochs, and are merged with
        those of the same epoch (a deferred prompt is answered twice). Empty responses, answers of
        an older epoch, and answers larger than the limit are ignored.
        """
        prompt, epoch = answered.prompt, answered.epoch
        fresh = {index: past for index, past in answered.responses if past.tokens}
        known = self._prompts.get(prompt, {})
        if not fresh or any(past.epoch > epoch for past in known.values()):
            return
        merged = {**{i: past for i, past in known.items() if past.epoch == epoch}, **fresh}
        if sum(past.num_bytes for past in merged.values()) > self._max_bytes:
            return
        self._forget(prompt)
        self._prompts[prompt] = merged
        self._count(merged, 1)
        while self.num_bytes > self._max_bytes:
            newest_first = reversed(self._prompts)
            trained = (key for key in newest_first if not key.startswith("\0"))  # see Group.key
            self._forget(next(trained, next(reversed(self._prompts))))
            self.num_evicted += 1

    def _forget(self, prompt: str) -> None:
        self._count(self._prompts.pop(prompt, {}), -1)

    def _count(self, responses: dict[int, PastResponse], sign: int) -> None:
        self.num_responses += sign * len(responses)
        self.num_bytes += sign * sum(past.num_bytes for past in responses.values())


def answers(round: Round) -> list[PromptAnswers]:
    """Return the answers of a closed round; copies no tokens."""
    return [
        _answered(group, round.step if round.is_eval else group.prompt.epoch)
        for group in round.groups.values()
    ]


def _answered(group: Group, epoch: int) -> PromptAnswers:
    responses = (
        (r.index, PastResponse(epoch, r.tokens, r.finish_reason is not None, r.reward))
        for r in group.responses
    )
    return PromptAnswers(group.key, epoch, tuple(responses))
