"""The trainer's nodes, what they are sent, and the versions they publish. Pure."""
