"""The run as one state machine: events in, commands out. Daemon, simulator and tests drive the same object.

Owns the order of rounds and steps, and what becomes of the work of a node that leaves. Who takes part
is kept in `fleet`, every response in `ledger`; what a round holds is decided in `rounds`, who generates
a response in `placement`. Must not await, read a clock or touch a socket: time is an argument.
"""

from typing import assert_never

from lightrl.core import rounds
from lightrl.core.commands import (
    CloseRound,
    CloseStep,
    Command,
    DrawPrompts,
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
from lightrl.core.invariants import check
from lightrl.core.ledger import Ledger, encode
from lightrl.core.state import (
    Group,
    GroupState,
    NodeState,
    Round,
    RoundState,
    RunState,
    Settings,
)
from lightrl.messages import (
    Drain,
    Hello,
    PublishWeights,
    StepDone,
    TokenChunk,
    TrainGroup,
    TrainResponse,
    TrainShard,
    WeightsFailed,
    Welcome,
)


class Coordinator:
    def __init__(self, settings: Settings, now: float) -> None:
        self.settings = settings
        self.state = RunState.STARTING
        self.step = 0  # optimizer steps done
        self.fleet = Fleet(settings)
        self.ledger = Ledger(settings, self.fleet)
        self.started_at = now
        self.evaluated: int | None = None  # the policy version evaluated last
        self._step_done: StepDone | None = None
        self._ending: tuple[RunState, str] | None = None
        self._out: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        """Everything to do because of `event`, in order. Raises InvariantViolation if the core is broken."""
        self._out = []
        if self.state in {RunState.FINISHED, RunState.STOPPED, RunState.FAILED}:
            return self._out
        match event:
            case NodeJoined(hello):
                self._join(hello, now)
            case NodeHeard(name, heartbeat):
                if node := self.fleet.nodes.get(name):
                    node.heard_at, node.load = now, heartbeat.load
                    node.loop_lag_ms, node.device = heartbeat.loop_lag_ms, heartbeat.device
            case NodeLost(name, reason):
                self._lose(name, reason)
            case NodeDraining(name, reason):
                self._drain(name, reason)
            case NodeLeft(name, reason, ok):
                self._leave(name, reason, ok)
            case DrainRequested(name, reason):
                self._request_drain(name, reason)
            case PromptsDrawn(prompts):
                self.ledger.fill(prompts)
            case TokensArrived(name, chunk):
                self._accept(name, chunk, now)
            case ResponseScored(response, reward, failure):
                self._score(response, reward, failure)
            case WeightsPublished(name, message):
                self._publish(name, message, now)
            case WeightsConfirmed(name, ready):
                self._out += self.fleet.confirm(name, ready)
            case WeightsRefused(name, failed):
                self._refuse(name, failed)
            case StepTrained(name, done):
                if name == self.fleet.trainer() and self._awaits(done):
                    self._step_done = done
            case TimerFired():
                self._expire_leases(now)
            case _:
                assert_never(event)
        self._advance(now)
        if self._ending is None:
            self.ledger.dispatch(self._out)
        return self._out

    def next_deadline(self) -> float | None:
        """When to feed TimerFired, or None."""
        return self.fleet.lease_check_at

    def check(self) -> None:
        """Raises InvariantViolation if any invariant is broken."""
        check(self)

    def _publish(self, name: str, message: PublishWeights, now: float) -> None:
        expected = 0 if self.fleet.published is None else self.step + 1
        self._out += self.fleet.publish(name, message, expected)
        if self.ledger.round is not None:
            self.ledger.round.published_at = now

    def _refuse(self, name: str, failed: WeightsFailed) -> None:
        """A node cannot load the published version, or its engine died and serves nothing any more."""
        node = self.fleet.nodes.get(name)
        if node is not None and node.policy_version == failed.policy_version:
            self.ledger.requeue_all(node)
        self._out += self.fleet.refuse(name, failed)

    # Responses

    def _accept(self, name: str, chunk: TokenChunk, now: float) -> None:
        node = self.fleet.nodes.get(name)
        if node is None or self._ending is not None:
            return
        node.heard_at = now
        if (problem := self.ledger.accept(node, chunk, self._out)) is not None:
            self._lose(name, problem)

    def _score(self, response: str, reward: float | None, failure: str) -> None:
        if self._ending is not None:
            return
        group, round = self.ledger.score(response, reward, failure, self._out), self.ledger.round
        if group is not None and round is not None and not round.is_eval:
            self._send_shard(round, (group,))

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
        self._report(text + (f": {moved} responses resume elsewhere" if moved else ""))
        if "trainer" in node.roles and trainer_failed is not None:
            self._end(RunState.FAILED, trainer_failed)

    def _drain(self, name: str, reason: str) -> None:
        node = self.fleet.nodes.get(name)
        if node is None or node.state is NodeState.DRAINING:
            return
        node.move(NodeState.DRAINING)
        self._report(f"{name} drains ({reason})")

    def _request_drain(self, name: str, reason: str) -> None:
        if name == "*":
            self._end(RunState.STOPPED, reason or "stopped by an operator")
        elif name in self.fleet.nodes:
            self._out.append(Send(name, Drain(name, reason)))
        else:
            self._report(f"drain {name}: no such node")

    def _expire_leases(self, now: float) -> None:
        for node in self.fleet.expired(now):
            self._lose(node.name, f"not heard of for {now - node.heard_at:.1f} s")

    # Rounds and steps

    def _advance(self, now: float) -> None:
        """Closes what is complete and opens what comes next, as far as it can be done now."""
        if self._ending is not None:
            round = self.ledger.round
            if round is not None and self._is_over(round):
                self._close_step(now)  # the trainer finished the step that it was at
            if not self.fleet.nodes:
                self.state, reason = self._ending
                self._out.append(Finish(self.state, reason))
            return
        round = self.ledger.round
        if round is not None and rounds.is_complete(round):
            self._close_round(round, now)
        if round is not None and self._is_over(round):
            upcoming = rounds.next_round(self.settings, self._steps_after(round), self.evaluated, now)
        elif round is None and self.fleet.published is not None:
            upcoming = rounds.next_round(self.settings, self.step, self.evaluated, now)
        else:
            return
        if upcoming is None:
            self._close_step(now)
            self._end(RunState.FINISHED, f"{self.step} steps done")
        elif self.fleet.serving(upcoming.policy_version):
            self._close_step(now)
            self._open_round(upcoming)

    def _is_over(self, round: Round) -> bool:
        """Nothing more will come of this round: evaluated, or trained and its version published."""
        if round.state is not RoundState.CLOSED:
            return False
        published = self.fleet.published is not None and self.fleet.published.policy_version == round.step + 1
        return round.is_eval or (published and self._step_done is not None)

    def _awaits(self, done: StepDone) -> bool:
        round = self.ledger.round
        return round is not None and round.state is RoundState.CLOSED and done.step == round.step

    @staticmethod
    def _steps_after(round: Round) -> int:
        return round.step if round.is_eval else round.step + 1

    def _open_round(self, round: Round) -> None:
        self.ledger.open(round)
        self.state = RunState.EVALUATING if round.is_eval else RunState.RUNNING
        self._out.append(DrawPrompts("eval" if round.is_eval else "train", round.needed))

    def _close_round(self, round: Round, now: float) -> None:
        round.move(RoundState.CLOSED)
        round.closed_at = now
        if round.is_eval:
            self.evaluated = round.policy_version
        else:
            self._send_shard(round, (), last=True)
        self._out.append(CloseRound(round))

    def _close_step(self, now: float) -> None:
        round, done = self.ledger.round, self._step_done
        if round is None or round.is_eval or done is None:
            return
        for group in round.groups.values():
            if group.state is GroupState.SCORED:
                group.move(GroupState.TRAINED)
                self.ledger.counters.trained_responses += len(group.responses)
        round.move(RoundState.TRAINED)
        self.step = round.step + 1
        self._step_done = None
        self._out.append(
            CloseStep(
                step=round.step,
                rollout_s=round.closed_at - round.opened_at,
                train_s=round.published_at - round.closed_at,
                weights_s=now - round.published_at,
                metrics=done.metrics,
            )
        )

    def _send_shard(self, round: Round, groups: tuple[Group, ...], last: bool = False) -> None:
        trainer = self.fleet.trainer()
        assert trainer is not None, "a run without its trainer ends"
        shard = TrainShard(
            step=round.step,
            index=round.num_shards,
            policy_version=round.policy_version,
            groups=tuple(_train_group(g) for g in groups),
            last=last,
            num_groups=round.num_scored,
        )
        round.num_shards += 1
        self._out.append(Send(trainer, shard))

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


def _train_group(group: Group) -> TrainGroup:
    responses: list[TrainResponse] = []
    for r in group.responses:
        assert r.reward is not None
        assert r.finish_reason is not None
        responses.append(TrainResponse(r.id, encode(r.tokens), encode(r.logprobs), r.reward, r.finish_reason))
    return TrainGroup(group.id, group.prompt.tokens, tuple(responses))
