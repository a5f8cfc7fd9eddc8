"""Render a snapshot as a screen: pure functions from `Snapshot` and `ScreenView` to rich text.

No sockets, no state, no clock. Every line is built to fit the width; sections give way from the
bottom when the height is short.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.cells import chop_cells
from rich.console import Group, RenderableType
from rich.text import Text

from lightrl.messages.snapshot import NodeRow, Snapshot
from lightrl.metrics.display import (
    bar,
    chain,
    columns,
    count,
    cut,
    duration,
    printable,
    pulling,
    responses,
    sides,
    sparkline,
    step_lines,
)
from lightrl.metrics.waits import waiting
from lightrl.metrics.warned import warning_text

Page: TypeAlias = Literal["overview", "samples", "events"]
PAGES: tuple[Page, ...] = ("overview", "samples", "events")

STATE_STYLES = {
    "starting": "yellow",
    "joining": "yellow",
    "loading": "yellow",
    "running": "green",
    "ready": "green",
    "updating": "cyan",
    "releasing": "cyan",
    "released": "blue",
    "evaluating": "cyan",
    "finishing": "cyan",
    "draining": "magenta",
    "finished": "bold green",
    "stopped": "bold yellow",
    "interrupted": "bold yellow",
    "failed": "bold red",
    "gone": "dim",
}
ORDINARY = {  # no news
    "rollout_tokens",
    "eval_tokens",
    "trained_responses",
    "groups_trained",
    "nodes_joined",
    "prompts_put_off",
}
STATE_COLUMNS, SIDE_COLUMNS = 9, 14
MAX_SET_COLUMNS = 20
MAX_WARNINGS = 3
CALM_S = 2.0  # what the run waits for has lasted: each step waits a moment for this and that
SHORT_ROLES = {"coordinator": "head", "trainer": "train", "rollout": "roll"}
HELP = (
    ("1 2 3, tab", "overview, samples, events"),
    ("up down, j k", "move through samples or events"),
    ("?", "this help"),
    ("q", "leave the screen; the run continues"),
)


@dataclass(frozen=True, slots=True)
class ScreenView:
    """The choices of the user, and the state of the connection."""

    page: Page = "overview"
    help: bool = False
    # of samples or events
    selected: int = 0
    # shown in place of the key hints: lost connection and the like
    notice: str = ""


def render(snapshot: Snapshot, view: ScreenView, width: int, height: int) -> RenderableType:
    """Return text of exactly `width` x `height`: no line is wider, and there are not more lines."""
    head = _header(snapshot, width)
    foot = _footer(view, width)
    room = max(0, height - len(head) - 1)
    if view.help:
        body = _help(width)
    elif view.page == "samples":
        body = _samples(snapshot, view, width, room)
    elif view.page == "events":
        body = _events_page(snapshot, view, width, room)
    else:
        body = _overview(snapshot, width, room)
    body = body[:room]
    blank = [Text("")] * (room - len(body))
    lines = [*head, *body, *blank, foot][-height:]
    for line in lines:
        line.plain = printable(line.plain)  # names and states come from other processes
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return Group(*lines)


def _header(s: Snapshot, width: int) -> list[Text]:
    state = Text(s.state, STATE_STYLES.get(s.state, ""))
    left = Text.assemble(
        (" LightRL ", "bold reverse"), "  ", (cut(s.run, max(8, width - 40)), "bold")
    )
    right = Text.assemble(state, "  ", duration(s.elapsed_s), " ")
    share = s.step / s.num_steps if s.num_steps else 0.0
    version = "–" if s.policy_version is None else f"v{s.policy_version}"
    before = f" step {s.step:,}/{s.num_steps:,} "
    after = (
        f" {share:4.0%}  {version}  {count(s.tokens_per_s)} tok/s  {count(s.rollout_tokens)} "
        "tokens "
    )
    room = max(0, width - len(before) - len(after))
    progress = Text.assemble(before, *_bar(share, room, "green"), after)
    row = s.wait if s.wait is not None and s.wait.lasted_s >= CALM_S else None
    wait = _wrapped(f"waiting {waiting(row)}", "yellow", width) if row is not None else []
    return [_spread(left, right, width), progress, *wait]


def _overview(s: Snapshot, width: int, room: int) -> list[Text]:
    """Return nodes and round, then as much of history, lengths and counters as fits, then
    events."""
    warned = _warnings(s, width)
    tight = 2 + len(_round(s, width)) + len(warned) + len(_history(s, width)) + 3
    body = _nodes(s, width, max(2, room - tight))
    body += _round(s, width) + warned
    for section in (_history(s, width), _lengths(s, width, tall=room >= 34), _counters(s, width)):
        if len(body) + len(section) <= room:
            body += section
    left = room - len(body)
    if left >= 2 and s.events:
        body.append(_rule("events", width))
        body += [_event(e, width) for e in s.events[-(left - 1) :]]
    return body


def _nodes(s: Snapshot, width: int, room: int) -> list[Text]:
    lines = [_rule(f"nodes {len(s.nodes)}" if s.nodes else "nodes", width)]
    if not s.nodes:
        return [*lines, Text(" none yet", "dim")]
    wide = width >= 100
    # of nodes that share devices also since when: for so long they have been on that side
    has_sides = any(n.state_s is not None for n in s.nodes)
    columns = SIDE_COLUMNS if has_sides else STATE_COLUMNS
    state = "state since" if has_sides else "state"
    title = f" {'node':14} {'role':10} {state:{columns}} {'ver':>5} {'running/slots':>13}"
    title += f" {'tok/s':>6} {'kv':>4} {'seen':>6}"
    lines.append(Text(title + (f"  {'pid':>7}  {'host / device'}" if wide else ""), "dim"))
    pulls = [f"{cut(n.name, 14)} {text}" for n in s.nodes if (text := pulling(n.weights))]
    devices = [Text(f" devices of {line}", "cyan") for line in sides(s.nodes)]
    room -= bool(pulls) + len(devices)
    visible = s.nodes if len(s.nodes) <= room - 2 else s.nodes[: max(1, room - 3)]
    lines += [_node(n, wide, columns) for n in visible]
    if len(visible) < len(s.nodes):
        rest = s.nodes[len(visible) :]
        running = sum(n.running for n in rest)
        speed = count(sum(n.tokens_per_s for n in rest))
        lines.append(Text(f" … and {len(rest)} more: {running} running, {speed} tok/s", "dim"))
    lines += devices
    if pulls:
        more = f" and {len(pulls) - 2} more" if len(pulls) > 2 else ""
        lines.append(Text(f" pulling: {' · '.join(pulls[:2])}{more}", "cyan"))
    return lines


def _node(n: NodeRow, wide: bool, columns: int) -> Text:
    roles = "+".join(SHORT_ROLES[r] for r in n.roles)
    busy = f"{n.running}/{n.slots}" if n.slots else "–"
    speed = count(n.tokens_per_s) if n.slots else "–"
    kv = f"{n.kv_usage:.0%}" if n.slots else "–"
    version = "–" if n.policy_version is None else str(n.policy_version)
    state = n.state if n.state_s is None else f"{n.state} {duration(n.state_s)}"
    late = "bold red" if n.heard_s_ago > 3 and n.state != "gone" else "dim"
    line = Text.assemble(
        f" {cut(n.name, 14):14} {cut(roles, 10):10} ",
        (f"{cut(state, columns):{columns}}", STATE_STYLES.get(n.state, "")),
        f" {version:>5} {busy:>13} {speed:>6} {kv:>4} ",
        (f"{n.heard_s_ago:5.1f}s", late),
    )
    if wide:
        line.append(f"  {n.pid:>7}  {cut(f'{n.host} {n.device}', 60)}", "dim")
    return line


def _round(s: Snapshot, width: int) -> list[Text]:
    stale = f"at most {s.max_staleness} versions stale" if s.max_staleness else ""
    lines = [_rule(" · ".join(part for part in ("round", s.round_kind, stale) if part), width)]
    rest = [*_tail(s, width), *(Text(f" {label:6} {line}") for label, line in step_lines(s))]
    if not s.round_kind:
        return [*lines, Text(" between rounds", "dim"), *rest]
    share = s.round_accepted / s.round_needed if s.round_needed else 0.0
    before = f" groups {s.round_accepted}/{s.round_needed} "
    after = f"  responses: {responses(s)}"
    room = max(4, min(40, width - len(before) - len(after) - 1))
    return [
        *lines,
        Text.assemble(before, *_bar(share, room, "cyan"), after),
        *rest,
    ]


def _warnings(s: Snapshot, width: int) -> list[Text]:
    """Return a line for each of the latest kinds, the newest first."""
    if not s.warnings:
        return []
    newest = s.warnings[: -MAX_WARNINGS - 1 : -1]
    lines = [Text(f" {cut(warning_text(row), width - 2)}", "yellow") for row in newest]
    return [_rule(f"warnings · {len(newest)} of {len(s.warnings)}", width), *lines]


def _tail(s: Snapshot, width: int) -> list[Text]:
    """Return one line if there is tail batching; lengths and rewards are of what is trained / of
    all launched."""
    if (t := s.tail) is None:
        return []
    line = (
        f" tail   queue {t.queue:,}  short/long {t.num_short:,}/{t.num_long:,}  length "
        f"{t.kept_length:.0f}/{t.launched_length:.0f}  reward "
        f"{t.kept_reward:.3f}/{t.scored_reward:.3f}"
    )
    legend = f"  kept/launched, {t.mode}"
    return [Text.assemble(line, (legend if len(line + legend) <= width else "", "dim"))]


def _history(s: Snapshot, width: int) -> list[Text]:
    if not s.rewards and not s.evals:
        return [_rule("history", width), Text(" no step is finished yet", "dim")]
    lines = [_rule("history", width)]
    room = max(1, min(100, width - 34))
    for label, values, form in (
        ("reward", s.rewards, ".3f"),
        ("length", s.lengths, ".1f"),
        ("step s", s.step_seconds, ".2f"),
    ):
        if values:
            scale = f" {min(values):{form}} … {max(values):{form}}"
            chart = sparkline(values, room).ljust(room)
            line = Text.assemble(
                f" {label:7}{values[-1]:8{form}} ", (chart, "green"), (scale, "dim")
            )
            lines.append(line)
    return lines + _evals(s, width)


def _evals(s: Snapshot, width: int) -> list[Text]:
    """Return a line for each set, by its name where there are several."""
    names = list(dict.fromkeys(name for _, scores in s.evals for name in scores))
    labels = [cut(name, MAX_SET_COLUMNS) for name in names] if len(names) > 1 else ["eval"]
    room = max(7, *map(len, labels))
    lines: list[Text] = []
    for name, label in zip(names, labels, strict=False):
        scores = [(step, scores[name]) for step, scores in s.evals if name in scores]
        line = Text(f" {label:{room}}{scores[-1][1]:8.3f} ")
        line.append(chain(scores, width - len(line.plain) - 1), "dim")
        lines.append(line)
    return lines


def _lengths(s: Snapshot, width: int, tall: bool) -> list[Text]:
    if not s.length_histogram:
        return []
    bounds = [bound for bound, _ in s.length_histogram]
    counts = [number for _, number in s.length_histogram]
    lines = [_rule("response lengths of the last step", width)]
    if not tall:
        chart = Text(f" tokens ▕{columns(counts)}▏ 1 … {bounds[-1]:,}", "cyan")
        return [*lines, chart.append(f"   most often ≤ {_mode(s)}", "dim")]
    top = max(*counts, 1)
    room = max(4, min(60, width - 20))
    return lines + [
        Text.assemble(f" ≤{bound:7,} ", (bar(number / top, room), "cyan"), f" {number:,}")
        for bound, number in s.length_histogram
    ]


def _mode(s: Snapshot) -> str:
    return f"{max(s.length_histogram, key=lambda bin: bin[1])[0]:,}"


def _counters(s: Snapshot, width: int) -> list[Text]:
    counted = (
        (name, value) for name, value in s.counters.items() if value and name not in ORDINARY
    )
    visible = [f"{name.replace('_', ' ')} {value:,}" for name, value in counted]
    if not visible:
        return []
    return [_rule("counted", width), Text(" " + cut(" · ".join(visible), width - 2), "yellow")]


def _event(event: tuple[float, str], width: int) -> Text:
    when, text = event
    return Text.assemble((f" {duration(when):>8}  ", "dim"), cut(text, max(1, width - 12)))


def _events_page(s: Snapshot, view: ScreenView, width: int, room: int) -> list[Text]:
    if not s.events:
        return [_rule("events", width), Text(" nothing has happened yet", "dim")]
    newest_first = s.events[::-1]
    start = min(view.selected, len(newest_first) - 1)
    visible = newest_first[start : start + max(1, room - 1)]
    title = f"events · newest first · {start + 1}–{start + len(visible)} of {len(newest_first)}"
    return [_rule(title, width), *(_event(e, width) for e in visible)]


def _samples(s: Snapshot, view: ScreenView, width: int, room: int) -> list[Text]:
    if not s.samples:
        return [_rule("samples", width), Text(" no response is finished yet", "dim")]
    selected = min(view.selected, len(s.samples) - 1)
    sample = s.samples[selected]
    list_room = min(len(s.samples), max(1, room // 3))
    start = min(max(0, selected - list_room // 2), len(s.samples) - list_room)
    lines = [_rule(f"samples · {selected + 1} of {len(s.samples)}, latest first", width)]
    for i in range(start, start + list_room):
        row = s.samples[i]
        score = "    –" if row.reward is None else f"{row.reward:5.2f}"
        text = Text.assemble(
            "▸" if i == selected else " ",
            f"{score} {row.num_tokens:>6,} tok  step {row.step:<5} ",
            (cut(f"{row.prompt} {row.text}", max(1, width - 30)), "" if i == selected else "dim"),
        )
        lines.append(text)
    lines.append(_rule(sample.response, width))
    lines += _wrapped(sample.prompt, "bold", width)
    lines += _wrapped(sample.text, "", width)
    return lines


def _wrapped(text: str, style: str, width: int) -> list[Text]:
    """Return long texts in full, cut at the width, with line breaks kept: the model's output, no
    summary."""
    room = max(2, width - 2)  # a wide character takes two cells
    return [
        Text(" " + part, style)
        for line in text.split("\n")
        for part in chop_cells(printable(line), room) or [""]
    ]


def _help(width: int) -> list[Text]:
    return [
        _rule("keys", width),
        *(Text.assemble((f"   {keys:14}", "bold"), what) for keys, what in HELP),
    ]


def _footer(view: ScreenView, width: int) -> Text:
    if view.notice:
        return Text(f" {cut(view.notice, width - 2)}", "bold yellow")
    marks = [
        (f" {i} {page} ", "reverse" if page == view.page else "dim")
        for i, page in enumerate(PAGES, 1)
    ]
    return _spread(Text.assemble(*marks), Text("? help  q quit ", "dim"), width)


def _bar(share: float, width: int, style: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return a bar: thick for the part that is done, thin for the rest."""
    done = bar(share, width).rstrip()
    return (done, style), ("─" * (width - len(done)), "dim")


def _rule(title: str, width: int) -> Text:
    text = f"── {cut(title, max(1, width - 6))} "
    return Text(text + "─" * max(0, width - len(text)), "blue")


def _spread(left: Text, right: Text, width: int) -> Text:
    gap = max(1, width - left.cell_len - right.cell_len)
    return Text.assemble(left, " " * gap, right)
