"""Order nodes that share devices with the trainer to sleep or wake, and the trainer to suspend.

When a round closes, its nodes are ordered to sleep, and the trainer trains. When the version is
published, the ranks are suspended, and the nodes wake. Within a step `sharing_policy` decides which
nodes release their devices. No progress of a change is stored: after every event the next orders
are derived from the states of all nodes, so that a node that dies asleep or reconnects awake, and a
restarted coordinator, need no special case. Also measures how each device spends a step
(`DeviceTimes`).
"""

from collections import defaultdict

from lightrl.core.commands import Outbox
from lightrl.core.nodes.fleet import Fleet
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.rounds.round_scheduler import RoundScheduler
from lightrl.core.rounds.shutdown import Shutdown
from lightrl.core.sharing.device_turns import AWAKE, DeviceTurns
from lightrl.core.sharing.shared_devices import NO_PARTS, NO_TRAINER, SharedDevices
from lightrl.core.sharing.sharing_policy import SharingPolicy
from lightrl.core.state import RESTING, Node, NodeState, Round, RoundState
from lightrl.messages.nodes import Hello
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.training import StepDone

LABELS = ("rollout", "switch", "train", "wait")
PAUSE_S = 0.05  # between two updates of device times, unless states change


class Colocation:
    def __init__(
        self,
        fleet: Fleet,
        table: ResponseTable,
        steps: RoundScheduler,
        shutdown: Shutdown,
        turns: DeviceTurns,
        policy: SharingPolicy,
        outbox: Outbox,
    ) -> None:
        self._fleet = fleet
        self._devices = fleet.devices
        self._table = table
        self._steps = steps
        self._feed = steps.trainer_feed
        self._shutdown = shutdown
        self._turns = turns
        self._policy = policy
        self._outbox = outbox
        self._num_suspends = 0
        self._asked: dict[str, int] = {}  # number of the unanswered order, by trainer node
        self._was_open = True  # shards could be sent at the last update
        # the step was suspended; it continues once devices are assigned again
        self._is_interrupted = False
        self._closed_round: Round | None = None  # the last closed round
        self._seen: object = None  # the state from which the last orders were derived
        self.figures: dict[str, float] = {}  # of the step that closed last
        self.device_s: dict[str, float] = {}  # likewise, see `DeviceTimes.close`
        self._times = DeviceTimes(fleet.devices, fleet.now)
        self._num_orders = self._num_moved = 0  # moves in the current step; orders before it
        self._step = steps.step
        self._begun: Round | None = None  # the round of the current step

    # Events

    def on_trainer_suspended(self, name: str, message: DevicesReleased) -> None:
        """Handle the release of a trainer node's devices, by order or before it publishes."""
        if name not in self._fleet.trainers or message.number not in {0, self._asked.get(name)}:
            return
        self._asked.pop(name, None)
        if name == self._fleet.trainer:
            self._is_interrupted = message.number > 0
        self._devices.park(name)
        if self._devices.nodes and self._devices.are_parked:
            self._policy.on_trainer_suspended(self._fleet.now)

    def on_hello(self, hello: Hello) -> None:
        """Repeat orders, which may be lost with the earlier connection; the Hello reports whether
        the ranks have released the devices."""
        node = self._fleet.nodes[hello.node]
        self._turns.repeat(node)
        if "trainer" not in hello.roles:
            trainer = self._fleet.nodes.get(node.shares)
            if trainer is not None and trainer.host != node.host:
                where = f"that is on {trainer.host}, and {node.name} on {node.host}"
                self._outbox.warn(f"{node.name} is to share the devices of {node.shares}: {where}")
            return
        self._forget(hello.node)
        if hello.is_released:
            self._devices.park(hello.node)

    def without_trainer(self) -> list[tuple[str, str]]:
        """Return (name, reason) of nodes that must leave: admitted before all trainer nodes had
        joined, they share the devices of a node that is not among these."""
        return [
            (name, f"shares the devices of {node.shares}, {NO_TRAINER}")
            for name, node in self._devices.nodes.items()
            if self._fleet.trainers.has_unknown({node.shares})
        ]

    def on_trainer_left(self, name: str) -> None:
        """Handle a trainer node that stopped in order, which leaves its devices free."""
        self._forget(name)
        self._devices.park(name)

    def _forget(self, name: str) -> None:
        self._asked.pop(name, None)
        self._devices.parked.discard(name)
        # The step is sent from the beginning.
        self._devices.are_training, self._devices.given = False, NO_PARTS
        self._is_interrupted = False

    def on_step_done(self, done: StepDone, now: float) -> None:
        if self._devices.nodes and done.step == self._steps.step:
            self._policy.on_step_done(now, done.metrics)

    @property
    def deadline(self) -> float | None:
        """The time at which the policy decides again."""
        return self._policy.look_again_at

    # Orders

    def update(self, now: float, decides: bool = True) -> None:
        """Give the orders that follow from an event; called in and after every event."""
        if not (self._devices.nodes or self._devices.given or not self._was_open):
            return
        self._times.look(now)
        if self._step != self._steps.step:
            self._close_step(now)
        self._begin_step(now)
        self._report_changes(now)
        if decides and not self._shutdown.has_begun:
            self._policy.evaluate(now)
        if self._seen == (seen := self._see()):
            return
        self._give_orders(now)
        self._seen = seen
        is_open = self._devices.may_train
        if is_open and (self._devices.are_training or self._is_interrupted):
            self._feed.give()  # also for what an ending run still trains
            self._is_interrupted = False
        if is_open and not self._was_open:
            self._shutdown.flush(self._feed.resume)
        self._was_open = is_open

    def _begin_step(self, now: float) -> None:
        """Begin a step when its round opens; start-up and evaluations belong to no step."""
        training = self._table.training
        if training is not None and training is not self._begun:
            self._begun = training
            self._times.close(now)
            self._num_orders, self._num_moved = self._turns.num_orders, 0

    def _close_step(self, now: float) -> None:
        switches = float(self._turns.num_orders - self._num_orders)
        counts = {"switches": switches, "moved": float(self._num_moved)}
        self.figures = {**self._policy.figures, **counts}
        self.device_s = self._times.close(now)
        self._policy.figures = {}
        self._step = self._steps.step

    def _report_changes(self, now: float) -> None:
        """Report changes of sides and the end of the rollout to the policy."""
        policy, round = self._policy, self._table.round
        for name in policy.changing:
            node = self._devices.nodes.get(name)
            if node is None or node.state is NodeState.DRAINING:
                policy.on_lost(name)
            elif node.state is NodeState.RELEASED:
                policy.on_asleep(name, now)
            elif node.state is NodeState.READY:
                policy.on_ready(name, now)
        is_closed = round is not None and round.state is RoundState.CLOSED
        if round is not None and is_closed and round is not self._closed_round:
            self._closed_round = round
            policy.on_rollout_ended(round, now)

    def _see(self) -> object:
        """Return the state that determines orders; a round is identified by its step."""
        round, published, feed = self._table.round, self._fleet.published, self._feed
        devices, training = self._devices, self._table.training
        return (
            devices.num_transitions,
            frozenset(devices.parked),
            (devices.are_training, devices.given, self._is_interrupted),
            self._policy.wanted,
            None if round is None else (round.kind, round.step, round.state),
            None if published is None else published.policy_version,
            (feed.trained_step, feed.is_replaying, training is None or feed.has_left(training)),
            tuple(self._asked),
            self._shutdown.has_begun,
        )

    def _give_orders(self, now: float) -> None:
        devices = self._devices
        devices.wanted = wanted = self._wanted()
        if self._shutdown.has_begun or self._fleet.published is None:
            return
        for name in sorted(wanted):
            if (node := devices.nodes[name]).state in AWAKE:
                self._policy.on_ordered(name, now if node.state is NodeState.READY else None)
                self._num_moved += len(node.running)
                self._turns.sleep(node)
        nodes = devices.nodes.values()
        resting = [n for n in nodes if n.state in RESTING and n.name not in wanted]
        # Also if an engine reports that it is awake on devices of active ranks.
        is_beside = (devices.are_whole and not wanted) or devices.is_trespassed
        if (resting or is_beside or not devices.are_training) and not devices.are_parked:
            self._suspend_trainer()
            return
        for node in resting:
            if node.state is NodeState.RELEASED:
                self._turns.wake(node)

    def _wanted(self) -> frozenset[str]:
        """Return the nodes whose devices should train."""
        all_names, no_names = frozenset(self._devices.nodes), frozenset[str]()
        round, training = self._table.round, self._table.training
        published = self._fleet.published
        if self._shutdown.has_begun or self._feed.is_replaying:
            return all_names
        if published is None:
            return no_names
        version = published.policy_version
        nodes = self._fleet.nodes.values()
        if self._feed.is_behind and all(n.policy_version != version for n in nodes):
            return all_names  # only the trainer can make this version again
        if training is not None and training.state is RoundState.CLOSED:
            return all_names if version == training.step or self._feed.is_behind else no_names
        if round is None:
            return all_names if self._feed.is_behind else no_names
        wanted = self._policy.wanted & all_names
        return all_names if wanted and self._devices.are_whole else wanted

    def _suspend_trainer(self) -> None:
        """Order trainer nodes to suspend once all shards made were sent: a later shard would make
        the ranks take the devices again. A step that is trained again ends by itself. The leader is
        ordered first: once it is suspended, the others have received all its messages to their
        ranks."""
        training, feed, devices = self._table.training, self._feed, self._devices
        if feed.trained_step is None or feed.is_replaying:
            return
        if training is not None and not feed.has_left(training):
            return
        leader = self._fleet.trainer
        for name in devices.trainers if leader in devices.parked else filter(None, [leader]):
            is_here = name in self._fleet.trainers
            if is_here and name not in devices.parked and name not in self._asked:
                self._num_suspends += 1
                self._asked[name] = self._num_suspends
                self._outbox.send(name, SetDevices("trainer", self._num_suspends, False))


