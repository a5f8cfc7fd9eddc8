"""The figures of rounds, against numbers worked out by hand."""

import asyncio
import json
import math
import threading
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightrl.coordinator.journaling import noted
from lightrl.core.commands import CloseStep
from lightrl.core.coordinator import Coordinator
from lightrl.core.log_entries import ShellNote
from lightrl.core.rounds.backlog import Deferred
from lightrl.core.settings import Settings, Tail
from lightrl.core.state import (
    DrawnPrompt,
    Group,
    GroupState,
    HeldResponse,
    Response,
    Round,
    RoundKind,
    RoundState,
)
from lightrl.errors import JournalError
from lightrl.journal.read import LOG, segments
from lightrl.journal.read import newest as read_newest
from lightrl.messages.load import Drafting
from lightrl.messages.responses import FinishReason, Sampling
from lightrl.messages.snapshot import Snapshot
from lightrl.metrics.names import METRICS
from lightrl.metrics.round_figures import (
    OF_ALL_FUNCTIONS,
    foresight_figures,
    num_devices,
    rank_correlation,
    sampled_entropy,
    step_figures,
    total_tokens,
)
from lightrl.metrics.rounds import Records, RecordsNote
from lightrl.metrics.selection_bias import Bias, kaplan_meier
from lightrl.metrics.sinks import read
from lightrl.wire import from_json
from tests.core.conftest import Driver
from tests.support.daemons import QUICKSTART, a_run

pytestmark = pytest.mark.usefixtures("warm_daemons")

LIMIT = 10
SETTINGS = Settings(
    run_seed=0,
    num_steps=9,
    prompts_per_step=2,
    group_size=2,
    max_response_tokens=LIMIT,
    sampling=Sampling(),
    slots=8,
    vocabulary=100,
    lease_s=1.0,
    reward_on_failure=None,
    num_prompts=8,
    tail=Tail(1.5, 1.5),
)
A, P, D = GroupState.ACCEPTED, GroupState.DEFERRED, GroupState.DROPPED
# tokens, why it ended (None: given up), reward
Answer = tuple[int, FinishReason | None, float | None]


def closed(
    kind: RoundKind,
    groups: dict[str, Any],
    step: int = 0,
    epoch: int = 0,
) -> Round:
    """A round of these groups; of each accepted one the two shortest scored responses are kept."""
    round = Round(kind, step, 2, len(groups), 0.0, RoundState.CLOSED, closed_at=2.0)
    for position, (prompt, (state, answers)) in enumerate(groups.items()):
        name = f"{prompt}@{epoch}"
        drawn = DrawnPrompt(prompt, epoch, b"")
        group = Group(name, drawn, round, position, 2, Sampling(), LIMIT, state=state)
        for index, (num_tokens, finish_reason, reward) in enumerate(answers):
            response = Response(
                f"{name}#{index}",
                group,
                index,
                seed=0,
                attempt=1,
                tokens=array("i", [7] * num_tokens),
                starts=[(step, 0)],
                finish_reason=finish_reason,
                reward=reward,
                scored=reward is not None,
            )
            group.responses.append(response)
            if reward is not None:
                group.finishers.append((num_tokens, index))
        group.finishers.sort()
        round.groups[name] = group
        if state is A:
            round.accepted.append(group)
    return round


SHORT = closed(
    "short",
    {
        "a": (A, [(2, "stop", 1.0), (4, "stop", 0.0), (4, None, None)]),
        "b": (A, [(3, "stop", 1.0), (5, None, None), (1, "stop", 1.0)]),
        "c": (P, [(3, "stop", 0.5), (5, None, None), (5, None, None)]),
    },
)
LONG = closed(
    "long",
    {
        "c": (A, [(3, "stop", 0.5), (10, "length", 0.0)]),
        "d": (A, [(8, "stop", 1.0), (9, "stop", 1.0)]),
    },
    step=1,
)
HELD = (HeldResponse(b"\7\0\0\0" * 3, b"", (), "stop", 0.5), HeldResponse(b"\7\0\0\0" * 5))
LONG.groups["c@0"].held = HELD


