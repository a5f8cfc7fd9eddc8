"""Who takes part, how fast each node is, and how many are worth having. Pure."""
