"""LightRL: reinforcement-learning post-training on reserved and preemptible nodes."""

__version__ = "0.1.0"