@pytest.mark.parametrize(
    ("finished", "given_up", "mean", "at_limit"),
    [
        ({2: 1, 4: 1}, {}, 3.0, 0.0),  # nothing given up: the plain mean
        ({2: 2, 10: 2}, {}, 6.0, 0.5),
        ({2: 1, 4: 1}, {3: 1}, 2 + 2 / 3 * 2, 0.0),
        # S: 1 up to 1, 5/6 up to 4 (at 3, one of five finishes and one is given up), 5/6 * 4/5 up
        # to 5, where one of three finishes, 5/6 * 4/5 * 2/3 for good
        ({1: 1, 3: 1, 5: 1}, {3: 1, 7: 2}, 1 + 5 / 6 * 2 + 2 / 3 * 2 + 4 / 9 * 5, 4 / 9),
        # none finished: nothing is known but that they may reach the limit
        ({}, {4: 3}, 10.0, 1.0),
        ({4: 1}, {0: 5}, 4.0, 0.0),  # those that never started say nothing
        ({}, {}, 0.0, 0.0),
        ({10: 1, 4: 0}, {3: 0}, 10.0, 1.0),  # counts that were taken back
    ],
)
def test_kaplan_meier(finished, given_up, mean, at_limit):
    assert kaplan_meier(finished, given_up, LIMIT)[:2] == pytest.approx((mean, at_limit))


def test_kaplan_meier_finds_the_mean_again_when_giving_up_has_nothing_to_do_with_length():
    """Every third of 3000 responses, geometric in length, is given up at a length of its own."""
    lengths = [1 + int(math.log(1 - (i + 0.5) / 3000) / math.log(0.9)) for i in range(3000)]
    finished: dict[int, int] = {}
    given_up: dict[int, int] = {}
    for i, length in enumerate(lengths):
        limit = 1 + (7 * i) % 23 if i % 3 == 0 else 1000
        counts, n = (finished, length) if length <= limit else (given_up, limit)
        counts[n] = counts.get(n, 0) + 1
    true_mean = sum(lengths) / len(lengths)
    mean, at_limit, _ = kaplan_meier(finished, given_up, 1000)
    assert sum(given_up.values()) > 300
    assert mean == pytest.approx(true_mean, rel=0.02)
    assert at_limit == 0.0


@pytest.mark.parametrize(
    ("xs", "ys", "expected"),
    [
        ([1, 5, 9], [10, 70, 30], 0.5),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        # ranks 0.5 0.5 2 3 and 0 1 2.5 2.5: deviations -1 -1 .5 1.5 and -1.5 -.5 1 1, each 4.5
        # squared
        ([1, 1, 2, 3], [1, 2, 5, 5], (1.5 + 0.5 + 0.5 + 1.5) / 4.5),
        ([1, 1, 1], [1, 2, 3], None),
        ([1, 2], [3, 3], None),
        ([1], [1], None),
        ([], [], None),
    ],
)
def test_rank_correlation(xs, ys, expected):
    assert rank_correlation(xs, ys) == (expected if expected is None else pytest.approx(expected))


def test_a_round_kept_against_what_it_launched():
    bias = Bias(LIMIT)
    core = Coordinator(SETTINGS, 0.0)
    core.backlog.deferred.append(Deferred(DrawnPrompt("c", 0, b""), 1, 0))
    figures = bias.add(SHORT, core.backlog)
    # finished: 1, 2, 3, 3, 4; given up: 4, 5, 5, 5
    estimated = kaplan_meier({1: 1, 2: 1, 3: 2, 4: 1}, {4: 1, 5: 3}, LIMIT)
    assert figures == pytest.approx(
        {
            "kept_length": 2.5,  # 2, 4, 3, 1
            "launched_length": 32 / 9,
            "launched_length_km": estimated[0],
            "kept_at_limit": 0.0,
            "launched_at_limit": 0.0,
            "launched_at_limit_km": estimated[1],
            "kept_reward": 0.75,
            "scored_reward": 0.7,  # that of the prompt put off included
            "deferred_staleness": 0.0,
            "deferred_staleness_max": 0.0,
            "aborted_tokens": 22.0,
            "aborted_share": 22 / 32,
            "put_off": 1.0,
            "queue": 1.0,
            "max_wait_steps": 0.0,
        }
    )


