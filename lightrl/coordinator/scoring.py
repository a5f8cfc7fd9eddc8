"""Send finished responses to the reward pool, and return their scores.

Owns the pool, the choice of responses that are scored in one call, and that missing rows are read
first, outside the event loop. Must not run user code (rewards/ does), nor decide what a response
without a score is worth: the core does.

Where functions compare the responses of a prompt, a group waits until all of them have finished.
The core guarantees that they do for a group that does not race within itself: either all of them
finish, or the whole group is dropped.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightrl.config.reward import is_own_function
from lightrl.config.schema import Config
from lightrl.coordinator.prompts import Prompts
from lightrl.coordinator.samples import SamplesLog, messages_of, texts_of
from lightrl.core import waits
from lightrl.core.commands import ScoreResponse
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import ResponseScored
from lightrl.core.state import Group, Response, ResponseState, Round, RoundState, sampled_spans
from lightrl.data.prompts import Prompt
from lightrl.errors import RewardError
from lightrl.metrics.round_figures import sample_of
from lightrl.metrics.rounds import Records
from lightrl.rewards import kept
from lightrl.rewards.base import SLOWEST, why_no_score
from lightrl.rewards.episodes import EpisodeRecord
from lightrl.rewards.protocol import RewardJob, RewardResult, WorkerSetup
from lightrl.rewards.runner import RewardPool
from lightrl.rewards.trial import Trials

# How long a run waits for the trial of its reward functions before it starts its daemons.
PATIENCE_S = 0.5
NO_REWARD = "the environment gave no reward; let it give one, or set reward.functions"


class ResponseScoring:
    """Scores finished responses by the reward pool, and feeds the scores to the core. Owns the pool
    and the responses on their way to it; decides which of them are scored in one call."""

    def __init__(
        self,
        tokenizer_dir: Path,
        log_dir: Path,
        prompts: Prompts,
        core: Coordinator,
        records: Records,
        feed: Callable[[ResponseScored], None],
        report: Callable[[str], None],
    ) -> None:
        """`log_dir` lies in the run directory. `serve` as a task; `submit` at any time;
        `pool.stop()` and `samples.close()` at the end. Raises RewardError."""
        config, sets = prompts.config, prompts.scored_alike
        functions = [name for each in sets for name in each.functions if is_own_function(name)]
        place, is_anew = log_dir.parent / kept.FOLDER, config.reward.source == "files"
        own, change = kept.sources(functions, place, is_anew)
        if change:
            report(change)
        reward, steps = config.reward.model_dump_json(), config.train.steps
        setup = WorkerSetup(reward, sets, str(tokenizer_dir), steps, own)
        self.pool = RewardPool(config.reward, setup, log_dir, self._scored, report)
        self.samples = SamplesLog(log_dir.parent, config.logging.samples, report)
        self._prompts = prompts
        self._core = core
        self._records = records
        self._feed = feed
        self._report = report
        self._by_group: tuple[bool, ...] | None = None  # None: not open yet
        self._early: list[ScoreResponse] = []  # until it is
        self._gathered = GatheredGroups()
        self._unread: asyncio.Queue[Sequence[Response]] = asyncio.Queue()  # of one prompt each
        self._num_unread = 0  # responses in there
        self._by_environment: asyncio.Queue[RewardResult] = asyncio.Queue()
        self._prompt_texts: dict[tuple[str, int], str] = {}  # of (response, attempt) in the pool
        self._trials = Trials(config.reward)
        records.waits.scoring = lambda: waits.Scoring(self._num_unscored, config.reward.workers)

    @property
    def _num_unscored(self) -> int:
        """Count responses in the pool, or on the way to it."""
        return len(self._early) + self._num_unread + len(self._prompt_texts)

    async def serve(
        self, announce: Callable[[], Coroutine[Any, Any, None]], tries_rows: bool
    ) -> None:
        """Score responses until cancelled. `announce` is called as soon as the functions can be
        used. With `tries_rows` they are tried with a row of each set before any response is scored;
        a trial that takes long is finished after `announce`.

        Raises RewardError, one line, if they cannot be used or never give a score, or if the
        workers cannot be kept alive; DataError for a row that cannot be read.
        """
        await self.pool.start()
        require_whole_groups(self._prompts.config, self.pool.by_group)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.pool.run(), name="pool")
            tasks.create_task(self._read(), name="rows")
            tasks.create_task(self._score_episodes(), name="episodes")
            trying = tasks.create_task(self._try_rows(tries_rows), name="first rows")
            await asyncio.wait({trying}, timeout=PATIENCE_S)
            tasks.create_task(announce(), name="announce")
            await trying
            self._by_group = self.pool.by_group
            early, self._early = self._early, []
            for command in early:
                self.submit(command)

    async def _try_rows(self, is_wanted: bool) -> None:
        rows = await self._prompts.first_rows() if is_wanted else ()
        for each in await self._trials.run(self.pool, rows):
            if each.verdict == "fail":
                raise RewardError(each.note)
            if each.note:
                self._report(f"rewards: {each.note}")

    def submit(self, command: ScoreResponse) -> None:
        """Pass a finished response to the pool. Where functions compare the responses of a prompt,
        it waits for the others."""
        response, group = command.response, command.response.group
        if self._by_group is None:
            self._early.append(command)
        elif not self._by_group[self._prompts.scored_as(group.prompt.id, group.round.is_eval)]:
            self._hand_over((response,))
        elif self._gathered.add(response):
            self._hand_over(group.responses)

    def _hand_over(self, responses: Sequence[Response]) -> None:
        """Pass responses of one prompt to the pool, and those that the environment alone scores to
        `_score_episodes`: this may be called while the core carries out an event."""
        group = responses[0].group
        index = self._prompts.scored_as(group.prompt.id, group.round.is_eval)
        has_functions = bool(self._prompts.scored_alike[index].functions)
        left: list[Response] = []
        for r in responses:
            if (result := environment_result(r, has_functions)) is None:
                left.append(r)
            else:
                self._prompt_texts[r.id, r.attempt] = ""
                self._by_environment.put_nowait(result)
        if not left:
            return
        task = self._prompts.known(group.prompt.id, group.round.is_eval)
        if task is None:
            self._num_unread += len(left)
            self._unread.put_nowait(left)
        else:
            self.pool.submit(*(self._job(r, task) for r in left))

    async def _score_episodes(self) -> None:
        while True:
            self._scored(await self._by_environment.get())

    async def _read(self) -> None:
        """Read rows of prompts that were drawn long ago, or by another process."""
        while True:
            responses = await self._unread.get()
            group = responses[0].group
            task = await self._prompts.get(group.prompt.id, group.round.is_eval)
            self._num_unread -= len(responses)
            if self._core.table.responses.get(responses[0].id) is responses[0]:  # still wanted
                self.pool.submit(*(self._job(r, task) for r in responses))

    def _job(self, r: Response, task: Prompt) -> RewardJob:
        group = r.group
        assert r.finish_reason is not None
        self._prompt_texts[r.id, r.attempt] = task.text
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
            slowest_s=self._core.lifecycle.slowest_s.get(group.key),
            episode=record_of(r),
        )

    def _scored(self, result: RewardResult) -> None:
        if self._trials.take(result):
            return
        prompt = self._prompt_texts.pop((result.response, result.attempt))
        response = self._core.table.responses.get(result.response)
        done = response is not None and response.state is ResponseState.DONE
        # one that came too late is no figure and no sample
        if response is not None and done and response.attempt == result.attempt:
            figures = (response.outcome.metrics if response.outcome else {}) | result.metrics
            self._records.scored(response, figures, result.failure, result.duration_s)
            chat = messages_of(response)
            self.samples.write(response, prompt, result, chat)
            prompt, text = texts_of(chat, prompt, result)
            text += "".join(f"\n[{k}: {v}]" for k, v in result.extras.items())
            self._records.sample(sample_of(response, prompt, text, result.reward))
        r = result
        self._feed(
            ResponseScored(r.response, r.attempt, r.reward, r.failure, slowest_of(r.metrics))
        )


def environment_result(response: Response, has_functions: bool) -> RewardResult | None:
    """Return the result of an episode that failed, or that no function scores; else None."""
    outcome = response.outcome
    if outcome is None or (has_functions and not outcome.failure):
        return None
    reward, failure = outcome.reward, outcome.failure
    if reward is None:
        failure = failure or NO_REWARD
    elif why := why_no_score(reward):
        failure = failure or f"the environment's reward is {why}"
    reward = None if failure else reward
    return RewardResult(response.id, response.attempt, reward, {}, "", 0.0, failure)


def record_of(response: Response) -> EpisodeRecord | None:
    """Return an episode that has ended, for reward functions; None for a single turn."""
    turns, outcome = response.turns, response.outcome
    if outcome is None:
        return None
    return EpisodeRecord(
        tuple(sampled_spans(turns, len(response.tokens))),
        (*(turn.record for turn in turns), outcome.record),
        (*(turn.reward for turn in turns[1:]), *((outcome.turn_reward,) * bool(turns))),
        outcome.reward,
    )


def slowest_of(metrics: Mapping[str, float]) -> float | None:
    """Return the figure of the reward "code", alone or among several functions."""
    return metrics.get(SLOWEST, metrics.get(f"code/{SLOWEST}"))


def require_whole_groups(config: Config, by_group: Sequence[bool]) -> None:
    """Raise RewardError if functions are to compare responses that race each other."""
    if any(by_group) and config.round.etas[1] > 1:
        raise RewardError(
            f"round.tail_batching = {config.round.tail_batching!r}: the responses of a prompt "
            "race, and a reward function is to get all of them together: set reward.batch = "
            "'response', or round.tail_batching = 'prompts'"
        )


class GatheredGroups:
    """Finished responses that wait for their siblings."""

    def __init__(self) -> None:
        self._waiting: dict[Round, dict[Group, set[int]]] = {}

    def add(self, response: Response) -> bool:
        """Add a response and return whether it was the last of its group. Responses that an earlier
        coordinator has scored count as finished."""
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
