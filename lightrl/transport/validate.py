"""Validate messages that decode: bounds of what the coordinator accepts, and which peers may send
which message.

Pure. Owns what types cannot express (lengths and ranges are in messages/), and the messages that
each limited key permits; the core decides whether a message makes sense at that moment. Without
bounds a broken peer could stop a timer with a period that is no number.
"""

from math import isfinite

from lightrl.errors import ProtocolError
from lightrl.keys import FILES, NODE_OF, Access, access_for
from lightrl.messages.broadcasts import BroadcastStatus
from lightrl.messages.episodes import EpisodeEnded, Observed
from lightrl.messages.message import Message
from lightrl.messages.nodes import Bye, Drain, Heartbeat, Hello
from lightrl.messages.responses import TokenChunk
from lightrl.messages.sharing import DevicesReleased
from lightrl.messages.training import Checkpointed, StepDone
from lightrl.messages.weights import (
    Canary,
    PublishWeights,
    WeightsEndpoint,
    WeightsFailed,
    WeightsReady,
)
from lightrl.system.addresses import split_known
from lightrl.weights.serve.request import MAX_NAME_BYTES, MAX_TICKET_BYTES

MIN_SECRET = 16  # characters from which tickets are made: an empty one would admit everyone
MAX_CANARY_TOKENS = 4096
MAX_WORKERS = 1024  # of an engine; the others of its group wait for all of them


def check_bounds(message: Message) -> None:
    """Raises ProtocolError if no version of this program would send this."""
    match message:
        case Hello():
            if len(message.node.encode()) > MAX_NAME_BYTES:
                raise ProtocolError(f"a node's name of more than {MAX_NAME_BYTES} bytes")
            _words(message.node, message.host, message.shares, *(r for r, _ in message.running))
            if message.serves is not None:
                _words(message.serves[1])
        case Heartbeat(load, lag, device, weights, num_workers):
            _words(device)
            _finite(lag)
            if num_workers > MAX_WORKERS:
                raise ProtocolError(f"Heartbeat: an engine of {num_workers} workers")
            if weights is not None and weights.num_bytes > weights.total_bytes:
                raise ProtocolError("Heartbeat: more of a version than there is of it")
            d = load.drafting
            if d is not None and d.accepted > min(d.drafted, d.emitted):
                raise ProtocolError("Heartbeat: more drafted tokens accepted than there were")
        case TokenChunk(_, digest, _):
            _words(digest)
        case PublishWeights():
            _publication(message)
        case WeightsEndpoint():
            _endpoint(message)
        case WeightsReady(_, digest, num_bytes, pull_s, load_s, peer_bytes, delta_bytes, diff):
            _words(digest)
            _finite(pull_s, load_s, diff or 0.0)
            _finite(message.broadcast_s or 0.0)
            if max(peer_bytes, delta_bytes) > num_bytes:
                raise ProtocolError("WeightsReady: a part has more bytes than the whole")
        case BroadcastStatus(_, group, address, reason):
            _words(group)
            if not (reason or group):
                raise ProtocolError("BroadcastStatus: neither a group nor a reason")
            if not reason and split_known(address) is None:
                raise ProtocolError(f"BroadcastStatus: {address[:80]!r}: not host:port")
        case WeightsFailed(_, _, node):
            _words(node)
        case Checkpointed(step, oldest) if oldest > step:
            raise ProtocolError("Checkpointed: the oldest checkpoint kept is newer than the newest")
        case StepDone(_, _, metrics):
            _words(*metrics)  # a metric may be NaN: that is worth seeing
        case Observed():
            _words(message.response, message.digest)
            _finite(message.reward or 0.0)
            if not message.token_ids or len(message.token_ids) % 4:
                raise ProtocolError(f"Observed: tokens of {len(message.token_ids)} bytes")
        case EpisodeEnded():
            _words(message.response, *message.metrics)
            _finite(message.reward or 0.0, message.turn_reward or 0.0)
        case Drain(node, _):
            _words(node)
        case _:
            pass


# by access; and a Drain of their own
OF_NODES: dict[Access, tuple[type[Message], ...]] = {
    Access.JOIN: (
        Hello,
        Heartbeat,
        TokenChunk,
        WeightsEndpoint,
        WeightsReady,
        WeightsFailed,
        BroadcastStatus,
        DevicesReleased,
        Bye,
    ),
    Access.ENVIRONMENT: (Hello, Heartbeat, Observed, EpisodeEnded, Bye),
}


def require_allowed(name: str, message: Message, access: Access) -> None:
    """Raises ProtocolError if `name`, whose key gives this `access`, must not send this.

    A Hello passes, whatever it asks for: it is answered, see `why_unwelcome`.
    """
    if access is Access.FULL or isinstance(message, OF_NODES[access]):
        return
    if not (isinstance(message, Drain) and message.node == name):
        raise ProtocolError(f"{type(message).__name__}: not with the {FILES[access]} key")


def why_unwelcome(head: str, hello: Hello, access: Access) -> str | None:
    """Return one line on why a key that gives this `access`, less than full, does not permit this
    Hello, or None; `head` is the coordinator's name."""
    if access_for(hello.roles) is not access:
        asked = ", ".join(hello.roles)
        return f"with the {FILES[access]} key one may be {NODE_OF[access]}, not {asked}"
    if hello.node == head:
        return f"{head} is the coordinator's name"
    return None


def _publication(message: PublishWeights) -> None:
    """Check a version of a trainer; the coordinator names its sources."""
    if message.sources:
        raise ProtocolError("PublishWeights: a trainer names no sources")
    if not message.num_bytes or not message.manifest_bytes:
        raise ProtocolError("PublishWeights: a version without bytes")
    _words(message.digest, *(word for d in message.deltas for word in (d.base, d.target, d.digest)))
    if (base := message.base) is not None:
        _words(base.digest)
        if base.sources or not base.num_bytes or not base.manifest_bytes:
            raise ProtocolError("PublishWeights: a base with sources, or without bytes")
    if message.canary is not None:
        _canary(message.canary)


def _canary(canary: Canary) -> None:
    _words(canary.dtype)
    num_tokens, rest = divmod(len(canary.token_ids), 4)
    if rest or not 2 <= num_tokens <= MAX_CANARY_TOKENS:
        raise ProtocolError(f"a canary of {len(canary.token_ids)} bytes")
    if len(canary.logprobs) != 4 * (num_tokens - 1):
        raise ProtocolError(f"a canary of {num_tokens} tokens with other logprobs")


def _endpoint(endpoint: WeightsEndpoint) -> None:
    """Check an endpoint that is sent to other nodes, which connect to it."""
    if not MIN_SECRET <= len(endpoint.secret) <= MAX_TICKET_BYTES:
        raise ProtocolError(f"WeightsEndpoint: a secret of {len(endpoint.secret)} characters")
    if not endpoint.addresses:
        raise ProtocolError("WeightsEndpoint: no address")
    for address in endpoint.addresses:
        if split_known(address) is None:
            raise ProtocolError(f"WeightsEndpoint: {address[:80]!r}: not host:port")


def _words(*words: str) -> None:
    """Check names: control characters would change the terminals on which they are printed."""
    if not all(map(str.isprintable, words)):
        raise ProtocolError("a name with control characters")


def _finite(*numbers: float) -> None:
    if not all(map(isfinite, numbers)):
        raise ProtocolError("a time that is no number")