def test_over_a_run_a_prompt_that_was_put_off_counts_once():
    bias = Bias(LIMIT)
    core = Coordinator(SETTINGS, 0.0)
    core.backlog.deferred.append(Deferred(DrawnPrompt("c", 0, b""), 1, 0))
    bias.add(SHORT, core.backlog)
    core.backlog.deferred.clear()
    assert bias.add(LONG, core.backlog)["max_wait_steps"] == 1
    run = bias.figures()
    # c: 3 and 10 in place of 3 and 5; its third response, which was never asked for again, stays
    finished, given_up = {1: 1, 2: 1, 3: 2, 4: 1, 8: 1, 9: 1, 10: 1}, {4: 1, 5: 2}
    assert (run["launched_length_km"], run["launched_at_limit_km"]) == pytest.approx(
        kaplan_meier(finished, given_up, LIMIT)[:2]
    )
    assert run["kept_length"] == (2 + 4 + 3 + 1 + 3 + 10 + 8 + 9) / 8
    assert run["launched_length"] == pytest.approx(
        (1 + 2 + 3 + 3 + 4 + 8 + 9 + 10 + 4 + 5 + 5) / 11
    )
    assert (run["kept_at_limit"], run["launched_at_limit"]) == pytest.approx((1 / 8, 1 / 11))
    assert (run["kept_reward"], run["scored_reward"]) == pytest.approx((5.5 / 8, 5.5 / 8))
    assert run["aborted_tokens"] == 22.0  # but what was sampled twice was sampled twice
    assert run["aborted_share"] == pytest.approx(22 / 62)
    assert (bias.state.num_rounds, bias.state.max_wait_steps) == ({"short": 1, "long": 1}, 1)


def test_prompts_only_is_without_bias_once_all_that_was_put_off_is_trained():
    bias = Bias(LIMIT)
    backlog = Coordinator(SETTINGS, 0.0).backlog
    put_off = {"c": (P, [(3, "stop", 0.5), (5, None, None)])}
    bias.add(closed("short", {"a": (A, [(2, "stop", 1.0), (4, "stop", 0.0)])} | put_off), backlog)
    now = bias.figures()
    assert now["kept_length"] == 3.0 < now["launched_length"] < now["launched_length_km"]
    flush = closed("flush", {"c": (A, [(3, "stop", 0.5), (10, "length", 0.0)])}, step=1)
    flush.groups["c@0"].held = HELD
    bias.add(flush, backlog)
    end = bias.figures()
    assert end["kept_length"] == end["launched_length"] == 4.75
    assert end["launched_length_km"] == pytest.approx(4.75)
    assert end["kept_reward"] == end["scored_reward"] == 0.375
    assert end["kept_at_limit"] == end["launched_at_limit"] == 0.25


def test_foresight_is_judged_by_what_is_known():
    round = closed(
        "short",
        {
            "a": (A, [(2, "stop", 1.0), (4, "stop", 0.0)]),  # mean 3, foreseen 5: off by 2
            # at least 6, foreseen 9: not known to be wrong
            "b": (P, [(6, None, None), (6, None, None)]),
            # at least 7, foreseen 4: off by 3 or more
            "c": (P, [(8, None, None), (6, "stop", 1.0)]),
            "d": (A, [(1, "stop", 1.0), (1, "stop", 0.0)]),  # new
            "e": (P, [(0, None, None), (0, None, None)]),  # never started
        },
    )
    for prompt, tokens in (("a", 5.0), ("b", 9.0), ("c", 4.0), ("e", 3.0)):
        round.groups[f"{prompt}@0"].foreseen_tokens = tokens
    assert foresight_figures(round) == pytest.approx(
        {
            "foresight/coverage": 6 / 8,
            "foresight/mean_abs_error_tokens": 5 / 3,
            "foresight/rank_correlation": -0.5,  # 5 9 4 against 3 6 7
        }
    )
    fresh = foresight_figures(LONG)
    assert fresh == {"foresight/coverage": 0.0}  # the first epoch: nothing to be judged


