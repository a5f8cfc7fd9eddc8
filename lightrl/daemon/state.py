"""Where a node is with its coordinator, and what may happen there. Pure.

A node says nothing but hello before it is admitted; hello says what still runs here, and whatever
else arrives before its answer was sent by someone who did not know that.

That a node is leaving is no part of it: it may happen in every state and changes none of them. Who
leaves is still welcomed, to say what it holds.
"""

from enum import StrEnum

from lightrl.state_machine import frozen


class ConnectionState(StrEnum):
    # nothing was said, or what was said may be lost
    OUT_OF_TOUCH = "out of touch"
    # a hello waits for its answer
    GREETING = "greeting"
    # as it does, but another process has our name; it is said again and again
    NAME_TAKEN = "name taken"
    # welcomed, and nothing has happened since that makes it untrue
    ADMITTED = "admitted"


class ConnectionEvent(StrEnum):
    TOUCH_LOST = "touch lost"
    HELLO_SAID = "hello said"
    NAME_REFUSED = "name refused"
    # the answer is that we are not needed any more
    DISMISSED = "dismissed"
    WELCOMED = "welcomed"


S, E = ConnectionState, ConnectionEvent

EDGES = frozen(
    {
        S.OUT_OF_TOUCH: {E.TOUCH_LOST: S.OUT_OF_TOUCH, E.HELLO_SAID: S.GREETING},
        S.GREETING: {
            E.TOUCH_LOST: S.OUT_OF_TOUCH,
            E.HELLO_SAID: S.GREETING,
            E.NAME_REFUSED: S.NAME_TAKEN,
            E.DISMISSED: S.OUT_OF_TOUCH,
            E.WELCOMED: S.ADMITTED,
        },
        S.NAME_TAKEN: {
            E.TOUCH_LOST: S.OUT_OF_TOUCH,
            E.HELLO_SAID: S.NAME_TAKEN,
            E.NAME_REFUSED: S.NAME_TAKEN,
            E.DISMISSED: S.OUT_OF_TOUCH,
            E.WELCOMED: S.ADMITTED,
        },
        S.ADMITTED: {E.TOUCH_LOST: S.OUT_OF_TOUCH},
    }
)

AWAITS_ANSWER = frozenset({S.GREETING, S.NAME_TAKEN})
