"""Looks at a simulated world and writes down what a report needs. Changes nothing.

The simulator knows how long every response would have been, also of those that were given up: that
is how the bias of what is trained can be told.
"""

from lightrl.core.commands import CloseStep
from lightrl.core.state import GroupState, Round
from lightrl.sim.engine_profile import EngineProfile
from lightrl.sim.machines import SPOT, SimMachine
from lightrl.sim.mechanism import Simulation
from lightrl.sim.outcome import LengthSums, StepRecord


class Observer:
    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._records: dict[int, StepRecord] = {}
        self._first: dict[tuple[str, int], LengthSums] = {}  # of prompts that are not trained yet
        # Machines x time, slow ones count less: [all, those that also train].
        self._node_s = [0.0, 0.0]
        self._present = [0.0, 0.0]
        self._looked_at = 0.0
        self._node_s_before = (0.0, 0.0)
        self._step_at = 0.0
        self._preemptions = 0
        self._token_s: dict[int, float] = {}  # least cost of a token, by parallelism

    def fleet_changes(self, machine: SimMachine, sign: int) -> None:
        """A machine comes, or goes for -1; one that sleeps for others does neither."""
        if not machine.width:
            return
        self._look()
        self._present[0] += sign * machine.speed
        self._present[1] += sign * machine.speed * (machine.spec.kind != SPOT)

    def _look(self) -> None:
        now = self._world.now
        for k, present in enumerate(self._present):
            self._node_s[k] += present * (now - self._looked_at)
        self._looked_at = now

    def round_closed(self, round: Round) -> None:
        world, out = self._world, self._world.outcome
        record = StepRecord(
            step=round.step,
            kind=round.kind,
            launched=sum(len(g.responses) for g in round.groups.values()),
            opened_at=round.opened_at,
            closed_at=world.now,
        )
        limit = world.settings.max_response_tokens
        kept: list[int] = []
        for group in round.groups.values():
            key = (group.prompt.id, group.prompt.epoch)
            if key not in self._first:
                self._first[key] = first = LengthSums()
                for r in group.responses:
                    first.add(world.final_tokens(r, r.seed), limit)
            if group.state is GroupState.ACCEPTED:
                out.launched.merge(self._first.pop(key))
                for r in group.kept:
                    kept.append(len(r.tokens))
                    out.kept.add(len(r.tokens), limit)
            elif group.state is GroupState.DEFERRED:
                record.put_off += 1
            else:
                record.dropped += 1
                self._first.pop(key)
        preemptions = sum(m.total("num_preemptions") for m in world.machines.values())
        record.preemptions, self._preemptions = preemptions - self._preemptions, preemptions
        record.parallelism = world.core.sizes.size or min(world.engines)
        self._bound(record, kept)
        self._records[round.step] = world.newest = record
        out.winners.append(
            (round.step, tuple(sorted(r.id for g in round.accepted for r in g.kept)))
        )

    def step_closed(self, step: CloseStep) -> None:
        record = self._records.pop(step.step)
        record.rollout_s, record.train_s, record.weights_s = (
            step.rollout_s,
            step.train_s,
            step.weights_s,
        )
        self._look()
        elapsed = self._world.now - self._step_at
        if elapsed > 0:
            record.nodes = (self._node_s[0] - self._node_s_before[0]) / elapsed
            record.training_nodes = (self._node_s[1] - self._node_s_before[1]) / elapsed
        self._node_s_before, self._step_at = (self._node_s[0], self._node_s[1]), self._world.now
        self._world.outcome.steps.append(record)

    def end(self) -> None:
        world, out = self._world, self._world.outcome
        out.elapsed_s = world.now
        for machine in world.machines.values():
            machine.go(world.now)
            times = out.device_times.setdefault(machine.spec.kind, {})
            for label, seconds in machine.times().items():
                times[label] = times.get(label, 0.0) + seconds
            kind = machine.spec.kind
            out.device_s[kind] = out.device_s.get(kind, 0.0) + machine.present_s
            out.sampled_tokens += machine.total("num_tokens")
            out.prefilled_tokens += machine.total("prefilled_tokens")
            out.preemptions += machine.total("num_preemptions")
        if world.scenario.training.placement == "dedicated":
            world.trainer.advance(world.now)
            out.device_times["trainer"] = dict(world.trainer.times)
            out.device_s["trainer"] = world.now
        counters = world.core.table.counters
        out.counters = {name: getattr(counters, name) for name in counters.__slots__}
        out.waiting_prompts = len(world.core.backlog.put_off)

    def _bound(self, record: StepRecord, kept: list[int]) -> None:
        """The least that any schedule needs for what was kept; see `report.bound_s`."""
        world = self._world
        engine, prompt = world.engines[record.parallelism], world.scenario.workload.prompt_tokens
        record.kept, record.kept_tokens = len(kept), sum(kept)
        record.kept_longest = max(kept, default=0)
        fastest = max(m.speed for m in world.machines.values())
        record.longest_s = engine.alone_s(prompt, record.kept_longest) / fastest
        per_token = self._cost_of_token(record.parallelism, engine)
        context = sum(n * prompt + n * (n - 1) / 2 for n in kept)
        most = engine.speculation
        drafted = most.tokens_per_forward(most.max_window) if most is not None else 1.0
        record.work_s = per_token * record.kept_tokens + engine.context_s * context / drafted
        training = world.scenario.training
        tokens = record.kept_tokens + prompt * len(kept)
        record.training_s = training.step_s + training.seconds(len(kept), tokens)

    def _cost_of_token(self, parallelism: int, engine: EngineProfile) -> float:
        if parallelism not in self._token_s:
            most = max(m.engine.slots for m in self._world.machines.values())
            self._token_s[parallelism] = engine.token_cost_s(most)
        return self._token_s[parallelism]
