def normalize_messages(value):
    return [{"role": "text", "content": value}] if isinstance(value, str) else [*value]
