"""The reward pool: worker processes that score responses while others still generate.

Owns the worker processes, which job is where, and the time limit of a call. A crash, hang or
exception of user code costs one response its score, never the run. Must not run user code: that is
the worker's.

A worker holds a few jobs in advance so that it never waits for us; they do not count as started.
When it has to be killed, those that had not started go back to the head of the queue.
"""

import asyncio
import contextlib
import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightrl import config
from lightrl.core.arrays import encode
from lightrl.errors import RewardError
from lightrl.log import environment as log_environment
from lightrl.rewards import worker
from lightrl.rewards.environment import inherited
from lightrl.rewards.worker import (
    COMMANDS,
    EVENTS,
    Scored,
    ScoreJobs,
    Setup,
    Started,
    WorkerFailed,
    WorkerReady,
)
from lightrl.system.child import Child, ChildDied, retry_on_resource_limit
from lightrl.system.restart import CrashCounter, RestartPolicy
from lightrl.wire import to_json

START_LIMIT_S = 120.0  # importing user code may load a model
LOOKAHEAD_S = 0.02  # work that a worker holds in advance: hides our latency, keeps the rest movable
MAX_IN_FLIGHT = 64  # jobs at one worker
LAG_GRACE_S = 0.05  # an answer may wait in the pipe while our event loop was busy
ASYNC_GRACE_S = 1.0  # an asynchronous call is ended inside its worker first; the kill comes after
# After deaths that no job explains, each soon after the start: such a worker cannot live.
RESTARTS = RestartPolicy(max_restarts=2, settled_s=10.0)

RewardChild = Child[worker.WorkerCommand, worker.WorkerEvent]


