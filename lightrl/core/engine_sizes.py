"""Engines of several sizes over the same devices: those of one size are awake, the others sleep.

Owns which size that is, and that it comes to be so. Each engine is a rollout node of its own that
says how many devices it spans. Once a round has closed, `planner` says the size for the next one,
and it changes while the trainer is at work: nodes of other sizes are released, and when the last of
them sleeps, those of this size wake. As in `handover`, orders follow from where everybody is. Owns
also what the planner must know of a round: what it took, preempted, and held at once.

To start an engine takes long, and room that no other may have then. So while nothing is sampled
those of each size start once, the largest first, and sleep as soon as they are up: they are told
Wake and Release, one behind the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightrl.core.backlog import Backlog
from lightrl.core.commands import Outbox
from lightrl.core.deadlines import earliest
from lightrl.core.ending import Ending
from lightrl.core.fleet import Fleet
from lightrl.core.length_predictor import LengthPredictor
from lightrl.core.planner import PlannedRound, Planner, PlannerMemory, peak_kv
from lightrl.core.responses import ResponseTable
from lightrl.core.round_time import EngineKind, prior_lengths, round_s
from lightrl.core.settings import Settings
from lightrl.core.state import Node, NodeState, Round, RoundKind, RoundState
from lightrl.messages.load import Load
from lightrl.messages.sharing import Release, Wake

MAX_LENGTHS = 256  # of a round, that are remembered
AWAKE = {NodeState.JOINING, NodeState.LOADING, NodeState.READY, NodeState.UPDATING}
HAS_LEFT = {RoundState.CLOSED, RoundState.TRAINED}


@dataclass(slots=True)
class _Open:
    """The round at hand, from when it was first seen."""

    step: int
    size: int
    since: float
    num_tokens: int
    preemptions: int
    kv_tokens: int = 0
    # an engine is ready to sample; `since` is when the first one was
    has_begun: bool = False


@dataclass(slots=True)
class _Told:
    """A node's last word of its engine."""

    incarnation: int
    # KV preemptions
    counted: int
    at: float = 0.0
    # an engine has been up there, whether or not it sleeps
    is_up: bool = False