class DeviceTimes:
    """Seconds that each shared device spent in a step on rollout, switching, training and waiting;
    their sum is the duration of the step."""

    def __init__(self, devices: SharedDevices, now: float) -> None:
        self._devices = devices
        self._at = now
        self._changes: tuple[int, bool] = (-1, False)
        self._labels: dict[str, str] = {}  # since then
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def look(self, now: float, always: bool = False) -> None:
        """Count the time since the last call; negative intervals are ignored. O(nodes), if states
        have changed or PAUSE_S has passed."""
        elapsed, trains = now - self._at, self._devices.are_training
        changes = self._devices.num_transitions, trains
        if not always and changes == self._changes and 0 <= elapsed < PAUSE_S:
            return
        if elapsed > 0:
            for name, label in self._labels.items():
                self._seconds[name, label] += elapsed
        self._labels = {name: _label(n, trains) for name, n in self._devices.nodes.items()}
        self._at, self._changes = now, changes

    def close(self, now: float) -> dict[str, float]:
        """Return seconds by "NODE/LABEL" of nodes that take part, and reset them."""
        self.look(now, always=True)
        seconds, self._seconds = self._seconds, defaultdict(float)
        return {
            f"{name}/{label}": seconds[name, label] for name in self._labels for label in LABELS
        }


def _label(node: Node, trains: bool) -> str:
    if node.is_asleep:
        return "train" if trains else "wait"
    if node.state in {NodeState.READY, NodeState.DRAINING}:
        return "rollout" if node.running else "wait"
    return "switch"
