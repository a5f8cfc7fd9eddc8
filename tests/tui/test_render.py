"""The screen at fixed sizes: what it says, and that it never exceeds its width or height."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from lightrl.launch.report import status_lines
from lightrl.messages.snapshot import (
    CostRow,
    NodeRow,
    SampleText,
    Snapshot,
    TailRow,
    WaitRow,
    WarningRow,
)
from lightrl.messages.weights import WeightsProgress
from lightrl.metrics.display import (
    bar,
    columns,
    count,
    cut,
    duration,
    pulling,
    shrink,
    sparkline,
    speculation,
    weights,
)
from lightrl.system.output import plain
from lightrl.tui.render import ScreenView, render

SIZES = [(80, 24), (120, 40)]


def node(name: str, state: str = "ready", running: int = 93) -> NodeRow:
    return NodeRow(
        name, ("rollout",), state, "box1", 4213, "cpu", 41, running, 128, 4912.0, 0.31, 0.2
    )


STARTING = Snapshot("quick", "/runs/quick", "starting", 0, 100, None, 0.4)
RUNNING = Snapshot(
    run="quick",
    run_dir="/runs/quick",
    state="running",
    step=41,
    num_steps=100,
    policy_version=41,
    elapsed_s=72.0,
    nodes=(
        NodeRow(
            "head",
            ("coordinator", "trainer"),
            "ready",
            "box1",
            4211,
            "cpu",
            41,
            0,
            0,
            0.0,
            0.0,
            0.1,
        ),
        node("rollout-0"),
        node("rollout-1", "updating", 24),
    ),
    round_kind="short",
    round_accepted=21,
    round_needed=32,
    responses_running=117,
    responses_queued=24,
    responses_done=115,
    rollout_tokens=412_345,
    tokens_per_s=9812.0,
    rewards=(0.4, 0.6, 0.889),
    lengths=(30.0, 25.0, 22.1),
    step_seconds=(0.8, 0.6, 0.67),
    evals=((0, {"eval": 0.292}), (10, {"eval": 0.635}), (20, {"eval": 0.917})),
    length_histogram=((16, 40), (64, 80), (105, 3)),
    counters={"reward_failures": 2, "nodes_lost": 0},
    events=((1.0, "rollout-0 joined"), (66.0, "step 40 done")),
    samples=(
        SampleText("p4@0#3", "87%7=", "80,73,66", 1.0, 36, 41),
        SampleText("p5@0#1", "39%3=", "36,33\x1b[2Jbad", None, 9, 41),
    ),
)
FINISHED = replace(RUNNING, state="finished", step=100, round_kind="")
TAIL = replace(
    RUNNING, tail=TailRow("prompts", 12, 8, 2, 812.4, 1033.6, 0.4119, 0.398), max_staleness=2
)
PRICED = replace(RUNNING, cost=CostRow(2, 1, 12.3, 0.41, 3.1))
DRAFTING = replace(
    RUNNING,
    metrics={
        "speculation/acceptance": 0.62,
        "speculation/drafted": 412_345.0,
        "speculation/tokens_per_forward": 2.1,
        "history/bytes": 640e6,
    },
)
CROWDED = replace(RUNNING, nodes=tuple(node(f"rollout-{k}") for k in range(64)))
SHARED = replace(
    RUNNING,
    nodes=(
        RUNNING.nodes[0],
        replace(node("rollout-0", "released", 0), state_s=62.4),
        replace(node("rollout-1"), state_s=3725.0),
        node("spot-3"),
    ),
)
PARTS = replace(
    SHARED,
    nodes=tuple(
        replace(node(f"rollout-{k}", state, 0), state_s=seconds, shares=trainer, part=part)
        for k, (trainer, part, state, seconds) in enumerate(
            [
                ("trainer-0", 0, "released", 62.4),
                ("trainer-0", 1, "ready", 3725.0),
                ("trainer-0", 1, "ready", 9.0),
                ("trainer-1", 0, "released", 5.0),
                ("trainer-1", 0, "releasing", 3.0),
            ]
        )
    ),
)
HINT = (
    "add one on another machine with: lightrl up --join tcp://10.0.0.1:5600 --key /runs/quick/join"
)
WAITING = replace(RUNNING, wait=WaitRow("rollout", 75.0, hint=HINT))
WARNED = replace(
    RUNNING,
    rewards=(0.5, math.inf, math.nan, 1.0),
    warnings=(
        WarningRow("a tracker gets no figures", 1, 3.0),
        *(WarningRow(f"kind {k}", 1, 9.0) for k in ("one", "two " * 30)),
        WarningRow("engine and trainer differ by 0.512 in logprobs: stale weights?", 3, 62.0),
    ),
)
HOSTILE = replace(
    RUNNING,
    warnings=(WarningRow("\x1b[2J" * 90, 2, 0.0),),
    wait=WaitRow("engines", 75.0, nodes=("n" * 90, "\x1b[2J"), num_nodes=2),
    run="r" * 200,
    nodes=(node("n" * 90, "draining"),),
    events=((5.0, "e" * 300),),
    samples=(replace(RUNNING.samples[0], text="漢字" * 200 + "\n\n" + "x" * 900),),
)


def screen(snapshot: Snapshot, view: ScreenView, width: int, height: int) -> str:
    console = Console(
        width=width, height=height, color_system=None, force_terminal=True, legacy_windows=False
    )
    with console.capture() as capture:
        console.print(render(snapshot, view, width, height))
    return capture.get()


@pytest.mark.parametrize(("width", "height"), [*SIZES, (60, 12), (200, 60), (40, 5)])
@pytest.mark.parametrize(
    "snapshot",
    [STARTING, RUNNING, FINISHED, TAIL, DRAFTING, CROWDED, SHARED, PARTS, WAITING, WARNED, HOSTILE],
)
@pytest.mark.parametrize(
    "view",
    [ScreenView(), ScreenView("samples"), ScreenView("events", selected=9), ScreenView(help=True)],
)
def test_fits_exactly(snapshot, view, width, height):
    # On a console that is wider and higher, what is too long would show.
    console = Console(
        width=1000, height=1000, color_system=None, force_terminal=True, legacy_windows=False
    )
    lines = console.render_lines(render(snapshot, view, width, height), pad=False)
    assert len(lines) == height
    assert max(sum(segment.cell_length for segment in line) for line in lines) <= width


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_running(width, height):
    text = screen(RUNNING, ScreenView(), width, height)
    for part in (
        "quick",
        "running  1:12",
        "step 41/100",
        "41%  v41  9.8k tok/s  412k tokens",
        "head+train",
        "updating",
        "93/128",
        "round · short",
        "groups 21/32",
        "117 running, 24 queued, 115 done",
        "0.889 ▁▄█",
        "0.292 @0 → 0.635 @10 → 0.917 @20",
        "reward failures 2",
        "step 40 done",
        "? help  q quit",
    ):
        assert part in text, part
    assert "nodes lost" not in text  # zero counters say nothing
    assert ("4213" in text) == (width >= 100)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_each_set_of_an_evaluation_has_a_line_of_its_own(width, height):
    long = "a" * 64
    evals = ((0, {"math": 0.25, long: 0.5}), (10, {"math": 0.375, long: 0.75}))
    lines = screen(replace(RUNNING, evals=evals), ScreenView(), width, height).splitlines()
    told = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if "@10" in line}
    assert told == {
        "math": "0.375 0.250 @0 → 0.375 @10",
        "a" * 19 + "…": "0.750 0.500 @0 → 0.750 @10",
    }


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_devices_that_are_shared_show_on_which_side_they_are_and_since_when(width, height):
    lines = screen(SHARED, ScreenView(), width, height).splitlines()
    begin = next(i for i, line in enumerate(lines) if " node " in line)
    title, *rows = lines[begin : begin + 5]
    column = title.index("state since")
    states = [row[column : column + 14].rstrip() for row in rows]
    assert states == ["ready", "released 1:02", "ready 1:02:05", "ready"]
    assert all(row[: title.index(" seen") + 5].endswith("s") for row in rows)  # below its title


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_parts_of_devices_show_by_trainer_node_and_in_status(width, height):
    said = [
        "trainer-0: part 0 trains 1:02, part 1 samples 0:09",
        "trainer-1: part 0 changes 0:03",
    ]
    text = screen(PARTS, ScreenView(), width, height)
    assert [line for line in said if f" devices of {line}" in text] == said
    status = status_lines(PARTS)
    assert [line for line in said if f"devices   {line}" in status] == said
    assert "devices" not in "\n".join(status_lines(SHARED))


@pytest.mark.parametrize(("width", "height"), [*SIZES, (60, 20)])
@pytest.mark.parametrize(
    "view", [ScreenView(), ScreenView("samples"), ScreenView("events"), ScreenView(help=True)]
)
def test_the_header_says_what_the_run_waits_for(view, width, height):
    lines = screen(WAITING, view, width, height).splitlines()
    room = width - 2
    text = f"waiting for a rollout node: none takes part (1:15); {HINT}"
    assert [line.strip() for line in lines[2 : 3 + len(text) // room]] == [
        text[start : start + room].strip() for start in range(0, len(text), room)
    ]
    scores = replace(RUNNING, wait=WaitRow("scores", 12.0, 31, 1, 41))
    said = "waiting for one reward worker to score 31 responses of step 42 (0:12)"
    assert said in screen(scores, view, 80, 24)


def test_what_lasts_a_moment_does_not_make_the_screen_jump():
    short = replace(RUNNING, wait=WaitRow("training", 1.9, step=41))
    assert screen(short, ScreenView(), 80, 24) == screen(RUNNING, ScreenView(), 80, 24)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_latest_warnings_are_on_the_first_screen(width, height):
    text = screen(WARNED, ScreenView(), width, height)
    told = "engine and trainer differ by 0.512 in logprobs: stale weights? (3"
    assert "warnings · 3 of 4" in text
    assert text.index(told) < text.index("kind two") < text.index("kind one")
    assert "a tracker" not in text
    assert "groups 21/32" in text
    assert "warnings" not in screen(RUNNING, ScreenView(), width, height)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_starting_says_that_nothing_is_there_yet(width, height):
    text = screen(STARTING, ScreenView(), width, height)
    assert "starting" in text
    assert "none yet" in text
    assert "no step is finished yet" in text


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_tail_batching_has_a_line_of_its_own(width, height):
    text = screen(TAIL, ScreenView(), width, height)
    assert "round · short · at most 2 versions stale" in text
    assert "tail   queue 12  short/long 8/2  length 812/1034  reward 0.412/0.398" in text
    assert ("kept/launched, prompts" in text) == (width >= 100)
    assert "queue 12" in screen(replace(TAIL, round_kind=""), ScreenView(), width, height)
    assert "tail   queue" not in screen(RUNNING, ScreenView(), width, height)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("between", [{}, {"round_kind": ""}])
def test_speculation_has_a_line_if_an_engine_speculates(width, height, between):
    line = " drafts 62% of 412k tokens kept · 2.10 tokens a forward · history 640MB"
    assert line in screen(replace(DRAFTING, **between), ScreenView(), width, height)
    assert "drafts" not in screen(RUNNING, ScreenView(), width, height)
    history_alone = replace(RUNNING, metrics={"history/bytes": 640e6})
    assert "drafts" not in screen(history_alone, ScreenView(), width, height)
    assert "drafts    62% of 412k tokens kept" in "\n".join(status_lines(DRAFTING))
    assert max(map(len, status_lines(DRAFTING)[:4])) <= 80
    assert "drafts" not in "\n".join(status_lines(RUNNING))


def test_what_speculation_did_in_figures():
    figures = {
        "speculation/tokens_per_forward": 1.0,
        "speculation/drafted": 0.0,
        "history/bytes": 0.0,
    }
    assert speculation(figures) == "nothing drafted · 1.00 tokens a forward · history 0B"
    assert speculation({}) == ""
    longest = {
        "speculation/tokens_per_forward": 65.0,
        "speculation/acceptance": 1.0,
        "speculation/drafted": 99_900.0,
        "history/bytes": 99_900.0,
    }
    assert len(speculation(longest)) == 67


def test_many_nodes_are_summed_up_and_leave_room_for_the_rest():
    text = screen(CROWDED, ScreenView(), 80, 24)
    assert "nodes 64" in text
    assert "… and 58 more: 5394 running, 285k tok/s" in text
    assert "groups 21/32" in text
    assert "reward" in text


def test_samples_show_prompt_text_and_score_without_control_characters():
    text = screen(RUNNING, ScreenView("samples", selected=1), 80, 24)
    assert "samples · 2 of 2" in text
    assert "▸    –" in text
    assert " 39%3=" in text
    assert "36,33·[2Jbad" in text
    assert "\x1b[2J" not in text


def test_events_page_starts_with_the_newest():
    text = screen(RUNNING, ScreenView("events"), 80, 24)
    assert text.index("step 40 done") < text.index("rollout-0 joined")


def test_notice_takes_the_place_of_the_hints():
    text = screen(RUNNING, ScreenView(notice="no answer from tcp://a:1; trying again ..."), 80, 24)
    assert "no answer from tcp://a:1; trying again ..." in text
    assert "q quit" not in text


def test_figures():
    assert [count(v) for v in (0, 999, 1000, 9812, 99_960, 412_345, 3.1e6)] == [
        *("0", "999", "1.0k", "9.8k", "100k", "412k", "3.1M")
    ]
    assert [duration(v) for v in (7.9, 754, 3723)] == ["0:07", "12:34", "1:02:03"]
    assert bar(0.5, 5) == "━━╸  "
    assert bar(7.0, 3) == "━━━"
    assert sparkline((0.0, 1.0), 10) == "▁█"
    assert sparkline((2.0, 2.0), 10) == sparkline((1e20, 1e20), 10) == "▄▄"
    assert sparkline((0.0, math.inf, 1.0, math.nan, -math.inf), 10) == "▁·█··"
    assert sparkline((math.nan, 1.0), 10) == "·▄"
    assert sparkline((math.nan,), 10) == "·"
    assert shrink((1, 3, 5, 7), 2) == [2.0, 6.0]
    assert columns((0, 1, 8)) == " ▁█"
    assert cut("a  b\nc", 10) == "a b c"
    assert cut("abcdef", 4) == "abc…"


def test_names_and_states_that_others_have_said_neither_colour_nor_move_anything():
    evil = "\x1b[2J[red]a\n\u202eb"
    rows = (replace(node(evil, evil), host=evil, device=evil), node("plain"))
    told = replace(
        RUNNING,
        run=evil,
        state=evil,
        round_kind=evil,
        nodes=rows,
        events=((1.0, evil),),
        counters={evil: 3},
        samples=(SampleText(evil, evil, evil, 1.0, 1, 1),),
        tail=TailRow(evil, 1, 1, 1, 1.0, 1.0, 1.0, 1.0),
    )
    console = Console(
        width=200, height=40, force_terminal=True, color_system="standard", file=io.StringIO()
    )
    for view in (ScreenView(notice=evil), ScreenView("samples"), ScreenView("events")):
        console.print(render(told, view, 200, 40))
    drawn = console.file.getvalue()
    assert "[red]" in drawn
    assert "[2J" in drawn
    assert "\x1b[2J" not in drawn
    assert "\u202e" not in drawn
    assert re.sub(r"\x1b\[[0-9;]*m", "", drawn).count("\x1b") == 0
    assert not any("\x1b" in line for line in map(plain, status_lines(told)))


GB = 10**9
PULLING = WeightsProgress(12, int(5.2 * GB), int(15.2 * GB), 3)
MOVED = {
    "weights/bytes": 2e9,
    "weights/from_peers": 1.2e9,
    "weights/delta_ratio": 0.013,
    "weights/publish_s": 2.1,
    "weights/pull_s": 3.44,
    "weights/pause_s": 0.8,
}


def test_a_pull_in_progress_is_one_line_of_who_and_how_far():
    assert pulling(PULLING) == "v12 34% of 15.2GB from 3 sources"
    assert pulling(None) == ""
    assert pulling(WeightsProgress(1, 0, 0, 1)) == "v1 0% of 0B from 1 source"


def test_how_a_version_travelled_is_one_line():
    expected = (
        "2.0GB moved, 60% from peers · 1.3% of the whole · published in 2.10 s · "
        "pulled in 3.44 s · paused 0.80 s"
    )
    assert weights(MOVED) == expected
    assert weights({}) == ""


@pytest.mark.parametrize("size", SIZES)
def test_nodes_that_pull_show_on_the_screen_and_in_status(size):
    nodes = tuple(replace(n, weights=PULLING) for n in RUNNING.nodes[1:])
    snapshot = replace(RUNNING, nodes=(RUNNING.nodes[0], *nodes), metrics=MOVED)
    text = screen(snapshot, ScreenView(), *size)
    assert "pulling: rollout-0 v12 34% of 15.2GB from 3 sources · rollout-1 v12" in text
    assert " weights 2.0GB moved, 60% from peers" in text
    status = status_lines(snapshot)
    assert "pulling   rollout-1: v12 34% of 15.2GB from 3 sources" in status
    assert any(line.startswith("weights   2.0GB moved") for line in status)


@pytest.mark.parametrize("snapshot", [PRICED, replace(PRICED, round_kind="")])
def test_costs_have_a_line_where_prices_are_known(snapshot: Snapshot):
    lines = screen(snapshot, ScreenView(), 100, 40).splitlines()
    assert " cost   12.30 US$ · 0.41 a step · 3.10 a million tokens" in map(str.rstrip, lines)
    assert " cost " not in screen(RUNNING, ScreenView(), 100, 40)