def test_what_a_round_brings_to_its_step():
    dropped = closed(
        "plain",
        {
            "a": (A, [(2, "stop", 1.0), (6, "length", 0.0)]),
            "b": (D, [(3, "stop", 1.0), (5, "stop", 1.0)]),  # no signal
            "c": (D, [(3, "stop", 1.0), (4, "stop", None)]),  # no score
        },
        step=4,
    )
    dropped.accepted[0].responses[1].starts = [(2, 0), (3, 4)]
    figures = step_figures(dropped)
    expected = {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/frac_zero_std": 0.0,
        "response_length/mean": 4.0,
        "response_length/min": 2.0,
        "response_length/max": 6.0,
        "response_length/terminated_mean": 2.0,
        "response_length/clip_ratio": 0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "round/groups_trained": 1.0,
        "round/groups_dropped": 2.0,
        "round/groups_no_signal": 1.0,
        "round/groups_unscored": 1.0,
        "perf/rollout_tokens_per_s": 11.5,
        "off_policy/span": 1.5,
        "off_policy/span_max": 2.0,
        "off_policy/newest_gap": 0.5,
        "off_policy/newest_gap_max": 1.0,
        "off_policy/oldest_gap": 1.0,
        "off_policy/oldest_gap_max": 2.0,
    }
    assert {name: figures[name] for name in expected} == expected


def test_lengths_of_prompts_are_those_of_the_trained_groups():
    answers: list[Answer] = [(2, "stop", 0.25), (3, "stop", 0.75)]
    round = closed("plain", {"a": (A, answers), "b": (A, answers), "c": (D, answers)})
    for name, length in (("a", 2), ("b", 4), ("c", 9)):
        round.groups[f"{name}@0"].prompt = DrawnPrompt(name, 0, bytes(4 * length))
    figures = step_figures(round)
    assert (figures["prompt_length/mean"], figures["prompt_length/max"]) == (3.0, 4.0)
    assert (figures["reward/min"], figures["reward/max"]) == (0.25, 0.75)
    assert total_tokens(round) == 2 * (2 + 4) + 2 * (2 + 3)


def test_devices_that_ranks_and_engines_share_count_once():
    driver = Driver()
    driver.start("a", "b")
    apart = num_devices(driver.core)
    driver.core.fleet.nodes["b"].shares = "t"
    assert num_devices(driver.core) == apart - 1


def records() -> Records:
    return Records("run", "/runs/run", "head", SETTINGS.num_steps, LIMIT)


def test_rounds_that_close_ahead_of_their_step_get_their_own_figures():
    """Two rounds are closed before the first step is trained, as in asynchronous training."""
    kept, core = records(), Coordinator(SETTINGS, 0.0)
    kept.close_round(SHORT, core, {"history/bytes": 1.0})
    core.table.counters.migrations = 3
    kept.close_round(LONG, core, {"history/bytes": 2.0})
    first, second = (
        kept.close_step(CloseStep(step, 1.0, 0.5, 0.25, {"lr": 1e-6}), core) for step in (0, 1)
    )
    assert (first["step"], second["step"]) == (1.0, 2.0)
    assert (first["response_length/mean"], second["response_length/mean"]) == (2.5, 7.5)
    assert (first["migration/moves"], second["migration/moves"]) == (0.0, 3.0)
    assert (first["history/bytes"], second["history/bytes"]) == (1.0, 2.0)
    assert (first["round/is_short"], first["round/is_long"], second["round/is_long"]) == (
        1.0,
        0.0,
        1.0,
    )
    assert (first["tail/kept_length"], first["tail_run/kept_length"]) == (2.5, 2.5)
    assert (second["tail/kept_length"], second["tail_run/kept_length"]) == (7.5, 5.0)
    assert first["timing_s/step"] == 1.75


def test_the_digest_is_of_what_was_trained_not_of_what_was_sampled_for_it():
    def digest(*rounds: Round) -> object:
        kept, core = records(), Coordinator(SETTINGS, 0.0)
        for round in rounds:
            kept.close_round(round, core, {})
            kept.close_step(CloseStep(round.step, 1.0, 1.0, 1.0, {}), core)
        return digest_of(kept, core)

    more = closed(
        "short",
        {
            "b": (A, [(3, "stop", 1.0), (6, None, None), (1, "stop", 1.0)]),
            "a": (A, [(2, "stop", 1.0), (4, "stop", 0.0), (9, None, None)]),
        },
    )
    assert digest(SHORT) == digest(more) != digest(SHORT, LONG)


def digest_of(kept: Records, core: Coordinator) -> object:
    asyncio.run(kept.hashed())
    return kept.summary(core, "", 1.0)["responses_digest"]


