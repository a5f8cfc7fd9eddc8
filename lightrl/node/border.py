"""What no honest peer says, although it decodes: the bounds of what the coordinator takes in.

Pure. Owns sizes and ranges, and which event a message is; whether it makes sense at that moment, the core
decides. Without bounds a broken peer could fill every snapshot with its host name, or stop a timer with a
period that is no number.
"""

from math import isfinite

from lightrl.core.events import (
    Event,
    NodeDraining,
    NodeHeard,
    NodeLeft,
    NodeLost,
    StepTrained,
    TokensArrived,
    WeightsConfirmed,
    WeightsPublished,
    WeightsRefused,
)
from lightrl.errors import ProtocolError
from lightrl.messages import (
    Bye,
    Checkpointed,
    Drafting,
    Drain,
    Heartbeat,
    Hello,
    Message,
    PublishWeights,
    StepDone,
    TokenChunk,
    Watch,
    WeightsFailed,
    WeightsReady,
)

MAX_TEXT = 4096  # characters of a reason
MAX_WORD = 256  # characters of a name
MAX_ITEMS = 1 << 16  # responses of a node, metrics
MAX_SLOTS = 1 << 20
MAX_WATCH_S = 3600.0
MAX_ENGINE_S = 1e12  # 30,000 years


def require_sane(message: Message) -> None:
    """Raises ProtocolError if no version of this program would send this."""
    match message:
        case Hello():
            _words(message.node, message.host, *(r for r, _ in message.running))
            _numbers(message.incarnation, message.pid)
            _attempts(*(a for _, a in message.running))
            sane = bool(message.node) and len(message.roles) <= 3 and len(message.running) <= MAX_ITEMS
            sane = sane and message.slots <= MAX_SLOTS
            if message.serves is not None:
                _versions(message.serves[0])
                _words(message.serves[1])
        case Heartbeat(load, lag, device):
            _words(device)
            _numbers(load.running, load.waiting, load.num_preemptions)
            sane = 0 <= load.kv_usage <= 1e6 and isfinite(lag) and _can_be(load.drafting)
        case TokenChunk(version, digest, responses):
            _versions(version)
            _words(digest)
            _attempts(*(i.attempt for i in responses))
            sane = len(responses) <= MAX_ITEMS and all(0 <= i.offset < 1 << 31 for i in responses)
        case PublishWeights(manifest, holders, ticket, portions):
            _versions(manifest.policy_version)
            _words(manifest.digest, ticket, *holders)
            sane = len(holders) <= MAX_ITEMS and all(0 <= n < 1 << 31 for n in portions)
        case WeightsReady(version, digest, num_bytes, pull_s, load_s):
            _versions(version)
            _words(digest)
            _numbers(num_bytes)
            sane = isfinite(pull_s) and isfinite(load_s)
        case WeightsFailed(version, reason):
            _versions(version)
            sane = len(reason) <= MAX_TEXT
        case Checkpointed(step):
            _versions(step)
            sane = True
        case StepDone(step, version, metrics):
            _versions(step, version)
            _words(*metrics)
            sane = len(metrics) <= MAX_ITEMS  # a metric may be NaN: that is worth seeing
        case Drain(node, reason):
            _words(node)
            sane = len(reason) <= MAX_TEXT
        case Bye(reason):
            sane = len(reason) <= MAX_TEXT
        case Watch(every_s):
            sane = 0 <= every_s <= MAX_WATCH_S
        case _:
            sane = True
    if not sane:
        raise ProtocolError(f"{type(message).__name__}: a value out of bounds")


def as_event(peer: str, message: Message | ProtocolError) -> Event:
    """What the core is told of a node's message; one that makes no sense from a node costs it its place."""
    match message:
        case TokenChunk():
            return TokensArrived(peer, message)
        case Heartbeat():
            return NodeHeard(peer, message)
        case PublishWeights():
            return WeightsPublished(peer, message)
        case WeightsReady():
            return WeightsConfirmed(peer, message)
        case WeightsFailed():
            return WeightsRefused(peer, message)
        case StepDone():
            return StepTrained(peer, message)
        case Bye(reason, ok):
            return NodeLeft(peer, reason, ok)
        case Drain(_, reason):
            return NodeDraining(peer, reason)
        case ProtocolError():
            return NodeLost(peer, str(message)[:200])
        case _:
            return NodeLost(peer, f"unexpected {type(message).__name__}")


def _words(*words: str) -> None:
    """Names are printed, on terminals that obey control characters."""
    if any(len(w) > MAX_WORD or not w.isprintable() for w in words):
        raise ProtocolError(f"a name of more than {MAX_WORD} characters, or with control characters")


def _numbers(*numbers: int) -> None:
    if any(not -(1 << 63) <= n < 1 << 63 for n in numbers):
        raise ProtocolError("a number beyond 64 bits")


def _can_be(drafting: Drafting | None) -> bool:
    """What it counts; it is summed up and divided."""
    if drafting is None:
        return True
    d = drafting
    counts = all(0 <= n < 1 << 53 for n in (d.drafted, d.accepted, d.forwards, d.emitted))
    seconds = all(0 <= s < MAX_ENGINE_S for s in (d.draft_s, d.engine_s))
    return counts and seconds and d.accepted <= min(d.drafted, d.emitted)


def _attempts(*attempts: int) -> None:
    """They are written down as int32."""
    if any(not 0 <= a < 1 << 31 for a in attempts):
        raise ProtocolError("an attempt that cannot be")


def _versions(*versions: int) -> None:
    if any(not 0 <= v < 1 << 53 for v in versions):
        raise ProtocolError("a policy version or step that cannot be")
