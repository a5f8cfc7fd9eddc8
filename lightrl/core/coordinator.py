"""The run as one state machine: events in, commands out. Daemon, simulator and tests drive the same
object.

Owns what becomes of the work of a node that leaves, and the end of the run. Who takes part is kept
in `fleet`, every response in `table`, the order of rounds and steps in `steps`. Decisions are pure
functions: what a round holds in `rounds`, who wins it in `race`, who generates a response in
`placement`. How a core is made again from a journal: `recovery`. Must not await, read a clock or
touch a socket: time is an argument.
"""

from collections.abc import Callable
from typing import assert_never

from lightrl.core import placement
from lightrl.core.backlog import Backlog
from lightrl.core.commands import (
    Command,
    Finish,
    Record,
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
    ShardLeft,
    ShardsDelivered,
    ShellFailed,
    StepTrained,
    TimerFired,
    TokensArrived,
    WeightsConfirmed,
    WeightsPublished,
    WeightsRefused,
)
from lightrl.core.fleet import Fleet
from lightrl.core.length_predictor import LengthPredictor
from lightrl.core.log_entries import VersionPublished
from lightrl.core.responses import ResponseTable
from lightrl.core.round_scheduler import RoundScheduler
from lightrl.core.state import (
    NodeState,
    RunState,
    Settings,
)
from lightrl.messages import (
    ENDING,
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
    def __init__(self, settings: Settings, now: float) -> None:
        self.settings = settings
        self.state = RunState.STARTING
        self.fleet = Fleet(settings)
        self.predictor = LengthPredictor(settings.max_response_tokens)
        self.table = ResponseTable(settings, self.fleet, self.predictor)
        self.steps = RoundScheduler(settings, self.fleet, self.table, self.predictor, now)
        self.trainer_feed = self.steps.trainer_feed
        self.started_at = now
        self._rebalance_at: float | None = None
        self._rebalanced_at = now
        self._ending: tuple[RunState, str] | None = None
        self._over = False
        self._out: list[Command] = []

    @property
    def backlog(self) -> Backlog:
        return self.steps.backlog

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.steps.step

    def handle(self, event: Event, now: float) -> list[Command]:
        """Everything to do because of `event`, in order. Raises InvariantViolation if the core is
        broken."""
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
                self._lose(name, reason, now)
            case NodeDraining(name, reason):
                self._drain(name, reason)
            case NodeLeft(name, reason, ok):
                self._leave(name, reason, ok, now)
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
            case ShardsDelivered(name, taken):
                if name == self.fleet.trainer:
                    self._hand_on(lambda: self.steps.shards_taken(taken.step, taken.index))
            case ShardLeft(step, index):
                self._hand_on(lambda: self.steps.shard_left(step, index))
            case ShellFailed(reason):
                self._end(RunState.FAILED, reason)
            case TimerFired():
                self._on_timer(now)
            case _:
                assert_never(event)
        self._advance(now)
        while self._ending is None:
            self.table.dispatch(self._out)
            if not self.table.decided:
                self._plan_rebalance(now)
                break
            self.steps.judge()  # what waited for a slot had lost meanwhile
            self._advance(now)
        return self._out

    def next_deadline(self) -> float | None:
        """When to feed TimerFired, or None."""
        times = (self.fleet.lease_check_at, self._rebalance_at, self._patience_ends_at)
        return min((t for t in times if t is not None), default=None)

    # Weights

    def _publish(self, name: str, message: PublishWeights, now: float) -> None:
        """The trainer has a version: a new one, or after it has come (back) the one where it
        stands."""
        manifest, published, stood_at = (
            message.manifest,
            self.fleet.published,
            self.trainer_feed.stands_at,
        )
        version, digest = manifest.policy_version, manifest.digest
        if name != self.fleet.trainer or version == stood_at:
            return  # not the trainer, or it came twice
        if stood_at is not None and version != stood_at + 1:
            self._report(f"{name} published version {version}, expected {stood_at + 1}: ignored")
            return
        is_new = published is not None and version > published.policy_version
        if stood_at is not None and is_new and not self.steps.has_closed(stood_at):
            self._report(
                f"{name} published version {version}, but the round of step {stood_at} is "
                "still open: ignored"
            )
            return
        if (problem := self._why_wrong(version, digest)) is not None:
            self._end(RunState.FAILED, problem)
            return
        self.trainer_feed.stands_at = version
        if published is None or version > published.policy_version:
            self._out.append(Record(VersionPublished(version, digest, message.portions)))
            self._out += self.fleet.publish(message)
            self.steps.published(now)
        elif version == published.policy_version:
            self._out += self.fleet.publish_again(message)
        else:
            behind = f"{name} is at step {version}, the run at step {self.step}"
            self._report(f"{behind}: the steps in between are trained again")
        self.fleet.trainer_stands()
        self.steps.feed_trainer(has_come=stood_at is None)
        if self._ending is not None:
            self._dismiss_trainer(self._ending[1])

    def _why_wrong(self, version: int, digest: str) -> str | None:
        """Why this version cannot be the trainer's, in one line."""
        known = self.fleet.digests.get(version, digest)
        if known != digest:
            return (
                f"version {version} was trained again and came out different (digest "
                f"{digest}, published was "
                f"{known}): lightrl resume --from-checkpoint goes back to the last checkpoint"
            )
        return self.steps.why_not_at(version) if self.trainer_feed.stands_at is None else None

    def _confirm(self, name: str, ready: WeightsReady) -> None:
        were_updating = bool(self.fleet.updating)
        self._out += self.fleet.confirm(name, ready)
        if (node := self.fleet.ready.get(name)) is not None:
            self.table.mark_free(node)
        if were_updating and not self.fleet.updating:
            self.table.mark_dirty()

    def _refuse(self, name: str, failed: WeightsFailed) -> None:
        """A node cannot load the published version, or its engine died; what ran there resumes
        elsewhere.

        In asynchronous mode it may still generate with the version before: that is aborted, not
        lost.
        """
        node = self.fleet.nodes.get(name)
        self.table.counters.engines_lost += name in self.fleet.ready
        if node is not None and node.running:
            attempts = tuple((r.id, r.attempt) for r in node.running.values())
            self._out.append(Send(name, Abort(attempts)))
            self.table.requeue_all(node)
        self._out += self.fleet.refuse(name, failed)

    # Responses

    def _accept(self, name: str, chunk: TokenChunk, now: float) -> None:
        node = self.fleet.nodes.get(name)
        if node is None or self._ending is not None:
            return
        node.heard_at = now
        if (problem := self.table.accept(node, chunk, now, self._out)) is not None:
            self._lose(name, problem, now)
        self.steps.judge()

    def _score(self, name: str, attempt: int, reward: float | None, failure: str) -> None:
        if self._ending is not None:
            return
        self.table.score(name, attempt, reward, failure, self._out)
        self.steps.judge()

    # Membership

    def _join(self, hello: Hello, now: float) -> None:
        if self.fleet.is_ghost(hello):
            self._out.append(
                Send(hello.node, Welcome(run="", refused="another process has this name now"))
            )
            return
        is_awaited = "trainer" in hello.roles and self._awaits_trainer
        reason = self.fleet.why_refused(hello)
        if self._ending is not None and not is_awaited:
            reason = ENDING
        if reason is not None:
            self._report(f"{hello.node} refused: {reason}")
            self._out.append(Send(hello.node, Welcome(run="", refused=reason)))
            return
        known = self.fleet.nodes.get(hello.node)
        if known is not None and known.incarnation != hello.incarnation:
            self.fleet.replace(known)
            self._lose(hello.node, "restarted", now)
        self._out += self.fleet.add(hello, now)
        self._reconcile(hello)
        if "trainer" in hello.roles:
            self.trainer_feed.hello()

    def _reconcile(self, hello: Hello) -> None:
        """Messages may have been lost: what runs there is what the node says."""
        node = self.fleet.nodes[hello.node]
        is_ready = self.fleet.ready.get(node.name) is node
        taken_back = self.table.reconcile(node, dict(hello.running), is_ready, self._out)
        if is_ready:
            self.table.mark_free(node)
        if taken_back:
            self._report(f"{node.name} goes on with {taken_back} responses")

    def _lose(self, name: str, reason: str, now: float) -> None:
        """It may come back, the trainer too."""
        if name in self.fleet.nodes:
            self.table.counters.nodes_lost += 1
            self._remove(name, f"{name} lost ({reason})", now)

    def _leave(self, name: str, reason: str, ok: bool, now: float) -> None:
        """A trainer that says that it failed, would fail again."""
        is_trainer = name == self.fleet.trainer
        if is_trainer and ok and self.trainer_feed.stands_at == self.settings.num_steps:
            self.trainer_feed.has_left = True
        self._remove(name, f"{name} left ({reason})" if ok else f"{name} failed: {reason}", now)
        if is_trainer and not ok:
            self._end(RunState.FAILED, f"trainer node {name}: {reason}")

    def _remove(self, name: str, text: str, now: float) -> None:
        node = self.fleet.nodes.get(name)
        if node is None:
            return
        moved = self.table.requeue_all(node)
        self.fleet.remove(name)
        self.table.mark_dirty()
        self._report(text + (f": {moved} responses resume elsewhere" if moved else ""))
        if "trainer" in node.roles:
            self.trainer_feed.lost(now)
            if self._ending is None:
                self._report(
                    f"the run waits {self.settings.patience_s:g} s for a trainer to come back"
                )

    @property
    def _awaits_trainer(self) -> bool:
        """All steps are done, but the trainer has not left with the last checkpoint written."""
        ending = self._ending is not None and self._ending[0] is RunState.FINISHED
        return ending and not self.trainer_feed.has_left

    @property
    def _patience_ends_at(self) -> float | None:
        since = self.trainer_feed.missing_since
        is_over = self._over or (self._ending is not None and not self._awaits_trainer)
        return None if since is None or is_over else since + self.settings.patience_s

    def _drain(self, name: str, reason: str) -> None:
        node = self.fleet.nodes.get(name)
        if node is None or node.state is NodeState.DRAINING:
            return
        self.fleet.drain(node)
        self.table.mark_dirty()
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
                self._lose(node.name, f"silent for {now - node.heard_at:.1f} s", now)
        if self._patience_ends_at is not None and now >= self._patience_ends_at:
            self._end(RunState.FAILED, f"no trainer for {self.settings.patience_s:g} s")
        if self._rebalance_at is not None and now >= self._rebalance_at:
            self._rebalance_at = None
            self._rebalanced_at = now
            if not self.table.queue and self._ending is None:
                self.table.rebalance(self._out)

    def _plan_rebalance(self, now: float) -> None:
        """Soon after a node got room that nothing waits for; not too often, for it looks at all
        nodes."""
        if not (self.settings.migration and self.table.has_idle_room):
            self._rebalance_at = None
        elif self._rebalance_at is None:
            pause_s = placement.REBALANCE_S + len(self.fleet.ready) * placement.REBALANCE_S_PER_NODE
            self._rebalance_at = max(now, self._rebalanced_at + pause_s)

    # The run

    def _advance(self, now: float) -> None:
        """Closes and opens what can be; the run is over when all nodes have left after its end."""
        if self._ending is None:
            self.steps.advance(now)
            if self.table.rounds:
                is_eval = self.table.rounds[0].kind == "eval"
                self.state = RunState.EVALUATING if is_eval else RunState.RUNNING
            if self.steps.finished:
                self._end(RunState.FINISHED, f"{self.step} steps done")
        else:
            self.steps.finish_step(now)
            if not self.fleet.nodes and not self._awaits_trainer:
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
        others = (n for n in self.fleet.nodes if n != self.fleet.trainer)
        self._out += [Send(n, Drain(n, reason)) for n in others]
        self._dismiss_trainer(reason)

    def _dismiss_trainer(self, reason: str) -> None:
        """Not before it has trained all steps, if it is what the run ends with."""
        trainer = self.fleet.trainer
        has_work = self._ending is not None and self._ending[0] is RunState.FINISHED
        has_work = has_work and self.trainer_feed.stands_at != self.settings.num_steps
        if trainer is not None and not has_work and not self._hands_over:
            self._out.append(Send(trainer, Drain(trainer, reason)))

    @property
    def _hands_over(self) -> bool:
        """A run that is stopped still trains the step of which all groups are known."""
        stopped = self._ending is not None and self._ending[0] is RunState.STOPPED
        return stopped and self.steps.is_handing_over

    def _hand_on(self, tell: Callable[[], None]) -> None:
        """Of the step that is handed over; a trainer that was awaited for nothing else may go."""
        before = self._hands_over
        if self._ending is None or before:
            tell()
        if before and not self._hands_over and self._ending is not None:
            self._dismiss_trainer(self._ending[1])

    def _report(self, text: str) -> None:
        self._out.append(Report(text))
