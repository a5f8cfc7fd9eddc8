"""Choose the nodes of responses and the responses that move. Pure functions of a view of the nodes.

Both decisions use one estimate, `Outlook`: when a node will have finished its responses. A node
decodes its responses in lock step, and a step takes longer with more responses (`Speed`, learned
from its chunks). The sum over the steps until the last response is done accounts for slow nodes,
and for the cost of a long response alone and among others.
"""

import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightrl.core.state import Node, Response

LengthForecast = Callable[[Response], float]  # expected total length of an unfinished response

# Cost of a migration in engine steps of the receiving node: unsent tokens (up to a chunk) are
# sampled again, held tokens are prefilled (16,000 tokens take less than 100 ms where a step takes
# 17 ms; CPUs are slower).
PREFILL_TOKENS_PER_STEP = 256
# gained seconds for each second that a move costs; eager moves cost 18 to 20 %
MIN_GAIN = 2.0
SURE = 2.0  # standard errors of the speeds that a gain must exceed
SAME_LENGTH = 1.25  # predicted lengths that differ by less are placed by the same order of nodes


@dataclass(slots=True)
class Outlook:
    """Predicted remaining work of a node."""

    node: Node
    # tokens of each of its responses, fewest first
    left: list[float]

    @property
    def running(self) -> int:
        return len(self.left)

    def finishes_in(self, more: float = 0.0) -> float:
        """Return the seconds until all responses are done, with one of `more` tokens if given."""
        return self.node.speed.finishes_in(self.left, more)

    def key(self, more: float) -> tuple[float, int, str]:
        """Return the sort key of a node for one more response; of equal nodes the emptier wins."""
        return self.finishes_in(more), self.running, self.node.name

    def add(self, tokens: float) -> None:
        insort(self.left, tokens)


def outlook(node: Node, foresee: LengthForecast) -> Outlook:
    return Outlook(node, sorted(remaining(r, foresee) for r in node.running.values()))


def assign(
    responses: Sequence[Response], nodes: Iterable[Node], foresee: LengthForecast
) -> list[tuple[Response, Node]]:
    """Return (response, node) for as many of `responses`, in order, as `nodes` have room for.

    Credit-based: a node never holds more than its slots, the rest waits. Each response goes to the
    node that would finish first with it, lengths taken as equal within SAME_LENGTH; the name breaks
    ties, so runs are reproducible. With the longest first this is Graham's greedy rule (1969).
    O(responses log nodes + nodes log(longest / shortest) + running responses) if sorted by length.
    """
    outlooks = {n.name: outlook(n, foresee) for n in nodes if n.free > 0} if responses else {}
    placed: list[tuple[Response, Node]] = []
    heap: list[tuple[float, int, str]] = []
    heap_tokens = 0.0  # for which the keys of the heap hold, nearly
    for response in responses:
        tokens = remaining(response, foresee)
        if not heap_tokens / SAME_LENGTH <= tokens <= heap_tokens:
            free = (o for o in outlooks.values() if o.running < o.node.slots)
            heap, heap_tokens = [o.key(tokens) for o in free], tokens
            heapq.heapify(heap)
        if not heap:
            break
        best = outlooks[heap[0][-1]]
        placed.append((response, best.node))
        best.add(tokens)
        if best.running < best.node.slots:
            heapq.heapreplace(heap, best.key(tokens))
        else:
            heapq.heappop(heap)
    return placed


