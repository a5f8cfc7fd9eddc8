"""Finished responses on their way to the reward pool, and what comes back of it.

Owns the pool. Must not run user code (rewards/ does), nor say what a response without a score is
worth: the core does.
"""

from collections.abc import Callable
from pathlib import Path

from lightrl.config import Config
from lightrl.coordinator.prompts import Prompts
from lightrl.core.commands import ScoreResponse
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import ResponseScored
from lightrl.core.state import ResponseState
from lightrl.metrics.round_figures import sample_of
from lightrl.metrics.rounds import Records
from lightrl.rewards.runner import RewardJob, RewardPool, RewardResult


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
        """`await pool.start()`, then `pool.run()`; `submit` at any time, `pool.stop()` at the
        end."""
        answer_key = config.data.answer_key
        self.pool = RewardPool(
            config.reward, tokenizer_dir, answer_key, log_dir, self._scored, report
        )
        self._prompts = prompts
        self._core = core
        self._records = records
        self._feed = feed

    def submit(self, command: ScoreResponse) -> None:
        r = command.response
        task = self._prompts.get(command.prompt, command.source == "eval")
        assert r.finish_reason is not None
        self.pool.submit(RewardJob(r.id, r.attempt, task.text, task.row, r.tokens, r.finish_reason))

    def _scored(self, result: RewardResult) -> None:
        response = self._core.table.responses.get(result.response)
        done = response is not None and response.state is ResponseState.DONE
        # one that came too late is no figure and no sample
        if response is not None and done and response.attempt == result.attempt:
            self._records.reward_figures(response, result.metrics)
            task = self._prompts.get(response.group.prompt.id, response.group.round.is_eval)
            self._records.sample(sample_of(response, task.text, result.text, result.reward))
        self._feed(ResponseScored(result.response, result.attempt, result.reward, result.failure))
