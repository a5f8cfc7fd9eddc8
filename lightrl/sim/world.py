"""The run in virtual time: a heap of what happens next, around the core.

Owns the time, and does what a daemon would do with each command; the core decides.
"""

from collections import deque
from collections.abc import Sequence
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
from lightrl.core.events import (
    Event,
    MessageArrived,
    NodeLeft,
    PromptsDrawn,
    ResponseScored,
    ShardLeft,
)
from lightrl.core.settings import Settings
from lightrl.core.state import DrawnPrompt
from lightrl.errors import SimError
from lightrl.messages.message import Message
from lightrl.messages.nodes import Drain
from lightrl.messages.responses import Abort, Generate
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.training import ShardsTaken, StepDone, TrainShard
from lightrl.sim.colocation import SimColocation, settings_in
from lightrl.sim.episodes import SimEpisodes
from lightrl.sim.fleet.engine import Attempt, blank
from lightrl.sim.fleet.machines import SimMachine, new_machine
from lightrl.sim.inputs.hardware import SimSpeculation
from lightrl.sim.inputs.nodes import SPOT, NodeChanges, NodeSpec, of_all_sizes, profile_of
from lightrl.sim.inputs.scenario import DEFAULT, Scenario, Switches
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.inputs.workload import Cursor
from lightrl.sim.membership import SimMembership
from lightrl.sim.observer import Observer
from lightrl.sim.outcome import SimOutcome
from lightrl.sim.responses import Lengths, RewardWorkers, eval_prompts, reward
from lightrl.sim.simulation import Simulation
from lightrl.sim.trainer import TRAINER, SimTrainer
from lightrl.sim.weights.transfers import Transfers


