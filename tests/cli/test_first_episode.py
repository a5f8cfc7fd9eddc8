"""`lightrl up --dry-run` plays an episode twice; what cannot be played is one line, there and in
`lightrl up`."""

import subprocess
from pathlib import Path

import pytest

from lightrl.cli import main
from lightrl.config.run_file import load_config
from lightrl.errors import LightRLError
from lightrl.launch.checks.first_rows import try_episode
from tests.support.cli import DEADLINE_S, EMULATED, QUICKSTART, arguments

GUESS = QUICKSTART.parents[1] / "guess" / "run.toml"
GAMES = """
import random, secrets, time

class Seeded:
    def reset(self, row, seed):
        self.random = random.Random(seed)
        return "?"

    def step(self, text):
        return self.random.choice("<>"), 0.0, False

class Drawn(Seeded):
    def step(self, text):
        return secrets.token_hex(), 0.0, False

class Saved(Drawn):
    def save(self):
        return b""

    def load(self, state):
        pass

class Asks(Seeded):
    def step(self, text):
        return "<", 0.0, text != "Yes."

class Fails(Seeded):
    def step(self, text):
        return {}[text]

class Half:
    def reset(self):
        return "?"

class Slow(Seeded):
    def reset(self, row, seed):
        time.sleep(60)

class Long(Seeded):
    def reset(self, row, seed):
        return "<" * 32
"""
LOST = "an episode whose environment is lost ends without a score"


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "games.py").write_text(GAMES)


def tried(name: str, *overrides: str) -> list[str]:
    config = load_config(GUESS, (f"environment.source=games.py:{name}", *overrides))
    return [f"{each.verdict} {each.line}" for each in try_episode(config)]


def test_game_with_equal_digests_is_resumable(tmp_path):
    assert tried("Seeded") == [
        "ok Seeded: 5 turns replayed with equal digests: resumable",
        "ok chat template: none: appends the texts of user turns",
        "ok length: 1 token of the first observation, 16 with 5 turns of '12'; at most 32",
    ]


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        (
            "Seeded",
            ("environment.resume=once",),
            "ok Seeded: 5 turns replayed with equal digests, but environment.resume = once: "
            f"{LOST}",
        ),
        (
            "Drawn",
            (),
            f"warn Drawn: turn 1 differs when it is replayed: {LOST}; draw from "
            'random.Random(seed), or set environment.resume = "snapshot"',
        ),
        (
            "Saved",
            ("environment.resume=snapshot",),
            f"warn Saved: turn 1 differs when it is loaded: {LOST}; `load` must set back all that "
            "`step` uses",
        ),
        ("Asks", (), "ok Asks: 5 turns replayed with equal digests: resumable"),
        (
            "Fails",
            (),
            "warn Fails: no turn was played; the turn '12' failed: {}/games.py:Fails: row 0: step "
            "raised KeyError: '12'",
        ),
    ],
)
def test_class_of_resumption_is_one_line(tmp_path, name, overrides, line):
    assert tried(name, *overrides)[0] == line.replace("{}", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        ("Half", (), "{}/games.py:Half: the class has no method 'step'"),
        (
            "Slow",
            ("environment.timeout_s=0.5",),
            "{}/games.py:Slow: row 0: took longer than environment.timeout_s = 0.5 s",
        ),
        (
            "Long",
            (),
            "environment.max_length = 32: the first observation has 32 tokens, and leaves none to "
            "sample",
        ),
        (
            "Seeded",
            ('environment.mcp=[{command = ["true"]}]',),
            "{}/games.py:Seeded: environment.mcp: true: ",
        ),
        ("Seeded", ('environment.command=["true"]',), "{}/games.py:Seeded: died 3 times at start"),
    ],
)
def test_environment_that_cannot_begin_is_one_line(tmp_path, name, overrides, line):
    with pytest.raises(LightRLError) as raised:
        tried(name, *overrides)
    assert str(raised.value).startswith(line.replace("{}", str(tmp_path)))
    assert "\n" not in str(raised.value)


def test_no_episode_of_agents_elsewhere_is_tried():
    lines = tried("", "environment.source=", "environment.endpoint=127.0.0.1:*")
    assert lines == ["ok agents open sessions while the run is up: no episode was tried"]


def test_the_dry_run_prints_its_lines_and_ends_with_an_error(tmp_path, capsys):
    dry_run = ["up", str(GUESS), "--dry-run"]
    main_ends(dry_run, 0)
    said = capsys.readouterr().out.splitlines()
    assert said[-3] == "episode     Guess: 5 turns replayed with equal digests: resumable"
    main_ends([*dry_run, "environment.source=games.py:Half"], 1)
    line = f"lightrl: {tmp_path}/games.py:Half: the class has no method 'step'\n"
    assert capsys.readouterr().err == line


def main_ends(words: list[str], status: int) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert int(end.value.code or 0) == status


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("environment.source=games.py:Half", "/games.py:Half: the class has no method 'step'"),
        ('environment.mcp=[{command = ["true"]}]', "environment.mcp: true: "),
        ('environment.command=["no-python"]', "'no-python': no such program on this machine"),
        ("environment.tools=games.py:later", "games.py:later: has no function later"),
    ],
)
def test_up_ends_with_the_reason_of_its_environment_node(tmp_path: Path, override, reason):
    done = subprocess.run(
        arguments("up", str(GUESS), *EMULATED, override, "--no-tui"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert reason in done.stderr.splitlines()[-1]
