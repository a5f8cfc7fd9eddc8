"""The run in virtual time: a heap of what happens next, around the core.

Owns the time, and does what a daemon would do with each command; the core decides.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

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
    MessageArrived,
    NodeLeft,
    PromptsDrawn,
    ResponseScored,
    ShardLeft,
    TimerFired,
)
from lightrl.core.settings import Settings
from lightrl.core.state import DrawnPrompt, Response
from lightrl.errors import SimError
from lightrl.messages.message import Message
from lightrl.messages.nodes import Drain
from lightrl.messages.responses import Abort, Generate
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.training import ShardsTaken, StepDone, TrainShard
from lightrl.sim.colocation import SimColocation, settings_in
from lightrl.sim.fleet.engine import Attempt
from lightrl.sim.fleet.machines import SimMachine, new_machine
from lightrl.sim.fleet.messages import TRAINER, blank
from lightrl.sim.inputs.hardware import SimSpeculation
from lightrl.sim.inputs.nodes import SPOT, NodeChanges, NodeSpec, of_all_sizes, profile_of
from lightrl.sim.inputs.scenario import DEFAULT, Scenario, Switches
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.inputs.workload import Cursor
from lightrl.sim.mechanism import FOREVER_S, Mechanism
from lightrl.sim.membership import SimMembership
from lightrl.sim.observer import Observer
from lightrl.sim.outcome import SimOutcome, StepRecord
from lightrl.sim.responses import Lengths, RewardWorkers, eval_prompts, reward
from lightrl.sim.trainer import TrainerModel
from lightrl.sim.weights.transfers import Transfers

MAX_TIMERS = 200_000  # in a row, without any other event


class World:
    def __init__(
        self,
        settings: Settings,
        scenario: Scenario,
        nodes: Sequence[NodeSpec],
        trace: Sequence[TraceEvent] = (),
        switches: Switches = DEFAULT,
        changes: NodeChanges | None = None,
    ) -> None:
        """`changes`: when nodes join and leave, beside the trace."""
        if not (nodes or trace or changes):
            raise SimError("a simulation needs nodes: --nodes, --trace or rollout.nodes")
        self.settings = settings_in(scenario, settings, switches, nodes)
        self.scenario = scenario
        self.switches = switches
        self.now = 0.0
        self.core = Coordinator(self.settings, now=0.0)
        self.handle = self.core.handle
        self.machines: dict[str, SimMachine] = {}
        self.outcome = SimOutcome()
        self.newest = StepRecord(-1, "", 0)
        self.engines = dict(scenario.engines)
        if switches.speculation:
            history = scenario.speculation
            self._speculate(replace(history, acceptance=history.first_acceptance))
        workload = scenario.workload
        self.trainer = TrainerModel(
            scenario.training.step_s,
            streaming=switches.streaming and switches.async_rewards,
            rate=0.0 if scenario.is_colocated else 1.0,
        )
        self.reward_workers = RewardWorkers(workload.reward)
        self._colocation = SimColocation(self)
        self.mechanisms: tuple[Mechanism, ...] = (self._colocation,)
        self._observer = Observer(self)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._cursor = Cursor(workload.num_prompts, settings.run_seed, workload.order)
        self._prompt = blank(workload.prompt_tokens)
        self._trained_at = math.inf  # of the newest entry in the heap
        self._lengths = Lengths(workload)
        self._finished = False
        self._has_history = False  # responses of an earlier epoch to draft from
        nodes = of_all_sizes(nodes, self.settings.parallel)
        spot_slots = nodes[0].slots if nodes else settings.slots
        spots = (NodeSpec(event.node, spot_slots, kind=SPOT) for event in trace)
        repeated = (change.spec for many in (changes or {}).values() for change in many)
        for spec in (*nodes, *spots, *repeated):
            if spec.name not in self.machines:
                profile = profile_of(spec, self.engines, scenario.spot_kv_tokens)
                self.machines[spec.name] = new_machine(spec, profile, switches)
        self._transfers = Transfers(self)
        self.fleet = SimMembership(
            self, self._observer, self._transfers, self._colocation, changes or {}
        )
        self.fleet.start(nodes, trace)

    def _speculate(self, speculation: SimSpeculation) -> None:
        self.engines = {k: replace(e, speculation=speculation) for k, e in self.engines.items()}
        kv_tokens = self.scenario.spot_kv_tokens
        for machine in self.machines.values():
            machine.engine.set_profile(self.now, profile_of(machine.spec, self.engines, kv_tokens))

    # Time

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), act))

    def _soon(self, seconds: float, act: Callable[[], None]) -> None:
        """Act immediately if it takes no time."""
        self.at(self.now + seconds, act) if seconds else act()

    def run(self) -> SimOutcome:
        """Simulate until the core finishes the run. Raise SimError if no event is left."""
        heap, timers = self._heap, 0
        while not self._finished:
            deadline = self.core.next_deadline()
            next_at = heap[0][0] if heap else FOREVER_S
            if (deadline or FOREVER_S) >= next_at >= FOREVER_S or timers > MAX_TIMERS:
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
        self._observer.end()
        return self.outcome

    def feed(self, event: Event) -> None:
        todo: deque[Event] = deque((event,))
        while todo:
            for command in self.handle(todo.popleft(), self.now):
                self._perform(command, todo)
        self._transfers.begin()

    # Commands

    def _perform(self, command: Command, todo: deque[Event]) -> None:
        match command:
            case Send(node, message):
                if node == TRAINER:
                    self._deliver_to_trainer(message, todo)
                elif (machine := self.machines.get(node)) is not None and machine.present:
                    # else it is lost, and the core has not detected it yet
                    self._deliver(machine, message, todo)
            case ScoreResponse(response, prompt):
                event = ResponseScored(response.id, response.attempt, reward(response.seed))
                if self.switches.async_rewards:
                    when = self.reward_workers.done_at(self.now, prompt, response.seed)
                    self.at(when, lambda: self.feed(event))
                else:
                    self.reward_workers.defer(response)
                    todo.append(event)
            case DrawPrompts("eval"):
                todo.append(PromptsDrawn(eval_prompts(self.settings.eval_sets, self._prompt)))
            case DrawPrompts("train", count):
                drawn = (self._cursor.draw() for _ in range(count))
                todo.append(PromptsDrawn(tuple(DrawnPrompt(p, e, self._prompt) for p, e in drawn)))
            case CloseRound(round):
                todo.extend(self._colocation.heartbeats())
                self._observer.round_closed(round)
                for mechanism in self.mechanisms:
                    mechanism.round_closed(round)
                if self.switches.speculation and self._cursor.epoch > 0 and not self._has_history:
                    self._has_history = True
                    self._speculate(self.scenario.speculation)
            case CloseStep() as step:
                self._observer.step_closed(step)
                self.fleet.begin_step(step.step + 1)
            case Finish():
                self._finished = True
            case _:
                pass  # Admit and Report: nothing that takes time

    def turn(self, machine: SimMachine, asleep: bool) -> None:
        """Let an engine sleep for those of another size, or wake it."""
        self._observer.fleet_changes(machine, -1)
        machine.turn(self.now, asleep)
        self._observer.fleet_changes(machine, 1)

    def _deliver_to_trainer(self, message: Message, todo: deque[Event]) -> None:
        if isinstance(message, TrainShard):
            step, index = message.step, message.index
            events = ShardLeft(step, index), MessageArrived(TRAINER, ShardsTaken(step, index))
            if delay_s := self.scenario.training.shard_s:
                self.at(self.now + delay_s, lambda: self._train_later(message, events))
                return
            self._train(message)
            todo.extend(events)
        elif isinstance(message, Drain):
            todo.append(NodeLeft(TRAINER, message.reason, ok=True))
        elif isinstance(message, SetDevices):
            self._colocation.order_trainer(message)
        else:
            self._transfers.deliver_to_trainer(message)

    def _deliver(self, machine: SimMachine, message: Message, todo: deque[Event]) -> None:
        match message:
            case Generate():
                self._generate(machine, message)
            case Abort(attempts):
                for response, number in attempts:
                    if not any(m.keeps(machine, response, number) for m in self.mechanisms):
                        self.abort(machine, response, number)
            case Drain(_, reason):
                todo.extend(self.fleet.leave(machine, reason))
            case SetDevices():
                todo.extend(self._colocation.order(machine, message))
            case _:
                self._transfers.deliver(machine, message)

    def _generate(self, machine: SimMachine, message: Generate) -> None:
        responses = self.core.table.responses
        prompt_tokens = self.scenario.workload.prompt_tokens
        attempts: list[Attempt] = []
        for request in message.requests:
            response = responses[request.response]
            final = self._lengths.current(response)
            id, prompt, held = response.id, response.group.prompt.id, len(request.prefix) // 4
            ends = final, final >= response.group.max_response_tokens
            attempts.append(Attempt(id, request.attempt, prompt, prompt_tokens, held, *ends))
        machine.engine.add(self.now, attempts)
        self._schedule(machine)

    def abort(self, machine: SimMachine, response: str, number: int) -> None:
        machine.engine.abort(self.now, response, number)
        self._schedule(machine)

    def final_tokens(self, response: Response) -> int:
        """Return its length as it was first sampled."""
        return self._lengths.of(response, response.seed)

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
                self.feed(MessageArrived(machine.spec.name, machine.chunk(deltas)))
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
            ready_at = self.reward_workers.deferred_done_at(self.now)
        self.trainer.add_work(self.now, shard.step, seconds, shard.last, ready_at)
        self.plan_training()
        self._colocation.begin_training()

    def plan_training(self) -> None:
        """Schedule the end of the oldest step again, because it has changed."""
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
        parked = MessageArrived(TRAINER, DevicesReleased("trainer", 0, 0, park_s))
        self._soon(park_s, lambda: self.feed(parked))
        self._soon(publish_s, lambda: self._step_done(done))

    def _step_done(self, done: StepDone) -> None:
        self._transfers.publish(done.policy_version)
        self.feed(MessageArrived(TRAINER, done))
        self.plan_training()

    def confirm(self, machine: SimMachine, version: int) -> None:
        machine.loading, machine.serves, machine.holds = -1, version, version
        machine.engine.hold(self.now, "train" if machine.asleep else None)
        machine.engine.idle_label = "idle"
        ready = self._transfers.confirm(machine, version)
        self.feed(MessageArrived(machine.spec.name, ready))