@dataclass(frozen=True, slots=True)
class RewardJob:
    """A finished response. `row` holds all columns of its prompt; `tokens` is not copied before a
    worker gets them: a whole round may wait.

    Example: RewardJob("p7@0#3", 1, "39%3=", {"answer": "36"}, array("i", [5, 8, 1]), "stop")
    """

    response: str
    # of the response; given back with the result, so that a late one can be told
    attempt: int
    prompt_text: str
    row: dict[str, Any]
    tokens: "array[int]"
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`reward` is None exactly if `failure` is not empty.

    `failure`: "" = scored, "no score" = the functions said None, "timeout", "crashed", or the
    exception in one line, e.g. "ValueError: could not convert string to float: 'x'".
    """

    response: str
    attempt: int
    reward: float | None
    metrics: dict[str, float]
    # decoded response, cut at worker.MAX_TEXT characters; "" after a timeout or crash
    text: str
    duration_s: float
    failure: str


class RewardPool:
    """`await start()`, then `run()` as a task; `submit` at any time; `await stop()` at the end.

    `on_result` is called once for every job, in the order in which they finish, from `run`.
    """

    def __init__(
        self,
        reward: config.Reward,
        tokenizer_dir: Path,
        answer_key: str,
        log_dir: Path,
        on_result: Callable[[RewardResult], None],
        report: Callable[[str], None],
    ) -> None:
        """`report` gets a line about each worker that must be started again, but for what a job did
        to it."""
        weights = reward.weights or (1.0,) * len(reward.functions)
        setup = Setup(reward.functions, weights, str(tokenizer_dir), answer_key, reward.timeout_s)
        self._on_result = on_result
        self._report = report
        self._queue: deque[RewardJob] = deque()
        self._workers = [
            _WorkerProcess(reward, setup, f"reward-{k}", log_dir / f"reward-{k}.log", report)
            for k in range(reward.workers)
        ]
        self._stopping = False

    async def start(self) -> None:
        """Starts all workers. Raises RewardError, one line, if a function cannot be used."""
        try:
            await asyncio.gather(*(w.start() for w in self._workers))
        except BaseException:
            await self.stop()
            raise

    async def run(self) -> None:
        """Serves until `stop`. Raises RewardError if the workers cannot be kept alive."""
        async with asyncio.TaskGroup() as tasks:
            for w in self._workers:
                tasks.create_task(self._serve(w), name=w.name)
            self._dispatch()

    def submit(self, job: RewardJob) -> None:
        self._queue.append(job)
        self._dispatch()

    async def stop(self) -> None:
        """Kills the workers; jobs without a result are forgotten."""
        self._stopping = True
        for w in self._workers:
            w.is_wanted = False
        await asyncio.gather(*(w.stop() for w in self._workers))

    async def _serve(self, w: "_WorkerProcess") -> None:
        idle_deaths = CrashCounter(RESTARTS)
        while not self._stopping:
            try:
                result = await w.next_result()
            except ChildDied as e:
                if self._stopping:
                    return
                results = w.failures()
                if results:
                    idle_deaths.progressed()
                else:
                    self._report(f"{e}; starting it again")
                    if idle_deaths.crashed(w.lived_s) is None:
                        raise RewardError(
                            f"reward worker died {idle_deaths.in_a_row} times without a job: {e}"
                        ) from None
                self._queue.extendleft(reversed(w.take_back()))
                for failed in results:
                    self._on_result(failed)
                self._dispatch()  # to the others, meanwhile
                await self._restart(w)
            else:
                idle_deaths.progressed()
                self._on_result(result)
            self._dispatch()

    async def _restart(self, w: "_WorkerProcess") -> None:
        await w.stop()
        try:
            await w.start()
        except RewardError:
            if not self._stopping:  # else `stop` killed it
                raise
        if self._stopping:
            await w.stop()

    def _dispatch(self) -> None:
        """Fills the workers evenly: one job at a time to the emptiest, then one frame to each."""
        batches: dict[_WorkerProcess, list[RewardJob]] = {}
        while self._queue:
            loads = [(len(w.jobs), k) for k, w in enumerate(self._workers) if w.has_room()]
            if not loads:
                break
            w = self._workers[min(loads)[1]]
            job = self._queue.popleft()
            w.jobs[w.next_number] = job
            w.next_number += 1
            batches.setdefault(w, []).append(job)
        for w, batch in batches.items():
            w.send(batch)


class _WorkerProcess:
    """One worker process with its jobs: number -> job, oldest first. Numbers are never used
    twice."""

    def __init__(
        self,
        reward: config.Reward,
        setup: Setup,
        name: str,
        log: Path,
        report: Callable[[str], None],
    ) -> None:
        self.name = name
        self._reward = reward
        self.is_wanted = True  # else it is not started again
        self.jobs: dict[int, RewardJob] = {}
        self.next_number = 0
        self._setup = setup
        self._log = log
        self._report = report
        self._child: RewardChild | None = None
        self._is_ready = False
        self._ready_at = 0.0
        self._is_async = False
        self._started: dict[int, float] = {}  # number -> loop time; oldest first
        self._timed_out: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._typical_s = LOOKAHEAD_S / 4  # of one call, moving average

    async def start(self) -> None:
        """Raises RewardError if the worker cannot serve."""
        deaths = CrashCounter(RESTARTS)
        while not self._is_ready:
            start = partial(_start_child, self.name, self._log, self._reward)
            self._child = await retry_on_resource_limit(start, self.name, self._report)
            try:
                self._is_async = await _set_up(self._child, self._setup)
            except ChildDied as e:
                if deaths.crashed() is None or not self.is_wanted:
                    raise RewardError(
                        f"importing {', '.join(self._setup.functions)}: {e}"
                    ) from None
                self._report(f"{e}; starting it again")
            else:
                self._is_ready = True
                self._ready_at = asyncio.get_running_loop().time()

    async def stop(self) -> None:
        self._is_ready = False
        self._stop_timer()
        if self._child is not None:
            self._child.kill()  # it holds nothing that needs saving, and may hang
            await self._child.stop()

    @property
    def lived_s(self) -> float:
        """Since it was ready."""
        return asyncio.get_running_loop().time() - self._ready_at

    def has_room(self) -> bool:
        if not self._is_ready:
            return False
        if self._is_async:
            return len(self.jobs) < MAX_IN_FLIGHT
        return len(self.jobs) < min(MAX_IN_FLIGHT, 1 + int(LOOKAHEAD_S / self._typical_s))

    def send(self, jobs: Sequence[RewardJob]) -> None:
        """Sends the jobs that were added last to `self.jobs`."""
        assert self._child is not None
        first = self.next_number - len(jobs)
        self._child.send(
            ScoreJobs(
                tuple(
                    worker.Job(
                        first + k, j.prompt_text, to_json(j.row), encode(j.tokens), j.finish_reason
                    )
                    for k, j in enumerate(jobs)
                )
            )
        )

    async def next_result(self) -> RewardResult:
        """Raises ChildDied when the worker has ended or was killed."""
        assert self._child is not None
        while True:
            match await self._child.receive():
                case Started(number):
                    self._started[number] = asyncio.get_running_loop().time()
                    self._watch()
                case Scored(number) as s:
                    self._started.pop(number, None)
                    self._typical_s += (max(s.duration_s, 1e-5) - self._typical_s) / 8
                    job = self.jobs.pop(number)
                    return RewardResult(
                        job.response,
                        job.attempt,
                        s.reward,
                        s.metrics,
                        s.text,
                        s.duration_s,
                        s.failure,
                    )
                case other:
                    raise RewardError(f"{self.name}: unexpected {other}")

    def failures(self) -> list[RewardResult]:
        """Results of the jobs that the worker's death is blamed on; they leave `jobs`.

        After an overrun that is the job that ran longest, unless its answer had just arrived; after
        a crash every job that had started: of asynchronous ones that overlap, nobody can say which
        did it.
        """
        now = asyncio.get_running_loop().time()
        self._is_ready = False
        self._stop_timer()
        why, blamed = "crashed", list(self._started)
        if self._timed_out is not None:
            why, blamed = "timeout", [n for n in blamed if n == self._timed_out]
        lost = [(self.jobs.pop(n), now - self._started[n]) for n in blamed]
        results = [
            RewardResult(job.response, job.attempt, None, {}, "", lasted_s, why)
            for job, lasted_s in lost
        ]
        self._started.clear()
        self._timed_out = None
        return results

    def take_back(self) -> list[RewardJob]:
        """The jobs that the worker still held, oldest first."""
        jobs = list(self.jobs.values())
        self.jobs.clear()
        return jobs

    def _watch(self) -> None:
        """Sets the alarm for the call that started first, if none is set."""
        if self._timer is None and self._started:
            oldest = next(iter(self._started))
            limit = self._setup.timeout_s + (ASYNC_GRACE_S if self._is_async else 0.0)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._started[oldest] + limit, self._overrun, oldest, False)

    def _overrun(self, number: int, read_again: bool) -> None:
        self._timer = None
        if number not in self._started:
            self._watch()
        elif not read_again:
            # If it was our loop that was late, the answer is in the pipe: read before judging.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LAG_GRACE_S, self._overrun, number, True)
        else:
            self._timed_out = number
            if self._child is not None:
                self._child.kill()  # `next_result` then raises ChildDied

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _start_child(name: str, log: Path, reward: config.Reward) -> RewardChild:
    return await Child.start(
        "lightrl.rewards.worker:main",
        name,
        COMMANDS,
        EVENTS,
        inherited=inherited(os.environ, reward.env),
        env={
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **log_environment("reward"),
        },
        log=log,
        within=reward.command,
    )


async def _set_up(child: RewardChild, setup: Setup) -> bool:
    """Returns whether jobs may overlap.

    Raises ChildDied if the worker has ended; RewardError, and ends it, if it cannot serve.
    """
    child.send(setup)
    try:
        async with asyncio.timeout(START_LIMIT_S):
            event = await child.receive()
    except TimeoutError:
        reason = f"importing {', '.join(setup.functions)} took longer than {START_LIMIT_S:g} s"
    except ChildDied:
        await child.stop()
        raise
    else:
        if isinstance(event, WorkerReady):
            return event.is_async
        reason = (
            event.reason if isinstance(event, WorkerFailed) else f"{child.name}: unexpected {event}"
        )
    child.kill()
    with contextlib.suppress(ChildDied):
        await child.stop()
    raise RewardError(reason)
