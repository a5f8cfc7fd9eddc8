"""The run as one state machine: events in, commands out. Daemon, simulator and tests drive it.

Owns the routing of events to parts, and the dispatch of waiting work to nodes with room. The parts:
`fleet` holds the nodes, `table` the place of every response, `arrivals` accepts tokens,
`lifecycle` decides the outcome of responses; `balance` migrates running work, `steps` orders rounds
and steps, `shutdown` ends the run. All parts add commands to one outbox. Decisions are pure
functions: `rounds` chooses the prompts of a round, `race` its winners, `placement` the node of a
response. `recovery` restores a core from a journal. Must not await, read a clock or use a socket:
time is an argument.
"""

import math
from typing import assert_never

from lightrl.core.commands import Command, Outbox
from lightrl.core.events import (
    CheckpointWritten,
    DrainRequested,
    Event,
    MessageArrived,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeMessage,
    PromptsDrawn,
    ResponseScored,
    ShardLeft,
    ShellFailed,
    TimerFired,
)
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.nodes.scaling import Scaling
from lightrl.core.responses import placement
from lightrl.core.responses.arrivals import Arrivals
from lightrl.core.responses.balance import Balance
from lightrl.core.responses.episodes import Episodes
from lightrl.core.responses.length_predictor import LengthPredictor
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.rounds.backlog import Backlog
from lightrl.core.rounds.group_lifecycle import GroupLifecycle
from lightrl.core.rounds.round_scheduler import RoundScheduler
from lightrl.core.rounds.shutdown import Shutdown
from lightrl.core.settings import Settings
from lightrl.core.sharing.colocation import Colocation
from lightrl.core.sharing.device_turns import DeviceTurns
from lightrl.core.sharing.engine_sizes import EngineSizes
from lightrl.core.sharing.sharing_policy import SharingPolicy
from lightrl.core.state import Node, NodeState, RunState
from lightrl.core.training.trainer_feed import TrainerFeed
from lightrl.core.training.versions import Versions
from lightrl.messages.broadcasts import BroadcastStatus
from lightrl.messages.episodes import EpisodeEnded, Observed
from lightrl.messages.nodes import ENDING, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.responses import Abort, TokenChunk
from lightrl.messages.sharing import DevicesReleased
from lightrl.messages.training import ShardsTaken, StepDone
from lightrl.messages.weights import (
    PublishWeights,
    WeightsEndpoint,
    WeightsFailed,
    WeightsReady,
)


