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
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, TypeAlias, cast

from lightrl.config.reward import Reward
from lightrl.data.layouts import answer_of
from lightrl.errors import RewardError
from lightrl.rewards import kept
from lightrl.rewards.base import Columns, RewardFunction, Sample, TrainerState
from lightrl.rewards.builtin import load_function
from lightrl.rewards.load import distinct_names
from lightrl.rewards.score import Score, one_line, score
from lightrl.system.child import Pipe
from lightrl.wire import Codec, from_json, unpack_i32

logger = logging.getLogger(__name__)

MAX_TEXT = 20_000  # characters of a response that are kept for people to read
_MAX_TRACEBACKS = 20  # of one worker's log: a function that always fails must not fill the disk


@dataclass(frozen=True, slots=True)
class RewardSet:
    """Prompts whose responses are scored by the same functions, and what their rows have."""

    functions: tuple[str, ...]
    weights: tuple[float, ...]
    prompt_key: str
    answer_key: str
    # of any row
    columns: tuple[str, ...]
    have_answers: bool
    # as data.as_chat and data.system_prompt
    as_chat: bool = False
    system_prompt: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first command."""

    # the config's section, as JSON
    reward: str
    sets: tuple[RewardSet, ...]
    tokenizer_dir: str
    num_steps: int
    # absolute path -> content of the modules that are imported as they were, see kept.py
    sources: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was sampled for a prompt."""

    # int32
    token_ids: bytes
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Job:
    """Responses of one prompt to score, all in one call where functions take lists. `row` is JSON;
    `prompts` is an index into `Setup.sets`."""

    number: int
    prompts: int
    prompt_text: str
    row: bytes
    answers: tuple[Answer, ...]
    # how far the run is
    step: int
    epoch: int
    # as in RewardJob
    slowest_s: float | None


@dataclass(frozen=True, slots=True)
class ScoreJobs:
    """Jobs to run, in this order."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """`is_async`: jobs overlap, because at least one function is asynchronous. `by_group`: of each
    set, whether a job is to have all responses of a prompt."""

    is_async: bool
    by_group: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker cannot serve; it ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """A call of user code for this job begins now."""

    number: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one response. `failure` "" = `reward` is a score; else why there is none, in one line."""

    reward: float | None
    metrics: dict[str, float]
    extras: dict[str, str]
    text: str
    failure: str


@dataclass(frozen=True, slots=True)
class Scored:
    """A job is done: one verdict for each of its responses."""

    number: int
    verdicts: tuple[Verdict, ...]
    duration_s: float


WorkerCommand: TypeAlias = Setup | ScoreJobs
WorkerEvent: TypeAlias = WorkerReady | WorkerFailed | Started | Scored
COMMANDS: Codec[WorkerCommand] = Codec(WorkerCommand)
EVENTS: Codec[WorkerEvent] = Codec(WorkerEvent)

WorkerPipe: TypeAlias = Pipe[WorkerCommand, WorkerEvent]
Decode: TypeAlias = Callable[[list[int]], str]


def main(sock: socket.socket) -> None:
    """Serves until the pool closes the pipe."""
    pipe: WorkerPipe = Pipe(sock, COMMANDS, EVENTS)
    sys.stderr = cast("TextIO", LastLine(sys.stderr))
    try:
        commands = pipe.receive()
        setup = commands[0]
        if not isinstance(setup, Setup):
            raise TypeError(f"the first command is {type(setup).__name__}, not Setup")
        named = ", ".join(dict.fromkeys(f for each in setup.sets for f in each.functions))
        kept.install(setup.sources)
        try:
            scorers = load_scorers(setup)
            decode = load_decoder(Path(setup.tokenizer_dir))
        except RewardError as e:
            pipe.send(WorkerFailed(str(e)))
            return
        except BaseException as e:  # importing user code may raise anything, or exit
            logger.exception("%s: cannot be imported", named)
            pipe.send(WorkerFailed(f"{named}: cannot be imported: {one_line(e)}"))
            return
        # not the thread's own loop, which functions may look for, close and replace
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(_Worker(sock, pipe, setup, scorers, decode).serve(commands[1:]))
    except EOFError:
        pass  # the pool has gone


