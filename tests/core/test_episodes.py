"""Episodes in the core: turns, observations, losses at every moment, and the journal."""

import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import pytest

from lightrl.core.commands import Command, Send
from lightrl.core.events import MessageArrived, NodeLost
from lightrl.core.rounds.rounds import hold
from lightrl.core.settings import EpisodeSettings, Tail
from lightrl.core.state import DrawnPrompt, ResponseState, RunState
from lightrl.messages.episodes import (
    BeginEpisode,
    EndEpisode,
    EpisodeEnded,
    Observed,
    StepEpisode,
)
from lightrl.messages.responses import Abort, Generate, ResponseTokens, TokenChunk
from lightrl.messages.training import TrainResponse, TrainShard
from lightrl.trainer.algorithm.advantage import advantages
from tests.core.conftest import Driver, ids, sent

TURN = 3  # tokens, sampled in two chunks


@dataclass
class Environment:
    """Plays episodes of a fixed number of turns; counts how often each turn was stepped."""

    incarnation: dict[str, int] = field(default_factory=dict[str, int])
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    turns: dict[str, int] = field(default_factory=dict[str, int])
    begun: list[BeginEpisode] = field(default_factory=list[BeginEpisode])
    # that end without a score, at any moment
    broken: set[str] = field(default_factory=set[str])

    def receive(self, message: Any) -> list[Observed | EpisodeEnded]:
        match message:
            case BeginEpisode():
                name = message.response
                # else answers to an older coordinator would count
                older = [b.incarnation for b in self.begun if b.response == name]
                assert message.incarnation > max(older, default=0)
                self.begun.append(message)
                self.incarnation[name] = message.incarnation
                self.tokens[name], self.turns[name] = [], 0
                for turn in message.turns:
                    self.tokens[name] += [*array("i", turn.observation), *array("i", turn.sampled)]
                    self.turns[name] += 1
                return [self.observe(name)]
            case StepEpisode(name, incarnation, turn, token_ids):
                if self.incarnation.get(name) != incarnation or turn != self.turns[name] - 1:
                    return []
                self.tokens[name] += array("i", token_ids)
                return [self.observe(name)]
            case EndEpisode(episodes):
                for name, incarnation in episodes:
                    if self.incarnation.get(name) == incarnation:
                        del self.incarnation[name]
                return []
            case _:
                return []

    def observe(self, name: str) -> Observed | EpisodeEnded:
        tokens, number = self.tokens[name], self.turns[name]
        if name in self.broken and number == sum(name.encode()) % 2:
            return EpisodeEnded(name, self.incarnation[name], number, "failed", failure="lost")
        if number == 1 + sum(name.encode()) % 3:
            reward = float(sum(tokens) % 2)
            return EpisodeEnded(name, self.incarnation[name], number, "done", reward)
        observation = ids(50 + number, 60 + sum(tokens) % 30)
        offset = len(tokens)
        tokens += array("i", observation)
        self.turns[name] += 1
        return Observed(name, self.incarnation[name], number, offset, observation, 5, "d", "[]")