class Coordinator:
    """Routes each event to the parts of the core, and returns the commands of all of them. Decides
    when waiting responses are dispatched to nodes; the parts, which it owns, decide the rest."""

    def __init__(self, settings: Settings, now: float) -> None:
        self.settings = settings
        self.outbox = out = Outbox()
        self.backlog = Backlog(settings.num_prompts)
        self.predictor = predictor = LengthPredictor(settings.max_response_tokens)
        self._expect = expect = predictor.expect if settings.foresight else predictor.expect_longest
        self.fleet = fleet = Fleet(settings, out)
        self.table = table = ResponseTable(settings, fleet, expect, out)
        self.lifecycle = lifecycle = GroupLifecycle(settings, table, self.backlog, out)
        self.balance = Balance(settings, fleet, table, expect, now)
        self.arrivals = Arrivals(settings, fleet, table, lifecycle, out)
        self.episodes = Episodes(settings, fleet, table, lifecycle, out)
        self.scaling = Scaling(settings, fleet, expect, out, now)
        self.trainer_feed = feed = TrainerFeed(fleet, table, out)
        self.steps = RoundScheduler(fleet, table, lifecycle, predictor, self.scaling, feed, out)
        self.shutdown = shutdown = Shutdown(settings, fleet, self.steps, out)
        self.versions = Versions(settings, fleet, self.steps, shutdown, out)
        self.policy = policy = SharingPolicy(settings, fleet, table, predictor)
        self.turns = turns = DeviceTurns(settings, fleet, table, out)
        self.colocation = Colocation(fleet, table, self.steps, shutdown, turns, policy, out)
        self.sizes = EngineSizes(settings, fleet, table, turns, self.steps.next_kind, out)
        self.started_at = now
        self._state = RunState.STARTING  # until the run ends

    @property
    def state(self) -> RunState:
        return self.shutdown.state if self.shutdown.has_begun else self._state

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.steps.step

    def handle(self, event: Event, now: float) -> list[Command]:
        """Return the commands that result from `event`. Raises InvariantViolation on a defect."""
        if self.shutdown.is_over:
            return []
        self.scaling.advance(now)
        self.fleet.now = now
        self._take(event, now)
        self._advance(now)
        self.colocation.update(now)  # a node that is ordered to sleep gets no more work
        if not self.shutdown.has_begun:
            self.sizes.update(now)
        self._dispatch()
        while self.lifecycle.settled and not self.shutdown.has_begun:
            self._advance(now)  # responses that waited for a slot had lost meanwhile
            self._dispatch()
        self.balance.plan(now, self.shutdown.has_begun)
        self.colocation.update(now, decides=False)
        self.fleet.trainers.send_set()
        return self.outbox.drain()

    def _take(self, event: Event, now: float) -> None:
        match event:
            case MessageArrived(name, message):
                self._receive(name, message, now)
            case ResponseScored():
                if not self.shutdown.has_begun:
                    self.lifecycle.score(event)
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
            case CheckpointWritten(step):
                self.trainer_feed.has_finished |= step == self.settings.num_steps
            case ShardLeft(step, index):
                self.shutdown.flush(self.trainer_feed.on_shard_left, step, index)
            case ShellFailed(reason):
                self.shutdown.begin(RunState.FAILED, reason)
            case TimerFired():
                self._on_timer(now)
            case _:
                assert_never(event)

    def _receive(self, name: str, message: NodeMessage, now: float) -> None:
        """Handle a message of a node; those of steps are accepted from the leading trainer node."""
        is_trainer = name == self.fleet.trainer
        match message:
            case TokenChunk():
                self._accept(name, message, now)
            case Heartbeat():
                self.fleet.on_heartbeat(name, message, now)
            case PublishWeights():
                self.versions.accept(name, message, now)
            case WeightsEndpoint():
                self.fleet.open_endpoint(name, message)
            case WeightsReady():
                self._confirm(name, message)
            case Observed() | EpisodeEnded():
                self._receive_from_environment(name, message, now)
            case WeightsFailed(source=""):
                self._refuse(name, message)
            case WeightsFailed():
                self.fleet.report_bad_source(name, message)
            case BroadcastStatus():
                self.fleet.on_broadcast(name, message)
            case StepDone() if is_trainer:
                self.steps.on_step_done(message)
                self.colocation.on_step_done(message, now)
            case ShardsTaken(step, index) if is_trainer:
                self.shutdown.flush(self.trainer_feed.on_shards_taken, step, index)
            case DevicesReleased("rollout"):
                self.turns.on_asleep(name, message)
            case DevicesReleased():
                self.colocation.on_trainer_suspended(name, message)
            case _:
                pass

    def next_deadline(self) -> float | None:
        """Return when to feed TimerFired, or None."""
        fleet, ends_at = self.fleet, self.shutdown.patience_ends_at
        of_fleet = fleet.lease_check_at, fleet.broadcasts.deadline
        of_turns = self.turns.deadline, self.colocation.deadline, self.sizes.deadline
        return earliest(*of_fleet, self.balance.deadline, ends_at, *of_turns)

    # Weights

    def _confirm(self, name: str, ready: WeightsReady) -> None:
        were_updating = bool(self.fleet.updating)
        self.fleet.confirm(name, ready)
        if (node := self.fleet.ready.get(name)) is not None:
            self.table.mark_free(node)
        if were_updating and not self.fleet.updating:
            self.table.mark_dirty()

    def _refuse(self, name: str, failed: WeightsFailed) -> None:
        """Requeue the responses of a node that cannot load the published version, or whose engine
        died.

        In asynchronous mode the node may still generate with the previous version: these responses
        are aborted, not lost.
        """
        node = self.fleet.nodes.get(name)
        self.table.counters.engines_lost += name in self.fleet.ready
        if node is not None and node.running:
            attempts = tuple((r.id, r.attempt) for r in node.running.values())
            self.outbox.send(name, Abort(attempts))
            self.table.requeue_all(node)
        self.fleet.refuse(name, failed)
        self.turns.on_refused(name)

    # Responses

    def _accept(self, name: str, chunk: TokenChunk, now: float) -> None:
        node = self.fleet.nodes.get(name)
        if node is None or self.shutdown.has_begun:
            return
        node.heard_at = now
        if (problem := self.arrivals.accept(node, chunk, now)) is not None:
            self._lose(name, problem, now)
        if node.parallel:
            self.sizes.on_tokens()

    def _dispatch(self) -> None:
        """Send waiting responses to nodes with room.

        The share of nodes that load the newest version is reserved: otherwise the first node to
        load would get the work of all others. An idle node still gets work that is reserved for a
        node that loads slowly.
        """
        if self.shutdown.has_begun:
            return
        if self.settings.episodes is not None:
            self.episodes.dispatch()
        if nodes := self.table.nodes_with_room():
            room = sum(n.free for n in nodes)
            most = min(room, self._num_unreserved(nodes))
            if self.settings.episodes is not None:
                most -= self.episodes.send_home(nodes, most)
            waiting = self.lifecycle.pop_waiting(most)
            placed = placement.assign(waiting, nodes, self._expect)
            self.table.dispatch(placed)
            if self.settings.episodes is not None and self.table.queue:
                for node in nodes:
                    self.table.mark_free(node)  # more turns may leave their homes later

    def _num_unreserved(self, nodes: list[Node]) -> int:
        """Return the number of waiting responses beyond the share of nodes that still load."""
        updating, num_waiting = self.fleet.share_updating, len(self.table.queue)
        if not updating:
            return num_waiting
        share = updating / (updating + self.fleet.share_ready)
        num_idle = sum(not n.running for n in nodes)
        num_open = num_waiting + self.table.num_running
        return max(num_idle, num_waiting - math.ceil(share * num_open))

    def _receive_from_environment(
        self, name: str, message: Observed | EpisodeEnded, now: float
    ) -> None:
        node = self.fleet.environments.get(name)
        if node is None or self.shutdown.has_begun:
            return
        if isinstance(message, EpisodeEnded):
            self.episodes.on_ended(node, message)
        elif (problem := self.episodes.on_observed(node, message)) is not None:
            self._lose(name, problem, now)

    # Membership

    def _join(self, hello: Hello, now: float) -> None:
        if (hello.node, hello.incarnation) in self.fleet.stale:
            self.outbox.send(hello.node, Welcome("", refused="another process has this name now"))
            return
        is_awaited = "trainer" in hello.roles and self.shutdown.awaits_trainer
        reason = self.fleet.why_refused(hello)
        if self.shutdown.has_begun and not is_awaited:
            reason = ENDING
        if reason is not None:
            self.outbox.warn(f"{hello.node} refused: {reason}")
            self.outbox.send(hello.node, Welcome(run="", refused=reason))
            return
        known = self.fleet.nodes.get(hello.node)
        if known is not None and known.incarnation != hello.incarnation:
            self.fleet.stale.add(known.name, known.incarnation)
            self._lose(hello.node, "restarted", now)
        self.fleet.add(hello, now)
        self._reconcile(hello)
        self.colocation.on_hello(hello)
        if "trainer" in hello.roles:
            self.trainer_feed.joined(hello.node)
            for name, why in self.colocation.without_trainer():
                self._remove(name, f"{name} refused: {why}", now)
                self.outbox.send(name, Welcome(run="", refused=why))

    def _reconcile(self, hello: Hello) -> None:
        """Adopt the running responses that a hello reports: messages may have been lost."""
        node = self.fleet.nodes[hello.node]
        is_ready = self.fleet.ready.get(node.name) is node
        if node.is_asleep:
            self.table.requeue_all(node)
        if "environment" in node.roles:
            self.episodes.reconcile(node, dict(hello.running))
            return
        taken_back = self.table.reconcile(node, dict(hello.running), is_ready)
        if is_ready:
            self.table.mark_free(node)
        if taken_back:
            self.outbox.report(f"{node.name} keeps {taken_back} running responses")

    def _lose(self, name: str, reason: str, now: float) -> None:
        """Remove a lost node, which may return, also if it trains."""
        if name in self.fleet.nodes:
            self.table.counters.nodes_lost += 1
            self._remove(name, f"{name} lost ({reason})", now)

    def _leave(self, name: str, reason: str, ok: bool, now: float) -> None:
        """Remove a node that left. Fail the run if a trainer failed: it would fail again."""
        is_trainer = name in self.fleet.trainers
        was_environment = name in self.fleet.environments
        is_last = self.trainer_feed.trained_step == self.settings.num_steps
        if not ok and name in self.fleet.nodes and "rollout" in self.fleet.nodes[name].roles:
            self.fleet.failed[name] = reason
        self.trainer_feed.has_finished |= ok and is_last and name == self.fleet.trainer
        text = f"{name} left ({reason})" if ok else f"{name} failed: {reason}"
        self._remove(name, text, now, ok, may_return=ok)
        if is_trainer:
            self.colocation.on_trainer_left(name)
        if is_trainer and not ok:
            self.shutdown.begin(RunState.FAILED, f"trainer node {name}: {reason}")
        if was_environment and not ok and not self.fleet.environments:
            self.shutdown.begin(RunState.FAILED, f"environment node {name}: {reason}")

    def _remove(
        self, name: str, text: str, now: float, is_orderly: bool = False, may_return: bool = True
    ) -> None:
        node = self.fleet.nodes.get(name)
        if node is None:
            return
        moved = self.table.requeue_all(node)
        begun = self.episodes.lost(node)
        self.fleet.remove(name)
        self.table.mark_dirty()
        report = self.outbox.report if is_orderly else self.outbox.warn
        text += f": {begun} episodes begin again elsewhere" if begun else ""
        report(text + (f": {moved} responses resume elsewhere" if moved else ""))
        if "trainer" in node.roles:
            self.trainer_feed.lost(now)
            if may_return and not self.shutdown.has_begun:
                self.outbox.report(self.fleet.trainers.lost_message(self.settings.patience_s))
        if not self.shutdown.has_begun and (why := self.fleet.why_no_rollout_node()) is not None:
            self.shutdown.begin(RunState.FAILED, why)

    def _drain(self, name: str, reason: str) -> None:
        node = self.fleet.nodes.get(name)
        if node is None or node.state is NodeState.DRAINING:
            return
        self.fleet.drain(node)
        self.table.mark_dirty()
        self.outbox.report(f"{name} drains ({reason})")

    def _request_drain(self, name: str, reason: str) -> None:
        if name == "*":
            self.shutdown.begin(RunState.STOPPED, reason or "stopped by an operator")
        elif name in self.fleet.nodes:
            self.outbox.send(name, Drain(name, reason))
        else:
            self.outbox.warn(f"drain {name}: no such node")

    # Time

    def _on_timer(self, now: float) -> None:
        if self.fleet.lease_check_at is not None and now >= self.fleet.lease_check_at:
            for node in self.fleet.expired(now):
                self._lose(node.name, f"silent for {now - node.heard_at:.1f} s", now)
        for node in self.turns.late(now):
            reason = f"kept its devices for {self.turns.limit_s(node):g} s"
            self._lose(node.name, reason, now)
        self.fleet.expire_broadcast()
        patience_ends_at = self.shutdown.patience_ends_at
        if patience_ends_at is not None and now >= patience_ends_at:
            self.shutdown.begin(RunState.FAILED, f"no trainer for {self.settings.patience_s:g} s")
        if not self.shutdown.has_begun:
            self.balance.look(now)

    # The run

    def _advance(self, now: float) -> None:
        """Advance rounds and steps, or conclude the shutdown; update the state of the run."""
        if not self.shutdown.has_begun:
            self.steps.advance(now)
            if self.table.rounds:
                is_eval = self.table.is_evaluating
                self._state = RunState.EVALUATING if is_eval else RunState.RUNNING
            if (trouble := self.lifecycle.trouble) is not None:
                self.shutdown.begin(RunState.FAILED, trouble)
            elif self.steps.finished:
                self.shutdown.begin(RunState.FINISHED, f"{self.step} steps done")
        else:
            self.steps.finish_step(now)
            self.shutdown.conclude()


def earliest(*times: float | None) -> float | None:
    """Return the first of several deadlines. Example: earliest(None, 3.0, 2.0) == 2.0"""
    return min((time for time in times if time is not None), default=None)
