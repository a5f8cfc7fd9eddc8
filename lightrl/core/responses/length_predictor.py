"""Predict lengths of responses from earlier epochs and from finished siblings.

Owns the stored lengths. A prediction orders work and guides placement; a wrong one costs time,
never correctness. Lengths of one prompt hardly change rank from epoch to epoch (RhymeRL, arXiv
2508.18588, section 3: 2 to 4 % of the responses do strongly).
"""

import math
from dataclasses import dataclass, field

from lightrl.core.state import Group, GroupState, Response, Round

BINS_PER_OCTAVE = 4
NUM_BINS = 24 * BINS_PER_OCTAVE  # up to 16 million tokens
FORGET = 0.5  # weight of earlier rounds in the overall distribution


@dataclass(frozen=True, slots=True)
class Memory:
    """The state of a LengthPredictor as plain data."""

    lengths: dict[str, tuple[int, list[int]]] = field(
        default_factory=dict[str, tuple[int, list[int]]]
    )
    finished: dict[str, int] = field(default_factory=dict[str, int])
    counts: tuple[float, ...] = ()
    # of each set to evaluate on
    longest: dict[str, int] = field(default_factory=dict[str, int])


class LengthPredictor:
    def __init__(self, max_response_tokens: int) -> None:
        self._max_tokens = max_response_tokens
        # prompt -> newest epoch known, lengths in it
        self._lengths: dict[str, tuple[int, list[int]]] = {}
        # prompt -> longest response trained in its newest epoch
        self._finished: dict[str, int] = {}
        # set to evaluate on -> longest response of its newest evaluation
        self._longest: dict[str, int] = {}
        self._counts = [0.0] * NUM_BINS  # of all finished responses, by length
        self._means: list[float] | None = None  # of those longer than a bin's lower end

    def memory(self) -> Memory:
        counts = tuple(self._counts)
        return Memory(dict(self._lengths), dict(self._finished), counts, dict(self._longest))

    def recall(self, memory: Memory) -> None:
        """Replace the whole state."""
        self._lengths, self._finished = dict(memory.lengths), dict(memory.finished)
        self._longest = dict(memory.longest)
        self._counts = list(memory.counts) or [0.0] * NUM_BINS
        self._means = None

    def learn(self, round: Round) -> None:
        """Learn the lengths of a closed training round."""
        self._counts = [FORGET * c for c in self._counts]
        self._means = None
        for group in round.groups.values():
            self._remember(group)
            for r in group.responses:
                if r.finish_reason is not None and (r.num_new or not r.carried):
                    self._counts[_bin(r.num_sampled)] += 1
        for group in round.accepted:
            self._finished[group.prompt.id] = max(r.num_sampled for r in group.kept)

    def learn_evaluation(self, round: Round) -> None:
        """Learn the lengths of a closed evaluation, for its own prompts only: training has another
        sampling and another limit."""
        longest: dict[str, int] = {}
        for group in round.groups.values():
            lengths = [r.num_sampled for r in group.responses if r.num_sampled]
            if lengths:
                self._lengths[group.key] = (group.prompt.epoch, lengths)
                longest[group.set] = max(longest.get(group.set, 0), *lengths)
        self._longest = longest

    def longest_of_set(self, group: Group) -> int:
        """Return the longest response of the group's set in the last evaluation; the limit of the
        group, if none is known."""
        return self._longest.get(group.set, group.max_response_tokens)

    def _remember(self, group: Group) -> None:
        """Store a group's lengths; for a deferred group, only as lower bounds of its last epoch."""
        lengths = [r.num_sampled for r in group.responses if r.num_sampled]
        epoch, older = self._lengths.get(group.prompt.id, (-1, []))
        if group.state is GroupState.DEFERRED and epoch < group.prompt.epoch and older:
            farthest = max(lengths, default=0)
            self._lengths[group.prompt.id] = (epoch, [max(n, farthest) for n in older])
        elif lengths:
            self._lengths[group.prompt.id] = (group.prompt.epoch, lengths)

    def mean(self, group: Group) -> float | None:
        """Return the expected length of the group's responses; None without an earlier epoch."""
        epoch, known = self._lengths.get(group.prompt.id, (0, []))
        is_new = group.round.is_eval or epoch >= group.prompt.epoch
        return None if is_new or not known else sum(known) / len(known)

    def expect(self, response: Response) -> float:
        """Return the expected total length of an unfinished response, given its tokens so far.

        The mean of the longer ones among its prompt's last epoch, or evaluation, and its finished
        siblings; where there are none, of all responses of recent rounds, or the limit.
        """
        held = len(response.tokens) - response.num_inserted  # as num_sampled; this runs often
        group = response.group
        longer = [n for n in self._lengths.get(group.key, (0, []))[1] if n > held]
        if group.finishers:
            scored = [r for r in group.responses if r.scored]
            longer += [n for r in scored if (n := len(r.tokens) - r.num_inserted) > held]
        if longer:
            return sum(longer) / len(longer)
        if group.round.is_eval:  # sets with a higher limit first: no other difference is known
            return float(group.max_response_tokens)
        return min(self._tail_mean(held), float(group.max_response_tokens))

    def expect_longest(self, response: Response) -> float:
        """Return the limit of the response; ignores all stored lengths."""
        return float(response.group.max_response_tokens)

    def finished(self, prompt: str) -> int | None:
        """Return the finishing time of this prompt's group in its last epoch: the length of its
        longest kept response.

        Depends only on samples, unlike the length of a response that was given up.
        """
        return self._finished.get(prompt)

    def _tail_mean(self, held: int) -> float:
        """Return the mean length of recent responses longer than `held`; 2 * held + 1 without."""
        if self._means is None:
            self._means = [0.0] * NUM_BINS
            total = weight = 0.0
            for i in range(NUM_BINS - 1, -1, -1):
                total += self._counts[i] * 2 ** ((i + 0.5) / BINS_PER_OCTAVE)
                weight += self._counts[i]
                self._means[i] = total / weight if weight > 1e-9 else 0.0
        mean = self._means[_bin(held)]
        return mean if mean > held else 2.0 * held + 1.0


def _bin(num_tokens: int) -> int:
    return min(NUM_BINS - 1, int(BINS_PER_OCTAVE * math.log2(num_tokens))) if num_tokens > 1 else 0