class LastLine:
    """A text stream with its last line: argparse writes there why it exits with status 2."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.last_line = stream, ""

    def write(self, text: str) -> int:
        self.last_line = next(iter(text.strip().splitlines()[-1:]), self.last_line)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(frozen=True, slots=True)
class Scorer:
    """What the responses of one set are scored by."""

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...]
    answer_key: str
    by_group: bool


def load_scorers(setup: Setup) -> list[Scorer]:
    """One for each set. Raises RewardError, one line, and whatever user code raises."""
    reward = Reward.model_validate_json(setup.reward)
    scorers: list[Scorer] = []
    loaded: dict[str, Callable[[Sample], Any]] = {}  # a judge has one limit for all sets
    for each in setup.sets:
        columns = Columns(
            frozenset(each.columns),
            each.prompt_key,
            each.answer_key,
            each.have_answers,
            each.as_chat,
            each.system_prompt,
        )
        functions = [load_function(name, reward, columns, loaded) for name in each.functions]
        names = distinct_names([f.name for f in functions], each.functions)
        named = tuple(replace(f, name=n) for f, n in zip(functions, names, strict=True))
        by_group = reward.batch == "group" and any(f.takes_list for f in functions)
        scorers.append(Scorer(named, each.weights, each.answer_key, by_group))
    taken = {key for scorer in scorers for f in scorer.functions for key in f.taken}
    if unknown := [key for key in reward.kwargs if key not in taken]:
        raise RewardError(
            f"reward.kwargs.{unknown[0]}: no function has a parameter {unknown[0]!r}, or **kwargs"
        )
    return scorers


class _Worker:
    def __init__(
        self,
        sock: socket.socket,
        pipe: WorkerPipe,
        setup: Setup,
        scorers: Sequence[Scorer],
        decode: Decode,
    ) -> None:
        self._sock = sock
        self._pipe = pipe
        self._scorers = scorers
        self._num_steps = setup.num_steps
        self._is_async = any(f.is_async for scorer in scorers for f in scorer.functions)
        self._limit_s = Reward.model_validate_json(setup.reward).timeout_s
        self._decode = decode
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_waiting = 0  # jobs that have not begun
        # What the next job that begins says first: to wake the pool twice costs more.
        self._held: list[WorkerEvent] = []
        self._num_tracebacks = 0

    async def serve(self, commands: Sequence[WorkerCommand]) -> None:
        """One task per job: synchronous functions run one after the other, asynchronous ones
        overlap."""
        loop = asyncio.get_running_loop()
        closed = loop.create_future()
        self._pipe.send(WorkerReady(self._is_async, tuple(s.by_group for s in self._scorers)))

        def receive() -> None:
            try:
                accept(self._pipe.receive(0))
            except EOFError:
                closed.set_result(None)
                loop.remove_reader(self._sock)

        def accept(arrived: Sequence[WorkerCommand]) -> None:
            for command in arrived:
                if isinstance(command, ScoreJobs):
                    self._num_waiting += len(command.jobs)
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
        self._num_waiting -= 1
        scorer, texts = self._scorers[job.prompts], [""] * len(job.answers)
        start, has_begun = time.perf_counter(), False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:

                def begin() -> None:
                    """The limit is that of a call, and so is the duration: others' may be waited
                    for before."""
                    nonlocal start, has_begun
                    if self._is_async and not has_begun:
                        start, has_begun = time.perf_counter(), True
                    self._say(Started(job.number))
                    if not limit.expired():
                        limit.reschedule(loop.time() + self._limit_s)

                samples = self._samples(job, scorer.answer_key)
                texts = [sample.response for sample in samples]
                state = TrainerState(job.step, self._num_steps, float(job.epoch))
                scores = await score(
                    scorer.functions, scorer.weights, samples, state, begin, self._log_traceback
                )
        except TimeoutError:  # a function's own is an exception like any other, and caught
            scores = [Score(failure="timeout") for _ in texts]
        except Exception as e:  # a row or a tokenizer of the user's
            self._log_traceback()
            scores = [Score(failure=one_line(e)) for _ in texts]
        duration_s = time.perf_counter() - start
        verdicts = tuple(
            Verdict(s.reward, s.metrics, s.extras, text[:MAX_TEXT], s.failure)
            for s, text in zip(scores, texts, strict=True)
        )
        scored = Scored(job.number, verdicts, duration_s)
        if self._num_waiting:
            self._held.append(scored)
        else:
            self._say(scored)

    def _say(self, event: WorkerEvent) -> None:
        held, self._held = self._held, []
        self._pipe.send(*held, event)

    def _samples(self, job: Job, answer_key: str) -> list[Sample]:
        row = from_json(job.row, dict[str, Any])
        answer = answer_of(row, answer_key)
        samples: list[Sample] = []
        for each in job.answers:
            ids = unpack_i32(each.token_ids)
            text = self._decode(ids)
            said = text, answer, row, ids, each.finish_reason, job.slowest_s
            samples.append(Sample(job.prompt_text, *said))
        return samples

    def _log_traceback(self) -> None:
        self._num_tracebacks += 1
        if self._num_tracebacks <= _MAX_TRACEBACKS:
            logger.warning("no score", exc_info=True)
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
        raise RewardError(f"{file}: cannot be loaded: {one_line(e)}") from e
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
        raise RewardError(f"{model_files}: no usable tokenizer: {one_line(e)}") from e
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
