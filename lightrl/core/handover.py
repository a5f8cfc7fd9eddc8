"""How devices change sides: orders to the nodes that share them, and what these answer.

Owns on which side each device should be, and that it gets there. A step is closed: its nodes are
released, and train. Its version is published: the ranks are parked, and the nodes wake. Within a
step `sides.py` says who goes and who comes back. Nothing is remembered of how far a change has got:
whatever happens, the next order follows from where everybody is, so a node that dies asleep, comes
back awake, or a coordinator that was started again needs no case of its own.

An order has a number, its answer repeats it, and an older one counts for nothing. A node that does
not answer a Release is lost after `release_s`: it kills its engine sooner. One that was not ready
may still start its engine, which it first lets get up: it has `patience_s` more, and no switch is
measured by it. It is not told to wake before it has answered.
"""

from lightrl.core.commands import Outbox
from lightrl.core.deadlines import earliest
from lightrl.core.device_times import DeviceTimes
from lightrl.core.ending import Ending
from lightrl.core.fleet import Fleet
from lightrl.core.responses import ResponseTable
from lightrl.core.round_scheduler import RoundScheduler
from lightrl.core.settings import Settings
from lightrl.core.shared_devices import NO_PARTS, NO_TRAINER
from lightrl.core.sides import Sides
from lightrl.core.state import RESTING, Node, NodeState, Round, RoundState
from lightrl.messages.nodes import Hello
from lightrl.messages.sharing import Park, Parked, Release, Released, Wake
from lightrl.messages.training import StepDone

AWAKE = {NodeState.JOINING, NodeState.LOADING, NodeState.READY, NodeState.UPDATING}
NOBODY = frozenset[str]()


