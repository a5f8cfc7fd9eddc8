"""What a node is to generate, in as many messages as it takes: a message has a limit, and a node
with many slots may be given long prefixes for all of them at once.

Pure. Which response runs where is decided in `placement` and `responses`.
"""

from collections.abc import Iterable, Iterator

from lightrl.messages.responses import Generate, ResponseRequest, Sampling

MAX_ORDER_BYTES = 8 << 20  # of tokens in one message
OF_REQUEST = 512  # bytes of a request without its tokens, at most


def orders(
    version: int, sampling: Sampling, requests: Iterable[ResponseRequest]
) -> Iterator[Generate]:
    """All requests in order. One that is larger than a message should be has one to itself."""
    part: list[ResponseRequest] = []
    size = 0
    for request in requests:
        num_bytes = len(request.prompt) + len(request.prefix) + OF_REQUEST
        if part and size + num_bytes > MAX_ORDER_BYTES:
            yield Generate(version, sampling, tuple(part))
            part, size = [], 0
        part.append(request)
        size += num_bytes
    if part:
        yield Generate(version, sampling, tuple(part))
