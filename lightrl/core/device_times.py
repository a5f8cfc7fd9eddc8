"""What each shared device did in a step: seconds that its engine sampled, that it took to change
sides, that it trained, and that it had nothing to do. They sum to the step.

Looked at when nodes change their states, and now and then between.
"""

from collections import defaultdict

from lightrl.core.shared_devices import SharedDevices
from lightrl.core.state import Node, NodeState

LABELS = ("rollout", "switch", "train", "wait")
PAUSE_S = 0.05  # between two looks, unless states change: each takes time for every node


class DeviceTimes:
    def __init__(self, devices: SharedDevices, now: float) -> None:
        self._devices = devices
        self._at = now
        self._changes: tuple[int, bool] = (-1, False)
        self._labels: dict[str, str] = {}  # since then
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def look(self, now: float, always: bool = False) -> None:
        """Time has passed. One that went backwards is not counted."""
        elapsed, trains = now - self._at, self._devices.are_training
        changes = self._devices.num_moves, trains
        if not always and changes == self._changes and 0 <= elapsed < PAUSE_S:
            return
        if elapsed > 0:
            for name, label in self._labels.items():
                self._seconds[name, label] += elapsed
        self._labels = {name: _label(n, trains) for name, n in self._devices.nodes.items()}
        self._at, self._changes = now, changes

    def close(self, now: float) -> dict[str, float]:
        """The step is over: seconds by "NODE/what it did", of nodes that are there."""
        self.look(now, always=True)
        seconds, self._seconds = self._seconds, defaultdict(float)
        names = self._labels
        return {f"{name}/{label}": seconds[name, label] for name in names for label in LABELS}


def _label(node: Node, trains: bool) -> str:
    if node.is_asleep:
        return "train" if trains else "wait"
    if node.state in {NodeState.READY, NodeState.DRAINING}:
        return "rollout" if node.running else "wait"
    return "switch"
