"""Nodes: membership, speed of each, and the number that is worth its cost. Pure."""
