"""The reward worker process: decodes responses, calls the user's functions, sends the scores back.

User code runs here and only here: it may raise, hang or end the process. The pool measures the time
from `Started` on and kills the worker; only asynchronous calls are cancelled here. Must not import
transformers unless a tokenizer has no tokenizer.json: that costs seconds and half a gigabyte, and a
worker starts again after every hang.
"""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from lightrl.config.reward import Reward
from lightrl.data.layouts import answer_of
from lightrl.errors import RewardError
from lightrl.rewards import kept
from lightrl.rewards.base import Columns, RewardFunction, RunProgress, Sample
from lightrl.rewards.builtin import load_function
from lightrl.rewards.episodes import SampledTurn, read_turns
from lightrl.rewards.load import distinct_names
from lightrl.rewards.protocol import (
    COMMANDS,
    EVENTS,
    Job,
    RewardResult,
    Scored,
    ScoreJobs,
    Started,
    WorkerCommand,
    WorkerEvent,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
)
from lightrl.rewards.score import Score, one_line, score
from lightrl.rewards.signatures import conversation
from lightrl.system.child import Pipe
from lightrl.wire import from_json, unpack_i32

logger = logging.getLogger(__name__)

MAX_TEXT = 20_000  # characters of a response in samples.jsonl
_MAX_TRACEBACKS = 20  # in the log of a worker, for a function that always fails


WorkerPipe: TypeAlias = Pipe[WorkerCommand, WorkerEvent]
Decode: TypeAlias = Callable[[list[int]], str]


def main(sock: socket.socket) -> None:
    """Serve until the pool closes the pipe."""
    pipe: WorkerPipe = Pipe(sock, COMMANDS, EVENTS)
    try:
        commands = pipe.receive()
        setup = commands[0]
        if not isinstance(setup, WorkerSetup):
            raise TypeError(f"the first command is {type(setup).__name__}, not WorkerSetup")
        kept.install(setup.sources)
        try:
            scorers = load_scorers(setup)
            decode = load_decoder(Path(setup.tokenizer_dir))
        except RewardError as e:
            pipe.send(WorkerFailed(str(e)))
            return
        except BaseException as e:  # importing user code may raise anything, or exit
            logger.exception("%s: cannot be imported", setup.named)
            pipe.send(WorkerFailed(f"{setup.named}: cannot be imported: {one_line(e)}"))
            return
        # not the thread's own loop, which functions may get, close and replace
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(_Worker(sock, pipe, setup, scorers, decode).serve(commands[1:]))
    except EOFError:
        pass  # the pool has gone


@dataclass(frozen=True, slots=True)
class Scorer:
    """The reward functions of one set, with their weights."""

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...]
    columns: Columns
    by_group: bool


def load_scorers(setup: WorkerSetup) -> list[Scorer]:
    """Load a scorer for each set. Raises RewardError, one line, and errors of user code."""
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
        scorers.append(Scorer(named, each.weights, columns, by_group))
    taken = {key for scorer in scorers for f in scorer.functions for key in f.taken}
    if unknown := [key for key in reward.kwargs if key not in taken]:
        raise RewardError(
            f"reward.kwargs.{unknown[0]}: no function has a parameter {unknown[0]!r}, or **kwargs"
        )
    return scorers


class _Worker:
    """One task per job: synchronous functions run one after the other, asynchronous ones
    overlap."""

    def __init__(
        self,
        sock: socket.socket,
        pipe: WorkerPipe,
        setup: WorkerSetup,
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
        self._num_tracebacks = 0

    async def serve(self, commands: Sequence[WorkerCommand]) -> None:
        loop = asyncio.get_running_loop()
        closed = loop.create_future()

        def finished(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) and not closed.done():
                closed.set_exception(error)

        def accept(arrived: Sequence[WorkerCommand]) -> None:
            for job in (j for each in arrived if isinstance(each, ScoreJobs) for j in each.jobs):
                task = loop.create_task(self._run(job))
                self._tasks.add(task)
                task.add_done_callback(finished)

        def receive() -> None:
            try:
                accept(self._pipe.receive(0))
            except EOFError:
                closed.set_result(None)
                loop.remove_reader(self._sock)

        self._pipe.send(WorkerReady(self._is_async, tuple(s.by_group for s in self._scorers)))
        accept(commands)
        loop.add_reader(self._sock, receive)
        await closed

    async def _run(self, job: Job) -> None:
        scorer, texts = self._scorers[job.prompts], [""] * len(job.responses)
        loop, began = asyncio.get_running_loop(), list[float]()
        try:
            async with asyncio.timeout(None) as limit:

                def begin() -> None:
                    """The limit is that of a call, after the wait for its turn."""
                    began.append(time.perf_counter())
                    self._pipe.send(Started(job.number))
                    if not limit.expired():
                        limit.reschedule(loop.time() + self._limit_s)

                samples = self._samples(job, scorer.columns)
                texts = [sample.response for sample in samples]
                state = RunProgress(job.step, self._num_steps, float(job.epoch))
                scores = await score(
                    scorer.functions, scorer.weights, samples, state, begin, self._log_traceback
                )
        except TimeoutError:  # a function's own is an exception like any other, and caught
            scores = [Score(failure="timeout") for _ in texts]
        except Exception as e:  # a row or a tokenizer of the user's
            self._log_traceback()
            scores = [Score(failure=one_line(e)) for _ in texts]
        duration_s = (time.perf_counter() - began[0] if began else 0.0) / len(texts)
        results = tuple(
            RewardResult(
                a.response,
                a.attempt,
                s.reward,
                s.metrics,
                text[:MAX_TEXT],
                duration_s,
                s.failure,
                s.extras,
            )
            for a, s, text in zip(job.responses, scores, texts, strict=True)
        )
        self._pipe.send(Scored(job.number, results))

    def _samples(self, job: Job, columns: Columns) -> list[Sample]:
        row = from_json(job.row, dict[str, Any])
        answer = answer_of(row, columns.answer_key)
        samples: list[Sample] = []
        for each in job.responses:
            ids, record, prompt = unpack_i32(each.token_ids), each.episode, job.prompt_text
            if record is None:
                text = self._decode(ids)
                turns = [SampledTurn(text, {"role": "assistant", "content": text})]
                first = conversation(prompt, row, columns)
            else:
                first, turns = read_turns(record, ids, self._decode)
                text = turns[-1].text if turns else ""
                begin = record.spans[0][0] if turns else len(ids)
                prompt, ids = self._decode(ids[:begin]), ids[begin:]
            messages = list(first) if isinstance(first, list) else []
            for turn in turns if messages else ():
                messages += turn.message, *turn.observation
            how = each.finish_reason, job.slowest_s, messages, turns, record and record.reward
            samples.append(Sample(prompt, text, answer, row, ids, *how))
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
