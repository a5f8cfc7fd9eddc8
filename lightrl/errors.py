"""The exceptions that cross module borders. Nothing else lives here."""

from typing import Any


class LightRLError(Exception):
    """Base of every error that a user may see; its text is one line with what to do."""


class ConfigError(LightRLError):
    """A config file, override or command-line value is wrong. Carries the dotted key and the
    value."""


class DataError(LightRLError):
    """A data set cannot be read. Carries the file and the line number."""


class DataUnreachable(DataError):
    """A data set of the hub that is not here, while the hub cannot be reached."""


class RewardError(LightRLError):
    """A reward function cannot be imported or has no known signature."""


class EngineError(LightRLError):
    """A rollout engine cannot start or has failed."""


class EngineUnusable(EngineError):
    """The library behind an engine does not work on this machine; another engine may."""


class TrainerError(LightRLError):
    """A training rank cannot start or has failed."""


class ProtocolError(LightRLError):
    """A frame does not decode or has wrong types; its peer is treated as lost."""


class WeightsError(LightRLError):
    """A weight transfer failed or its digest does not match; the version never becomes live."""


class JournalError(LightRLError):
    """The journal cannot be written or read. Carries the file."""


class PeerUnreachable(LightRLError):
    """The peer that a message was meant for is not connected."""


class WrongKey(LightRLError):
    """The process at the address does not accept our key, or we do not accept its key."""


class SimError(LightRLError):
    """A workload, a trace or an option of the simulator is wrong. Carries the file and the line
    number."""


class InvariantViolation(LightRLError):
    """The core, or a role of a daemon, reached a state that must not exist: it stops."""


def first_line(cause: object) -> str:
    """The beginning of a message that may have several lines and a trace; without one, its
    type."""
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0][:300]


def first_error(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first exception in a group of groups: the one that ended the others."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
