"""What the journal of a run tells: `lightrl replay`, and `lightrl status` of a run that was
killed."""

import json
import socket

import pytest

from lightrl.cli import main
from lightrl.core.log_entries import ShellNote, TokensTaken
from lightrl.journal.read import segments
from lightrl.messages.snapshot import Snapshot
from lightrl.replay import log
from lightrl.tui.render import ScreenView
from tests.support.journals import FIRST, SECOND, left_behind, note, tokens
from tests.tui.test_render import screen


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lightrl(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    assert not end.value.code, captured.err
    return captured.out


def complaint(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    assert end.value.code == 1
    return capsys.readouterr().err.strip()


def test_a_row_for_each_round_and_what_segments_repeat_counts_once(capsys, tmp_path):
    left_behind(tmp_path / "runs" / "one")
    lines = lightrl(capsys, "replay", "one").splitlines()
    assert lines[0].split()[:6] == ["STEP", "ROUND", "PROMPTS", "RESPONSES", "TOKENS", "SCORED"]
    assert " ".join(lines[1].split()) == "0 plain 1 2 4 2 0.500 1 2 bbbbbbbbbbbb done"
    assert " ".join(lines[2].split()) == "1 plain 1 1 5 0 - 0 0 - open"
    assert lines[-1] == "ends after 1 steps, version 1; 2 open responses of 5 tokens"


def test_a_checkpoint_that_comes_meanwhile_takes_nothing_away(tmp_path, monkeypatch):
    run_dir = tmp_path / "runs" / "one"
    left_behind(run_dir)
    listed = []

    def list_and_remove(folder):
        found = segments(folder)
        if not listed:  # as the coordinator does it, between the listing and the reading
            found[0].path.unlink()
        listed.append(found)
        return found

    monkeypatch.setattr(log, "segments", list_and_remove)
    told = log.read_run(run_dir)
    assert len(listed[0]) == 2
    assert (told.files, told.damage) == (["00000002_step_1.log"], [])


def test_one_step_and_one_response(capsys, tmp_path):
    left_behind(tmp_path / "runs" / "one")
    out = lightrl(capsys, "replay", "one", "--step", 1)
    assert out.splitlines()[-1].split() == ["p2@0#0", "5", "v0:2,v1:3", "-", "-", "-", "2"]
    out = lightrl(capsys, "replay", "one", "--response", "p2@0#0")
    assert "version 0, tokens 0 to 1\n  31 32\n\nversion 1, tokens 2 to 4\n  33 34 35" in out
    told = json.loads(lightrl(capsys, "replay", "one", "--response", "p2@0#0", "--json"))
    assert told["response"]["token_ids"] == [31, 32, 33, 34, 35]
    assert told["response"]["spans"] == [[0, 2], [1, 3]]
    told = json.loads(lightrl(capsys, "replay", "one", "--step", "0", "--json"))
    assert [r["response"] for r in told["responses"]] == ["p1@0#0", "p1@0#1"]
    assert told["rounds"][0]["num_trained"] == 2
    assert told["segments"] == ["00000001_step_0.log", "00000002_step_1.log"]


def test_what_is_not_in_the_journal(capsys, tmp_path):
    left_behind(tmp_path / "runs" / "one")
    assert complaint(capsys, "replay", "one", "--step", 7).endswith(
        "step 7: not in the journal; it holds steps 0 to 1"
    )
    assert "p9@0#0: no such response in the journal" in complaint(
        capsys, "replay", "one", "--response", "p9@0#0"
    )
    (tmp_path / "runs" / "two").mkdir()
    assert complaint(capsys, "replay", "two").endswith("has no journal")
    assert "is an address" in complaint(capsys, "replay", "tcp://127.0.0.1:1")


def test_damage_is_a_line_and_all_before_it_is_told(capsys, tmp_path):
    run_dir = left_behind(tmp_path / "runs" / "one")
    newest = sorted((run_dir / "journal").glob("*.log"))[-1]
    newest.write_bytes(newest.read_bytes()[:-3])
    out = lightrl(capsys, "replay", "one")
    assert "DAMAGED" in out
    assert "a record is cut off" in out
    assert "2 open responses of 2 tokens" in out
    assert len(json.loads(lightrl(capsys, "replay", "one", "--json"))["damage"]) == 1


def test_the_time_of_an_interrupted_run_is_that_from_which_it_goes_on(capsys, tmp_path):
    began, _, *rest = SECOND
    left_behind(tmp_path / "runs" / "one", segments=((0, FIRST), (1, [began, note(75.0), *rest])))
    assert "one · interrupted · 1:15" in lightrl(capsys, "status", "one")


def test_a_run_that_was_killed_is_interrupted_and_shows_where_its_journal_ends(capsys, tmp_path):
    run_dir = left_behind(tmp_path / "runs" / "one")
    with socket.create_server(("127.0.0.1", 0)) as was:
        (run_dir / "address").write_text(f"tcp://127.0.0.1:{was.getsockname()[1]}\n")
    out = lightrl(capsys, "status", "one")
    assert "one · interrupted · 1:01" in out
    assert "step      1/" in out
    assert "policy version 1" in out
    assert "plain · 0/1 groups · 0 running, 2 queued, 0 done" in out
    assert out.splitlines()[-1] == "continue  lightrl resume runs/one"
    snapshot = json.loads(lightrl(capsys, "status", "one", "--json"))
    assert snapshot["rewards"] == [0.5]
    assert snapshot["evals"] == [[0, {"held": 0.25}]]
    assert "lightrl resume" in complaint(capsys, "down", "one")
    rows = {"nodes": (), "events": (), "cost": None}
    shown = screen(Snapshot(**{**snapshot, **rows}), ScreenView(), 80, 24)
    assert "interrupted" in shown


def test_a_segment_that_no_coordinator_would_go_on_from_is_damage_and_the_others_are_told(
    capsys, tmp_path
):
    began, _, *rest = FIRST
    contradiction = [began, note(0.0), *rest, TokensTaken(0, (tokens("p2@0#0", 7, [1]),))]
    other = [began, ShellNote(b"{}"), *rest]
    for name, first, why in (
        ("one", contradiction, "p2@0#0: tokens 2 to 7 are not in the journal"),
        ("two", other, "undecodable JSON"),
    ):
        left_behind(tmp_path / "runs" / name, segments=((0, first), (1, SECOND)))
        lines = lightrl(capsys, "replay", name).splitlines()
        assert [line for line in lines if line.split()[:2] == ["1", "plain"]]
        [damage] = [line for line in lines if line.startswith("DAMAGED")]
        assert "00000001_step_0.log: " in damage
        assert why in damage
