"""A run as plain lines: progress and result say what went wrong on the way."""

from lightrl.launch.report import Progress, result_lines
from lightrl.messages import Snapshot
from lightrl.wire import to_json


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


def test_the_result_hides_no_trouble(tmp_path):
    counters = {"rewards_failed": 1024, "groups_dropped": 2, "nodes_lost": 1, "holes": 5}
    summary = {"steps": 3, "trained_responses": 0, "counters": counters}
    (tmp_path / "summary.json").write_bytes(to_json(summary))
    lines = result_lines(tmp_path)
    trouble = "rewards failed: 1,024, groups dropped: 2, nodes lost: 1"
    assert f"  WARNING    {trouble}; see {tmp_path}/logs" in lines
    assert "  WARNING    no response was trained on: the model is as it was" in lines
    counters = dict.fromkeys(counters, 0)
    (tmp_path / "summary.json").write_bytes(
        to_json({**summary, "trained_responses": 9, "counters": counters})
    )
    assert "WARNING" not in "".join(result_lines(tmp_path))
