"""Prompts between rounds: deferred, or drawn too early; and the rest of the epoch.

Owns prompts that no open round holds. `rounds` decides what a round takes from here.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightrl.core.state import DrawnPrompt, HeldResponse


@dataclass(frozen=True, slots=True)
class Deferred:
    """A prompt that lost the race of a short round."""

    prompt: DrawnPrompt
    # placements of its responses so far; later ones count on, so that late chunks are recognised
    attempts: int
    # the step that first deferred it
    since: int
    # its responses by index, as many as a later round launches; () = none was launched
    held: tuple[HeldResponse, ...] = ()


@dataclass(slots=True)
class Backlog:
    """Holds prompts, first in, first out: each waits for about one period of rounds.

    Example: Backlog(256, deferred=deque([Deferred(DrawnPrompt("p7", 0, <int32>), 2, since=3)]),
    num_drawn=64)
    """

    # of one epoch
    num_prompts: int
    deferred: deque[Deferred] = field(default_factory=deque[Deferred])
    # drawn, but not usable then
    held_back: deque[DrawnPrompt] = field(default_factory=deque[DrawnPrompt])
    # from the data, over all epochs
    num_drawn: int = 0

    def restore(
        self, num_drawn: int, deferred: Iterable[Deferred], held_back: Iterable[DrawnPrompt]
    ) -> None:
        """Replace the whole content."""
        self.num_drawn = num_drawn
        self.deferred = deque(deferred)
        self.held_back = deque(held_back)

    @property
    def epoch_left(self) -> int:
        """Return the number of prompts of this epoch that no round has had; 0 between epochs."""
        return -self.num_drawn % self.num_prompts + len(self.held_back)

    def pop_oldest(self, count: int) -> list[Deferred]:
        """Remove and return the `count` oldest, or all; of one prompt only the older epoch."""
        taken: dict[str, Deferred] = {}
        kept: list[Deferred] = []
        while self.deferred and len(taken) < count:
            held = self.deferred.popleft()
            if held.prompt.id in taken:
                kept.append(held)
            else:
                taken[held.prompt.id] = held
        self.deferred.extendleft(reversed(kept))
        return list(taken.values())

    def pop_held_back(self, count: int, busy: set[str]) -> list[DrawnPrompt]:
        """Remove and return up to `count` held-back prompts that are not `busy`, in order."""
        usable: list[DrawnPrompt] = []
        kept: deque[DrawnPrompt] = deque()
        for prompt in self.held_back:
            if len(usable) < count and prompt.id not in busy:
                usable.append(prompt)
                busy.add(prompt.id)
            else:
                kept.append(prompt)
        self.held_back = kept
        return usable

    def draw(self, drawn: Sequence[DrawnPrompt], busy: set[str]) -> list[DrawnPrompt]:
        """Accept prompts drawn from the data; return those usable now, hold back the others.

        `busy` prompts are already deferred or in the round, from the end of the last
        epoch.
        """
        self.num_drawn += len(drawn)
        self.held_back.extend(drawn)
        return self.pop_held_back(len(drawn), busy)
