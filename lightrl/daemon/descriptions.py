"""Describe a node in the log: the run that it serves, and the reason for which it leaves."""

from lightrl.config.schema import Config
from lightrl.devices.sizes import slots_of
from lightrl.messages.nodes import ENDING, Hello

SIGNALS = {
    "SIGTERM": "this process was asked to end (SIGTERM)",
    "SIGINT": "ctrl-C (SIGINT)",
    "SIGUSR1": "notice that this machine will be taken away (SIGUSR1)",
    "SIGHUP": "its terminal is gone (SIGHUP)",
}


def describe_service(config: Config, address: str, hello: Hello) -> str:
    """Return the run, roles and size of a node in one line.

    Example: serves run math at tcp://10.0.0.1:5600: rollout of Qwen/Qwen3-0.6B, 64 slots,
    preemptible
    """
    does: list[str] = []
    if "trainer" in hello.roles:
        does.append(f"trains {config.model.path}")
    if "rollout" in hello.roles:
        does.append(f"rollout of {config.model.path}")
        does.append(f"{hello.slots or slots_of(config, hello.parallel)} slots")
    does += ["preemptible"] * hello.is_preemptible
    does += [f"on the devices of {hello.shares}"] if hello.shares else []
    return f"serves run {config.run.name} at {address}: {', '.join(does)}"


def describe_reason(reason: str) -> str:
    """Describe `reason`, which is the name of a signal or the text of the coordinator's Drain."""
    if reason == ENDING or reason.startswith("run "):
        return reason
    return SIGNALS.get(reason, f"the run lets this node go ({reason})")
