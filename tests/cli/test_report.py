"""A run as plain lines: progress and result say what went wrong on the way."""

from dataclasses import replace

from lightrl.launch.report import Progress, result_lines, status_lines
from lightrl.messages.snapshot import Snapshot, WaitRow
from lightrl.metrics.remote import GETS_NO_MORE
from lightrl.wire import to_json

IDLE = Snapshot(*("one", "/r", "running", 0, 3, 1, 1.0))


def test_a_run_without_rewards_says_so():
    progress = Progress()
    counters = {"rewards_failed": 256, "groups_dropped": 32, "nodes_lost": 0}
    snapshot = Snapshot(
        *("one", "/r", "running", 1, 3, 1, 1.0),
        rewards=(0.0,),
        metrics={"round/groups_trained": 0.0},
        counters=counters,
    )
    warning = "WARNING: step 1 trained no group; so far rewards failed: 256, groups dropped: 32"
    assert warning in list(progress.lines(snapshot, 10.0))
    assert list(progress.lines(snapshot, 20.0)) == []  # once a step


def test_the_first_failure_of_a_reward_and_each_step_without_a_score_are_told_once():
    progress = Progress()
    first, second = "no reward for p1@0#2: KeyError: 'x'", "no reward for p3@0#0: ValueError"
    empty = "step 2: none of 64 responses has a score: ValueError"

    def lines(*events: str) -> list[str]:
        told = tuple((1.0, text) for text in events)
        snapshot = Snapshot(*("one", "/r", "running", 0, 3, 1, 1.0), events=told)
        return list(progress.lines(snapshot, 10.0))

    doubt = "rewards: train: the right answer gets no more than a wrong one"
    assert lines(doubt) == [f"WARNING: {doubt}"]
    assert lines(doubt, "p0 joined", first) == [f"WARNING: {first}"]
    assert lines("p0 joined", first, second, empty) == [f"WARNING: {empty}"]
    assert lines(first, second, empty) == []


def test_a_tracker_that_gets_nothing_more_is_told_once():
    progress = Progress()
    line = f"WARNING: wandb: UsageError: No API key configured; {GETS_NO_MORE} (see logs/wandb.log)"
    snapshot = Snapshot(
        *("one", "/r", "running", 0, 3, 1, 1.0), events=((1.0, "p0 joined"), (2.0, line))
    )
    assert list(progress.lines(snapshot, 10.0)) == [line]
    assert list(progress.lines(snapshot, 20.0)) == []


def test_a_step_whose_gradient_is_not_finite_is_told():
    metrics = {"round/groups_trained": 4.0, "train/skipped_nonfinite": 1.0}
    progress = Progress()
    bad, good = (
        Snapshot(*("one", "/r", "running", step, 3, 1, 1.0), rewards=(0.0,), metrics=figures)
        for step, figures in ((1, metrics), (2, metrics | {"train/updates": 1.0}))
    )
    told = "WARNING: step 1 changed nothing: its gradient is not finite"
    assert told in list(progress.lines(bad, 10.0))
    assert not [line for line in progress.lines(good, 20.0) if "WARNING" in line]


def test_what_a_run_survives_is_said_when_it_happens():
    progress = Progress()

    def lines(**counters: int) -> list[str]:
        return list(
            progress.lines(
                Snapshot(*("one", "/r", "running", 0, 3, 1, 1.0), counters=counters), 10.0
            )
        )

    assert lines(nodes_lost=3) == []  # before we looked
    assert lines(nodes_lost=3, engines_lost=1) == [
        "WARNING: engines lost: 1; the run continues; see logs/head.log"
    ]
    assert lines(nodes_lost=3, engines_lost=1) == []
    assert lines(nodes_lost=4, engines_lost=1, weights_failed=2) == [
        "WARNING: nodes lost: 4, weights failed: 2; the run continues; see logs/head.log"
    ]