class EngineSizes:
    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        table: ResponseTable,
        backlog: Backlog,
        predictor: LengthPredictor,
        ending: Ending,
        next_kind: Callable[[], RoundKind],
        outbox: Outbox,
    ) -> None:
        self.planner = Planner(settings.parallel or (1,))
        self.size = settings.parallel[0] if settings.parallel else 0  # of those that are awake
        self._settings = settings
        self._fleet = fleet
        self._nodes = fleet.devices.parallel
        self._loads: dict[str, _Told] = {}
        self._table = table
        self._backlog = backlog
        self._predictor = predictor
        self._ending = ending
        self._next_kind = next_kind  # of the training round that is opened next
        self._outbox = outbox
        self._num_preempted = 0  # in the run so far, as far as this core has seen it
        self._open: _Open | None = None
        self._chunks = 0  # until what nodes hold is added up again
        self._none_since: float | None = None  # when no node of this size was left
        self._released_by: float | None = None  # the node that was told so first
        self._seen: object = None  # all that the last orders followed from
        # node -> incarnation, of those that were told to start an engine and sleep again
        self._started: dict[str, int] = {}
        self._starting = 0  # the size that starts; 0 = none does
        self._has_begun = False  # something has been sampled, or the first size is settled
        self._num_switches = 0
        self._prompt_tokens = 0  # of the last round, on average
        self._learned: tuple[int, PlannedRound] | None = None  # the last round, and its step
        self._num_up = 0  # grows with what is heard of engines that are up, or are not

    # What outlives the coordinator

    def memory(self) -> PlannerMemory:
        return replace(self.planner.memory(), size=self.size)

    def figures(self, step: int) -> dict[str, float]:
        """Of a step that closes: what its round's engines were, and how often they preempted; the
        size for the next one, and changes since this core began. {}: there is one size."""
        if self._learned is None or self._learned[0] != step:
            return {}
        done = self._learned[1]
        figures = {"parallel": done.size, "preemptions": done.preemptions}
        figures |= {"next_parallel": self.size, "switches": self._num_switches}
        return {name: float(value) for name, value in figures.items()}

    def recall(self, known: PlannerMemory) -> None:
        self.planner.recall(known)
        if known.size in self._settings.parallel:
            self.size = known.size

    # Time

    @property
    def deadline(self) -> float | None:
        waits = None if self._none_since is None else self._none_since + self._settings.release_s
        return earliest(waits, self._released_by)

    def late(self, now: float) -> list[Node]:
        """Nodes that have not given their devices back."""
        if self._released_by is None or now < self._released_by:
            return []
        told = (n for n in self._nodes.values() if n.state is NodeState.RELEASING)
        return [n for n in told if n.since + self._limit_s(n) <= now]  # rounded as the deadline is

    def _limit_s(self, node: Node) -> float:
        """In which it must answer a Release; longer if its engine may have to start before."""
        told = self._loads.get(node.name)
        is_up = told is not None and told.incarnation == node.incarnation and told.is_up
        return self._settings.release_s + (0.0 if is_up else self._settings.patience_s)

    # What happens

    def heard(self, node: Node) -> None:
        """Tokens have come from a node. O(1), on average."""
        if node.parallel and self._open is not None:
            self._chunks -= 1
            if self._chunks < 0:
                held = sum(n.context for n in self._nodes.values())
                self._open.kv_tokens = max(self._open.kv_tokens, held)
                self._chunks = len(self._nodes)

    def heard_load(self, name: str, load: Load, now: float) -> None:
        """What a node's engine does, by its own word. Another engine counts preemptions from 0."""
        if (node := self._nodes.get(name)) is None:
            return
        told = self._loads.get(name)
        if told is None or told.incarnation != node.incarnation:
            # what it counted before it was known here was in no round
            told = self._loads[name] = _Told(node.incarnation, load.num_preemptions)
            self._num_up += 1
        more = load.num_preemptions - told.counted
        if self._open is None or node.parallel == self._open.size:  # else of a round before
            self._num_preempted += more if more >= 0 else load.num_preemptions
        told.counted, told.at = load.num_preemptions, now
        if told.is_up != bool(node.device):
            told.is_up = bool(node.device)
            self._num_up += 1

    def update(self, now: float) -> None:
        """In every event. With no node that says its size it does nothing."""
        if not self._nodes or self._ending.has_begun:
            return
        if (round := self._table.round) is not None and not round.is_eval:
            self._measure(round, now)
        if not self._has_begun:
            self._begin()
        is_due = self._none_since is not None and now >= (self.deadline or 0.0)
        if self._see() != self._seen or is_due:
            self._give_orders(now)
            self._seen = self._see()

    def _begin(self) -> None:
        """The first round may begin with another size than the first, if all sizes have said in
        time what they cost; and so may one after a resume."""
        round, ready = self._table.round, self._fleet.ready
        if any(name in ready for name in self._nodes):
            self._has_begun = True
        elif self._expect(set(self._settings.parallel), [1]):
            self._has_begun = True
            is_open = round is not None and round.state not in HAS_LEFT and not round.is_eval
            self._plan(round.kind if round is not None and is_open else None)

    def _see(self) -> object:
        """All that orders follow from."""
        published, round = self._fleet.published, self._table.round
        return (
            (self._fleet.devices.num_moves, self.size, self._num_up),
            None if published is None else published.policy_version,
            round is None or round.state in HAS_LEFT,
        )

    def _measure(self, round: Round, now: float) -> None:
        seen = self._open
        if round.state not in HAS_LEFT:
            if seen is None or seen.step != round.step:
                counts = _num_tokens(round), self._num_preempted
                seen = self._open = _Open(round.step, self.size, now, *counts)
            if not seen.has_begun:
                seen.since, seen.has_begun = now, bool(self._fleet.ready)
        elif seen is not None and seen.step == round.step and self._have_told(round):
            self._open = None
            self._learn(seen, round)
            if round.step + 1 < self._settings.num_steps:
                self._plan()

    def _have_told(self, round: Round) -> bool:
        """All nodes have said how often they preempted in the round; or nobody waits for it."""
        published = self._fleet.published
        if published is not None and published.policy_version > round.step:
            return True
        nodes = (n for n in self._nodes.values() if n.state is NodeState.READY)
        told = (self._loads.get(n.name) for n in nodes)
        return all(t is not None and t.at >= round.closed_at for t in told)

    def _learn(self, seen: _Open, round: Round) -> None:
        if seen.size != self.size:
            return  # it has changed since
        nodes = [n for n in self._nodes.values() if n.parallel == self.size]
        caches = [n.load.kv_tokens for n in nodes]
        self.planner.has_caches(self.size, sum(caches) if all(caches) else 0)
        lengths = sorted(
            (len(r.tokens) for g in round.groups.values() for r in g.responses), reverse=True
        )
        prompts = [len(g.prompt.tokens) // 4 for g in round.groups.values()]
        self._prompt_tokens = sum(prompts) // max(1, len(prompts))
        done = PlannedRound(
            kind=round.kind,
            size=self.size,
            preemptions=self._num_preempted - seen.preemptions,
            seconds=round.closed_at - seen.since,
            num_tokens=_num_tokens(round) - seen.num_tokens,
            kv_tokens=seen.kv_tokens,
            lengths=tuple(lengths[:: 1 + len(lengths) // MAX_LENGTHS]),
            num_responses=len(lengths),
            expected_s=self._expect({seen.size}, lengths).get(seen.size, 0.0),
        )
        self._learned = round.step, done
        self.planner.learn(done)

    def _plan(self, kind: str | None = None) -> None:
        """Of the round at hand, or the next one."""
        kind = kind or self._next_kind()
        foreseen = self._foreseen_kv() if kind == "long" and self._settings.foresight else 0.0
        expected = self._expect(set(self._settings.parallel), self._lengths_of(kind))
        size = self.planner.size_for(kind, foreseen, expected)
        if size != self.size and size in self._sizes_there():
            self._outbox.report(
                f"engines of {size} devices, not {self.size}, for the next round: {kind}"
            )
            self._take(size)

    def _take(self, size: int) -> None:
        self.size, self._none_since = size, None
        self._num_switches += 1

    def _lengths_of(self, kind: str) -> list[int]:
        """That the responses of the next round are expected to have: those of the last one of its
        kind, or what is assumed, on top of what its prompts have got already."""
        settings = self._settings
        some, count = self.planner.lengths(kind)
        if count:
            return [some[k * len(some) // count] for k in range(count)]
        short = kind == "short"
        prompts = settings.prompts_launched if short else settings.prompts_per_step
        count = prompts * (settings.responses_launched if short else settings.group_size)
        longest = settings.max_response_tokens
        held = sorted(self._held_lengths(), reverse=True) if kind in {"long", "flush"} else []
        rest = prior_lengths(count, longest)
        if not held:
            return rest
        return [min(longest, n + round(held[k * len(held) // count])) for k, n in enumerate(rest)]

    def _held_lengths(self) -> list[float]:
        """Of earlier responses to the prompts that wait for a long round. Most were given up, and
        go on from there when they start again."""
        prompts = [p.prompt for p in self._backlog.put_off][: self._settings.prompts_per_step]
        return [n for prompt in prompts for n in self._predictor.lengths(prompt.id)]

    def _expect(self, sizes: set[int], lengths: Sequence[int]) -> dict[int, float]:
        """Seconds that such a round takes engines of each size; {}: not all have said what they
        cost."""
        expected: dict[int, float] = {}
        for size in sizes:
            nodes = [n for n in self._nodes.values() if n.parallel == size]
            costs = [n.load.costs for n in nodes if n.load.costs is not None]
            if not costs or not lengths:
                return {}
            slowest = max(costs, key=lambda c: (c.base_s, c.response_s))
            kv_tokens = min(n.load.kv_tokens for n in nodes)
            kind = EngineKind(len(nodes), nodes[0].slots, kv_tokens, slowest)
            expected[size] = round_s(kind, lengths, self._prompt_tokens)
        return expected

    def _sizes_there(self) -> set[int]:
        return {n.parallel for n in self._nodes.values() if n.state is not NodeState.DRAINING}

    def _foreseen_kv(self) -> float:
        """Of the long round that comes next: its prompts wait."""
        lengths: list[float] = []
        prompts = [p.prompt for p in self._backlog.put_off][: self._settings.prompts_per_step]
        for prompt in prompts:
            known = self._predictor.lengths(prompt.id)
            num = self._settings.group_size
            longest = sorted(known, reverse=True)[:num]
            held = len(prompt.tokens) // 4
            lengths += [held + n for n in longest]
        slots = sum(n.slots for n in self._nodes.values() if n.parallel == self.size)
        return peak_kv(lengths, slots)

    # Orders

    def _give_orders(self, now: float) -> None:
        nodes = self._nodes.values()
        self._look_for_others(now)
        self._starting = self._to_start()
        size = self._starting or self.size
        for node in nodes:
            if node.parallel != size and node.state in AWAKE:
                self._release(node)
        if all(n.is_asleep for n in nodes if n.parallel != size):
            for node in nodes:
                if node.parallel == size and node.state is NodeState.RELEASED:
                    self._wake(node)
        told = [n for n in nodes if n.state is NodeState.RELEASING]
        self._released_by = min((n.since + self._limit_s(n) for n in told), default=None)

    def _release(self, node: Node) -> None:
        self._fleet.release(node)
        node.order += 1
        self._outbox.send(node.name, Release(node.order))

    def _wake(self, node: Node) -> None:
        """To sample, or only to start its engine."""
        if self._starting and not self._is_to_start(node):
            return  # it has done so
        node.order += 1
        self._fleet.wake(node)
        self._outbox.send(node.name, Wake(node.order))
        self._started[node.name] = node.incarnation
        if self._starting:
            self._release(node)

    def _to_start(self) -> int:
        """The size whose engines start now, 0 = none: while nothing is sampled, the largest of
        which one has not been up, until the last of them sleeps again."""
        nodes, round = self._nodes.values(), self._table.round
        if any(n.parallel == self._starting and n.state is NodeState.RELEASING for n in nodes):
            return self._starting
        is_open = round is not None and round.state not in HAS_LEFT
        if is_open and any(n.state is NodeState.READY for n in nodes):
            return 0
        sizes = (n.parallel for n in nodes if n.parallel != self.size and self._is_to_start(n))
        return max(sizes, default=0)

    def _is_to_start(self, node: Node) -> bool:
        """By its own word no engine has been up there, and it was not told to start one."""
        told = self._loads.get(node.name)
        if told is None or told.incarnation != node.incarnation or told.is_up:
            return False
        was_told = self._started.get(node.name) == node.incarnation
        return not was_told and node.state is not NodeState.DRAINING

    def _look_for_others(self, now: float) -> None:
        """If no node of this size comes, another one does the work."""
        staying = self._sizes_there()
        if self.size in staying or not staying:
            self._none_since = None
        elif self._none_since is None:
            self._none_since = now
        elif now >= self._none_since + self._settings.release_s:
            size = min(staying, key=lambda s: (max(s, self.size) / min(s, self.size), s))
            self._outbox.warn(f"no engine of {self.size} devices is there: those of {size} work")
            self._take(size)


def _num_tokens(round: Round) -> int:
    return sum(r.num_new for g in round.groups.values() for r in g.responses)
