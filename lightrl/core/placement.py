"""Which node gets which response, and which running responses move. Pure functions of a view of the
nodes.

Both decisions rest on one estimate. A node decodes its responses in lock step, and a step with B of
them takes base + slope * B seconds (`Speed`, learned from its chunks). A response with so many
tokens before it is in (tokens / gain) steps: one token comes of a step, more where the node
speculates and the response has a history to draft from (`Gain`, learned likewise). Summed over the
steps until the last one is done, the node finishes in

    base * (most steps of a response) + slope * (sum of the steps of all)        seconds

since there are as many steps as that response needs, and each takes time for every response in it.
It says at once what a slow node is worth, what a long response costs alone and among others, and
where a batch is so large that another node is better: above the plateau of the
throughput-against-batch curve slope dominates, below it base does.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightrl.core.state import Node, Response

Foresee = Callable[[Response], float]  # expected whole length of a response that goes on

# What a move costs, in engine steps of the receiving node: to sample again what was not sent yet
# (up to a chunk), and to prefill what is held (16,000 tokens take less than 100 ms where a step
# takes 17 ms; CPUs are slower).
PREFILL_TOKENS_PER_STEP = 256
# gained seconds for each second a move costs; moving eagerly is known to cost 18 to 20 %
MIN_GAIN = 2.0
SAME_LENGTH = 1.25  # predicted lengths that differ by less are placed by the same order of nodes
REBALANCE_S = 0.5  # at least so long between two looks at all nodes,
# and so much longer for each: looking then takes under one percent of the time
REBALANCE_S_PER_NODE = 0.002


@dataclass(slots=True)
class Outlook:
    """What a node has before it, as predicted."""

    node: Node
    running: int
    # steps, of the response with most before it
    longest: float
    # steps, of all its responses
    total: float

    def finishes_in(self, more: float = 0.0) -> float:
        """Seconds until all is done, with one more response of `more` steps."""
        speed = self.node.speed
        return speed.base * max(self.longest, more) + speed.slope * (self.total + more)

    def key(self, more: float) -> tuple[float, int, str]:
        """Orders nodes for one more response; of equal ones the emptier is better."""
        return self.finishes_in(more), self.running, self.node.name

    def add(self, steps: float) -> None:
        self.running += 1
        self.longest = max(self.longest, steps)
        self.total += steps


def outlook(node: Node, foresee: Foresee) -> Outlook:
    steps = [_remaining(r, foresee) / node.gain_of(r) for r in node.running.values()]
    return Outlook(node, len(steps), max(steps, default=0.0), sum(steps))


@dataclass(slots=True)
class _Order:
    """Nodes with free slots, for responses of one kind: who would finish first comes first."""

    outlooks: dict[str, Outlook]
    heap: list[tuple[float, int, str]]
    # for which the heap's keys hold, nearly
    tokens: float = 0.0

    def best(self, response: Response, tokens: float) -> Outlook | None:
        if not self.tokens / SAME_LENGTH <= tokens <= self.tokens:
            free = (o for o in self.outlooks.values() if o.running < o.node.slots)
            self.heap = [o.key(tokens / o.node.gain_of(response)) for o in free]
            heapq.heapify(self.heap)
            self.tokens = tokens
        while self.heap:
            best = self.outlooks[self.heap[0][-1]]
            if self.heap[0][1] == best.running:
                return best
            # the other kind's order gave it more
            self.rank(best, tokens / best.node.gain_of(response))
        return None

    def rank(self, best: Outlook, steps: float) -> None:
        """The first node has got one more."""
        if best.running < best.node.slots:
            heapq.heapreplace(self.heap, best.key(steps))
        else:
            heapq.heappop(self.heap)


def assign(
    responses: Sequence[Response], nodes: Iterable[Node], foresee: Foresee
) -> list[tuple[Response, Node]]:
    """(response, node) for as many of `responses`, in order, as `nodes` have free slots.

    Credit-based: a node never holds more than its slots, the rest waits. Each response goes to the
    node that would finish first with it, lengths taken as equal within SAME_LENGTH; the name breaks
    ties, so runs repeat. Where nodes speculate, responses with history and without have an order of
    nodes each. With the longest first this is Graham's greedy rule (1969). O(responses log nodes +
    nodes log(longest / shortest) + what runs at these nodes) if they are in order.
    """
    if not responses:
        return []
    outlooks = {n.name: outlook(n, foresee) for n in nodes if n.free > 0}
    speculates = any(o.node.speculates for o in outlooks.values())
    orders = {kind: _Order(outlooks, []) for kind in (False, True)}
    placed: list[tuple[Response, Node]] = []
    for response in responses:
        order = orders[speculates and response.has_history]
        tokens = _remaining(response, foresee)
        if (best := order.best(response, tokens)) is None:
            break
        steps = tokens / best.node.gain_of(response)
        placed.append((response, best.node))
        best.add(steps)
        order.rank(best, steps)
    return placed


def moves(
    nodes: Sequence[Node], foresee: Foresee, chunk_tokens: int = 16
) -> list[tuple[Response, Node]]:
    """Running responses that should go on elsewhere, and where, when nothing waits for a slot.

    From the node that finishes last, the one with most steps goes to the node that would finish it
    first, as long as (tokens that remain) x (time gained per token) is worth MIN_GAIN times the
    move, and that node does not become the last one by it. What earlier moves cost a node counts
    against it. O((nodes + moves) log nodes + running responses).
    """
    outlooks = {n.name: outlook(n, foresee) for n in nodes}
    cost_s = dict.fromkeys(outlooks, 0.0)  # of the moves to a node so far
    last = [(-o.finishes_in(), name) for name, o in outlooks.items() if o.running]
    idle = [(o.finishes_in() + o.node.speed.step_s(o.running + 1), n) for n, o in outlooks.items()]
    heapq.heapify(last)
    heapq.heapify(idle)
    candidates: dict[str, list[tuple[float, float, Response]]] = {}  # (steps, tokens, response)
    moved: list[tuple[Response, Node]] = []
    while last and idle:
        _, source_name = last[0]
        _, target_name = idle[0]
        source, target = outlooks[source_name], outlooks[target_name]
        if target.running >= target.node.slots or target_name == source_name:
            heapq.heappop(idle)
            continue
        if source_name not in candidates:
            longest = _steps_of_all(source.node, foresee)
            candidates[source_name] = sorted(longest, key=lambda c: (c[0], c[2].id))
        if not candidates[source_name]:
            heapq.heappop(last)
            continue
        steps, tokens, response = candidates[source_name][-1]
        gain, gain_there = source.node.gain_of(response), target.node.gain_of(response)
        cost = move_s(response, target, chunk_tokens)
        per_token = source.node.speed.step_s(source.running) / gain
        per_token -= target.node.speed.step_s(target.running + 1) / gain_there
        arrives = cost_s[target_name] + cost + target.finishes_in(tokens / gain_there)
        if (
            tokens * per_token <= MIN_GAIN * (cost_s[target_name] + cost)
            or arrives >= source.finishes_in()
        ):
            break
        candidates[source_name].pop()
        moved.append((response, target.node))
        cost_s[target_name] += cost
        target.add(tokens / gain_there)
        source.running -= 1
        source.total -= steps
        rest = candidates[source_name]
        source.longest = rest[-1][0] if rest else 0.0
        heapq.heapreplace(last, (-source.finishes_in(), source_name))
        step_s = target.node.speed.step_s(target.running + 1)
        heapq.heapreplace(idle, (cost_s[target_name] + target.finishes_in() + step_s, target_name))
    return moved


def move_s(response: Response, target: Outlook, chunk_tokens: int) -> float:
    """What taking a response over costs a node: the prompt and all tokens are prefilled."""
    steps = chunk_tokens + held_tokens(response) / PREFILL_TOKENS_PER_STEP
    return target.node.speed.step_s(1) * steps


def held_tokens(response: Response) -> int:
    """Of its prompt and of what was sampled."""
    return len(response.group.prompt.tokens) // 4 + len(response.tokens)


def _steps_of_all(node: Node, foresee: Foresee) -> list[tuple[float, float, Response]]:
    """(steps, tokens, response) of what a node has before it."""
    left = ((_remaining(r, foresee), r) for r in node.running.values())
    return [(tokens / node.gain_of(r), tokens, r) for tokens, r in left]


def _remaining(response: Response, foresee: Foresee) -> float:
    return max(1.0, foresee(response) - len(response.tokens))