def test_a_resumed_run_does_not_tell_its_first_life_again():
    progress = Progress()

    def lines(step: int, now: float, *evals: tuple[int, float]) -> list[str]:
        scores = tuple((at, {"held": score}) for at, score in evals)
        place = ("one", "/r", "running", step, 9, 1, 1.0)
        snapshot = Snapshot(*place, rewards=(0.5,), evals=scores)
        return [" ".join(line.split()[:4]) for line in progress.lines(snapshot, now)]

    assert lines(5, 0.0, (0, 0.2)) == []
    assert lines(6, 10.0, (0, 0.2), (6, 0.4)) == ["step 6/9 reward 0.500", "step 6/9 eval 0.400"]


def test_several_sets_are_named_in_progress_status_and_result(tmp_path):
    scores = ((0, {"math": 0.25, "code": 0.5}), (3, {"math": 0.375, "code": 0.75}))
    snapshot = Snapshot(*("one", "/r", "running", 3, 9, 3, 1.0), evals=scores)
    assert list(Progress().lines(Snapshot(*("one", "/r", "running", 0, 9, 0, 1.0)), 0.0)) == []
    assert list(Progress().lines(replace(snapshot, step=0, evals=scores[:1]), 0.0)) == [
        "step     0/9  eval math 0.250, code 0.500"
    ]
    assert "eval      math 0.375, code 0.750 at step 3" in status_lines(snapshot)
    told = {"math": [[0, 0.25], [3, 0.375]], "code": [[0, 0.5], [3, 0.75]]}
    (tmp_path / "summary.json").write_bytes(to_json({"steps": 3, "eval_sets": told}))
    lines = result_lines(tmp_path)
    assert lines[1:3] == ["  held-out   math  0.250 -> 0.375", "             code  0.500 -> 0.750"]
    (tmp_path / "summary.json").write_bytes(
        to_json({"steps": 3, "eval_sets": {"math": told["math"]}})
    )
    assert result_lines(tmp_path)[1] == "  held-out   0.250 -> 0.375"


def test_the_result_says_what_drafts_did(tmp_path):
    drafting = {"drafted": 12_000.0, "acceptance": 0.87, "tokens_per_forward": 1.3}
    (tmp_path / "summary.json").write_bytes(to_json({"steps": 3, "speculation": drafting}))
    assert "  drafts     87% of 12.0k tokens kept · 1.30 tokens a forward" in result_lines(tmp_path)


def test_the_result_hides_no_trouble(tmp_path):
    counters = {
        "rewards_failed": 1024,
        "groups_dropped": 2,
        "nodes_lost": 1,
        "engines_lost": 2,
        "holes": 5,
    }
    summary = {"steps": 3, "trained_responses": 0, "counters": counters}
    (tmp_path / "summary.json").write_bytes(to_json(summary))
    lines = result_lines(tmp_path)
    trouble = "rewards failed: 1,024, groups dropped: 2, nodes lost: 1, engines lost: 2"
    assert f"  WARNING    {trouble}; see {tmp_path}/logs" in lines
    assert "  WARNING    no response was trained on: the model is unchanged" in lines
    counters = dict.fromkeys(counters, 0)
    (tmp_path / "summary.json").write_bytes(
        to_json({**summary, "trained_responses": 9, "counters": counters})
    )
    assert "WARNING" not in "".join(result_lines(tmp_path))


SCORES = WaitRow("scores", 12.0, 31, 1, 0)


def test_what_a_run_waits_for_is_a_line_once_it_has_lasted_and_when_it_is_over():
    progress = Progress()

    def lines(now: float, wait: WaitRow | None) -> list[str]:
        return list(progress.lines(replace(IDLE, wait=wait), now))

    assert lines(5.0, replace(SCORES, lasted_s=7.0)) == []
    assert lines(10.0, SCORES) == [
        "waiting for one reward worker to score 31 responses of step 1 (0:12)"
    ]
    assert lines(10.5, replace(SCORES, lasted_s=12.5)) == []
    assert lines(13.0, None) == [
        "waited 0:15 for one reward worker to score 31 responses of step 1"
    ]


def test_status_says_what_the_run_waits_for():
    assert not [line for line in status_lines(IDLE) if line.startswith("waiting")]
    waits = replace(IDLE, wait=SCORES)
    text = "waiting   for one reward worker to score 31 responses of step 1 (0:12)"
    assert text in status_lines(waits)
    assert b'"wait":{"kind":"scores","lasted_s":12.0,"num":31,"of":1,"step":0,' in to_json(waits)
