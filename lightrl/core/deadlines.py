"""The first of several deadlines, of which there may be none. Pure."""


def earliest(*times: float | None) -> float | None:
    """Asked for after every event. Example: earliest(None, 3.0, 2.0) == 2.0"""
    first = None
    for time in times:
        if time is not None and (first is None or time < first):
            first = time
    return first
