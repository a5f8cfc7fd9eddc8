"""The prompts and the lengths of a run, as they were: each response is as long as it was in the
run, whatever else is simulated otherwise.

Owns what follows where the run does not say: responses that it gave up, or never launched, and
prompts beyond its end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightrl.sim.workload import EmpiricalLengths, complete_censored, uniforms

Drawn: TypeAlias = tuple[str, int]  # a prompt in an epoch
# [prompt, epoch, index, tokens, finished] of each, as in lengths.jsonl
Responses: TypeAlias = Sequence[tuple[str, int, int, int, bool]]


@dataclass(frozen=True)
class ReplayLengths:
    """Implements `LengthDistribution`. A response that the run did not launch, or a prompt in
    another epoch, has a length that this prompt had, else one that another had."""

    by_response: Mapping[tuple[str, int, int], int]
    others: EmpiricalLengths

    def length(
        self, prompt: str, epoch: int, noise: int, limit: int, group: str = "", index: int = 0
    ) -> int:
        known = self.by_response.get((prompt, epoch, index))
        if known is None:
            return self.others.length(prompt, epoch, noise, limit)
        return max(1, min(known, limit))


def replayed(rounds: Iterable[Responses], seed: int) -> ReplayLengths:
    seen: dict[tuple[str, int, int], tuple[int, bool]] = {}
    for responses in rounds:
        for prompt, epoch, index, tokens, finished in responses:
            key = (prompt, epoch, index)
            before = seen.get(key, (0, False))
            # put off and sampled again: how it ended counts, else how far it came
            if finished or (not before[1] and tokens >= before[0]):
                seen[key] = (tokens, finished)
    by_prompt: dict[str, list[tuple[int, bool]]] = {}
    for (prompt, _, _), said in seen.items():
        by_prompt.setdefault(prompt, []).append(said)
    whole = complete_censored(by_prompt, seed)
    left = {prompt: iter(lengths) for prompt, lengths in whole.items()}
    by_response = {key: next(left[key[0]]) for key in seen}
    return ReplayLengths(by_response, EmpiricalLengths(whole, seed))


def drawn_in(
    drawn: Mapping[int, Sequence[Drawn]], rounds: Mapping[int, Responses]
) -> tuple[Drawn, ...]:
    """The prompts in the order in which they were drawn. `drawn`: those of each step, as in
    speeds.jsonl; a coordinator that was started again lacks what the one before it drew, which is
    known once it is launched."""
    order: dict[Drawn, None] = {}
    for step in sorted(drawn.keys() | rounds.keys()):
        launched = ((prompt, epoch) for prompt, epoch, *_ in rounds.get(step, ()))
        order |= dict.fromkeys((*drawn.get(step, ()), *launched))
    return tuple(order)


class ReplayCursor:
    """The prompts as they were drawn; beyond that the rest of the epoch, and others of all."""

    def __init__(self, order: Sequence[Drawn], num_prompts: int, seed: int) -> None:
        names = list(dict.fromkeys(prompt for prompt, _ in order))
        self._names = names + [f"p{i}" for i in range(num_prompts - len(names))]
        self._seed = seed
        self._known = list(order)[::-1]
        self.epoch = order[-1][1]
        drawn = {prompt for prompt, epoch in order if epoch == self.epoch}
        self._left = self._shuffled(n for n in self._names if n not in drawn)
        self.epoch = order[0][1]

    def draw(self) -> Drawn:
        if self._known:
            prompt, self.epoch = self._known.pop()
            return prompt, self.epoch
        if not self._left:
            self.epoch += 1
            self._left = self._shuffled(self._names)
        return self._left.pop(), self.epoch

    def _shuffled(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda n: uniforms(self._seed, n, self.epoch)[0])