class Handover:
    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        table: ResponseTable,
        steps: RoundScheduler,
        ending: Ending,
        sides: Sides,
        outbox: Outbox,
    ) -> None:
        self._changes = settings.offload != "off"  # within a step
        self._release_s, self._patience_s = settings.release_s, settings.patience_s
        self._fleet = fleet
        self._devices = fleet.devices
        self._table = table
        self._steps = steps
        self._feed = steps.trainer_feed
        self._ending = ending
        self._sides = sides
        self._outbox = outbox
        self._num_parks = 0
        self._asked: dict[str, int] = {}  # trainer nodes that have not answered a Park: its number
        self._was_open = True  # shards could leave
        self._is_interrupted = (
            False  # the step, by a Park: it is not trained on until more is given
        )
        self._over: Round | None = None  # the round that closed last
        self._seen: object = None  # all that the last orders followed from
        self._released_by: float | None = None  # the node whose time ends first
        self._may_start: set[str] = set()  # nodes told to release, whose engines may not be up yet
        self.figures: dict[str, float] = {}  # of the step that closed last
        self.device_s: dict[str, float] = {}  # likewise, see `DeviceTimes.close`
        self._times = DeviceTimes(fleet.devices, fleet.now)
        self._num_switches = self._num_moved = 0  # in the step at hand
        self._step = steps.step
        self._begun: Round | None = None  # the round of the step at hand

    # What they say

    def released(self, name: str, message: Released) -> None:
        """A node has given its devices back; what still ran there goes on elsewhere."""
        node = self._fleet.nodes.get(name)
        if node is None or node.state is not NodeState.RELEASING or message.number != node.order:
            return
        self._table.requeue_all(node)
        self._fleet.on_asleep(node)

    def parked(self, name: str, message: Parked) -> None:
        """The ranks of a trainer node have given its devices back; unasked, before they publish."""
        if name not in self._fleet.trainers or message.number not in {0, self._asked.get(name)}:
            return
        self._asked.pop(name, None)
        if name == self._fleet.trainer:
            self._is_interrupted = message.number > 0
        self._devices.park(name)
        if self._devices.nodes and self._devices.are_parked:
            self._sides.parked(self._fleet.now)

    def greeted(self, hello: Hello) -> None:
        """What was under way to this node, or from it, may be lost; it says who has its devices."""
        node = self._fleet.nodes[hello.node]
        if node.state is NodeState.RELEASING:
            self._order_release(node)
        if "trainer" not in hello.roles:
            trainer = self._fleet.nodes.get(node.shares)
            if trainer is not None and trainer.host != node.host:
                where = f"that is on {trainer.host}, and {node.name} on {node.host}"
                self._outbox.warn(f"{node.name} is to share the devices of {node.shares}: {where}")
            return
        self._forget(hello.node)
        if hello.is_released:
            self._devices.park(hello.node)

    def strangers(self) -> list[tuple[str, str]]:
        """(name, why it must leave): nodes that were taken in while it was not known that nobody
        trains on the devices which they share."""
        return [
            (name, f"shares the devices of {node.shares}, {NO_TRAINER}")
            for name, node in self._devices.nodes.items()
            if self._fleet.trainers.are_strangers({node.shares})
        ]

    def trainer_left(self, name: str) -> None:
        """In order: nothing of it is left on its devices. Of one that is lost nobody knows."""
        self._forget(name)
        self._devices.park(name)

    def _forget(self, name: str) -> None:
        self._asked.pop(name, None)
        self._devices.parked.discard(name)
        # It gets its step from the beginning.
        self._devices.are_training, self._devices.given = False, NO_PARTS
        self._is_interrupted = False

    def step_trained(self, done: StepDone, now: float) -> None:
        if self._devices.nodes and done.step == self._steps.step:
            self._sides.step_trained(now, done.metrics)

    @property
    def may_leave(self) -> bool:
        """Whether shared nodes may leave the rollout before it is over, and others go on."""
        if not self._changes or not self._devices.nodes or self._table.is_evaluating:
            return False
        num_sampling = len(self._fleet.ready) + len(self._fleet.updating)
        return num_sampling > self._devices.num_awake

    # Time

    @property
    def deadline(self) -> float | None:
        return earliest(self._released_by, self._sides.look_again_at)

    def late(self, now: float) -> list[Node]:
        """Nodes that have not given their devices back."""
        if self._released_by is None or now < self._released_by:
            return []
        nodes = self._devices.nodes.values()
        told = (n for n in nodes if n.state is NodeState.RELEASING)
        return [n for n in told if n.since + self.limit_s(n) <= now]  # rounded as the deadline is

    def limit_s(self, node: Node) -> float:
        """In which it must answer a Release."""
        return self._release_s + (self._patience_s if node.name in self._may_start else 0.0)

    def refused(self, name: str) -> None:
        """A node does not serve what it should; its engine may have died before it was told to
        release, and start again."""
        node = self._devices.nodes.get(name)
        if node is not None and node.state is NodeState.RELEASING:
            self._may_start.add(name)
            self._set_deadline()

    def _set_deadline(self) -> None:
        nodes = self._devices.nodes.values()
        told = [n for n in nodes if n.state is NodeState.RELEASING]
        self._released_by = min((n.since + self.limit_s(n) for n in told), default=None)

    # Orders

    def update(self, now: float, decides: bool = True) -> None:
        """In every event, and after it. With nobody who shares it does nothing."""
        if self._devices.nodes or self._devices.given or not self._was_open:
            self._times.look(now)
            if self._step != self._steps.step:
                self._close_step(now)
            self._begin_step(now)
            self._note(now)
            if decides and not self._ending.has_begun:
                self._sides.look(now)
            if self._seen != (seen := self._see()):
                self._give_orders(now)
                self._seen = seen
                is_open = self._devices.may_train
                if is_open and (self._devices.are_training or self._is_interrupted):
                    self._feed.give()  # also what a run that ends still trains
                    self._is_interrupted = False
                if is_open and not self._was_open:
                    self._ending.hand_on(self._steps.go_on)
                self._was_open = is_open

    def _begin_step(self, now: float) -> None:
        """It does when its round opens; start-up and evaluations are of no step."""
        training = self._steps.training()
        if training is not None and training is not self._begun:
            self._begun = training
            self._times.close(now)
            self._num_switches = self._num_moved = 0

    def _close_step(self, now: float) -> None:
        counts = {"switches": float(self._num_switches), "moved": float(self._num_moved)}
        self.figures = {**self._sides.figures, **counts}
        self.device_s = self._times.close(now)
        self._sides.figures = {}
        self._step = self._steps.step

    def _note(self, now: float) -> None:
        """Tells `sides` what has happened."""
        sides, round = self._sides, self._table.round
        for name in sides.on_their_way:
            node = self._devices.nodes.get(name)
            if node is None or node.state is NodeState.DRAINING:
                sides.lost(name)
            elif node.state is NodeState.RELEASED:
                sides.trains(name, now)
            elif node.state is NodeState.READY:
                sides.samples(name, now)
        if round is not None and round.state is RoundState.CLOSED and round is not self._over:
            self._over = round
            sides.rollout_ended(round, now)

    def _see(self) -> object:
        """All that orders follow from, but for the round, which is another one by its step."""
        round, published, feed = self._table.round, self._fleet.published, self._feed
        devices, training = self._devices, self._steps.training()
        return (
            devices.num_moves,
            frozenset(devices.parked),
            (devices.are_training, devices.given, self._is_interrupted),
            self._sides.wanted,
            None if round is None else (round.kind, round.step, round.state),
            None if published is None else published.policy_version,
            (feed.stands_at, feed.is_replaying, training is None or feed.has_left(training)),
            tuple(self._asked),
            self._ending.has_begun,
        )

    def _give_orders(self, now: float) -> None:
        devices = self._devices
        devices.wanted = wanted = self._wanted()
        if self._ending.has_begun or self._fleet.published is None:
            self._released_by = None
            return
        for name in sorted(wanted):
            if (node := devices.nodes[name]).state in AWAKE:
                is_up = node.state is NodeState.READY
                (self._may_start.discard if is_up else self._may_start.add)(name)
                self._sides.leaves(name, now if is_up else None)
                self._num_moved += len(node.running)
                self._fleet.release(node)
                self._order_release(node)
        nodes = devices.nodes.values()
        resting = [n for n in nodes if n.state in RESTING and n.name not in wanted]
        # Also if an engine is awake beside them, by its own word.
        is_beside = (devices.are_whole and not wanted) or devices.is_trespassed
        must_park = resting or is_beside or not devices.are_training
        if must_park and not devices.are_parked:
            self._park()
        else:
            for node in resting:
                if node.state is NodeState.RELEASED:  # what it said before, it said awake
                    self._wake(node)
        self._set_deadline()

    def _wanted(self) -> frozenset[str]:
        """Whose devices should train."""
        everyone = frozenset(self._devices.nodes)
        round, training = self._table.round, self._steps.training()
        published = self._fleet.published
        if self._ending.has_begun or self._feed.is_replaying:
            return everyone
        if published is None:
            return NOBODY
        version = published.policy_version
        nodes = self._fleet.nodes.values()
        if self._feed.is_behind and all(n.policy_version != version for n in nodes):
            return everyone  # only the trainer can make this version again
        if training is not None and training.state is RoundState.CLOSED:
            if version == training.step or self._feed.is_behind:
                return everyone
            return NOBODY
        if round is None:
            return everyone if self._feed.is_behind else NOBODY
        wanted = self._sides.wanted & everyone
        return everyone if wanted and self._devices.are_whole else wanted

    def _order_release(self, node: Node) -> None:
        self._num_switches += 1
        node.order += 1
        self._outbox.send(node.name, Release(node.order))

    def _wake(self, node: Node) -> None:
        self._num_switches += 1
        node.order += 1
        self._devices.wake()
        self._fleet.wake(node)
        self._outbox.send(node.name, Wake(node.order))

    def _park(self) -> None:
        """Asks those whose ranks are not parked, once they have all shards that were made: one that
        came later would have them take the devices again. What is trained again ends by itself.
        The node that leads is asked first: once it has parked, the others have all that it had
        told their ranks, so that none answers before that comes."""
        training, feed, devices = self._steps.training(), self._feed, self._devices
        if feed.stands_at is None or feed.is_replaying:
            return
        if training is not None and not feed.has_left(training):
            return
        leader = self._fleet.trainer
        for name in devices.trainers if leader in devices.parked else filter(None, [leader]):
            is_here = name in self._fleet.trainers
            if is_here and name not in devices.parked and name not in self._asked:
                self._num_parks += 1
                self._asked[name] = self._num_parks
                self._outbox.send(name, Park(self._num_parks))
