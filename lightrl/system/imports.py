"""How a process imports libraries as heavy as torch. Knows nothing of any of them."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around imports: all that they make stays, and nobody looks through it for garbage.

    Meanwhile the collector would do so again and again, a quarter of the time that torch and
    transformers take.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
