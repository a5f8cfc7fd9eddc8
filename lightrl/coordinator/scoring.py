"""Finished responses on their way to the reward pool, and what comes back of it.

Owns the pool, and which responses are scored in one call. Must not run user code (rewards/ does),
nor say what a response without a score is worth: the core does.

Where functions compare the responses of a prompt, a group waits until all of them have finished.
That they will is what the core promises of a group that does not race within itself: either they
have all finished, or the whole group is out.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from lightrl.config import Config
from lightrl.coordinator.prompts import Prompts
from lightrl.core.commands import ScoreResponse
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import ResponseScored
from lightrl.core.state import Group, Response, ResponseState, Round, RoundState
from lightrl.errors import RewardError
from lightrl.metrics.round_figures import sample_of
from lightrl.metrics.rounds import Records
from lightrl.metrics.samples import SamplesLog
from lightrl.rewards.jobs import RewardJob, RewardResult
from lightrl.rewards.runner import RewardPool


class Scoring:
    def __init__(
        self,
        config: Config,
        tokenizer_dir: Path,
        log_dir: Path,
        prompts: Prompts,
        core: Coordinator,
        records: Records,
        feed: Callable[[ResponseScored], None],
        report: Callable[[str], None],
    ) -> None:
        """`log_dir` lies in the run directory. `await start()`, then `pool.run()`; `submit` at any
        time; `pool.stop()` and `samples.close()` at the end."""
        sets, steps = prompts.scored_alike, config.train.steps
        self.pool = RewardPool(
            config.reward, sets, tokenizer_dir, log_dir, self._scored, report, steps
        )
        self.samples = SamplesLog(log_dir.parent, config.logging.samples, report)
        self._config = config
        self._prompts = prompts
        self._core = core
        self._records = records
        self._feed = feed
        self._by_group: tuple[bool, ...] | None = None  # None: not known yet
        self._early: list[ScoreResponse] = []  # until it is
        self._gathered = GatheredGroups()

    async def start(self) -> None:
        """Raises RewardError, one line, if the functions cannot be used."""
        await self.pool.start()
        self._by_group = self.pool.by_group
        require_whole_groups(self._config, self._by_group)
        early, self._early = self._early, []
        for command in early:
            self.submit(command)

    def submit(self, command: ScoreResponse) -> None:
        response, group = command.response, command.response.group
        if self._by_group is None:
            self._early.append(command)
        elif not self._by_group[self._prompts.scored_as(group.prompt.id, group.round.is_eval)]:
            self.pool.submit(self._job(response))
        elif self._gathered.add(response):
            self.pool.submit(*map(self._job, group.responses))

    def _job(self, r: Response) -> RewardJob:
        group = r.group
        task = self._prompts.get(group.prompt.id, group.round.is_eval)
        assert r.finish_reason is not None
        return RewardJob(
            r.id,
            r.attempt,
            task.text,
            task.row,
            r.tokens,
            r.finish_reason,
            prompts=self._prompts.scored_as(group.prompt.id, group.round.is_eval),
            step=group.round.step,
            epoch=group.prompt.epoch,
        )

    def _scored(self, result: RewardResult) -> None:
        response = self._core.table.responses.get(result.response)
        done = response is not None and response.state is ResponseState.DONE
        # one that came too late is no figure and no sample
        if response is not None and done and response.attempt == result.attempt:
            self._records.scored(response, result.metrics, result.failure, result.duration_s)
            task = self._prompts.get(response.group.prompt.id, response.group.round.is_eval)
            self.samples.write(
                response, task.text, result.text, result.reward, result.metrics, result.failure
            )
            text = result.text + "".join(f"\n[{k}: {v}]" for k, v in result.extras.items())
            self._records.sample(sample_of(response, task.text, text, result.reward))
        self._feed(ResponseScored(result.response, result.attempt, result.reward, result.failure))


def require_whole_groups(config: Config, by_group: Sequence[bool]) -> None:
    """Raises RewardError if functions are to compare responses that race each other."""
    if any(by_group) and config.round.etas[1] > 1:
        raise RewardError(
            f"round.tail_batching = {config.round.tail_batching!r}: the responses of a prompt "
            "race, and a reward function is to get all of them at once: set reward.batch = "
            "'response', or round.tail_batching = 'prompts'"
        )


class GatheredGroups:
    """Finished responses that wait for their siblings."""

    def __init__(self) -> None:
        self._waiting: dict[Round, dict[Group, set[int]]] = {}

    def add(self, response: Response) -> bool:
        """Whether it was the last of its group. Those that a coordinator before this one has scored
        wait for nobody."""
        group = response.group
        if group.round not in self._waiting:
            open_ones = {RoundState.FILLING, RoundState.RUNNING}
            rounds = self._waiting.items()
            self._waiting = {r: groups for r, groups in rounds if r.state in open_ones}
        groups = self._waiting.setdefault(group.round, {})
        waiting = groups.setdefault(group, set())
        waiting.add(response.index)
        is_last = all(r.scored or r.index in waiting for r in group.responses)
        if is_last:
            del groups[group]
        return is_last
