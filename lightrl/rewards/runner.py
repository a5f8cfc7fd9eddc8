"""The reward pool: worker processes that score responses while others still generate.

A crash, hang or exception of user code costs one call its scores, never the run. User code runs in
the workers only (worker.py).

A worker holds a few jobs in advance; they do not count as started. After a kill, those that had not
started return to the head of the queue.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lightrl.config.reward import Reward
from lightrl.core.arrays import encode
from lightrl.errors import RewardError
from lightrl.log import environment as log_environment
from lightrl.rewards.protocol import (
    COMMANDS,
    EVENTS,
    Finished,
    Job,
    Jobs,
    RewardJob,
    RewardResult,
    Scored,
    ScoreJobs,
    Started,
    WorkerCommand,
    WorkerEvent,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
    inherited,
)
from lightrl.system.child import Child, ChildDied, retry_on_resource_limit
from lightrl.system.restart import CrashCounter, RestartPolicy
from lightrl.wire import to_json

START_LIMIT_S = 120.0  # importing user code may load a model
LOOKAHEAD_S = 0.02  # work that a worker holds in advance, which hides the latency of the pool
MAX_IN_FLIGHT = 64  # jobs at one worker
LAG_GRACE_S = 0.05  # for an answer in the pipe
ASYNC_GRACE_S = 1.0  # an asynchronous call is cancelled inside its worker before the kill
# After deaths without a job, each soon after the start.
RESTARTS = RestartPolicy(max_restarts=2, settled_s=10.0)

RewardChild = Child[WorkerCommand, WorkerEvent]


class WorkerProcess:
    """One worker process with its jobs: number -> job, oldest first. Numbers are unique."""

    def __init__(
        self,
        reward: Reward,
        setup: WorkerSetup,
        name: str,
        log: Path,
        report: Callable[[str], None],
    ) -> None:
        self.name = name
        self._reward = reward
        self.is_wanted = True  # else it does not start again
        self.jobs: dict[int, Jobs] = {}
        self.by_group: tuple[bool, ...] = ()
        self._next_number = 0
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
                ready = await _set_up(self._child, self._setup)
            except ChildDied as e:
                if deaths.crashed() is None or not self.is_wanted:
                    raise RewardError(f"importing {self._setup.named}: {e}") from None
                self._report(f"{e}; starting it again")
            else:
                self._is_ready = True
                self._is_async, self.by_group = ready.is_async, ready.by_group
                self._ready_at = asyncio.get_running_loop().time()

    async def stop(self) -> None:
        self._is_ready = False
        self._stop_timer()
        if self._child is not None:
            self._child.kill()  # it has nothing to save, and may hang
            await self._child.stop()

    @property
    def lived_s(self) -> float:
        """Return the seconds since the worker was ready."""
        return asyncio.get_running_loop().time() - self._ready_at

    @property
    def most(self) -> int:
        """Jobs that it may hold."""
        if not self._is_ready:
            return 0
        if self._is_async:
            return MAX_IN_FLIGHT
        return min(MAX_IN_FLIGHT, 1 + int(LOOKAHEAD_S / self._typical_s))

    def wants_more(self) -> bool:
        """Return whether to send jobs, in batches: a message costs as much as a short call."""
        held, most = len(self.jobs), self.most
        return held < most if self._is_async else held <= most // 2 < most

    def add(self, jobs: Jobs) -> Job:
        """Hold these jobs; return the message of them, for `send`."""
        number = self._next_number
        self._next_number += 1
        self.jobs[number] = jobs
        return _job(number, jobs)

    def send(self, batch: Sequence[Job]) -> None:
        assert self._child is not None
        self._child.send(ScoreJobs(tuple(batch)))

    async def next_results(self) -> list[RewardResult]:
        """The results of one job. Raises ChildDied when the worker has ended."""
        assert self._child is not None
        while True:
            match await self._child.receive():
                case Started(number):
                    self._started.pop(number, None)  # the limit is that of a call
                    self._started[number] = asyncio.get_running_loop().time()
                    self._watch()
                case Scored(number, results):
                    del self.jobs[number]
                    self._started.pop(number, None)
                    duration_s = max(sum(r.duration_s for r in results), 1e-5)
                    self._typical_s += (duration_s - self._typical_s) / 8
                    return list(results)
                case other:
                    raise RewardError(f"{self.name}: unexpected {other}")

    def failures(self) -> list[RewardResult]:
        """Remove the jobs that ended the worker from `jobs`, and return their results.

        After a time-out that is the job that ran longest, unless its answer has just arrived; after
        a crash every started job, since asynchronous ones overlap.
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
            for jobs, lasted_s in lost
            for job in jobs
        ]
        self._started.clear()
        self._timed_out = None
        return results

    def take_back(self) -> list[Jobs]:
        """The jobs that the worker still held, oldest first."""
        jobs = list(self.jobs.values())
        self.jobs.clear()
        return jobs

    def _watch(self) -> None:
        """Set the timer for the call that started first, if none is set."""
        if self._timer is None and self._started:
            oldest, began = next(iter(self._started.items()))
            grace_s = ASYNC_GRACE_S if self._is_async else LAG_GRACE_S
            until = began + self._reward.timeout_s + grace_s
            self._timer = asyncio.get_running_loop().call_at(until, self._overrun, oldest, began)

    def _overrun(self, number: int, began: float) -> None:
        self._timer = None
        if self._started.get(number) != began:
            self._watch()
        else:
            self._timed_out = number
            if self._child is not None:
                self._child.kill()  # `next_results` then raises ChildDied

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RewardPool:
    """`await start()`, then `run()` as a task; `submit` at any time; `await stop()` at the end.

    `on_result` is called once for every job, in the order in which they finish, from `run`. Without
    any function there are no workers, and no job may be submitted.
    """

    def __init__(
        self,
        reward: Reward,
        setup: WorkerSetup,
        log_dir: Path,
        on_result: Callable[[RewardResult], object],
        report: Callable[[str], None],
    ) -> None:
        """`report` gets a line about each worker that ended without a job and starts again."""
        self._on_result = on_result
        self._report = report
        self._queue: deque[Jobs] = deque()
        self._workers = [
            WorkerProcess(reward, setup, f"reward-{k}", log_dir / f"reward-{k}.log", report)
            for k in range(reward.workers if setup.named else 0)
        ]
        self._none_by_group = (False,) * len(setup.sets)
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

    @property
    def by_group(self) -> tuple[bool, ...]:
        """Return by set whether all responses of a prompt are scored together; after `start`."""
        return self._workers[0].by_group if self._workers else self._none_by_group

    def submit(self, *jobs: RewardJob) -> None:
        """Queue responses of one prompt, which functions of lists get in one call."""
        self._queue.append(jobs)
        self._dispatch()

    async def stop(self) -> None:
        """Kill the workers; jobs without a result are lost."""
        self._stopping = True
        for w in self._workers:
            w.is_wanted = False
        await asyncio.gather(*(w.stop() for w in self._workers))

    async def _serve(self, w: WorkerProcess) -> None:
        idle_deaths = CrashCounter(RESTARTS)
        while not self._stopping:
            try:
                results = await w.next_results()
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
                self._dispatch()  # to the others
                await self._restart(w)
            else:
                idle_deaths.progressed()
                for result in results:
                    self._on_result(result)
            self._dispatch()

    async def _restart(self, w: WorkerProcess) -> None:
        await w.stop()
        try:
            await w.start()
        except RewardError:
            if not self._stopping:  # else `stop` killed it
                raise
        if self._stopping:
            await w.stop()

    def _dispatch(self) -> None:
        """Fill the workers evenly: one job at a time to the emptiest, then one frame to each."""
        if not self._queue:
            return
        batches: dict[WorkerProcess, list[Job]] = {}
        ready = [(w, w.most) for w in self._workers if w.wants_more()]
        while self._queue:
            with_room = [w for w, most in ready if len(w.jobs) < most]
            if not with_room:
                break
            w = min(with_room, key=lambda w: len(w.jobs))
            batches.setdefault(w, []).append(w.add(self._queue.popleft()))
        for w, batch in batches.items():
            w.send(batch)


