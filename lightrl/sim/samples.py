"""What each response will be: its noise, and the length that follows from it.

Owns in which step a response was first generated: under newer weights the same noise may give
another sample. The lengths themselves are drawn in workload.py.
"""

from collections.abc import Sequence

from lightrl.core.settings import EvalSet
from lightrl.core.state import DrawnPrompt, Response
from lightrl.sim.workload import Workload, uniforms


class Samples:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._first_step: dict[str, int] = {}

    def noise(self, response: Response) -> int:
        """Of the sample that it will be now."""
        step = response.group.round.step
        if response.carried:
            step = response.group.since  # in which it began: it is that sample
        first, again = self._first_step.setdefault(response.id, step), self._workload.same_again
        if first == step or again >= 1 or uniforms("again", response.seed, step)[0] < again:
            return response.seed
        return response.seed ^ (step << 64)

    def length(self, response: Response, noise: int) -> int:
        """In tokens, at most the limit of its group."""
        group = response.group
        prompt, lengths = group.prompt, self._workload.lengths
        limit = group.max_response_tokens
        return lengths.length(prompt.id, prompt.epoch, noise, limit, group.id, response.index)


def held_out(sets: Sequence[EvalSet], tokens: bytes) -> tuple[DrawnPrompt, ...]:
    """The prompts of all sets to evaluate on, each of these tokens."""
    return tuple(
        DrawnPrompt(f"{one.name}/{i}", 0, tokens) for one in sets for i in range(one.num_prompts)
    )
