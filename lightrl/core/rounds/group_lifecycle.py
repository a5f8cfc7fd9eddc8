"""The outcome of responses and groups: scored, kept, given up, dropped or deferred.

Owns the races of the open rounds: only this module writes the order of finishers and the `bound`
and `cut` that follow from it. `race` decides which responses have lost. Every response that has
lost, waiting or running, is given up in `give_up`.
"""

import bisect

from lightrl.core.commands import Outbox
from lightrl.core.events import ResponseScored
from lightrl.core.responses.queue import WorkQueue
from lightrl.core.responses.responses import ResponseTable
from lightrl.core.rounds import race, rounds
from lightrl.core.rounds.backlog import Backlog, Deferred
from lightrl.core.settings import Settings
from lightrl.core.state import (
    Group,
    GroupState,
    Response,
    ResponseState,
    Round,
)
from lightrl.messages.episodes import EpisodeEnded
from lightrl.messages.responses import FinishReason

MAX_SLOWEST = 100_000  # prompts


class GroupLifecycle:
    """Decides which responses and groups are kept, given up, dropped or deferred. Owns the races of
    the open rounds, and the groups that are settled and not yet decided."""

    def __init__(
        self, settings: Settings, table: ResponseTable, backlog: Backlog, outbox: Outbox
    ) -> None:
        # groups whose responses are all resolved, or that are out of the race; not yet decided
        self.settled: list[Group] = []
        # why the run must end, in one line: its steps have no scores
        self.trouble: str | None = None
        # Group.key -> seconds of the slowest test of any right answer so far, from which the reward
        # "code" takes its limit; empty with run.deterministic, where limits are fixed
        self.slowest_s: dict[str, float] = {}
        self._settings = settings
        self._table = table
        self.backlog = backlog
        self._outbox = outbox
        self._has_scored = False
        self._num_unscored = 0  # steps in a row without any score

    # Responses

    def pop_waiting(self, most: int, queue: WorkQueue | None = None) -> list[Response]:
        """Remove and return up to `most` responses from a queue, by default that of the rollout
        nodes; give up those that have lost."""
        taken: list[Response] = []
        queue = self._table.queue if queue is None else queue
        while len(taken) < most and (response := queue.pop()) is not None:
            if race.has_lost(response):
                self.give_up(response)
            else:
                taken.append(response)
        return taken

    def finish(self, response: Response, reason: FinishReason) -> None:
        """Mark a response as finished and request its score, unless it has lost the race. An
        episode has finished a turn, and waits for its environment."""
        if self._settings.episodes is not None:
            self._table.wait(response, reason)
            if race.has_lost(response):
                self.give_up(response)
        else:
            self._finish(response, reason)

    def end_episode(self, response: Response, outcome: EpisodeEnded) -> None:
        """End an episode that waits for its environment."""
        response.outcome = outcome
        self._table.forget_environment(response)
        self._finish(response, "stop" if outcome.stop == "done" else "length")

    def _finish(self, response: Response, reason: FinishReason) -> None:
        response.finish_reason = reason
        self._table.num_finished += 1
        self._table.release(response)
        response.transition(ResponseState.DONE)
        if race.has_lost(response):
            self.give_up(response)
        else:
            self._outbox.score(response)

    def score(self, scored: ResponseScored) -> None:
        """Store the score of a finished response."""
        name, reward = scored.response, scored.reward
        response = self._table.responses.get(name)
        if response is None or response.attempt != scored.attempt or response.scored:
            return
        if response.state is not ResponseState.DONE:
            return
        group = response.group
        self._outbox.record(scored)
        self._learn_time(group.key, scored.slowest_s)
        if reward is None:
            self._count_failure(group.round, name, scored.failure)
            reward = None if group.round.is_eval else self._settings.reward_on_failure
        else:
            group.round.num_rewards += 1
            self._has_scored = True
        response.reward, response.scored = reward, True
        if not response.resolved:
            self._count(response)

    def count_finished(self, responses: list[Response]) -> None:
        """Count the responses of continued groups that finished in an earlier round."""
        for response in responses:
            if response.state is ResponseState.DONE and response.scored:
                self._count(response)
            elif response.state is ResponseState.DONE:
                self._outbox.score(response)

    def _count(self, response: Response) -> None:
        """Count a scored response as a finisher; give up siblings that have lost by it."""
        group, reward = response.group, response.reward
        if reward is not None or group.round.is_eval or self._settings.skips_unscored:
            group.round.num_scores += 1
            bisect.insort(group.finishers, race.finish_of_response(self._settings, response))
            group.bound = race.bound(self._settings, group)
        self._settle(response)
        for lost in race.losers_of_group(group):
            self.give_up(lost)

    def _learn_time(self, key: str, seconds: float | None) -> None:
        if seconds is None or self._settings.deterministic:
            return
        if key in self.slowest_s or len(self.slowest_s) < MAX_SLOWEST:
            self.slowest_s[key] = max(seconds, self.slowest_s.get(key, 0.0))

    def give_up(self, response: Response) -> None:
        """Remove a response from the race, in any state.

        A finished response still waits for its score, without consequence.
        """
        if response.resolved:
            return
        if response.state is ResponseState.RUNNING:
            self._table.stop(response)
        if response.state is not ResponseState.DONE:
            self._table.forget_environment(response)
            response.transition(ResponseState.ABORTED)
        self._settle(response)

    def _settle(self, response: Response) -> None:
        """Mark a response as resolved: its group no longer depends on it."""
        group = response.group
        response.resolved = True
        group.num_open -= 1
        if not group.num_open:
            group.round.num_open -= 1
        if not group.num_open or race.is_out(group):
            self.settled.append(group)

    # Groups

    def close_settled_groups(self) -> list[Round]:
        """Complete or eliminate the settled groups. Return their rounds."""
        touched: dict[Round, None] = {}
        while self.settled:
            group = self.settled.pop()
            touched[group.round] = None
            if group.state is not GroupState.OPEN:
                continue
            if race.is_won(group):
                self._complete(group)
            elif race.is_out(group):
                self._eliminate(group)
        return list(touched)

    def _complete(self, group: Group) -> None:
        round = group.round
        group.transition(GroupState.COMPLETE)
        if self._settings.dynamic_sampling and not round.is_eval and race.has_zero_std(group):
            if not round.races:  # in a race it is dropped only if it would have won
                self._drop(group)
            return
        bisect.insort(round.finishers, race.finish_of_group(group))
        cut = race.cut(self._settings, round)
        if cut < round.cut:
            round.cut = cut
            for lost in race.losers_of_round(round):
                self.give_up(lost)

    def _eliminate(self, group: Group) -> None:
        """Give up a group that cannot become complete.

        A race defers the group when it ends, whether it is too long or has too few scores: which
        of the two is known first depends on time. A round without a race drops it.
        """
        if group.round.races:
            self._give_up_all(group)
        else:
            self._drop(group)

    def accept_decided(self, round: Round) -> None:
        """Accept the groups that are certain to belong to the step; set the next recheck."""
        round.recheck_at = race.next_recheck(round)
        accepted = race.decided_groups(self._settings, round)
        for group in accepted:
            group.transition(GroupState.ACCEPTED)
        round.accepted += accepted

    def end(self, round: Round) -> None:
        """Defer the groups that a closing round has not accepted."""
        for group in round.groups.values():
            if group.state in {GroupState.OPEN, GroupState.COMPLETE}:
                self._defer_group(group)
        self._table.counters.aborted_tokens += round.aborted_tokens

    def _defer_group(self, group: Group) -> None:
        if race.is_surplus_zero_std(self._settings, group):
            self._drop(group)
            return
        self._give_up_all(group)
        group.transition(GroupState.DEFERRED)
        group.continues = self._settings.tail.continues
        attempts = max(n for r in group.responses for n in (r.attempt, r.incarnation))
        held = tuple(rounds.hold(self._settings, r) for r in group.responses[: group.size])
        held = () if self._settings.tail.fresh_noise else held
        self.defer(Deferred(group.prompt, attempts, group.round.step, held))

    def defer(self, prompt: Deferred) -> None:
        self.backlog.deferred.append(prompt)
        self._table.counters.prompts_put_off += 1

    def _drop(self, group: Group) -> None:
        self._table.counters.groups_dropped += 1
        # dropped although complete: all its rewards were equal; the others lack scores
        self._table.counters.groups_flat += group.state is GroupState.COMPLETE
        self._give_up_all(group)
        group.transition(GroupState.DROPPED)

    def _give_up_all(self, group: Group) -> None:
        for response in group.responses:
            self.give_up(response)

    # Rounds without any score

    def _count_failure(self, round: Round, response: str, failure: str) -> None:
        """Count a reward that failed. Only the first of a round is reported: hundreds may fail for
        the same reason."""
        self._table.counters.rewards_failed += 1
        round.num_failed += 1
        if round.num_failed == 1:
            round.failure = failure
            self._outbox.warn(f"no reward for {response}: {failure}")

    def check_scores(self, round: Round) -> None:
        """Check that a closed round has a score; set `trouble` if the run must end.

        A run without any score so far ends with its first such step or evaluation: the reward
        function is wrong, and later steps would not differ. After the first score the cause may be
        temporary (an overloaded judge), and the run ends after `max_unscored_steps` in a row; with
        episodes, also if most have no score in so many steps.
        """
        most_failed = self._settings.episodes is not None and round.num_failed > round.num_rewards
        if (round.num_rewards and not most_failed) or not round.num_failed:
            if round.num_rewards and not round.is_eval:
                self._num_unscored = 0
            return
        self._num_unscored += not round.is_eval
        what = f"evaluation at step {round.step}" if round.is_eval else f"step {round.step + 1}"
        text = f"{what}: none of {round.num_failed} responses has a score: {round.failure}"
        if round.num_rewards:
            num = round.num_failed + round.num_rewards
            text = f"{what}: {round.num_failed} of {num} episodes have no score: {round.failure}"
        most = self._settings.max_unscored_steps
        if most and not self._has_scored and not self._table.counters.trained_responses:
            self.trouble = text
        elif most and self._num_unscored >= most:
            self.trouble = f"{text} ({self._num_unscored} such steps in a row)"
        else:
            self._outbox.warn(text)

    def forgive(self) -> None:
        """Reset the trouble of a resumed run: the cause may have been fixed."""
        self.trouble, self._num_unscored = None, 0