class Episodes(Driver):
    """Rollout nodes sample tokens that depend on seed and position; messages wait in a queue, so
    that a test can lose any of them with its node."""

    def __init__(
        self,
        rollouts: int = 2,
        environments: int = 1,
        broken: set[str] | None = None,
        **changes: Any,
    ) -> None:
        changes = {"episodes": EpisodeSettings(), "max_response_tokens": 50, **changes}
        super().__init__(**changes)
        self.queue: deque[tuple[str, Any]] = deque()  # (node, message of the coordinator)
        self.at: dict[str, Environment] = {}
        self.broken = broken or set[str]()
        self.engines: dict[str, dict[str, Any]] = {}
        self.trained: dict[str, TrainResponse] = {}
        self.scores: dict[str, float] = {}
        self.clock = 0
        self.start()
        for k in range(rollouts):
            self.add_rollout(f"r{k}")
        for k in range(environments):
            self.add_environment(f"e{k}")

    def draw(self, count: int) -> tuple[DrawnPrompt, ...]:
        return tuple(replace(prompt, tokens=b"") for prompt in super().draw(count))

    def add_rollout(self, name: str) -> None:
        self.engines[name] = {}
        self.clock += 1
        self.take(self.join(name, incarnation=self.clock))
        version = self.core.fleet.published
        assert version is not None
        self.take(self.confirm(name, version.policy_version))

    def add_environment(self, name: str) -> None:
        self.at[name] = Environment(broken=self.broken)
        self.clock += 1
        self.take(self.join(name, "environment", slots=64, incarnation=self.clock))

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if not isinstance(command, Send):
                continue
            if isinstance(command.message, TrainShard):
                for group in command.message.groups:
                    assert group.prompt == b""
                    for response in group.responses:
                        before = self.trained.setdefault(response.response, response)
                        assert before == response
            self.queue.append((command.node, command.message))

    def event(self, event: Any) -> None:
        self.take(self.feed(event, self.now + 0.01))

    def play(self, accident: Callable[[], None] = lambda: None) -> None:  # type: ignore[override]
        """Until nothing is left to do in this step."""
        while self.queue or any(self.engines.values()) or self.unscored():
            accident()
            if self.queue:
                node, message = self.queue.popleft()
                self.deliver(node, message)
            elif (name := next((n for n, e in self.engines.items() if e), None)) is not None:
                self.sample(name)
            for name in self.unscored():
                outcome = self.held(name).outcome
                assert outcome is not None
                self.take(self.score(name, outcome.reward, outcome.failure))

    def unscored(self) -> list[str]:
        held = self.core.table.responses.values()
        return [r.id for r in held if r.state == "done" and not r.scored and not r.resolved]

    def deliver(self, node: str, message: Any) -> None:
        if node in self.at:
            for answer in self.at[node].receive(message):
                self.event(MessageArrived(node, answer))
        elif node in self.engines:
            if isinstance(message, Generate):
                for request in message.requests:
                    assert request.prompt == b""
                    self.engines[node][request.response] = request
            elif isinstance(message, Abort):
                for name, attempt in message.attempts:
                    request = self.engines[node].get(name)
                    if request is not None and request.attempt == attempt:
                        del self.engines[node][name]

    def sample(self, node: str) -> None:
        """A response of this node gets some tokens."""
        name, request = next(iter(self.engines[node].items()))
        del self.engines[node][name]
        prefix = list(array("i", request.prefix))
        done = len(prefix) - request.turn_start
        new = [
            random.Random(f"{request.seed} {position}").randrange(40)
            for position in range(len(prefix), len(prefix) + min(2, TURN - done))
        ]
        ended = done + len(new) == TURN
        if not ended:
            prefix += new
            self.engines[node][name] = request.__class__(
                name, request.attempt, request.seed, b"", ids(*prefix), 9, request.turn_start
            )
        logs = array("f", [-0.1 * t for t in new]).tobytes()
        offset = len(prefix) - (0 if ended else len(new))
        finish = "stop" if ended else None
        item = ResponseTokens(name, request.attempt, offset, ids(*new), logs, finish)
        version = self.version_at(node)
        self.event(MessageArrived(node, TokenChunk(version, f"digest-{version}", (item,))))

    def lose(self, node: str) -> None:
        """The node dies with all messages to it, and another process takes its place."""
        self.queue = deque(m for m in self.queue if m[0] != node)
        self.event(NodeLost(node, "killed"))
        if node in self.at:
            self.add_environment(node)
        else:
            self.add_rollout(node)

    def lose_coordinator(self) -> None:
        """The coordinator dies; the nodes stay, and what was sent to it since is lost."""
        self.queue.clear()
        commands = self.restart()
        self.take(commands)
        self.take(self.join("t", "trainer"))
        self.take(self.publish(0))
        for name, engine in self.engines.items():
            running = {r.response: r.attempt for r in engine.values()}
            self.clock += 1
            self.take(self.join(name, incarnation=self.clock, serves=0, running=running))
        for name, environment in self.at.items():
            self.clock += 1
            self.take(
                self.join(
                    name,
                    "environment",
                    slots=64,
                    incarnation=self.clock,
                    running=dict(environment.incarnation),
                )
            )


def played(**changes: Any) -> Episodes:
    driver = Episodes(**changes)
    driver.play()
    return driver


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, TrainResponse]:
    return played().trained