class World(Simulation):
    def __init__(
        self,
        settings: Settings,
        scenario: Scenario,
        nodes: Sequence[NodeSpec],
        trace: Sequence[TraceEvent] = (),
        switches: Switches = DEFAULT,
        changes: NodeChanges | None = None,
    ) -> None:
        """`changes`: when the nodes join and leave, which else stay."""
        if not (nodes or trace):
            raise SimError("a simulation needs nodes: --nodes, --trace or rollout.nodes")
        settings = settings_in(scenario, settings, switches, nodes)
        super().__init__(settings, scenario, switches)
        workload = scenario.workload
        self._cursor = Cursor(workload.num_prompts, settings.run_seed, workload.order)
        self._lengths = Lengths(workload)
        has_episodes = settings.episodes is not None  # their first observation is the prompt
        self._prompt = blank(0 if has_episodes else workload.prompt_tokens)
        self.episodes = SimEpisodes(self, workload.environment, self._lengths)
        self._has_history = False  # responses of an earlier epoch to draft from
        self.reward_workers = RewardWorkers(workload.reward)
        nodes = of_all_sizes(nodes, settings.parallel)
        spot_slots = nodes[0].slots if nodes and not changes else settings.slots
        spots = (NodeSpec(event.node, spot_slots, kind=SPOT) for event in trace)
        for spec in (*nodes, *spots):
            if spec.name not in self.machines:
                profile = profile_of(spec, self.engines, scenario.spot_kv_tokens)
                self.machines[spec.name] = new_machine(spec, profile, switches)
        if switches.speculation:
            history = scenario.speculation
            self._speculate(replace(history, acceptance=history.first_acceptance))
        self._trainer = SimTrainer(self, self._trained)
        self._observer = Observer(self, self._lengths)
        self._transfers = Transfers(self, self._trainer)
        self._colocation = SimColocation(self, self._trainer, self._transfers)
        self.fleet = SimMembership(self, self._transfers, self._colocation, changes or {})
        self.fleet.start(nodes, trace)
        if has_episodes:
            self.episodes.start()

    def _speculate(self, speculation: SimSpeculation) -> None:
        self.engines = {k: replace(e, speculation=speculation) for k, e in self.engines.items()}
        kv_tokens = self.scenario.spot_kv_tokens
        for machine in self.machines.values():
            machine.engine.set_profile(self.now, profile_of(machine.spec, self.engines, kv_tokens))

    def run(self) -> SimOutcome:
        """Simulate until the core finishes the run. Raise SimError if no event is left."""
        self.play()
        self._transfers.end()
        self._observer.end(self._trainer)
        return self.outcome

    def feed(self, event: Event) -> None:
        super().feed(event)
        self._transfers.begin()

    # Commands

    def perform(self, command: Command, todo: deque[Event]) -> None:
        match command:
            case Send(node, message):
                if node == TRAINER:
                    self._deliver_to_trainer(message, todo)
                elif (machine := self.machines.get(node)) is not None and machine.present:
                    # else it is lost, and the core has not detected it yet
                    self._deliver(machine, message, todo)
                elif machine is None:
                    todo.extend(self.episodes.deliver(node, message))
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
                self._colocation.round_closed()
                if self.switches.speculation and self._cursor.epoch > 0 and not self._has_history:
                    self._has_history = True
                    self._speculate(self.scenario.speculation)
            case CloseStep() as step:
                self._observer.step_closed(step)
                self.fleet.begin_step(step.step + 1)
            case Finish():
                self.is_finished = True
            case _:
                pass  # Admit and Report: nothing that takes time

    def _deliver_to_trainer(self, message: Message, todo: deque[Event]) -> None:
        match message:
            case TrainShard(step=step, index=index):
                events = ShardLeft(step, index), MessageArrived(TRAINER, ShardsTaken(step, index))
                if delay_s := self.scenario.training.shard_s:
                    self.at(self.now + delay_s, lambda: self._train_later(message, *events))
                else:
                    self._train(message)
                    todo.extend(events)
            case Drain(_, reason):
                todo.append(NodeLeft(TRAINER, reason, ok=True))
            case SetDevices():
                self._colocation.order_trainer(message)
            case _:
                self._transfers.deliver_to_trainer(message)

    def _deliver(self, machine: SimMachine, message: Message, todo: deque[Event]) -> None:
        match message:
            case Generate():
                self._generate(machine, message)
            case Abort(attempts):
                for response, number in attempts:
                    self.abort(machine, response, number)
            case Drain(_, reason):
                todo.extend(self.fleet.leave(machine, reason))
            case SetDevices():
                todo.extend(self._colocation.order(machine, message))
            case _:
                self._transfers.deliver(machine, message)

    def _generate(self, machine: SimMachine, message: Generate) -> None:
        responses = self.core.table.responses
        attempts: list[Attempt] = []
        for request in message.requests:
            response = responses[request.response]
            id, prompt, held = response.id, response.group.prompt.id, len(request.prefix) // 4
            attempt = Attempt(id, request.attempt, prompt, len(request.prompt) // 4, held)
            attempt.final_tokens = self._lengths.current(response)
            attempt.truncated = attempt.final_tokens >= response.group.max_response_tokens
            if response.turns:
                attempt.final_tokens, attempt.truncated = self.episodes.turn_of(response)
                attempt.num_cached = 0
            attempts.append(attempt)
        machine.engine.add(self.now, attempts)
        self._schedule(machine)

    def abort(self, machine: SimMachine, response: str, number: int) -> None:
        machine.engine.abort(self.now, response, number)
        self._schedule(machine)

    # Engines

    def _schedule(self, machine: SimMachine) -> None:
        self.set_alarm(
            f"node {machine.spec.name}", machine.engine.next_at, lambda: self._step(machine)
        )

    def _step(self, machine: SimMachine) -> None:
        is_due = machine.engine.next_at <= self.now
        if is_due and (deltas := machine.engine.step(self.now)):
            self.feed(MessageArrived(machine.spec.name, machine.chunk(deltas)))
        self._schedule(machine)

    # Training and weights

    def _train_later(self, shard: TrainShard, *events: Event) -> None:
        self._train(shard)
        for event in events:
            self.feed(event)

    def _train(self, shard: TrainShard) -> None:
        ready_at = 0.0
        if shard.last and not self.switches.async_rewards:
            ready_at = self.reward_workers.deferred_done_at(self.now)
        self._trainer.train(shard, ready_at)
        self._colocation.begin_training()

    def _trained(self, done: StepDone) -> None:
        self._colocation.step_trained()
        park_s = self._colocation.park_s
        publish_s = park_s + self.scenario.transfer.publishing_s
        self._trainer.publish(publish_s)
        parked = MessageArrived(TRAINER, DevicesReleased("trainer", 0, 0, park_s))
        self.after(park_s, lambda: self.feed(parked))
        self.after(publish_s, lambda: self._step_done(done))

    def _step_done(self, done: StepDone) -> None:
        self._transfers.publish(done.policy_version)
        self.feed(MessageArrived(TRAINER, done))