def choose_migrations(
    nodes: Sequence[Node], foresee: LengthForecast, chunk_tokens: int = 16
) -> list[tuple[Response, Node]]:
    """Return (response, target) of running responses to migrate, when no response waits for a slot.

    From the node that finishes last, the longest response moves to the node that would
    finish it first, as long as that pays and the target does not become the last node. The cost of
    earlier moves to a node is included. O((nodes + migrations) log nodes + running responses).
    """
    outlooks = {n.name: outlook(n, foresee) for n in nodes}
    cost_s = dict.fromkeys(outlooks, 0.0)  # of the moves to a node so far
    ends = {name: o.finishes_in() for name, o in outlooks.items()}
    last = [(-ends[name], name) for name, o in outlooks.items() if o.running]
    idle = [(ends[n] + o.node.speed.step_s(o.running + 1), n) for n, o in outlooks.items()]
    heapq.heapify(last)
    heapq.heapify(idle)
    candidates: dict[str, list[tuple[float, Response]]] = {}  # most tokens last
    moved: list[tuple[Response, Node]] = []
    while last and idle:
        _, source_name = last[0]
        _, target_name = idle[0]
        source, target = outlooks[source_name], outlooks[target_name]
        if target.running >= target.node.slots or target_name == source_name:
            heapq.heappop(idle)
            continue
        if source_name not in candidates:
            candidates[source_name] = works_of(source.node, foresee)
        if not candidates[source_name]:
            heapq.heappop(last)
            continue
        tokens, response = candidates[source_name][-1]
        cost = migration_s(response, target.node, chunk_tokens)
        spent_s = cost_s[target_name] + cost
        arrives = spent_s + target.finishes_in(tokens)
        here_s = taken_s(tokens, source.node, source.running)
        there_s = taken_s(tokens, target.node, target.running + 1)
        if not pays(here_s, there_s, spent_s) or arrives >= source.finishes_in():
            break
        candidates[source_name].pop()
        moved.append((response, target.node))
        cost_s[target_name] += cost
        target.add(tokens)
        del source.left[-1]
        heapq.heapreplace(last, (-source.finishes_in(), source_name))
        step_s = target.node.speed.step_s(target.running + 1)
        heapq.heapreplace(idle, (cost_s[target_name] + target.finishes_in() + step_s, target_name))
    return moved


def taken_s(tokens: float, node: Node, batch: int) -> tuple[float, float]:
    """Return the seconds until `tokens` are sampled in a constant batch of that size, and their
    standard error."""
    seconds = tokens * node.speed.step_s(batch)
    return seconds, seconds * node.speed.error


def pays(here: tuple[float, float], there: tuple[float, float], cost_s: float) -> bool:
    """Return whether a move gains enough: MIN_GAIN times its cost, and SURE standard errors of the
    speeds. `here` and `there` are results of `taken_s`."""
    error_s = math.hypot(here[1], there[1])
    return here[0] - there[0] > MIN_GAIN * cost_s + SURE * error_s


def migration_s(response: Response, to: Node, chunk_tokens: int) -> float:
    """Return the seconds that a move costs the node `to`, which prefills the prompt and tokens."""
    return to.speed.step_s(1) * (chunk_tokens + response.context / PREFILL_TOKENS_PER_STEP)


def leaves(response: Response, home: Node, wait_s: float) -> bool:
    """Return whether a turn of an episode, which waits `wait_s` for the node that ran its last one,
    is to run elsewhere: the KV is gone, or MIN_GAIN times its prefill takes less."""
    if not is_home(response, home):
        return True
    prefill_s = home.speed.step_s(1) * response.context / PREFILL_TOKENS_PER_STEP
    return wait_s > MIN_GAIN * prefill_s


def is_home(response: Response, node: Node) -> bool:
    """Return whether a node ran the last turn of an episode, and may still have its KV: a newer
    version has cleared it."""
    is_same = bool(response.turns) and response.last_node == node.name
    return is_same and response.version == node.policy_version


def works_of(node: Node, foresee: LengthForecast) -> list[tuple[float, Response]]:
    """Return the remaining tokens of a node's responses, most tokens last."""
    works = [(remaining(r, foresee), r) for r in node.running.values()]
    return sorted(works, key=lambda w: (w[0], w[1].id))


def remaining(response: Response, foresee: LengthForecast) -> float:
    sampled = len(response.tokens) - response.num_inserted  # as num_sampled; this runs often
    return max(1.0, foresee(response) - sampled)