def test_nobody_waits_until_a_step_is_hashed(tmp_path):
    """Its thread is held up here, as gigabytes do it: steps close meanwhile, and come to the same
    digest."""
    goes_on, digests = threading.Event(), list[object]()
    for is_held_up in (True, False):
        kept, core = records(), Coordinator(SETTINGS, 0.0)
        if is_held_up:
            kept._hashing.submit(goes_on.wait)
        for round in (SHORT, LONG):
            kept.close_round(round, core, {})
            kept.close_step(CloseStep(round.step, 1.0, 1.0, 1.0, {}), core)
        if is_held_up:
            assert not kept.is_hashed
            with pytest.raises(TimeoutError):  # rather than to wait, or to tell what is not known
                kept.note(1.0, {}, SETTINGS)
            goes_on.set()
        digests.append(digest_of(kept, core))
        assert digests[-1] == from_json(kept.note(1.0, {}, SETTINGS), RecordsNote).digest
    assert digests[0] == digests[1] != digest_of(records(), Coordinator(SETTINGS, 0.0))


def test_who_stops_waiting_for_a_digest_leaves_it_to_others():
    async def scenario() -> None:
        kept, core, goes_on = records(), Coordinator(SETTINGS, 0.0), threading.Event()
        kept._hashing.submit(goes_on.wait)
        kept.close_round(SHORT, core, {})
        kept.close_step(CloseStep(0, 1.0, 1.0, 1.0, {}), core)
        waiting = asyncio.create_task(kept.hashed())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        goes_on.set()
        await kept.hashed()
        assert kept.note(1.0, {}, SETTINGS)

    asyncio.run(scenario())


def test_a_run_goes_on_while_a_step_is_hashed_and_its_next_segment_begins_with_the_digest(
    tmp_path: Path,
):
    goes_on = threading.Event()

    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            try:
                run.head._records._hashing.submit(goes_on.wait)
                await run.add_rollout("a")
                await run.until(lambda s: s.step == 1 and s.responses_done > 0)
                assert {s.step for s in segments(run.config.run_dir / "journal")} == {0}
            finally:
                goes_on.set()
            await run.until_finished()
            assert run.head.succeeded

    asyncio.run(scenario())
    summary = from_json((tmp_path / "test" / "summary.json").read_bytes(), dict)
    newest, facts, _ = read_newest(tmp_path / "test" / "journal", LOG)
    [note] = [fact.data for fact in facts if isinstance(fact, ShellNote)]
    assert newest.step == 2
    assert from_json(note, RecordsNote).digest == summary["responses_digest"]


def test_a_journal_of_another_version_is_refused_in_words():
    """As they were before evaluations had several sets."""
    note = {"digest": "", "evals": [[0, 0.29]], "rl_wall_s": 0.0, "elapsed_s": 1.0, "data": ""}
    with pytest.raises(JournalError, match=r"^the journal is of another version of LightRL: go on"):
        noted([ShellNote(json.dumps(note).encode())])


def test_figures_of_reward_functions_are_of_the_trained_responses():
    kept, core = records(), Coordinator(SETTINGS, 0.0)
    group = SHORT.groups["a@0"]
    SHORT.state = RoundState.RUNNING
    for response, digits in zip(group.responses, (1.0, 3.0, 50.0), strict=True):
        kept.scored(response, {"digits": digits}, "", 0.1)
    SHORT.state = RoundState.CLOSED
    kept.scored(group.responses[0], {"digits": 99.0}, "", 0.1)  # too late
    kept.close_round(SHORT, core, {})
    assert kept.close_step(CloseStep(0, 1.0, 1.0, 1.0, {}), core)["reward/digits"] == 2.0


def test_a_figure_of_a_function_never_takes_the_place_of_one_that_is_always_there():
    kept, core = records(), Coordinator(SETTINGS, 0.0)
    SHORT.state = RoundState.RUNNING
    plain = dict.fromkeys(OF_ALL_FUNCTIONS, 77.0)
    kept.scored(SHORT.groups["a@0"].responses[0], plain, "", 0.1)
    SHORT.state = RoundState.CLOSED
    kept.close_round(SHORT, core, {})
    record = kept.close_step(CloseStep(0, 1.0, 1.0, 1.0, {}), core)
    known = {metric.name for metric in METRICS if metric.name.startswith("reward/")}
    assert known - {"reward/<name>"} == {f"reward/{name}" for name in OF_ALL_FUNCTIONS}
    assert 77.0 not in [record[f"reward/{name}"] for name in OF_ALL_FUNCTIONS]
    assert [record[f"reward/function/{name}"] for name in OF_ALL_FUNCTIONS] == [77.0] * 9


