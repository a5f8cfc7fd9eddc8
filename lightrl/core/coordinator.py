"""The run as one state machine: events in, commands out. Daemon, simulator and tests drive the same object.

Owns what becomes of the work of a node that leaves, and the end of the run. Who takes part is kept in
`fleet`, every response in `ledger`, the order of rounds and steps in `steps`. Decisions are pure
functions: what a round holds in `rounds`, who wins it in `race`, who generates a response in
`placement`. Must not await, read a clock or touch a socket: time is an argument.
"""

from typing import assert_never

from lightrl.core import placement
from lightrl.core.commands import (
    Command,
    Finish,
    Report,
    Send,
)
from lightrl.core.events import (
    DrainRequested,
    Event,
    NodeDraining,
    NodeHeard,
    NodeJoined,
    NodeLeft,
    NodeLost,
    PromptsDrawn,
    ResponseScored,
    StepTrained,
    TimerFired,
    TokensArrived,
    WeightsConfirmed,
    WeightsPublished,
    WeightsRefused,
)
from lightrl.core.fleet import Fleet
from lightrl.core.foresight import Foresight
from lightrl.core.invariants import check
from lightrl.core.ledger import Ledger
from lightrl.core.state import (
    NodeState,
    RunState,
    Settings,
)
from lightrl.core.steps import Resumed, Steps
from lightrl.messages import (
    Abort,
    Drain,
    Hello,
    PublishWeights,
    TokenChunk,
    WeightsFailed,
    WeightsReady,
    Welcome,
)


