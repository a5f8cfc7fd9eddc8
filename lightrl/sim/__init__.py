"""The run in virtual time: the very same core, with engines, trainer and rewards as models."""