def test_a_figure_that_some_responses_lack_is_the_mean_of_the_others():
    kept, core = records(), Coordinator(SETTINGS, 0.0)
    SHORT.state = RoundState.RUNNING
    kept.scored(SHORT.groups["a@0"].responses[0], {"digits": 3.0}, "", 0.1)
    SHORT.state = RoundState.CLOSED
    kept.close_round(SHORT, core, {})
    assert kept.close_step(CloseStep(0, 1.0, 1.0, 1.0, {}), core)["reward/digits"] == 3.0


def test_sampled_entropy_is_of_all_responses_and_the_epoch_a_share():
    answers: list[Answer] = [(2, "stop", 1.0), (2, "stop", 0.0)]
    round = closed("plain", {"a": (A, answers), "b": (D, answers)}, step=3)
    for name, logprob in (("a@0", -1.0), ("b@0", -3.0)):
        for response in round.groups[name].responses:
            response.logprobs = array("f", [logprob] * 2)
    kept, core = records(), Coordinator(SETTINGS, 0.0)
    core.backlog.num_drawn = 12
    kept.close_round(round, core, {})
    record = kept.close_step(CloseStep(3, 1.0, 1.0, 1.0, {}), core)
    assert (record["entropy/sampled"], record["epoch"]) == (2.0, 1.5)
    assert (record["policy_version"], record["step"]) == (4.0, 4.0)


def test_figures_of_scoring_are_of_all_responses():
    kept, core = records(), Coordinator(SETTINGS, 0.0)
    group = SHORT.groups["a@0"]
    SHORT.state = RoundState.RUNNING
    for response, failure in zip(group.responses, ("", "timeout", "KeyError: 'x'"), strict=True):
        kept.scored(response, {}, failure, 0.25 if failure else 0.1)
    SHORT.state = RoundState.CLOSED
    kept.close_round(SHORT, core, {})
    record = kept.close_step(CloseStep(0, 1.0, 1.0, 1.0, {}), core)
    assert (record["reward/failures"], record["reward/timeouts"]) == (2.0, 1.0)
    assert record["reward/score_s"] == pytest.approx(0.2)
    assert record["reward/min"] <= record["reward/mean"] <= record["reward/max"]


def test_summary_and_snapshot_tell_the_bias_of_the_run():
    kept, core = records(), Coordinator(SETTINGS, 0.0)
    kept.close_round(SHORT, core, {})
    core.backlog.deferred.append(Deferred(DrawnPrompt("c", 0, b""), 1, 0))
    tail = kept.summary(core, "", 1.0)["tail"]
    assert isinstance(tail, dict)
    assert (tail["mode"], tail["rounds"], tail["queue"]) == ("both", {"short": 1}, 1)
    assert (tail["kept_length"], tail["aborted_tokens"]) == (2.5, 22.0)
    row = kept.snapshot(core, 1.0).tail
    assert row is not None
    assert (row.mode, row.queue, row.num_short, row.num_long) == ("both", 1, 1, 0)
    assert (row.kept_length, row.launched_length) == (
        2.5,
        pytest.approx(tail["launched_length_km"]),
    )

    plain, strict = records(), Coordinator(replace(SETTINGS, tail=Tail()), 0.0)
    plain.close_round(LONG, strict, {})
    assert not any(
        name.startswith("tail")
        for name in plain.close_step(CloseStep(1, 1.0, 1.0, 1.0, {}), strict)
    )
    assert plain.snapshot(strict, 1.0).tail is None


