"""The pure core: decides the next commands from events and the time passed with them.

Standard library only; no code here awaits, reads a clock, draws random numbers, logs or uses a
socket.
"""
