"""The reward worker process: decodes responses, calls the user's functions, streams the scores
back.

Owns what is said through its pipe. User code runs here and only here: it may raise, hang or take
the process down. Nobody here watches the clock for that: `Started` tells the pool when to start
counting, and the pool kills. Must not import transformers unless a tokenizer has no tokenizer.json
(it costs seconds and half a gigabyte, and a worker is started again after every hang).
"""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lightrl.data.layouts import answer_of
from lightrl.errors import RewardError
from lightrl.rewards.base import RewardFunction, Sample, score
from lightrl.rewards.builtin import load_function
from lightrl.system.child import Pipe
from lightrl.wire import Codec, from_json, unpack_i32

logger = logging.getLogger(__name__)

MAX_TEXT = 2000  # characters of a response that are kept for people to read
_MAX_TRACEBACKS = 20  # of one worker's log: a function that always fails must not fill the disk


@dataclass(frozen=True, slots=True)
class Setup:
    """The first command."""

    functions: tuple[str, ...]
    weights: tuple[float, ...]
    tokenizer_dir: str
    answer_key: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """One response to score; `row` is JSON."""

    number: int
    prompt_text: str
    row: bytes
    # int32
    token_ids: bytes
    finish_reason: str


@dataclass(frozen=True, slots=True)
class ScoreJobs:
    """Jobs to run, in this order."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """`is_async`: jobs overlap, because at least one function is asynchronous."""

    is_async: bool


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker cannot serve; it ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """User code begins on this job now."""

    number: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A job is done. `failure` "" = `reward` is a score; else why there is none, in one line."""

    number: int
    reward: float | None
    metrics: dict[str, float]
    text: str
    duration_s: float
    failure: str


WorkerCommand: TypeAlias = Setup | ScoreJobs
WorkerEvent: TypeAlias = WorkerReady | WorkerFailed | Started | Scored
COMMANDS: Codec[WorkerCommand] = Codec(WorkerCommand)
EVENTS: Codec[WorkerEvent] = Codec(WorkerEvent)

WorkerPipe: TypeAlias = Pipe[WorkerCommand, WorkerEvent]
Decode: TypeAlias = Callable[[list[int]], str]


def main(sock: socket.socket) -> None:
    """Serves until the pool closes the pipe."""
    pipe: WorkerPipe = Pipe(sock, COMMANDS, EVENTS)
    try:
        commands = pipe.receive()
        setup = commands[0]
        if not isinstance(setup, Setup):
            raise TypeError(f"the first command is {type(setup).__name__}, not Setup")
        try:
            functions = [load_function(reference) for reference in setup.functions]
            decode = load_decoder(Path(setup.tokenizer_dir))
        except RewardError as e:
            pipe.send(WorkerFailed(str(e)))
            return
        except Exception as e:  # importing user code may raise anything
            logger.exception("%s: cannot be imported", ", ".join(setup.functions))
            pipe.send(
                WorkerFailed(f"{', '.join(setup.functions)}: cannot be imported: {_one_line(e)}")
            )
            return
        pipe.send(WorkerReady(any(f.is_async for f in functions)))
        asyncio.run(_Worker(sock, pipe, setup, functions, decode).serve(commands[1:]))
    except EOFError:
        pass  # the pool has gone


class _Worker:
    def __init__(
        self,
        sock: socket.socket,
        pipe: WorkerPipe,
        setup: Setup,
        functions: Sequence[RewardFunction],
        decode: Decode,
    ) -> None:
        self._sock = sock
        self._pipe = pipe
        self._functions = functions
        self._weights = setup.weights
        self._answer_key = setup.answer_key
        self._limit_s = setup.timeout_s
        self._decode = decode
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_tracebacks = 0

    async def serve(self, commands: Sequence[WorkerCommand]) -> None:
        """One task per job: synchronous functions run one after the other, asynchronous ones
        overlap."""
        loop = asyncio.get_running_loop()
        closed = loop.create_future()

        def receive() -> None:
            try:
                accept(self._pipe.receive(0))
            except EOFError:
                closed.set_result(None)
                loop.remove_reader(self._sock)

        def accept(arrived: Sequence[WorkerCommand]) -> None:
            for command in arrived:
                if isinstance(command, ScoreJobs):
                    for job in command.jobs:
                        task = loop.create_task(self._run(job))
                        self._tasks.add(task)
                        task.add_done_callback(finished)

        def finished(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None and not closed.done():
                closed.set_exception(task.exception() or EOFError())

        accept(commands)
        loop.add_reader(self._sock, receive)
        await closed

    async def _run(self, job: Job) -> None:
        text, reward, metrics, failure = "", None, {}, ""
        self._pipe.send(Started(job.number))
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                ids = unpack_i32(job.token_ids)
                row = from_json(job.row, dict[str, Any])
                text = self._decode(ids)
                answer = answer_of(row, self._answer_key)
                sample = Sample(job.prompt_text, text, answer, row, ids, job.finish_reason)
                result = await score(self._functions, self._weights, sample)
            reward, metrics = result.reward, result.metrics
            failure = "no score" if reward is None else ""
        except Exception as e:
            # A function's own TimeoutError is an exception like any other.
            failure = "timeout" if isinstance(e, TimeoutError) and limit.expired() else _one_line(e)
            self._log_traceback(job.number)
        duration_s = time.perf_counter() - start
        self._pipe.send(Scored(job.number, reward, metrics, text[:MAX_TEXT], duration_s, failure))

    def _log_traceback(self, number: int) -> None:
        self._num_tracebacks += 1
        if self._num_tracebacks <= _MAX_TRACEBACKS:
            logger.warning("no score for job %d", number, exc_info=True)
        if self._num_tracebacks == _MAX_TRACEBACKS:
            logger.warning("further tracebacks of this worker are not shown")


def load_decoder(model_files: Path) -> Decode:
    """Token ids to text without special tokens. Raises RewardError if there is no usable tokenizer.

    Reads tokenizer.json directly, plus the special tokens that only tokenizer_config.json names.
    """
    file = model_files / "tokenizer.json"
    if not file.is_file():
        return _load_slow_decoder(model_files)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as e:  # tokenizers raises plain Exception
        raise RewardError(f"{file}: cannot be loaded: {_one_line(e)}") from e
    known = tokenizer.get_vocab(with_added_tokens=True)
    tokenizer.add_special_tokens([t for t in _special_tokens(model_files) if t in known])
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def _special_tokens(model_files: Path) -> list[str]:
    found: list[Any] = []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = model_files / name
        table = json.loads(file.read_bytes()) if file.is_file() else {}
        found += [v for k, v in table.items() if k.endswith("_token")]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = table.get(key) or []
            found += more.values() if isinstance(more, dict) else more
        found += [t for t in (table.get("added_tokens_decoder") or {}).values() if t.get("special")]
    texts = [t.get("content") if isinstance(t, dict) else t for t in found]
    return [t for t in texts if isinstance(t, str) and t]


def _load_slow_decoder(model_files: Path) -> Decode:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_files, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as e:
        raise RewardError(f"{model_files}: no usable tokenizer: {_one_line(e)}") from e
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def _one_line(e: BaseException) -> str:
    """Example: "ValueError: could not convert string to float: 'x'"."""
    lines = str(e).strip().splitlines()
    if isinstance(e, RewardError):
        return lines[0][:300]
    return f"{type(e).__name__}: {lines[0]}"[:300] if lines else type(e).__name__