@pytest.mark.parametrize(("mode", "deferred"), [("prompts", "restart"), ("both", "continue")])
def test_the_files_of_a_real_run_agree_with_each_other(tmp_path: Path, mode: str, deferred: str):
    """Two epochs of 12 prompts, 4 a step, raced: metrics, summary, lengths and trainer say the
    same."""
    rows = (QUICKSTART / "train.jsonl").read_text().splitlines()[:12]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    trained: list[int] = []

    async def scenario():
        changes = {
            "data": {"path": str(tmp_path / "train.jsonl")},
            "round": {"tail_batching": mode, "eta": 1.5, "deferred": deferred},
            "train": {"steps": 6, "prompts_per_step": 4},
            "rollout": {"slots": 32},
        }
        async with a_run(tmp_path, **changes) as run:
            await run.add_rollout("a")
            await run.until_finished()
            assert run.head.succeeded
            for shard in run.trainer.shards:
                trained.extend(len(r.token_ids) // 4 for g in shard.groups for r in g.responses)

    asyncio.run(scenario())
    run_dir = tmp_path / "test"
    summary = from_json((run_dir / "summary.json").read_bytes(), dict)
    rounds = [json.loads(line) for line in (run_dir / "lengths.jsonl").read_text().splitlines()]
    steps = read(run_dir)
    assert len(trained) == summary["trained_responses"] == 6 * 4 * 4
    assert [r["step"] for r in rounds] == list(range(6))
    assert summary["tail"]["mode"] == mode
    assert summary["tail"]["rounds"] == {
        kind: [r["kind"] for r in rounds].count(kind) for kind in {r["kind"] for r in rounds}
    }
    for step, round in zip(steps, rounds, strict=True):
        lengths = [num_tokens for *_, num_tokens, _ in round["responses"]]
        assert step["tail/launched_length"] == pytest.approx(sum(lengths) / len(lengths))
        assert step["round/is_short"] == (round["kind"] == "short")
        assert step["tail/kept_length"] == pytest.approx(step["response_length/mean"])
        in_group = 4 if round["kind"] != "short" or mode == "prompts" else 6
        prompts = {prompt for prompt, *_ in round["responses"]}
        assert len(round["responses"]) == in_group * len(prompts)
        if round["kind"] == "short":  # some may have been put off without being launched
            assert len(prompts) <= 6 == 4 + step["tail/put_off"]
        else:
            assert (len(prompts), step["tail/put_off"]) == (4, 0)
    launched = sum(num_tokens for r in rounds for *_, num_tokens, _ in r["responses"])
    assert (
        sum(r["tail/aborted_tokens"] for r in steps)
        == summary["aborted_tokens"]
        == summary["rollout_tokens"] - sum(trained)
    )
    # a response that was continued is in two rounds
    assert (launched == summary["rollout_tokens"]) == (deferred == "restart")
    assert any(r["tail/deferred_staleness"] >= 1 for r in steps) == (deferred == "continue")
    assert summary["tail"]["kept_length"] == pytest.approx(sum(trained) / len(trained))
    assert summary["tail"]["prompts_put_off"] == sum(r["tail/put_off"] for r in steps) > 0
    assert steps[-1]["foresight/coverage"] > 0
    assert steps[-1]["history/prompts"] == 12
    tail = from_json((run_dir / "snapshot.json").read_bytes(), Snapshot).tail
    assert tail is not None
    assert tail.num_short + tail.num_long == 6


def test_lengths_and_sampled_entropy_by_hand():
    figures = step_figures(SHORT)
    # a keeps 1 and 0, b 1 and 1; c is put off with one response that has 0.5
    assert (figures["reward/mean"], figures["reward/scored"]) == (0.75, 0.7)
    assert {k: v for k, v in figures.items() if k.startswith("data/")} == {
        "data/a/reward": 0.5,
        "data/b/reward": 1.0,
        "data/a/reward_scored": 0.5,
        "data/b/reward_scored": 1.0,
        "data/c/reward_scored": 0.5,
    }
    trained = [r for g in SHORT.accepted for r in g.kept]
    lengths = [len(r.tokens) for r in trained]
    assert figures["response_length/min"] == min(lengths)
    assert figures["response_length/std"] == pytest.approx(
        math.sqrt(sum((n - 2.5) ** 2 for n in lengths) / len(lengths))
    )
    ended = [len(r.tokens) for r in trained if r.finish_reason != "length"]
    assert figures["response_length/terminated_mean"] == pytest.approx(sum(ended) / len(ended))
    assert sampled_entropy([array("f", [-1.0, -2.0]), array("f"), array("f", [0.0])]) == 1.0
    assert sampled_entropy([]) == 0.0


def test_sums_over_all_steps_do_not_depend_on_how_many_records_are_read_again():
    core, kept = Coordinator(SETTINGS, 0.0), records()
    kept.speculation._news = Drafting(drafted=8, accepted=4, forwards=4, emitted=8)
    kept.close_round(SHORT, core, {})
    record = kept.close_step(CloseStep(0, 1.0, 0.5, 0.5, {"weights/publish_s": 3.0}), core)
    asyncio.run(kept.hashed())
    note = from_json(kept.note(1.0, {}, SETTINGS), RecordsNote)
    for steps in ([], [record], [record] * 2):
        again = records()
        again.recall(note, core, steps)
        assert again.speculation.whole() == kept.speculation.whole() != {}
        assert again.weights.totals.figures() == kept.weights.totals.figures() == {"publish_s": 3.0}


def test_tokens_of_a_run_are_counted_on_after_a_restart():
    core, kept = Coordinator(SETTINGS, 0.0), records()
    kept.close_round(SHORT, core, {})
    first = kept.close_step(CloseStep(0, 1.0, 0.5, 0.5, {}), core)
    number = total_tokens(SHORT)
    assert (first["num_tokens_total"], first["perf/tokens_per_gpu_s"]) == (number, number / 2.0)
    again = records()
    asyncio.run(kept.hashed())
    note = from_json(kept.note(1.0, {}, SETTINGS), RecordsNote)
    again.recall(note, core, [first])
    again.close_round(LONG, core, {})
    second = again.close_step(CloseStep(1, 1.0, 0.5, 0.5, {}), core)
    assert second["num_tokens_total"] == number + total_tokens(LONG)


def test_a_round_that_closes_before_an_earlier_one_counts_and_so_does_the_earlier_one():
    """In asynchronous runs a short round overtakes a long one; a restart comes in between."""
    core, kept = Coordinator(SETTINGS, 0.0), records()
    later = closed("short", {"e": (A, [(1, "stop", 1.0)]), "f": (A, [(2, "stop", 0.0)])}, step=2)
    kept.close_round(SHORT, core, {})
    kept.close_step(CloseStep(0, 1.0, 0.5, 0.5, {}), core)
    kept.close_round(later, core, {})
    asyncio.run(kept.hashed())
    again = records()
    again.recall(from_json(kept.note(1.0, {}, SETTINGS), RecordsNote), core, [])
    for number in range(2):
        again.close_round((later, LONG)[number], core, {})  # the first one once more
    asyncio.run(again.hashed())
    summary: Any = again.summary(core, "", 1.0)
    assert summary["tail"]["rounds"] == {"short": 2, "long": 1}
    lengths = [2, 4, 3, 1, 1, 2, 3, 10, 8, 9]
    assert summary["tail"]["kept_length"] == pytest.approx(sum(lengths) / len(lengths))


def test_figures_of_responses_that_nobody_continues_are_not_kept():
    kept, core = records(), Coordinator(SETTINGS, 0.0)
    round = closed("short", {"c": (P, [(3, "stop", 0.5), (5, "stop", 0.0), (6, "stop", 1.0)])})
    [group] = round.groups.values()
    group.continues, round.state = True, RoundState.RUNNING
    for response in group.responses:
        kept.scored(response, {"digits": 1.0}, "", 0.1)
    round.state = RoundState.CLOSED
    kept.close_round(round, core, {})
    assert list(kept._reward_figures) == ["c@0#0", "c@0#1"]


def test_rewards_by_data_set_are_of_all_prompts_of_a_set_and_of_dropped_groups_too():
    """As with dynamic sampling, which trains none of the groups that are all right or wrong."""
    answers = {
        "gsm8k/1": (A, [(2, "stop", 1.0), (3, "stop", 0.0)]),
        "gsm8k/2": (D, [(2, "stop", 1.0), (3, "stop", 1.0)]),
        "math/1": (A, [(2, "stop", 0.0), (3, "stop", 0.5)]),
        "math/2": (D, [(2, "stop", 0.0), (3, "stop", None)]),
    }
    figures = step_figures(closed("plain", answers))
    assert (figures["reward/mean"], figures["reward/scored"]) == (0.375, 0.5)
    assert {k: v for k, v in figures.items() if k.startswith("data/")} == {
        "data/gsm8k/reward": 0.5,
        "data/gsm8k/reward_scored": 0.75,
        "data/math/reward": 0.25,
        "data/math/reward_scored": pytest.approx(0.5 / 3),
    }
