"""A run as plain lines: progress and result say what went wrong on the way."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightrl.launch.report import ProgressLines, repeated_warnings, result_lines, status_lines
from lightrl.messages.snapshot import Snapshot, WaitRow, WarningRow
from lightrl.metrics.warned import warning_text
from lightrl.wire import to_json

IDLE = Snapshot(*("one", "/r", "running", 0, 3, 1, 1.0))
COUNTERS = {
    "rewards_failed": 1024,
    "groups_dropped": 2,
    "groups_flat": 0,
    "nodes_lost": 1,
    "engines_lost": 2,
}


def write_summary(run_dir: Path, **figures: Any) -> None:
    summary: dict[str, Any] = {"steps": 3, "rl_wall_s": 2.0, "rollout_tokens": 90}
    summary |= {"trained_responses": 9, "eval_sets": {}, "speculation": {}}
    summary |= {"counters": dict.fromkeys(COUNTERS, 0)} | figures
    (run_dir / "summary.json").write_bytes(to_json(summary))


def test_a_warning_is_told_once_for_each_kind_and_with_its_number_from_then_on():
    progress = ProgressLines()

    def lines(*rows: WarningRow) -> list[str]:
        return list(progress.lines(replace(IDLE, warnings=rows), 10.0))

    first = WarningRow("no reward for p1@0#2: KeyError: 'x'", 1, 1.0)
    later = WarningRow("no reward for p3@1#0: KeyError: 'y'", 9, 31.0)
    other = WarningRow("engine and trainer differ by 0.512 in logprobs: stale weights?", 2, 30.0)
    assert lines(first) == [f"WARNING: {first.text}"]
    assert lines(other, later) == [f"WARNING: {other.text} (2 times, last 0:30)"]
    assert lines(replace(other, num=3, text=other.text.replace("512", "7")), later) == []
    status = status_lines(replace(IDLE, warnings=(other, later)))
    assert f"warning   {later.text} (9 times, last 0:31)" in status


def test_a_resumed_run_tells_its_warnings_though_not_its_steps():
    place = ("one", "/r", "running", 5, 9, 1, 1.0)
    row = WarningRow("journal: its end is torn", 1, 0.0)
    lines = list(ProgressLines().lines(Snapshot(*place, rewards=(0.5,), warnings=(row,)), 0.0))
    assert lines == ["WARNING: journal: its end is torn"]


def test_the_end_of_a_run_repeats_its_warnings_but_not_its_reason_and_not_all(tmp_path):
    words = ("one", "two", "three", "four", "five", "six", "seven")
    rows = [WarningRow(f"{word} went wrong", 1 + k, float(k)) for k, word in enumerate(words)]
    reason = "trainer node trainer-0: no space is left"
    rows.append(WarningRow("trainer-0 failed: no space is left", 1, 9.0))
    last = Snapshot(*("one", "/r", "failed", 1, 3, 1, 1.0), warnings=tuple(rows))
    assert repeated_warnings(tmp_path) == []
    (tmp_path / "snapshot.json").write_bytes(to_json(last))
    (tmp_path / "summary.json").write_bytes(to_json({"steps": 1, "reason": reason}))
    assert repeated_warnings(tmp_path) == [
        "WARNING: 2 other kinds, see logs/head.log",
        *(f"WARNING: {warning_text(row)}" for row in rows[2:-1]),
    ]


def test_a_resumed_run_does_not_tell_its_first_life_again():
    progress = ProgressLines()

    def lines(step: int, now: float, *evals: tuple[int, float]) -> list[str]:
        scores = tuple((at, {"held": score}) for at, score in evals)
        place = ("one", "/r", "running", step, 9, 1, 1.0)
        shown = {"rewards": (0.5,), "lengths": (7.0,), "step_seconds": (2.0,)}
        snapshot = Snapshot(*place, **shown, evals=scores)
        return [" ".join(line.split()[:4]) for line in progress.lines(snapshot, now)]

    assert lines(5, 0.0, (0, 0.2)) == []
    assert lines(6, 10.0, (0, 0.2), (6, 0.4)) == ["step 6/9 reward 0.500", "step 6/9 eval 0.400"]


def test_an_evaluation_tells_how_far_it_is():
    progress = ProgressLines()
    counts = {"responses_running": 1, "responses_queued": 1, "responses_waiting": 1}
    going = replace(IDLE, **counts, round_kind="eval", responses_done=7, tokens_per_s=1200.0)
    status = "eval · 0/0 groups · 1 running, 1 queued, 1 waiting, 7 done"
    assert f"round     {status}" in status_lines(going)
    line = "evaluating: 7 of 10 responses  1.2k tokens/s  0:01"
    assert list(progress.lines(going, 25.0)) == [line]
    assert list(progress.lines(going, 44.0)) == []
    none = dict.fromkeys(counts, 0)
    scoring = replace(going, **none, responses_done=10, round_accepted=3, round_needed=5)
    line = "evaluating: 10 of 10 responses  3 of 5 prompts are scored  1.2k tokens/s  0:01"
    assert list(progress.lines(scoring, 45.0)) == [line]


def test_several_sets_are_named_in_progress_status_and_result(tmp_path):
    scores = ((0, {"math": 0.25, "code": 0.5}), (3, {"math": 0.375, "code": 0.75}))
    snapshot = Snapshot(*("one", "/r", "running", 3, 9, 3, 1.0), evals=scores)
    assert list(ProgressLines().lines(Snapshot(*("one", "/r", "running", 0, 9, 0, 1.0)), 0.0)) == []
    assert list(ProgressLines().lines(replace(snapshot, step=0, evals=scores[:1]), 0.0)) == [
        "step     0/9  eval math 0.250, code 0.500"
    ]
    assert "eval      math 0.375, code 0.750 at step 3" in status_lines(snapshot)
    told = {"math": [[0, 0.25], [3, 0.375]], "code": [[0, 0.5], [3, 0.75]]}
    write_summary(tmp_path, eval_sets=told)
    lines = result_lines(tmp_path)
    assert lines[1:3] == ["  held-out   math  0.250 -> 0.375", "             code  0.500 -> 0.750"]
    write_summary(tmp_path, eval_sets={"math": told["math"]})
    assert result_lines(tmp_path)[1] == "  held-out   0.250 -> 0.375"


def test_the_result_says_what_drafts_did(tmp_path):
    drafting = {"drafted": 12_000.0, "acceptance": 0.87, "tokens_per_forward": 1.3}
    write_summary(tmp_path, speculation=drafting)
    assert "  drafts     87% of 12.0k tokens kept · 1.30 tokens a forward" in result_lines(tmp_path)


def test_the_result_hides_no_trouble(tmp_path):
    write_summary(tmp_path, trained_responses=0, counters=COUNTERS)
    lines = result_lines(tmp_path)
    trouble = "rewards failed: 1,024, groups dropped: 2, nodes lost: 1, engines lost: 2"
    assert f"  WARNING    {trouble}; see {tmp_path}/logs" in lines
    assert "  WARNING    no response was trained on: the model is unchanged" in lines
    write_summary(tmp_path)
    assert "WARNING" not in "".join(result_lines(tmp_path))


SCORES = WaitRow("scores", 12.0, 31, 1, 0)


def test_what_a_run_waits_for_is_a_line_once_it_has_lasted_and_when_it_is_over():
    progress = ProgressLines()

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
