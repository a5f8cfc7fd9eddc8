"""The reward pool: worker processes that score responses while others still generate.

Owns the worker processes and the jobs of each. A crash, hang or exception of user code costs one
response its score, never the run. Must not run user code: workers do.

A worker holds a few jobs in advance; they do not count as started. After a kill, those that had not
started return to the head of the queue.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from lightrl.config.reward import Reward
from lightrl.errors import RewardError
from lightrl.rewards.jobs import Jobs, RewardJob, RewardResult
from lightrl.rewards.process import RESTARTS, WorkerProcess
from lightrl.rewards.worker import RewardSet, Setup
from lightrl.system.child import ChildDied
from lightrl.system.restart import CrashCounter


class RewardPool:
    """`await start()`, then `run()` as a task; `submit` at any time; `await stop()` at the end.

    `on_result` is called once for every job, in the order in which they finish, from `run`.
    """

    def __init__(
        self,
        reward: Reward,
        sets: Sequence[RewardSet],
        tokenizer_dir: Path,
        log_dir: Path,
        on_result: Callable[[RewardResult], object],
        report: Callable[[str], None],
        num_steps: int = 0,
        sources: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """`report` gets a line about each worker that ended without a job and starts again.
        `num_steps`: of the run. `sources`: of the functions, see `kept`."""
        model, own = str(tokenizer_dir), dict(sources)
        setup = Setup(reward.model_dump_json(), tuple(sets), model, num_steps, own)
        self._on_result = on_result
        self._report = report
        self._queue: deque[Jobs] = deque()
        self._workers = [
            WorkerProcess(reward, setup, f"reward-{k}", log_dir / f"reward-{k}.log", report)
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

    @property
    def by_group(self) -> tuple[bool, ...]:
        """Of each set, whether all responses of a prompt are scored together; after `start`."""
        return self._workers[0].by_group

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
        batches: dict[WorkerProcess, list[Jobs]] = {}
        hungry = [(w, w.most) for w in self._workers if w.wants_more()]
        while self._queue:
            with_room = [w for w, most in hungry if len(w.jobs) < most]
            if not with_room:
                break
            w = min(with_room, key=lambda w: len(w.jobs))
            jobs = self._queue.popleft()
            w.jobs[w.next_number] = jobs
            w.next_number += 1
            batches.setdefault(w, []).append(jobs)
        for w, batch in batches.items():
            w.send(batch)
