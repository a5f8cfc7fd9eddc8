"""What a node says to the person before it: which run it serves, and why it leaves. Words only."""

from lightrl.config.schema import Config
from lightrl.devices.sizes import slots_of
from lightrl.messages.nodes import ENDING, Hello

SIGNALS = {
    "SIGTERM": "this process was asked to end (SIGTERM)",
    "SIGINT": "ctrl-C (SIGINT)",
    "SIGUSR1": "notice that this machine will be taken away (SIGUSR1)",
    "SIGHUP": "its terminal is gone (SIGHUP)",
}


def what_it_serves(config: Config, address: str, hello: Hello) -> str:
    """Example: serves run math at tcp://10.0.0.1:5600: rollout of Qwen/Qwen3-0.6B, 64 slots,
    preemptible"""
    does: list[str] = []
    if "trainer" in hello.roles:
        does.append(f"trains {config.model.path}")
    if "rollout" in hello.roles:
        does.append(f"rollout of {config.model.path}")
        does.append(f"{hello.slots or slots_of(config, hello.parallel)} slots")
    does += ["preemptible"] * hello.is_preemptible
    does += [f"on the devices of {hello.shares}"] if hello.shares else []
    return f"serves run {config.run.name} at {address}: {', '.join(does)}"


def why_it_leaves(reason: str) -> str:
    """`reason`: the name of a signal, or what the coordinator has said."""
    if reason == ENDING or reason.startswith("run "):
        return reason
    return SIGNALS.get(reason, f"the run lets this node go ({reason})")
