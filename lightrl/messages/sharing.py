"""Messages by which devices sample and train in turn.

Under the rules of message.py. Runs whose engines have devices of their own send none of them. The
`Hello` of a rollout node that shares names the trainer node; on both sides the hello also reports
who has the devices. Orders that arrive after a hello and before its Welcome belong to an earlier
connection and are ignored; a coordinator that was restarted counts from 1.
"""

from dataclasses import dataclass

from lightrl.messages.fields import Count, DeviceParts, EngineSeconds


@dataclass(frozen=True, slots=True)
class SleepEngine:
    """To a rollout node: give the devices back. It sends the tokens that it still holds and puts
    its engine to sleep; other nodes continue what ran.

    `number` counts the orders to this node; an answer repeats it, and an older one is ignored.
    Example: SleepEngine(3)
    """

    number: Count


@dataclass(frozen=True, slots=True)
class EngineAsleep:
    """The engine sleeps, or is gone, and its devices are free; no token follows. Example:
    EngineAsleep(3, 14_800_000_000, 0.6)."""

    number: Count
    # as the engine counts; 0 = it is gone, or frees nothing, as vLLM on a CPU
    freed_bytes: Count
    # since the order arrived
    seconds: EngineSeconds


@dataclass(frozen=True, slots=True)
class WakeEngine:
    """To a node that sleeps: sample again, with the version that it has or is still fetching.
    Answered by WeightsReady or WeightsFailed. Only after the ranks have given its devices back.

    Example: WakeEngine(4)
    """

    number: Count


@dataclass(frozen=True, slots=True)
class AssignDevices:
    """To the trainer node that leads, where parts of the devices change sides by themselves: all
    that the ranks have of them now, to train this step. Each replica of the model is a part.

    Sent before a shard, and whenever another part is free. It takes nothing back: SuspendTrainer
    does, and the end of the step. Example: AssignDevices(4, (1,))
    """

    step: Count
    parts: DeviceParts


@dataclass(frozen=True, slots=True)
class SuspendTrainer:
    """To each trainer node whose devices are shared: give them back in the middle of a step. What
    was accumulated stays, in the host's memory; a shard that follows fetches all of it.

    Before it publishes a version the node does so without this order. Example: SuspendTrainer(2)
    """

    number: Count


@dataclass(frozen=True, slots=True)
class TrainerSuspended:
    """Nothing of the ranks of this node is on its devices; sent after each SuspendTrainer and, with
    number 0, before a version is published. Example: TrainerSuspended(2, 22_000_000_000, 1.1)."""

    number: Count
    # in the host's memory now, that were on the devices
    num_bytes: Count
    seconds: EngineSeconds