async def _start_child(name: str, log: Path, reward: Reward) -> RewardChild:
    return await Child.start(
        "lightrl.rewards.worker:main",
        name,
        COMMANDS,
        EVENTS,
        inherited=inherited(os.environ, reward.environment),
        env={
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **log_environment("reward"),
        },
        log=log,
        within=reward.command,
    )


def _job(number: int, jobs: Jobs) -> Job:
    one = jobs[0]
    responses = tuple(
        Finished(j.response, j.attempt, encode(j.tokens), j.finish_reason, j.episode) for j in jobs
    )
    row = to_json(one.row)
    where = one.step, one.epoch, one.slowest_s
    return Job(number, one.prompts, one.prompt_text, row, responses, *where)


async def _set_up(child: RewardChild, setup: WorkerSetup) -> WorkerReady:
    """Raises ChildDied if the worker has ended; RewardError after ending one that cannot serve."""
    child.send(setup)
    try:
        async with asyncio.timeout(START_LIMIT_S):
            event = await child.receive()
    except TimeoutError:
        reason = f"importing {setup.named} took longer than {START_LIMIT_S:g} s"
    except ChildDied:
        await child.stop()
        raise
    else:
        if isinstance(event, WorkerReady):
            return event
        reason = (
            event.reason if isinstance(event, WorkerFailed) else f"{child.name}: unexpected {event}"
        )
    child.kill()
    with contextlib.suppress(ChildDied):
        await child.stop()
    raise RewardError(reason)
