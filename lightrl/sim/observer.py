"""Records in a simulated world what a report needs.

The simulator knows the full length of every response, also of aborted ones: from that the report
derives the bias of what is trained.
"""

from functools import lru_cache

from lightrl.core.commands import CloseStep
from lightrl.core.state import GroupState, Round
from lightrl.sim.inputs.hardware import EngineProfile
from lightrl.sim.outcome import StepRecord
from lightrl.sim.responses import Lengths
from lightrl.sim.simulation import Simulation
from lightrl.sim.trainer import TRAINER, SimTrainer

_token_cost_s = lru_cache(EngineProfile.token_cost_s)


class Observer:
    def __init__(self, world: Simulation, lengths: Lengths) -> None:
        self._world = world
        self._lengths = lengths
        self._records: dict[int, StepRecord] = {}
        self._first: dict[tuple[str, int], list[int]] = {}  # lengths of prompts not trained yet
        # when the last step closed; node seconds until then, of all and of those that also train
        self._step_at, self._node_s = 0.0, (0.0, 0.0)
        self._preemptions = 0
        world.outcome.limit = world.settings.max_response_tokens

    def round_closed(self, round: Round) -> None:
        world, out = self._world, self._world.outcome
        kept: list[int] = []
        for group in round.groups.values():
            key = (group.prompt.id, group.prompt.epoch)
            if key not in self._first:
                self._first[key] = [self._lengths.of(r, r.seed) for r in group.responses]
            if group.state is GroupState.ACCEPTED:
                out.launched.update(self._first.pop(key))
                kept += [r.num_sampled for r in group.kept]
            elif group.state is not GroupState.DEFERRED:
                self._first.pop(key)
        out.kept.update(kept)
        out.winners.append(
            (round.step, tuple(sorted(r.id for g in round.accepted for r in g.kept)))
        )
        record = StepRecord(round.step, round.kind, opened_at=round.opened_at)
        preemptions = sum(m.engine.num_preemptions for m in world.machines.values())
        record.preemptions, self._preemptions = preemptions - self._preemptions, preemptions
        record.parallelism = world.core.sizes.size or min(world.engines)
        self._count_work(record, kept)
        self._records[round.step] = record

    def step_closed(self, step: CloseStep) -> None:
        world, record = self._world, self._records.pop(step.step)
        record.rollout_s, record.train_s = step.rollout_s, step.train_s
        record.weights_s = step.weights_s
        seconds = [(m.node_s(world.now), m.is_spot) for m in world.machines.values()]
        node_s = sum(s for s, _ in seconds), sum(s for s, is_spot in seconds if not is_spot)
        if elapsed := world.now - self._step_at:
            pairs = zip(node_s, self._node_s, strict=True)
            record.nodes, record.training_nodes = ((a - b) / elapsed for a, b in pairs)
        self._step_at, self._node_s = world.now, node_s
        record.bound_s = self._bound_s(record)
        world.outcome.steps.append(record)

    def end(self, trainer: SimTrainer) -> None:
        world, out = self._world, self._world.outcome
        out.elapsed_s = world.now
        slot_s = 0.0
        for machine in world.machines.values():
            machine.leave(world.now)
            engine, kind = machine.engine, machine.spec.kind
            times = out.device_times.setdefault(kind, {})
            for label, seconds in engine.times.items():
                times[label] = times.get(label, 0.0) + seconds
            out.sampled_tokens += engine.num_tokens
            out.prefilled_tokens += engine.prefilled_tokens
            out.preemptions += engine.num_preemptions
            out.slots_busy += engine.slot_s
            slot_s += engine.slots * sum(engine.times.values()) / machine.spec.width
        out.slots_busy /= max(1e-9, slot_s)
        if not world.scenario.is_colocated:
            trainer.advance()
            out.device_times[TRAINER] = dict(trainer.times)
        counters = world.core.table.counters
        out.counters = {name: getattr(counters, name) for name in counters.__slots__}
        out.waiting_prompts = len(world.core.backlog.deferred)

    def _count_work(self, record: StepRecord, kept: list[int]) -> None:
        """Set the least work of what was kept."""
        world = self._world
        engine, prompt = world.engines[record.parallelism], world.scenario.workload.prompt_tokens
        record.kept, record.kept_tokens = len(kept), sum(kept)
        record.longest_tokens = max(kept, default=0)
        fastest = max(m.speed for m in world.machines.values())
        record.longest_s = engine.alone_s(prompt, record.longest_tokens) / fastest
        slots = max(m.engine.slots for m in world.machines.values())
        per_token = _token_cost_s(engine, slots)
        context = sum(n * prompt + n * (n - 1) / 2 for n in kept)
        spec = engine.speculation
        drafted = spec.tokens_per_forward(spec.max_window) if spec is not None else 1.0
        record.work_s = per_token * record.kept_tokens + engine.context_s * context / drafted
        training = world.scenario.training
        tokens = record.kept_tokens + prompt * len(kept)
        record.training_s = training.step_s + training.seconds(len(kept), tokens)

    def _bound_s(self, record: StepRecord) -> float:
        """Return the least seconds that any schedule of the same kept responses takes.

        It is the largest of: their least work over the capacity of the fleet; the longest of them
        alone on a fast node, if steps do not overlap; their training. On shared GPUs work and
        training add up.
        """
        longest_s = 0.0 if self._world.settings.max_staleness else record.longest_s
        work_s = record.work_s
        if self._world.scenario.is_colocated:
            work_s += record.training_s * record.training_nodes
        return max(longest_s, work_s / record.nodes if record.nodes else 0.0, record.training_s)
