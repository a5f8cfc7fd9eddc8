"""Responses: their places, their tokens, and the nodes that sample them. Pure."""
