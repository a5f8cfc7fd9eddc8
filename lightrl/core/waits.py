"""Determine from the state what a run currently waits for: at most one `Wait`. Pure.

Owns the choice among several waits. Changes no state; metrics/waits.py has the texts. The first of
these that applies is returned:

1. a run that ends: its last checkpoint, then the nodes that have not left;
2. a trainer that was lost, or has not joined: no step can be trained, and a lost trainer that does
   not return ends the run;
3. a step with all samples: its devices change sides, ranks load the model, a checkpoint is written,
   or ranks train. A run that samples ahead meanwhile (max_staleness) does not wait;
4. a rollout node, if none takes part;
5. the first version, published by ranks that have loaded the model;
6. prompts, if their draws are unanswered;
7. nodes of which none can sample yet: sleeping nodes change sides, engines start, or a version is
   being sent;
8. scores, if all responses are sampled, or if more responses wait for a score than for tokens;
9. environments, if no response is sampled or queued and episodes wait for an observation, or if no
   environment node takes part;
10. the tail: at most a tenth of the responses, while no others wait.

Otherwise all nodes sample, and the run does not wait.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from lightrl.core.coordinator import Coordinator
from lightrl.core.state import OVER, RESTING, Node, NodeState, Round, RoundState

TAIL_SHARE = 0.1  # of the responses of the open rounds


class WaitKind(StrEnum):
    LAST_CHECKPOINT = "last checkpoint"
    LEAVING = "leaving"
    TRAINER_LOST = "trainer lost"
    TRAINER = "trainer"
    DEVICES = "devices"
    RANKS = "ranks"
    CHECKPOINT = "checkpoint"
    TRAINING = "training"
    ROLLOUT = "rollout"
    PROMPTS = "prompts"
    ENGINES = "engines"
    WEIGHTS = "weights"
    SCORES = "scores"
    TAIL = "tail"
    ENVIRONMENTS = "environments"


K = WaitKind


@dataclass(frozen=True, slots=True)
class Scoring:
    """State of the reward pool, provided by the shell."""

    num_waiting: int = 0  # responses, including those that are being scored
    num_workers: int = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait; `since` is set by a WaitClock. Example: Wait(K.SCORES, num=31, of=1, step=4)."""

    kind: WaitKind
    since: float = 0.0
    # missing nodes, responses, prompts
    num: int = 0
    # needed nodes; reward workers
    of: int = 0
    # of the round, training or checkpoint; None: of no step
    step: int | None = None
    is_eval: bool = False
    # names of the awaited nodes
    nodes: tuple[str, ...] = ()
    # of this wait in earlier steps; None: unknown
    usual_s: float | None = None
    # when the run ends because of the wait; None: never
    ends_at: float | None = None


class WaitClock:
    """Tracks the begin of the current wait by periodic calls of `look`."""

    def __init__(self) -> None:
        self._wait: Wait | None = None

    def look(self, wait: Wait | None, now: float) -> Wait | None:
        """Return `wait` with its begin: the time of the first look."""
        before, self._wait = self._wait, wait
        if wait is not None:
            same = before is not None and (wait.kind, wait.step) == (before.kind, before.step)
            self._wait = replace(wait, since=before.since if before and same else now)
        return self._wait


def decide(core: Coordinator, scoring: Scoring) -> Wait | None:
    """Return what the run waits for; None if all nodes work or the run is over."""
    if core.state in OVER:
        return None
    if core.shutdown.has_begun:
        return _end(core)
    if (away := _trainer_away(core)) is not None:
        return away
    round = core.table.training
    if round is not None and round.state is RoundState.CLOSED and not core.steps.is_step_done:
        samples_ahead = core.table.num_running or core.table.queue.has_waiting
        return None if samples_ahead else _training(core, round)
    return _samples(core, scoring)


def _end(core: Coordinator) -> Wait:
    if core.shutdown.awaits_trainer:
        return _trainer_away(core) or Wait(K.LAST_CHECKPOINT, step=core.step)
    return Wait(K.LEAVING, nodes=_names(core.fleet.nodes.values()))


