"""Devices that take turns, with the trainer or with engines of other sizes. Pure."""
