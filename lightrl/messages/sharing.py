"""Messages by which devices sample and train in turn.

Under the rules of message.py. Runs whose engines have devices of their own send none of them. The
`Hello` of a rollout node that shares names the trainer node; on both sides the hello also reports
who has the devices. Orders that arrive after a hello and before its Welcome belong to an earlier
connection and are ignored; a coordinator that was restarted counts from 1.
"""

from dataclasses import dataclass

from lightrl.messages.fields import Count, DeviceParts, EngineSeconds, Role


@dataclass(frozen=True, slots=True)
class SetDevices:
    """To a node whose devices are shared: its engine or its ranks may use them, or must release
    them. `role` names which: a daemon may have both.

    - Engine, not active: it sends the tokens that it still holds and sleeps; other nodes continue
      its responses. DevicesReleased answers.
    - Engine, active: it samples again, with the version that it has or is still fetching.
      WeightsReady or WeightsFailed answers. Sent only after the ranks have released its devices.
    - Ranks, not active, in the middle of a step: what was accumulated stays in the host's memory,
      and a shard that follows fetches all of it. DevicesReleased answers. Before they publish a
      version the ranks release their devices without an order.
    - Ranks, active, where parts of the devices change sides by themselves: `parts` are all that
      the ranks have now, each a replica of the model. Sent to the leader before a shard, and when
      another part is free. It takes nothing back.

    Example: SetDevices("rollout", 3, active=False)
    """

    role: Role
    # of the orders to this role of this node: an answer repeats it, and an older order is ignored;
    # the step, of an order with parts
    number: Count
    active: bool
    parts: DeviceParts = ()


@dataclass(frozen=True, slots=True)
class DevicesReleased:
    """The engine, or the ranks of this node, have released the shared devices; no token follows.
    Ranks send it with number 0 before each version.

    Example: DevicesReleased("rollout", 3, 14_800_000_000, 0.6)
    """

    role: Role
    number: Count
    # by the engine's own count, 0 = it is gone or frees nothing; or those of the ranks that are in
    # the host's memory now
    num_bytes: Count
    # since the order arrived
    seconds: EngineSeconds