class Coordinator:
    def __init__(self, settings: Settings, now: float, resumed: Resumed | None = None) -> None:
        self.settings = settings
        self.state = RunState.STARTING
        self.fleet = Fleet(settings)
        self.foresight = Foresight(settings.max_response_tokens)
        self.ledger = Ledger(settings, self.fleet, self.foresight)
        self.steps = Steps(settings, self.fleet, self.ledger, self.foresight, now, resumed)
        self.backlog = self.steps.backlog
        self.started_at = now
        self._rebalance_at: float | None = None
        self._rebalanced_at = now
        self._ending: tuple[RunState, str] | None = None
        self._over = False
        self._out: list[Command] = []

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.steps.step

    def handle(self, event: Event, now: float) -> list[Command]:
        """Everything to do because of `event`, in order. Raises InvariantViolation if the core is broken."""
        self._out = self.steps.out = []
        if self._over:
            return self._out
        match event:
            case TokensArrived(name, chunk):
                self._accept(name, chunk, now)
            case ResponseScored(response, attempt, reward, failure):
                self._score(response, attempt, reward, failure)
            case NodeHeard(name, heartbeat):
                if node := self.fleet.nodes.get(name):
                    node.heard_at, node.load = now, heartbeat.load
                    node.loop_lag_ms, node.device = heartbeat.loop_lag_ms, heartbeat.device
            case NodeJoined(hello):
                self._join(hello, now)
            case NodeLost(name, reason):
                self._lose(name, reason)
            case NodeDraining(name, reason):
                self._drain(name, reason)
            case NodeLeft(name, reason, ok):
                self._leave(name, reason, ok)
            case DrainRequested(name, reason):
                self._request_drain(name, reason)
            case PromptsDrawn(prompts):
                self.steps.fill(prompts)
            case WeightsPublished(name, message):
                self._publish(name, message, now)
            case WeightsConfirmed(name, ready):
                self._confirm(name, ready)
            case WeightsRefused(name, failed):
                self._refuse(name, failed)
            case StepTrained(name, done):
                if name == self.fleet.trainer:
                    self.steps.take_step(done)
            case TimerFired():
                self._on_timer(now)
            case _:
                assert_never(event)
        self._advance(now)
        while self._ending is None:
            self.ledger.dispatch(self._out)
            if not self.ledger.decided:
                self._plan_rebalance(now)
                break
            self.steps.judge()  # what waited for a slot had lost meanwhile
            self._advance(now)
        return self._out

    def next_deadline(self) -> float | None:
        """When to feed TimerFired, or None."""
        times = [t for t in (self.fleet.lease_check_at, self._rebalance_at) if t is not None]
        return min(times, default=None)

    def check(self) -> None:
        """Raises InvariantViolation if any invariant is broken."""
        check(self)

    # Weights

    def _publish(self, name: str, message: PublishWeights, now: float) -> None:
        published = self.fleet.published
        if published is not None and published.policy_version == message.manifest.policy_version:
            return  # it came twice
        expected = self.step if published is None else self.step + 1
        self._out += self.fleet.publish(name, message, expected)
        published = self.fleet.published
        if published is not None and published.message is message:
            self.steps.published(now)

    def _confirm(self, name: str, ready: WeightsReady) -> None:
        were_updating = bool(self.fleet.updating)
        self._out += self.fleet.confirm(name, ready)
        if (node := self.fleet.ready.get(name)) is not None:
            self.ledger.freed(node)
        if were_updating and not self.fleet.updating:
            self.ledger.look_at_all()

    def _refuse(self, name: str, failed: WeightsFailed) -> None:
        """A node cannot load the published version, or its engine died; what ran there resumes elsewhere.

        In asynchronous mode it may still generate with the version before: that is aborted, not lost.
        """
        node = self.fleet.nodes.get(name)
        if node is not None and node.running:
            attempts = tuple((r.id, r.attempt) for r in node.running.values())
            self._out.append(Send(name, Abort(attempts)))
            self.ledger.requeue_all(node)
        self._out += self.fleet.refuse(name, failed)

    # Responses

    def _accept(self, name: str, chunk: TokenChunk, now: float) -> None:
        node = self.fleet.nodes.get(name)
        if node is None or self._ending is not None:
            return
        node.heard_at = now
        if (problem := self.ledger.accept(node, chunk, now, self._out)) is not None:
            self._lose(name, problem)
        self.steps.judge()

    def _score(self, name: str, attempt: int, reward: float | None, failure: str) -> None:
        if self._ending is not None:
            return
        self.ledger.score(name, attempt, reward, failure, self._out)
        self.steps.judge()

    # Membership

    def _join(self, hello: Hello, now: float) -> None:
        if self.fleet.is_ghost(hello):
            return
        reason = "the run is ending" if self._ending is not None else self.fleet.why_refused(hello)
        if reason is not None:
            self._report(f"{hello.node} refused: {reason}")
            self._out.append(Send(hello.node, Welcome(run="", refused=reason)))
            return
        known = self.fleet.nodes.get(hello.node)
        if known is not None and known.incarnation < hello.incarnation:
            self._lose(hello.node, "restarted")
        if self._ending is None:
            self._out += self.fleet.add(hello, now)
        else:  # it was the trainer
            self._out.append(Send(hello.node, Welcome(run="", refused="the run is ending")))

    def _lose(self, name: str, reason: str) -> None:
        if name in self.fleet.nodes:
            self.ledger.counters.nodes_lost += 1
            self._remove(
                name, f"{name} lost ({reason})", trainer_failed=f"trainer node {name} lost ({reason})"
            )

    def _leave(self, name: str, reason: str, ok: bool) -> None:
        failed = None if ok and self._ending is not None else f"trainer node {name}: {reason}"
        self._remove(name, f"{name} left ({reason})" if ok else f"{name} failed: {reason}", failed)

    def _remove(self, name: str, text: str, trainer_failed: str | None) -> None:
        node = self.fleet.nodes.get(name)
        if node is None:
            return
        moved = self.ledger.requeue_all(node)
        self.fleet.remove(name)
        self.ledger.look_at_all()
        self._report(text + (f": {moved} responses resume elsewhere" if moved else ""))
        if "trainer" in node.roles and trainer_failed is not None:
            self._end(RunState.FAILED, trainer_failed)

    def _drain(self, name: str, reason: str) -> None:
        node = self.fleet.nodes.get(name)
        if node is None or node.state is NodeState.DRAINING:
            return
        self.fleet.drain(node)
        self.ledger.look_at_all()
        self._report(f"{name} drains ({reason})")

    def _request_drain(self, name: str, reason: str) -> None:
        if name == "*":
            self._end(RunState.STOPPED, reason or "stopped by an operator")
        elif name in self.fleet.nodes:
            self._out.append(Send(name, Drain(name, reason)))
        else:
            self._report(f"drain {name}: no such node")

    # Time

    def _on_timer(self, now: float) -> None:
        if self.fleet.lease_check_at is not None and now >= self.fleet.lease_check_at:
            for node in self.fleet.expired(now):
                self._lose(node.name, f"not heard of for {now - node.heard_at:.1f} s")
        if self._rebalance_at is not None and now >= self._rebalance_at:
            self._rebalance_at = None
            self._rebalanced_at = now
            if not self.ledger.queue and self._ending is None:
                self.ledger.rebalance(self._out)

    def _plan_rebalance(self, now: float) -> None:
        """Soon after a node got room that nothing waits for; not too often, for it looks at all nodes."""
        if not (self.settings.migration and self.ledger.has_idle_room):
            self._rebalance_at = None
        elif self._rebalance_at is None:
            pause_s = placement.REBALANCE_S + len(self.fleet.ready) * placement.REBALANCE_S_PER_NODE
            self._rebalance_at = max(now, self._rebalanced_at + pause_s)

    # The run

    def _advance(self, now: float) -> None:
        """Closes and opens what can be; the run is over when all nodes have left after its end."""
        if self._ending is None:
            self.steps.advance(now)
            if self.ledger.rounds:
                is_eval = self.ledger.rounds[0].kind == "eval"
                self.state = RunState.EVALUATING if is_eval else RunState.RUNNING
            if self.steps.finished:
                self._end(RunState.FINISHED, f"{self.step} steps done")
        else:
            self.steps.finish_step(now)
            if not self.fleet.nodes:
                self._over = True
                self.state, reason = self._ending
                self._out.append(Finish(self.state, reason))

    def _end(self, state: RunState, reason: str) -> None:
        """Asks every node to leave; the run is over when all have. A failure outranks a success."""
        if self._ending is not None:
            if state is RunState.FAILED and self._ending[0] is RunState.FINISHED:
                self._ending = (state, reason)
            return
        self._ending = (state, reason)
        self.state = RunState.FINISHING
        self._report(reason)
        self._out += [Send(n.name, Drain(n.name, reason)) for n in self.fleet.nodes.values()]

    def _report(self, text: str) -> None:
        self._out.append(Report(text))