def bits(mask: bytes, length: int) -> list[int]:
    return [mask[i // 8] >> (i % 8) & 1 for i in range(length)]


def test_observations_are_inserted_and_masked(undisturbed: dict[str, TrainResponse]):
    assert len(undisturbed) == 4
    for name, response in undisturbed.items():
        num_turns = 1 + sum(name.encode()) % 3
        tokens = list(array("i", response.token_ids))
        assert len(tokens) == num_turns * (2 + TURN)
        assert bits(response.loss_mask, len(tokens)) == ([0] * 2 + [1] * TURN) * num_turns
        logs = array("f", response.rollout_logprobs)
        assert all(logs[k] == 0 for k in range(len(tokens)) if k % 5 < 2)
        assert tokens[0::5] == [50 + k for k in range(num_turns)]


def test_a_waiting_episode_has_no_slot_and_remembers_its_node():
    driver = Episodes(rollouts=1)
    while not any(r.finishes for r in driver.core.table.responses.values()):
        if driver.queue:
            driver.deliver(*driver.queue.popleft())
        else:
            driver.sample("r0")
    (response,) = (r for r in driver.core.table.responses.values() if r.finishes)
    assert response.state is ResponseState.WAITING
    assert response.node is None
    assert response.last_node == "r0"
    assert response.id not in driver.core.fleet.nodes["r0"].running


def test_a_message_that_comes_twice_changes_nothing(undisturbed: dict[str, TrainResponse]):
    class Twice(Episodes):
        def event(self, event: Any) -> None:
            super().event(event)
            super().event(event)

    driver = Twice()
    driver.play()
    assert driver.trained == undisturbed


def test_seeds_of_environments_are_those_of_prompts():
    driver = played()
    begun = driver.at["e0"].begun
    seeds = {(b.response.partition("@")[0], b.seed) for b in begun}
    assert len(begun) == 4
    assert len(seeds) == 2


@pytest.mark.parametrize("seed", range(40))
def test_losses_at_any_moment_change_no_trained_token(
    seed: int, undisturbed: dict[str, TrainResponse]
):
    driver = Episodes(rollouts=2, environments=2)
    rng = random.Random(seed)

    def accident() -> None:
        if rng.random() < 0.1:
            victim = rng.choice(["r0", "r1", "e0", "e1", "head", "all"])
            if victim in {"head", "all"}:
                driver.lose_coordinator()
            if victim == "all":
                for name in ("r0", "r1", "e0", "e1"):
                    driver.lose(name)
            elif victim != "head":
                driver.lose(victim)

    driver.play(accident)
    assert driver.trained == undisturbed


@pytest.fixture(scope="module")
def whole_step() -> Episodes:
    return played(**MANY)


MANY: dict[str, Any] = {
    "prompts_per_step": 8,
    "group_size": 8,
    "reward_on_failure": None,
    "skips_unscored": True,
    "max_unscored_steps": 5,
    "num_steps": 20,
}


def test_episodes_that_infrastructure_killed_leave_rewards_and_advantages_as_they_were(
    whole_step: Episodes,
):
    names = sorted(whole_step.trained)
    broken = set(random.Random(7).sample(names, len(names) * 15 // 100))
    driver = Episodes(broken=broken, **MANY)
    driver.play()
    assert driver.trained == {n: r for n, r in whole_step.trained.items() if n not in broken}
    assert driver.round.num_failed == len(broken) == 9
    seen, whole = (rewards(d.trained) for d in (driver, whole_step))
    means = [fmean(r for group in d.values() for r in group.values()) for d in (seen, whole)]
    assert abs(means[0] - means[1]) < 2 * 0.5 * math.sqrt(1 / 55 - 1 / 64)  # two deviations
    changes = list[float]()
    for group, of_group in seen.items():
        before = dict(
            zip(whole[group], advantages("dr_grpo", [*whole[group].values()]), strict=True)
        )
        for name, advantage in zip(
            of_group, advantages("dr_grpo", [*of_group.values()]), strict=True
        ):
            changes.append(advantage - before[name])
    assert abs(fmean(changes)) < 0.05
    assert fmean(map(abs, changes)) < 0.1


def rewards(trained: dict[str, TrainResponse]) -> dict[str, dict[str, float]]:
    """By group and name."""
    found: dict[str, dict[str, float]] = {}
    for name, response in trained.items():
        found.setdefault(name.partition("#")[0], {})[name] = response.reward
    return found


def test_a_run_most_of_whose_episodes_fail_ends_after_five_steps():
    driver = Episodes(**{**MANY, "prompts_per_step": 1, "group_size": 5})
    driver.play()
    for step in range(1, 6):
        assert driver.core.state is RunState.RUNNING
        driver.broken |= {
            f"p{k}@{epoch}#{j}" for k in range(99) for epoch in (0, 1) for j in (0, 2, 3)
        }
        driver.take(driver.next_step())
        driver.play()
        assert driver.round.step == step
    assert driver.core.state is RunState.FINISHING
    assert driver.core.lifecycle.trouble == (
        "step 6: 3 of 5 episodes have no score: lost (5 such steps in a row)"
    )


def test_an_environment_that_failed_gives_no_score():
    driver = Episodes(reward_on_failure=None, skips_unscored=True, group_size=3)
    begun = sent_begun(driver)
    name = begun.response
    failed = EpisodeEnded(name, begun.incarnation, 0, "failed", None, failure="broken")
    driver.event(MessageArrived("e0", failed))
    held = driver.held(name)
    assert held.state is ResponseState.DONE
    assert held.outcome is not None
    assert held.outcome.failure == "broken"
    assert ("e0", EndEpisode(((name, begun.incarnation),))) in driver.queue


def sent_begun(driver: Episodes) -> BeginEpisode:
    return next(m for _, m in driver.queue if isinstance(m, BeginEpisode))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": b""}, "malformed"),
        ({"token_ids": ids(1)[:3]}, "malformed"),
        ({"offset": 7}, "malformed"),
        ({"token_ids": ids(100)}, "outside the vocabulary"),
        ({"token_ids": ids(-1)}, "outside the vocabulary"),
    ],
)
def test_an_observation_that_cannot_be_inserted_loses_its_node(change: dict[str, Any], reason: str):
    driver = Episodes()
    begun = sent_begun(driver)
    fields = {"offset": 0, "token_ids": ids(1), **change}
    message = Observed(begun.response, 1, 0, max_new_tokens=5, digest="", record="", **fields)
    driver.event(MessageArrived("e0", message))
    assert "e0" not in driver.core.fleet.nodes


def test_a_rollout_node_can_neither_insert_nor_end():
    driver = Episodes()
    begun = sent_begun(driver)
    for message in (
        Observed(begun.response, 1, 0, 0, ids(1), 5, "", ""),
        EpisodeEnded(begun.response, 1, 0, "done", 1.0),
    ):
        driver.event(MessageArrived("r0", message))
    held = driver.held(begun.response)
    assert held.state is ResponseState.WAITING
    assert not held.tokens


def test_an_episode_that_lost_its_race_is_ended_at_its_environment():
    driver = Episodes(
        tail=Tail(eta_prompts=1.5, eta_responses=1.5), prompts_per_step=2, group_size=2
    )
    driver.play()
    over = {name for r in driver.at.values() for name in r.incarnation}
    assert not over
    assert len(driver.trained) == 4


def test_as_many_are_open_as_keep_the_engines_busy():
    driver = Episodes(rollouts=1, prompts_per_step=20, episodes=EpisodeSettings(max_open=3))
    assert len(driver.core.table.open_episodes) == 3
    driver.play()
    assert len(driver.trained) == 40
    unmeasured = Episodes(rollouts=1, prompts_per_step=20)
    assert len(unmeasured.core.table.open_episodes) == 8  # of 4 slots
    unmeasured.core.table.turn_s.seconds, unmeasured.core.table.turn_s.num = 1.0, 99
    unmeasured.core.episodes.step_s.seconds, unmeasured.core.episodes.step_s.num = 3.0, 99
    assert unmeasured.core.episodes.num_wanted == 20  # 4 slots, a quarter of the time, a margin


def test_a_turn_goes_back_to_its_node():
    driver = Episodes(rollouts=3, slots=2, prompts_per_step=12)
    places: dict[str, set[str]] = {}
    deliver = driver.deliver

    def watch(node: str, message: Any) -> None:
        if isinstance(message, Generate):
            for request in message.requests:
                places.setdefault(request.response, set()).add(node)
        deliver(node, message)

    driver.deliver = watch  # type: ignore[method-assign]
    driver.play()
    moved = sum(len(nodes) - 1 for nodes in places.values())
    assert len(places) == 24
    assert moved <= 3


@pytest.mark.parametrize("deferred", ["continue", "restart"])
def test_deferred_episodes_are_played_to_their_end(deferred: Any):
    driver = Episodes(
        tail=Tail(eta_prompts=1.5, deferred=deferred),
        prompts_per_step=2,
        num_steps=6,
        num_prompts=12,
    )
    for step in range(6):
        driver.play()
        if step < 5:
            driver.take(driver.next_step())
    assert len({name.partition("#")[0] for name in driver.trained}) == 12


def spans_of(driver: Episodes) -> Iterator[tuple[int, int]]:
    for response in driver.core.table.responses.values():
        yield len(response.tokens), sum(num for _, num in response.spans)


def test_spans_and_lengths_count_sampled_tokens():
    driver = Episodes(group_size=2, prompts_per_step=8)
    for _ in range(60):
        if driver.queue:
            driver.deliver(*driver.queue.popleft())
        elif (name := next((n for n, e in driver.engines.items() if e), None)) is not None:
            driver.sample(name)
    held = list(driver.core.table.responses.values())
    assert any(len(r.turns) > 1 for r in held)
    for response in held:
        assert sum(num for _, num in response.spans) == response.num_sampled
        assert response.num_sampled == len(response.tokens) - 2 * len(response.turns)
        for deferred in ("continue", "restart"):
            settings = replace(driver.core.settings, tail=Tail(deferred=deferred))
            assert hold(settings, response).num_sampled == response.num_sampled


def test_begin_carries_all_that_is_recorded():
    driver = Episodes(rollouts=1)
    while not any(len(r.turns) == 2 and r.finishes for r in driver.core.table.responses.values()):
        driver.deliver(*driver.queue.popleft()) if driver.queue else driver.sample("r0")
    response = next(r for r in driver.core.table.responses.values() if len(r.turns) == 2)
    driver.lose("e0")
    driver.play()
    again = [b for b in driver.at["e0"].begun if b.response == response.id]
    assert again
    assert [len(t.sampled) // 4 for t in again[0].turns][:2] == [TURN, TURN]
    assert sent([], Generate) == []


def test_a_snapshot_has_an_episode_that_ended_before_its_first_observation():
    driver = Episodes(skips_unscored=True, group_size=3)
    begun = sent_begun(driver)
    failed = EpisodeEnded(begun.response, 1, 0, "failed", None, failure="broken")
    driver.event(MessageArrived("e0", failed))
    driver.lose_coordinator()
    outcome = driver.held(begun.response).outcome
    assert outcome is not None
    assert outcome.failure == "broken"


def test_an_episode_without_room_holds_up_no_other(undisturbed: dict[str, TrainResponse]):
    driver = Episodes(environments=0)
    for name in ("e0", "e1"):
        driver.at[name] = Environment()
        driver.clock += 1
        driver.take(driver.join(name, "environment", slots=2, incarnation=driver.clock))
    assert len(driver.core.table.open_episodes) == 4
    driver.queue = deque(m for m in driver.queue if m[0] != "e0")
    del driver.at["e0"]
    driver.event(NodeLost("e0", "killed"))
    driver.play()
    assert driver.trained == undisturbed


def test_a_rollout_node_cannot_sample_before_the_first_observation():
    driver = Episodes()
    name = sent_begun(driver).response
    item = ResponseTokens(name, 1, 0, ids(1, 2), array("f", [-0.5] * 2).tobytes(), "stop")
    other = next(r.id for r in driver.core.table.responses.values() if r.id != name)
    driver.event(MessageArrived("r0", TokenChunk(0, "digest-0", (item,))))
    driver.take(driver.join("r1", incarnation=99, serves=0, running={other: 1}))
    assert not driver.held(name).tokens
    assert driver.held(other).state is not ResponseState.RUNNING
    assert "e0" in driver.core.fleet.nodes


def test_an_episode_that_failed_takes_no_place_in_a_race():
    driver = Episodes(tail=Tail(eta_responses=1.5), group_size=4, skips_unscored=True)
    begun = sent_begun(driver)
    failed = EpisodeEnded(begun.response, 1, 0, "failed", None, failure="broken")
    driver.event(MessageArrived("e0", failed))
    driver.play()
    assert len(driver.trained) == 8


def test_only_the_newest_saved_state_is_kept():
    driver = Episodes(rollouts=1)
    observe = driver.at["e0"].observe
    driver.at["e0"].observe = lambda name: (
        replace(made, state=b"s")
        if isinstance(  # type: ignore
            made := observe(name), Observed
        )
        else made
    )
    while not any(len(r.turns) == 2 for r in driver.core.table.responses.values()):
        driver.deliver(*driver.queue.popleft()) if driver.queue else driver.sample("r0")
    response = next(r for r in driver.core.table.responses.values() if len(r.turns) == 2)
    assert [turn.state for turn in response.turns] == [b"", b"s"]
