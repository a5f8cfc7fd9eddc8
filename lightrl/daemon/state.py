"""The state of a node's connection to its coordinator, and which events may occur in it. Pure.

A node sends nothing but hello before it is admitted. Hello lists what still runs here; any message
that arrives before the answer was sent without that information.

Draining is not part of this state: it may start in every state and changes none of them. A node
that drains is still admitted, to report what it holds.
"""

from enum import StrEnum

from lightrl.state_machine import frozen


class ConnectionState(StrEnum):
    # nothing was sent, or what was sent may be lost
    DISCONNECTED = "disconnected"
    # a hello waits for its answer
    JOINING = "joining"
    # welcomed, and still in agreement with the coordinator
    ADMITTED = "admitted"


class ConnectionEvent(StrEnum):
    CONNECTION_LOST = "connection lost"
    HELLO_SENT = "hello sent"
    # the coordinator does not need this node any more
    DISMISSED = "dismissed"
    WELCOMED = "welcomed"


S, E = ConnectionState, ConnectionEvent

EDGES = frozen(
    {
        S.DISCONNECTED: {E.CONNECTION_LOST: S.DISCONNECTED, E.HELLO_SENT: S.JOINING},
        S.JOINING: {
            E.CONNECTION_LOST: S.DISCONNECTED,
            E.HELLO_SENT: S.JOINING,
            E.DISMISSED: S.DISCONNECTED,
            E.WELCOMED: S.ADMITTED,
        },
        S.ADMITTED: {E.CONNECTION_LOST: S.DISCONNECTED},
    }
)
