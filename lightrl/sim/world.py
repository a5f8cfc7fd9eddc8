"""The run in virtual time: a heap of what happens next, around the very same core.

Owns time, and what a daemon would do with each command; decides nothing that the core decides.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lightrl.core import invariants
from lightrl.core.commands import (
    CloseRound,
    CloseStep,
    Command,
    DrawPrompts,
    Finish,
    ScoreResponse,
    Send,
)
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import (
    Event,
    NodeLeft,
    PromptsDrawn,
    ResponseScored,
    ShardLeft,
    ShardsDelivered,
    StepTrained,
    TimerFired,
    TokensArrived,
    TrainerParked,
    WeightsConfirmed,
)
from lightrl.core.settings import Settings
from lightrl.core.state import DrawnPrompt, Response
from lightrl.errors import SimError
from lightrl.messages.message import Message
from lightrl.messages.nodes import Drain
from lightrl.messages.responses import Abort, Generate
from lightrl.messages.sharing import (
    AssignDevices,
    SleepEngine,
    SuspendTrainer,
    TrainerSuspended,
    WakeEngine,
)
from lightrl.messages.training import ShardsTaken, StepDone, TrainShard
from lightrl.sim.colocation import Colocation, settings_in
from lightrl.sim.deferred_rewards import DeferredRewards
from lightrl.sim.engine import Attempt
from lightrl.sim.engine_profile import SimSpeculation
from lightrl.sim.machines import (
    SPOT,
    NodeChanges,
    NodeSpec,
    SimMachine,
    new_machine,
    of_all_sizes,
    profile_of,
)
from lightrl.sim.mechanism import FOREVER_S, Mechanism
from lightrl.sim.membership import Membership
from lightrl.sim.messages import TRAINER, blank
from lightrl.sim.observer import Observer
from lightrl.sim.outcome import Outcome, StepRecord
from lightrl.sim.replayed import ReplayCursor
from lightrl.sim.samples import Samples, held_out
from lightrl.sim.scenario import DEFAULT, Scenario, Switches
from lightrl.sim.scoring import SimScoring, reward
from lightrl.sim.traces import TraceEvent
from lightrl.sim.trainer import TrainerModel
from lightrl.sim.transfers import Transfers
from lightrl.sim.workload import Cursor

PATIENCE = 200_000  # timers in a row without anything else happening


class World:
    def __init__(
        self,
        settings: Settings,
        scenario: Scenario,
        nodes: Sequence[NodeSpec],
        trace: Sequence[TraceEvent] = (),
        switches: Switches = DEFAULT,
        check: bool = False,
        changes: NodeChanges | None = None,
    ) -> None:
        """`changes`: of nodes that come and go beside the trace."""
        if not (nodes or trace or changes):
            raise SimError("a simulation needs nodes: --nodes, --trace or rollout.nodes")
        is_colocated = scenario.training.placement == "colocated"
        self.shares = is_colocated and switches.offload != "off"
        self.settings = settings_in(scenario, settings, switches, nodes)
        self.scenario = scenario
        self.switches = switches
        self.check = check
        self.now = 0.0
        self.core = Coordinator(self.settings, now=0.0)
        self.handle = self.core.handle
        self.machines: dict[str, SimMachine] = {}
        self.outcome = Outcome()
        self.newest = StepRecord(-1, "", 0)
        self.engines = dict(scenario.engines)
        if switches.speculation:
            history = scenario.speculation
            self._speculate(replace(history, acceptance=history.first_acceptance))
        workload, rewards = scenario.workload, scenario.workload.reward
        self.scoring = SimScoring(
            replace(rewards, adaptive=switches.adaptive_limit or rewards.adaptive)
        )
        self.trainer = TrainerModel(
            scenario.training.step_s,
            streaming=switches.streaming and switches.async_rewards,
            rate=0.0 if is_colocated else 1.0,
        )
        self.deferred = DeferredRewards(self)
        self._colocation = Colocation(self)
        self.mechanisms: tuple[Mechanism, ...] = (self.deferred, self._colocation)
        self.observer = Observer(self)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        known = workload.num_prompts, settings.run_seed
        self._cursor = ReplayCursor(workload.order, *known) if workload.order else Cursor(*known)
        self._prompt = blank(workload.prompt_tokens)
        self._trained_at = math.inf  # of the newest entry in the heap
        self._samples = Samples(workload)
        self._finished = False
        self._has_history = False  # responses of an earlier epoch to draft from
        nodes = of_all_sizes(nodes, self.settings.parallel)
        spot_slots = nodes[0].slots if nodes else settings.slots
        spots = (NodeSpec(event.node, spot_slots, kind=SPOT) for event in trace)
        repeated = (change.spec for many in (changes or {}).values() for change in many)
        for spec in (*nodes, *spots, *repeated):
            self._add_machine(spec)
        self._transfers = Transfers(self)
        self.fleet = Membership(self, self._transfers, self._colocation, changes or {})
        self.fleet.set_out(nodes, trace)

    def _add_machine(self, spec: NodeSpec) -> None:
        if spec.name in self.machines:
            return
        profile = profile_of(spec, self.engines, self.scenario.spot_kv_tokens)
        self.machines[spec.name] = new_machine(spec, profile, self.switches)

    def _speculate(self, speculation: SimSpeculation) -> None:
        self.engines = {k: replace(e, speculation=speculation) for k, e in self.engines.items()}
        kv_tokens = self.scenario.spot_kv_tokens
        for machine in self.machines.values():
            machine.engine.adopt(self.now, profile_of(machine.spec, self.engines, kv_tokens))

    # Time

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), act))

    def _soon(self, seconds: float, act: Callable[[], None]) -> None:
        """Before anything else that happens now, if it takes no time."""
        self.at(self.now + seconds, act) if seconds else act()

    def run(self) -> Outcome:
        """Until the core says that the run is over. Raises SimError if nothing happens any more."""
        heap, timers = self._heap, 0
        while not self._finished:
            deadline = self.core.next_deadline()
            next_at = heap[0][0] if heap else FOREVER_S
            if (deadline or FOREVER_S) >= next_at >= FOREVER_S or timers > PATIENCE:
                raise SimError(
                    f"the run is stuck at step {self.core.step} of {self.settings.num_steps} after "
                    f"{self.now:.0f} s: no node is left, or none can load the weights"
                )
            if deadline is not None and deadline < next_at:
                self.now = max(self.now, deadline)
                timers += 1
                self.feed(TimerFired())
                continue
            timers = 0
            self.now, _, act = heapq.heappop(heap)
            act()
        self._transfers.end()
        self.observer.end()
        return self.outcome

    def feed(self, event: Event) -> None:
        todo: deque[Event] = deque((event,))
        core, now = self.core, self.now
        while todo:
            commands = self.handle(todo.popleft(), now)
            if self.check:
                invariants.check(core)
            for command in commands:
                self._perform(command, todo)
        self._transfers.begin()

    # Commands

    def _perform(self, command: Command, todo: deque[Event]) -> None:
        match command:
            case Send(node, message):
                if node == TRAINER:
                    self._tell_trainer(message, todo)
                elif (machine := self.machines.get(node)) is not None and machine.present:
                    # else it died, and the core has not noticed yet
                    self._tell(machine, message, todo)
            case ScoreResponse(response, prompt):
                event = ResponseScored(response.id, response.attempt, reward(response.seed))
                if self.switches.async_rewards:
                    when = self.scoring.done_at(self.now, prompt, response.seed)
                    self.at(when, lambda: self.feed(event))
                else:
                    self.deferred.defer(response)
                    todo.append(event)
            case DrawPrompts("eval"):
                todo.append(PromptsDrawn(held_out(self.settings.eval_sets, self._prompt)))
            case DrawPrompts("train", count):
                drawn = (self._cursor.draw() for _ in range(count))
                todo.append(PromptsDrawn(tuple(DrawnPrompt(p, e, self._prompt) for p, e in drawn)))
            case CloseRound(round):
                todo.extend(self._colocation.loads())
                self.observer.round_closed(round)
                for mechanism in self.mechanisms:
                    mechanism.round_closed(round)
                if self.switches.speculation and self._cursor.epoch > 0 and not self._has_history:
                    self._has_history = True
                    self._speculate(self.scenario.speculation)
            case CloseStep() as step:
                self.observer.step_closed(step)
                self.fleet.begin_step(step.step + 1)
            case Finish():
                self._finished = True
            case _:
                pass  # Admit and Report: nothing that takes time

    def turn(self, machine: SimMachine, asleep: bool) -> None:
        """An engine sleeps for those of another size, or wakes."""
        self.observer.fleet_changes(machine, -1)
        machine.turn(self.now, asleep)
        self.observer.fleet_changes(machine, 1)

    def _tell_trainer(self, message: Message, todo: deque[Event]) -> None:
        if isinstance(message, TrainShard):
            step, index = message.step, message.index
            events = ShardLeft(step, index), ShardsDelivered(TRAINER, ShardsTaken(step, index))
            if delay_s := self.scenario.training.shard_s:
                self.at(self.now + delay_s, lambda: self._train_later(message, events))
                return
            self._train(message)
            todo.extend(events)
        elif isinstance(message, Drain):
            todo.append(NodeLeft(TRAINER, message.reason, ok=True))
        elif isinstance(message, AssignDevices | SuspendTrainer):
            self._colocation.tell_trainer(message)
        else:
            self._transfers.tell_trainer(message)

    def _tell(self, machine: SimMachine, message: Message, todo: deque[Event]) -> None:
        match message:
            case Generate():
                self._generate(machine, message)
            case Abort(attempts):
                for response, number in attempts:
                    if not self.deferred.goes_on(machine, response, number):
                        self.abort(machine, response, number)
            case Drain(_, reason):
                todo.extend(self.fleet.leave(machine, reason))
            case SleepEngine() | WakeEngine():
                todo.extend(self._colocation.obey(machine, message))
            case _:
                self._transfers.tell(machine, message)

    def _generate(self, machine: SimMachine, message: Generate) -> None:
        responses = self.core.table.responses
        prompt_tokens = self.scenario.workload.prompt_tokens
        attempts: list[Attempt] = []
        for request in message.requests:
            response = responses[request.response]
            final = self._samples.length(response, self._samples.noise(response))
            id, prompt, held = response.id, response.group.prompt.id, len(request.prefix) // 4
            ends = final, final >= response.group.max_response_tokens
            attempts.append(Attempt(id, request.attempt, prompt, prompt_tokens, held, *ends))
        machine.engine.add(self.now, attempts)
        self._schedule(machine)

    def abort(self, machine: SimMachine, response: str, number: int) -> None:
        machine.engine.abort(self.now, response, number)
        self._schedule(machine)

    def final_tokens(self, response: Response, noise: int) -> int:
        return self._samples.length(response, noise)

    # Engines

    def _schedule(self, machine: SimMachine) -> None:
        at = machine.engine.next_at
        if at < machine.scheduled_at:
            machine.scheduled_at = at
            heapq.heappush(self._heap, (at, next(self._order), lambda: self._due(machine)))

    def _due(self, machine: SimMachine) -> None:
        if self.now < machine.scheduled_at:
            return  # superseded
        machine.scheduled_at = math.inf
        if machine.engine.next_at <= self.now:
            deltas = machine.engine.step(self.now)
            if deltas:
                self.feed(TokensArrived(machine.spec.name, machine.chunk(deltas)))
                for mechanism in self.mechanisms:
                    mechanism.tokens(deltas)
        self._schedule(machine)

    # Training and weights

    def _train_later(self, shard: TrainShard, events: Iterable[Event]) -> None:
        self._train(shard)
        for event in events:
            self.feed(event)

    def _train(self, shard: TrainShard) -> None:
        seconds = self.trainer.take(shard, self.scenario)
        self.outcome.trained_tokens += sum(
            len(r.token_ids) // 4 for group in shard.groups for r in group.responses
        )
        ready_at = 0.0
        if shard.last and not self.switches.async_rewards:
            ready_at = self.deferred.scored_at()
        self.trainer.add_work(self.now, shard.step, seconds, shard.last, ready_at)
        self.plan_training()
        self._colocation.trains()

    def plan_training(self) -> None:
        """After anything that changes when the step in front will be trained."""
        at = self.trainer.done_at()
        if at < math.inf and at != self._trained_at:
            self._trained_at = at
            self.at(at, self._trained)

    def _trained(self) -> None:
        if self.trainer.done_at() > self.now + 1e-9:
            return  # superseded
        self._trained_at = math.inf
        done = self.trainer.finish(self.now)
        for mechanism in self.mechanisms:
            mechanism.step_trained()
        park_s = self._colocation.park_s
        publish_s = park_s + self.scenario.transfer.publishing_s
        self.trainer.publish(self.now, publish_s)
        parked = TrainerParked(TRAINER, TrainerSuspended(0, 0, park_s))
        self._soon(park_s, lambda: self.feed(parked))
        self._soon(publish_s, lambda: self._step_done(done))

    def _step_done(self, done: StepDone) -> None:
        self._transfers.publish(done.policy_version)
        self.feed(StepTrained(TRAINER, done))
        self.plan_training()

    def confirm(self, machine: SimMachine, version: int) -> None:
        machine.loading, machine.serves, machine.holds = -1, version, version
        machine.engine.hold(self.now, "train" if machine.asleep else None)
        machine.engine.idle_label = "idle"
        ready = self._transfers.confirm(machine, version)
        self.feed(WeightsConfirmed(machine.spec.name, ready))
