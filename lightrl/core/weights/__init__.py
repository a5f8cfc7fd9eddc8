"""Sources of a version for each node, and groups of nodes that receive it by broadcast. Pure."""
