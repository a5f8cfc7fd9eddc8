"""Where every response is, its tokens, and which node samples it. Pure."""
