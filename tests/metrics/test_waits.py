"""What a run waits for, in words, and how often that is said."""

from dataclasses import replace

import pytest

from lightrl.core.waits import WaitKind
from lightrl.messages.snapshot import WaitRow
from lightrl.metrics.waits import WaitLines, waiting, what

HINT = "add one with: lightrl up --join tcp://10.0.0.1:5600 --key /runs/one/join"
ONE, FOUR = (("a",), 1), (("a", "b", "c", "d"), 4)


def row(kind: str, num: int = 0, of: int = 0, step: int | None = None, **fields: object) -> WaitRow:
    return WaitRow(kind, 12.0, num, of, step, **fields)  # type: ignore[arg-type]


SAID = [
    (row("rollout", hint=HINT), f"a rollout node: none takes part (0:12); {HINT}"),
    (row("scores", 31, 1, 4), "one reward worker to score 31 responses of step 5 (0:12)"),
    (
        row("scores", 1, 12, 4, is_eval=True),
        "12 reward workers to score 1 response of the evaluation after step 4 (0:12)",
    ),
    (row("engines", nodes=("a",), num_nodes=1), "the engine of a to load (0:12)"),
    (
        row("engines", nodes=("a", "b", "c", "d"), num_nodes=64),
        "the engines of a, b, c and 61 more to load (0:12)",
    ),
    (
        row("weights", step=5, nodes=("a", "b"), num_nodes=2),
        "version 5 of the weights to reach a, b (0:12)",
    ),
    (row("ranks", nodes=("trainer-0",), num_nodes=1), "trainer-0 to load the model (0:12)"),
    (
        row("training", step=4, usual_s=3.25),
        "the trainer, which trains step 5, usually 3.2 s (0:12)",
    ),
    (row("training", step=4), "the trainer, which trains step 5 (0:12)"),
    (row("tail", 1, step=4, nodes=("a",), num_nodes=1), "the last response of step 5, on a (0:12)"),
    (
        row("tail", 3, step=4, nodes=("a", "b"), num_nodes=2),
        "the last 3 responses of step 5, on a, b (0:12)",
    ),
    (row("prompts", 64, step=0), "64 prompts of step 1 to be read (0:12)"),
    (row("trainer", 1, 1), "a trainer node to join (0:12)"),
    (row("trainer", 1, 2), "1 of 2 trainer nodes to join (0:12)"),
    (
        row("trainer lost", 1, 1, left_s=588.0),
        "a trainer node to come back; the run ends in 9:48 (0:12)",
    ),
    (row("checkpoint", step=20), "a checkpoint of 20 steps to be written (0:12)"),
    (row("last checkpoint", step=20), "the last checkpoint, of 20 steps, to be written (0:12)"),
    (row("devices", nodes=("a",), num_nodes=1), "devices to change sides: a (0:12)"),
    (
        row("environments", 3, step=4, nodes=("e",), num_nodes=1),
        "observations of 3 episodes of step 5, on e (0:12)",
    ),
    (row("environments"), "an environment node (0:12)"),
    (row("leaving", nodes=("a", "t"), num_nodes=2), "a, t to leave (0:12)"),
]


@pytest.mark.parametrize(("said", "text"), SAID, ids=[text[:30] for _, text in SAID])
def test_each_in_words(said: WaitRow, text: str):
    assert waiting(said) == f"for {text}"


def test_every_kind_has_words():
    assert {said.kind for said, _ in SAID} == set(map(str, WaitKind))
    assert all(what(WaitRow(str(kind), 1.0)) for kind in WaitKind)


def told(rows: list[tuple[float, WaitRow | None]], lines: WaitLines | None = None) -> list[str]:
    """Each line with when it was said."""
    lines = lines or WaitLines()
    return [f"{now:g} {line}" for now, row in rows for line in lines.lines(row, now)]


def lasting(kind: str, start: float, end: float, **fields: object) -> list[tuple[float, WaitRow]]:
    """Looked at every second."""
    whole = row(kind, **fields)  # type: ignore[arg-type]
    times = range(int(end - start))
    return [(start + s, replace(whole, lasted_s=float(s))) for s in times]


def test_a_wait_is_said_when_it_has_lasted_ever_more_rarely_and_when_it_is_over():
    engines = lasting("engines", 100, 190, nodes=("a",), num_nodes=1)
    lines = told([*engines, (190.0, None), (191.0, None)])
    assert lines == [
        "110 waiting for the engine of a to load (0:10)",
        "120 waiting for the engine of a to load (0:20)",
        "140 waiting for the engine of a to load (0:40)",
        "180 waiting for the engine of a to load (1:20)",
        "190 waited 1:30 for the engine of a to load",
    ]


def test_what_does_not_last_is_not_said():
    assert told([*lasting("weights", 0, 9, step=1), (9.0, None)]) == []


def test_one_wait_after_another_is_another():
    rows = [*lasting("training", 0, 12, step=1), *lasting("training", 12, 24, step=2)]
    assert told([*rows, (24.0, None)]) == [
        "10 waiting for the trainer, which trains step 2 (0:10)",
        "12 waited 0:12 for the trainer, which trains step 2",
    ]


def test_what_takes_as_long_as_usual_does_not_flood_a_log():
    """A hundred steps of a minute each that wait for the trainer: the first is said, then the one
    that takes twice as long."""
    lines, rows = WaitLines(), list[tuple[float, WaitRow | None]]()
    for step in range(100):
        length = 130 if step == 60 else 60
        start = rows[-1][0] + 1 if rows else 0.0
        rows += lasting("training", start, start + length, step=step, usual_s=60.0)
    said = told(rows, lines)
    assert [line.partition(" ")[2] for line in said] == [
        "waiting for the trainer, which trains step 61, usually 60.0 s (2:00)",
        "waited 2:10 for the trainer, which trains step 61, usually 60.0 s",
    ]


def test_the_tail_of_each_step_is_said_once_if_it_is_no_longer_than_the_last():
    rows = list[tuple[float, WaitRow | None]]()
    for step in range(20):
        start = rows[-1][0] + 1 if rows else 0.0
        rows += [*lasting("tail", start, start + 15, num=2, step=step), (start + 15, None)]
    assert len(told(rows)) == 2


def test_a_coordinator_that_comes_back_counts_anew():
    """Its snapshots say that it has waited for a shorter time than was said before."""
    rows = [*lasting("rollout", 0, 12), *lasting("rollout", 12, 24)]
    assert told(rows) == [
        "10 waiting for a rollout node: none takes part (0:10)",
        "12 waited 0:12 for a rollout node: none takes part",
    ]