def _trainer_away(core: Coordinator) -> Wait | None:
    trainers = core.fleet.trainers
    missing, needed = trainers.num_missing, trainers.num_needed
    if missing and core.trainer_feed.missing_since is not None:
        return Wait(K.TRAINER_LOST, num=missing, of=needed, ends_at=core.shutdown.patience_ends_at)
    return Wait(K.TRAINER, num=missing, of=needed) if missing else None


def _training(core: Coordinator, round: Round) -> Wait:
    """Return the wait of a step with all samples."""
    feed, devices = core.trainer_feed, core.fleet.devices
    if feed.trained_step is None:
        return _ranks(core)
    trainer = core.fleet.nodes.get(core.fleet.trainer or "")
    if trainer is not None and trainer.is_saving:
        return Wait(K.CHECKPOINT, step=feed.trained_step)
    moving = [n for n in devices.nodes.values() if not n.is_asleep]
    if moving and not devices.are_training and feed.is_owed(round):
        return Wait(K.DEVICES, step=round.step, nodes=_names(moving))
    # a trainer that is behind trains steps again
    step = feed.trained_step if feed.is_behind else round.step
    return Wait(K.TRAINING, step=step, usual_s=core.steps.usual_train_s)


def _ranks(core: Coordinator) -> Wait:
    return Wait(K.RANKS, nodes=tuple(core.fleet.trainers.names))


def _samples(core: Coordinator, scoring: Scoring) -> Wait | None:
    """Return the wait of a step without all samples."""
    fleet, table = core.fleet, core.table
    nodes = [n for n in fleet.nodes.values() if "rollout" in n.roles]
    nodes = [n for n in nodes if n.state is not NodeState.DRAINING]
    if not nodes and not _is_sampled(core):
        return Wait(K.ROLLOUT)
    if fleet.published is None:
        return _ranks(core)
    if core.steps.draws:
        round = core.steps.draws[0]
        return Wait(
            K.PROMPTS,
            num=core.steps.num_missing(round),
            step=round.step,
            is_eval=round.is_eval,
        )
    if core.settings.episodes is not None and not fleet.environments and not _is_sampled(core):
        return Wait(K.ENVIRONMENTS)
    if not fleet.ready and not table.num_running and not _is_sampled(core):
        return _none_ready(core, nodes)
    return _last_ones(core, scoring)


def _is_sampled(core: Coordinator) -> bool:
    """Return whether the open round is running and all its responses are sampled."""
    table, round = core.table, core.table.round
    is_open = round is not None and round.state is RoundState.RUNNING
    has_episodes = bool(table.open_episodes) or table.unbegun.has_waiting
    return is_open and not (table.num_running or table.queue.has_waiting or has_episodes)


def _none_ready(core: Coordinator, nodes: list[Node]) -> Wait:
    coming = [n for n in nodes if n.state not in RESTING]
    if not coming:
        return Wait(K.DEVICES, step=core.step, nodes=_names(nodes))
    if started := [n for n in coming if n.device]:  # nodes with a started engine come first
        version = core.fleet.sources.policy_version
        return Wait(K.WEIGHTS, step=version, nodes=_names(started))
    return Wait(K.ENGINES, nodes=_names(coming))


def _last_ones(core: Coordinator, scoring: Scoring) -> Wait | None:
    table, round = core.table, core.table.round
    if round is None or round.state is not RoundState.RUNNING:
        return None
    running, most = table.num_running, max(1, int(TAIL_SHARE * len(table.responses)))
    if running > max(most, scoring.num_waiting):
        return None  # before the queue is counted
    left = running + len(table.queue.waiting())
    step, is_eval = round.step, round.is_eval
    if table.open_episodes and not left:
        nodes, num = _names(core.fleet.environments.values()), len(table.open_episodes)
        return Wait(K.ENVIRONMENTS, num=num, step=step, is_eval=is_eval, nodes=nodes)
    is_slower = scoring.num_waiting > max(left, scoring.num_workers)
    if scoring.num_waiting and (not left or is_slower):
        waiting, workers = scoring.num_waiting, scoring.num_workers
        return Wait(K.SCORES, num=waiting, of=workers, step=step, is_eval=is_eval)
    if running == left and 0 < left <= most and left < len(table.responses):
        at = [n for n in core.fleet.nodes.values() if n.running]
        return Wait(K.TAIL, num=left, step=step, is_eval=is_eval, nodes=_names(at))
    return None


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(sorted(n.name for n in nodes))
