"""Messages between every node and the coordinator: which nodes exist, which are alive, which leave.

Under the rules of message.py.
"""

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from lightrl.messages.fields import (
    MAX_CONFIG,
    RESPONSES,
    Attempt,
    Count,
    Int64,
    ModelFiles,
    Name,
    Reason,
    Role,
    Slots,
    Text,
    Version,
    Word,
)
from lightrl.messages.load import Load
from lightrl.messages.weights import WeightsProgress

PROTOCOL = 20
# the refusal of a node whose lease has expired: it may send another Hello
REJOIN = "rejoin"
ENDING = "the run is ending"  # the refusal of a node that comes too late
# the node may send another Hello: the other process may be gone soon
TAKEN = "another process with this name takes part"


@dataclass(frozen=True, slots=True)
class Hello:
    """A node announces itself; again, with the responses that it still runs, when messages may be
    lost.

    The coordinator takes back what it still wants of `running` and aborts the rest.
    Example: Hello("rollout-0", 17, ("rollout",), 3, pid=4242, host="a", slots=128)
    """

    node: Name
    # of the process; another one replaces the node known by this name
    incarnation: Int64
    roles: Annotated[tuple[Role, ...], Meta(max_length=3)]
    protocol: Int64
    pid: Int64
    host: Word
    # responses that may run, or episodes that may be held, concurrently; 0 = the value of the run's
    # config
    slots: Slots = 0
    # policy version and digest that its engine has loaded
    serves: tuple[Version, Word] | None = None
    # (response, attempt) that it generates; of an environment node (response, incarnation)
    running: Annotated[tuple[Attempt, ...], RESPONSES] = ()
    # has what it `serves` as a file, from which others can pull; not after a broadcast
    has_file: bool = True
    # may be taken away at any moment
    is_preemptible: bool = False
    # of several trainer nodes the one that decides what their ranks do
    leads: bool = False
    # the trainer node whose devices this rollout node uses; "" = its own
    shares: Word = ""
    # which part of those, where parts change sides by themselves, from 0 on
    part: Count = 0
    # of devices that are used in turn: others have them now; its engine sleeps, or its ranks are
    # parked
    is_released: bool = False
    # devices of its engine, which shares them in turn with engines of other sizes; 0: no turns
    parallel: Count = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator admits a node, or refuses it with one line.

    Carries all a node needs to take part, so that it needs no shared file system: the resolved
    config as JSON and the small files of the model directory (config.json and the like, no
    weights). Example: Welcome("quickstart", config_json="{...}", model_files={"config.json":
    b"{...}"})
    """

    run: Word
    config_json: Annotated[str, Meta(max_length=MAX_CONFIG)] = ""
    model_files: ModelFiles = field(default_factory=dict[str, bytes])
    # empty = accepted; or one line, of which REJOIN, ENDING and TAKEN are known
    refused: Reason = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sender is alive; both sides send it. Example: Heartbeat(Load(running=3), 0.4, "cpu")."""

    load: Load = field(default_factory=Load)
    # how late the sender's event loop is
    loop_lag_ms: float = 0.0
    # of its engine or ranks, once they have started
    device: Word = ""
    # of the version that it pulls
    weights: WeightsProgress | None = None
    # of its engine, once it has started, each with a device of its own; 0: none that can receive
    # weights by broadcast
    num_workers: Count = 0
    # of a trainer node: its ranks wait until a checkpoint is written
    is_saving: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """From a tool: drain `node` ("*" = stop the run). To a node: leave. From a node: it takes no
    more work and leaves. Example: Drain("rollout-0", "SIGTERM")."""

    node: Word
    reason: Reason = ""


@dataclass(frozen=True, slots=True)
class Bye:
    """A node leaves for good; nothing more will come from it. Example: Bye("drained").

    `ok` False means that it failed, with the reason in one line.
    """

    reason: Text
    ok: bool = True
