"""The ceiling of a pull: sockets, a hash call and a file, nothing else.

`python -m scripts.bench.weights_lib.bare serve PATH HOST STREAMS` prints its port and sends what it
is asked for; `receive HOST PORT STREAMS SIZE TO KIND` prints the seconds it took. KIND: "alone"
without a hash; "whole" receives a bucket into the mapped file and hashes it with one call;
"portions" hashes and writes what fits a core's cache. All threads of a process, as in a pull.
"""

import itertools
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

BUCKET = 8 << 20
PORTION = 1 << 20  # CHUNK_BYTES of machine/local.py


def serve(path: str, host: str, streams: int) -> None:
    file = os.open(path, os.O_RDONLY)
    listener = socket.create_server((host, 0))
    print(listener.getsockname()[1], flush=True)

    def answer(sock: socket.socket) -> None:
        while len(asked := sock.recv(16, socket.MSG_WAITALL)) == 16:
            offset, size = int.from_bytes(asked[:8], "little"), int.from_bytes(asked[8:], "little")
            while size:
                sent = os.sendfile(sock.fileno(), file, offset, size)
                offset, size = offset + sent, size - sent

    threads = [
        threading.Thread(target=answer, args=(listener.accept()[0],)) for _ in range(streams)
    ]
    run(threads)


def run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def receive(host: str, port: int, streams: int, size: int, to: str, kind: str) -> float:
    file = os.open(to, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.ftruncate(file, size)
    view = memoryview(mmap.mmap(file, size))
    numbers = itertools.count()  # shared by the threads

    def whole(sock: socket.socket, start: int, end: int) -> None:
        while start < end:
            start += sock.recv_into(view[start:end], end - start, socket.MSG_WAITALL)

    def hashed(sock: socket.socket, start: int, end: int) -> None:
        whole(sock, start, end)
        blake3(view[start:end]).digest()

    def portions(sock: socket.socket, start: int, end: int, *, is_hashed: bool = True) -> None:
        buffer, digest = memoryview(bytearray(PORTION)), blake3()
        while start < end:
            n = sock.recv_into(buffer, min(PORTION, end - start), socket.MSG_WAITALL)
            if is_hashed:
                digest.update(buffer[:n])
            os.pwrite(file, buffer[:n], start)
            start += n
        digest.digest()

    def alone(sock: socket.socket, start: int, end: int) -> None:
        portions(sock, start, end, is_hashed=False)

    kinds: dict[str, Callable[[socket.socket, int, int], None]] = {
        "alone": alone,
        "whole": hashed,
        "portions": portions,
    }

    def stream() -> None:
        with socket.create_connection((host, port)) as sock:
            while (start := next(numbers) * BUCKET) < size:
                end = min(start + BUCKET, size)
                sock.sendall(start.to_bytes(8, "little") + (end - start).to_bytes(8, "little"))
                kinds[kind](sock, start, end)

    begun = time.monotonic()
    run([threading.Thread(target=stream) for _ in range(streams)])
    return time.monotonic() - begun


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", path, host, streams]:
            serve(path, host, int(streams))
        case [_, host, port, streams, size, to, kind]:
            print(receive(host, int(port), int(streams), int(size), to, kind))
            Path(to).unlink()
        case _:
            sys.exit(__doc__)
