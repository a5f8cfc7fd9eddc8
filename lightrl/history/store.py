"""What the prompts of a run were answered before: the tokens of their newest responses, in bounded
memory.

Owns which are kept; what they are good for is decided by who reads them. A prompt keeps what its
newest epoch brought: trained, surplus and put-off responses alike, finished or not. The prompts of
evaluations are kept beside those of the training data, each evaluation counting as an epoch. When
the limit is reached, the training prompt that was answered last is forgotten: it is asked again in
an epoch from now. What was answered longest ago is needed next, and a store that gave it up first
would have forgotten most prompts by the time they come again.

The arrays are those of the rounds that have closed, so that learning a gigabyte copies nothing:
nobody may change them. The limit is on tokens, 4 bytes each. What Python needs around them comes on
top, some 330 bytes for a response: 4 % for responses of 2,000 tokens, so that 10,000 prompts with 8
of these take 670 MB.
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
    # False: it was given up, and these are its first tokens
    finished: bool
    # None: it has no score
    reward: float | None = None

    @property
    def num_bytes(self) -> int:
        """Of its tokens."""
        return 4 * len(self.tokens)


@dataclass(frozen=True, slots=True)
class PromptAnswers:
    """What one group brought. Example: PromptAnswers("p7", 1, ((0, PastResponse(1, ...)),))."""

    # as `Group.key`
    prompt: str
    epoch: int
    # (index in its group, response)
    responses: tuple[tuple[int, PastResponse], ...]

    @property
    def num_bytes(self) -> int:
        """Of its tokens."""
        return sum(past.num_bytes for _, past in self.responses)


class History:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self.num_responses = 0
        self.num_evicted = 0  # prompts, for want of room
        self._max_bytes = max_bytes
        self._prompts: dict[
            str, dict[int, PastResponse]
        ] = {}  # key -> index -> response; oldest prompt first

    def of(self, prompt: str) -> tuple[PastResponse, ...]:
        """What is known of a prompt, by the responses' numbers in its group; () if nothing is."""
        known = self._prompts.get(prompt, {})
        return tuple(known[index] for index in sorted(known))

    def all(self) -> Iterator[PromptAnswers]:
        """Everything, the prompt answered longest ago first: whoever adds it in this order has the
        same."""
        for prompt, known in self._prompts.items():
            epoch = next(iter(known.values())).epoch  # all have the same
            yield PromptAnswers(prompt, epoch, tuple(known.items()))

    def learn(self, answers: Iterable[PromptAnswers]) -> dict[str, float]:
        """Takes in a round that has closed; returns the figures of the store.

        hit_rate is the share of the round's prompts of which something was known before, evicted
        the number of prompts that had to make room.
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
        """What one epoch brought: in place of what earlier ones did, beside what the same one did
        (a prompt that was put off comes twice in an epoch). Empty responses are left out, and so
        are what comes of an epoch older than what is known, and what has no room even alone.
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
    """All that a closed round brought. Quick, however long it is: nothing is copied."""
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
