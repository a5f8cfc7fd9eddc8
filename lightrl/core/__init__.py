"""The pure core: what happens next, decided from events and the time given with them.

Standard library only; nothing here awaits, reads a clock, draws random numbers, logs or touches a
socket.
"""
