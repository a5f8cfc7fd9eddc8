"""What is said so that devices sample and train in turn: who gives them back, and who has them.

Under the rules of message.py. A run whose engines have devices of their own says none of it.
A rollout node that shares says so in its `Hello`, with the name of the trainer node; on both sides
the hello also says who has the devices. Orders that come after a hello and before its Welcome are
of an earlier connection and count no more; a coordinator that was started again counts from 1.
"""

from dataclasses import dataclass

from lightrl.messages.fields import Count, DeviceParts, EngineSeconds


@dataclass(frozen=True, slots=True)
class Release:
    """To a rollout node: give the devices back. It sends the tokens that it still holds and puts
    its engine to sleep; what ran goes on elsewhere from there.

    `number` counts the orders to this node; an answer repeats it, and an older one is ignored.
    Example: Release(3)
    """

    number: Count


@dataclass(frozen=True, slots=True)
class Released:
    """The engine sleeps, or is gone, and its devices are free; no token follows. Example:
    Released(3, 14_800_000_000, 0.6)."""

    number: Count
    # by the engine's own count; 0 = it is gone, or frees nothing, as vLLM on a CPU
    freed_bytes: Count
    # since the order came
    seconds: EngineSeconds


@dataclass(frozen=True, slots=True)
class Wake:
    """To a released node: sample again, with the version that it has here or is still fetching.
    Answered by WeightsReady or WeightsFailed. Only after its devices were given back by the ranks.

    Example: Wake(4)
    """

    number: Count


@dataclass(frozen=True, slots=True)
class Give:
    """To the trainer node that leads, where parts of the devices change sides by themselves: all
    that the ranks have of them now, to train this step. Each replica of the model is a part.

    Said before a shard, and whenever another part is free. It takes nothing back: that is what Park
    is for, or the step's end. Example: Give(4, (1,))
    """

    step: Count
    parts: DeviceParts


@dataclass(frozen=True, slots=True)
class Park:
    """To each trainer node whose devices are shared: give them back in the middle of a step. What
    was accumulated stays, in the host's memory; a shard that follows fetches all of it.

    Before it publishes a version it does that unasked. Example: Park(2)
    """

    number: Count


@dataclass(frozen=True, slots=True)
class Parked:
    """Nothing of the ranks of this node is on its devices; said after each Park and, with number 0,
    before a version is published. Example: Parked(2, 22_000_000_000, 1.1)."""

    number: Count
    # in the host's memory now, that were on the devices
    num_bytes: Count
    seconds: EngineSeconds
