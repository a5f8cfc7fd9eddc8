"""Where nodes get a version, and which nodes receive it together. Pure."""
