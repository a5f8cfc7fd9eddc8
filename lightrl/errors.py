"""The exceptions that cross module borders. Nothing else lives here."""


class LightRLError(Exception):
    """Base of every error that a user may see; its text is one line that says what to do."""


class ConfigError(LightRLError):
    """A config file, override or command-line value is wrong. Carries the dotted key and the value."""


class DataError(LightRLError):
    """A data set cannot be read. Carries the file and the line number."""


class RewardError(LightRLError):
    """A reward function cannot be imported or has no known signature."""


class EngineError(LightRLError):
    """A rollout engine cannot start or has failed."""


class TrainerError(LightRLError):
    """A training rank cannot start or has failed."""


class ProtocolError(LightRLError):
    """A frame does not decode or has wrong types; its peer is treated as lost."""


class WeightsError(LightRLError):
    """A weight transfer failed or its digest does not match; the version never becomes live."""


class PeerUnreachable(LightRLError):
    """The peer that a message was meant for is not connected."""


class SimError(LightRLError):
    """A workload, a trace or an option of the simulator is wrong. Carries the file and the line number."""


class InvariantViolation(LightRLError):
    """The core reached a state that must not exist; the run stops."""
