"""Rounds: their prompts, their winners, and the order of rounds and steps. Pure."""
