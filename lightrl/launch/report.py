"""A run as plain lines: progress without a screen, the result at its end, `lightrl status`."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightrl.client import ask
from lightrl.client.address import relative
from lightrl.client.find_run import OVER, final_snapshot
from lightrl.errors import LightRLError, PeerUnreachable, ProtocolError
from lightrl.log import WARNING
from lightrl.messages.snapshot import INTERRUPTED, NodeRow, Snapshot
from lightrl.metrics.display import (
    aligned,
    count,
    duration,
    pulling,
    responses,
    sides,
    speculation,
    step_lines,
    usd,
)
from lightrl.metrics.evaluation import Scores, scores_line
from lightrl.metrics.waits import WaitLines, waiting
from lightrl.metrics.warned import MAX_REPEATED, kind, last_warnings, warning_text
from lightrl.trainer.checkpoint.on_disk import CHECKPOINTS, by_step, step_of
from lightrl.wire import from_json

SNAPSHOT_EVERY_S = 0.5
LINE_EVERY_S = 2.0
EVAL_LINE_EVERY_S = 20.0
RETRY_S = 1.0
# reported with the result
TROUBLE = ("rewards_failed", "groups_dropped", "nodes_lost", "engines_lost")


async def print_progress(address: str, key: str, report: Callable[[str], None] = print) -> None:
    """Report a line every few seconds and for every evaluation, until the run is over."""
    progress = ProgressLines()
    while True:
        try:
            async with contextlib.aclosing(ask.watch(address, SNAPSHOT_EVERY_S, key)) as snapshots:
                async for snapshot in snapshots:
                    for line in progress.lines(snapshot, time.monotonic()):
                        report(line)
                    if snapshot.state in OVER:
                        return
        except PeerUnreachable:
            pass  # the launcher reports why
        await asyncio.sleep(RETRY_S)


class ProgressLines:
    """Lines of progress, and which of them have been printed."""

    def __init__(self) -> None:
        self._printed_at = self._eval_printed_at = float("-inf")
        self._step = 0
        self._num_evals = 0
        self._state = ""
        self._is_first = True
        self._warned: set[str] = set()  # kinds of warnings
        self._waits = WaitLines()

    def lines(self, s: Snapshot, now: float) -> Iterator[str]:
        """Yield the lines that this snapshot adds."""
        state = f"starting: {_readiness(s)}" if s.state == "starting" else s.state
        if state != self._state and s.state in {"starting", "finishing", "stopped", "failed"}:
            yield state
        self._state = state
        if self._is_first and s.step > 0:  # resumed: printed before
            self._step, self._num_evals = s.step, len(s.evals)
        self._is_first = False
        for row in s.warnings:
            if (of := kind(row.text)) not in self._warned:
                self._warned.add(of)
                yield f"{WARNING}{warning_text(row)}"
        yield from self._waits.lines(s.wait, now)
        if s.round_kind == "eval" and now - self._eval_printed_at >= EVAL_LINE_EVERY_S:
            self._eval_printed_at = now
            yield f"evaluating: {_evaluated(s)}"
        evals, self._num_evals = s.evals[self._num_evals :], len(s.evals)
        yield from (_eval_line(s.num_steps, *e) for e in evals if e[0] < s.step)
        over = s.step == s.num_steps
        if s.step > self._step and s.rewards and (over or now - self._printed_at >= LINE_EVERY_S):
            self._step, self._printed_at = s.step, now
            yield (
                f"step {s.step:>5}/{s.num_steps}  reward {s.rewards[-1]:.3f}  length "
                f"{s.lengths[-1]:6.1f}  {s.step_seconds[-1]:.2f} s/step{_speed(s)}  "
                f"{duration(s.elapsed_s)}"
            )
        yield from (_eval_line(s.num_steps, *e) for e in evals if e[0] >= s.step)


def _evaluated(s: Snapshot) -> str:
    done = s.responses_done
    total = done + s.responses_running + s.responses_queued + s.responses_waiting
    scored = f"  {s.round_accepted:,} of {s.round_needed:,} prompts are scored"
    waits = scored if done == total else ""
    return f"{done:,} of {total:,} responses{waits}{_speed(s)}  {duration(s.elapsed_s)}"


def _speed(s: Snapshot) -> str:
    return f"  {count(s.tokens_per_s)} tokens/s" if s.tokens_per_s else ""


def _eval_line(num_steps: int, step: int, scores: Scores) -> str:
    return f"step {step:>5}/{num_steps}  eval {scores_line(scores)}"


def result_lines(run_dir: Path) -> list[str]:
    """Return the result of a finished run, from its summary. Raises LightRLError without one."""
    summary = read_summary(run_dir)
    wall_s, tokens, sets = (summary[k] for k in ("rl_wall_s", "rollout_tokens", "eval_sets"))
    lines = [
        f"finished {summary['steps']} steps in {wall_s:.1f} s, without start-up and evaluation"
    ]
    width = max(map(len, sets), default=0) if len(sets) > 1 else 0
    for k, (name, scores) in enumerate(sets.items()):
        label, of = "" if k else "held-out", f"{name:{width}}  " if width else ""
        lines.append(f"  {label:10} {of}{scores[0][1]:.3f} -> {scores[-1][1]:.3f}")
    speed = f" ({tokens / wall_s:,.0f} a second)" if wall_s else ""
    trained = f"{summary['trained_responses']:,} responses trained on"
    lines.append(f"  tokens     {tokens:,}{speed}; {trained}")
    if line := speculation({f"speculation/{k}": v for k, v in summary["speculation"].items()}):
        lines.append(f"  drafts     {line}")
    if trouble := _trouble(summary["counters"]):
        lines.append(f"  WARNING    {', '.join(trouble)}; see {run_dir / 'logs'}")
    if not summary["trained_responses"]:
        lines.append("  WARNING    no response was trained on: the model is unchanged")
    if (model := exported_model(run_dir)) is not None:
        lines.append(f"  model      {model}")
    return [*lines, f"  run        {run_dir}"]


def repeated_warnings(run_dir: Path) -> list[str]:
    """Return the warnings of a run that is over, from its last snapshot."""
    try:
        last = final_snapshot(run_dir)
        return last_warnings(last.warnings, but=stop_reason(run_dir)) if last is not None else []
    except LightRLError:
        return []  # the result reports why


def stop_reason(run_dir: Path) -> str:
    """Return why the run ended, from its summary. Raises LightRLError without one."""
    return str(read_summary(run_dir)["reason"] or "no reason given")


def exported_model(run_dir: Path) -> Path | None:
    """Return the newest Hugging Face model directory of the run."""
    folders = [path / "hf" for path in by_step(run_dir / CHECKPOINTS)]
    names = ("config.json", "adapter_config.json")
    found = [f for f in folders if any((f / name).is_file() for name in names)]
    return max(found, key=lambda folder: step_of(folder.parent), default=None)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return summary.json of a run that is over. Raises LightRLError without one."""
    file = run_dir / "summary.json"
    try:
        return from_json(file.read_bytes(), dict[str, Any])
    except FileNotFoundError:
        raise LightRLError(
            f"{file}: missing, so the run did not finish; see {run_dir / 'logs'}"
        ) from None
    except (OSError, ProtocolError) as e:
        raise LightRLError(f"{file}: {e}") from None


def _trouble(counters: Mapping[str, int]) -> list[str]:
    # groups of equal rewards were replaced
    unscored = counters["groups_dropped"] - counters["groups_flat"]
    named = {**counters, "groups_dropped": unscored}
    return [f"{name.replace('_', ' ')}: {named[name]:,}" for name in TROUBLE if named[name]]


def status_lines(s: Snapshot) -> list[str]:
    """Return the table of `lightrl status`: plain text, one node a line."""
    version = "none" if s.policy_version is None else str(s.policy_version)
    lines = [
        f"run       {s.run} · {s.state} · {duration(s.elapsed_s)}",
        (
            f"step      {s.step}/{s.num_steps} · policy version {version} · "
            f"{count(s.tokens_per_s)} tokens/s"
        ),
        f"round     {_round(s)}",
        *(f"eval      {scores_line(scores)} at step {step}" for step, scores in s.evals[-1:]),
        *(f"waiting   {waiting(row)}" for row in [s.wait] if row),
        *(f"{label:10}{line}" for label, line in step_lines(s)),
        *_forecast(s),
        *(f"warning   {warning_text(row)}" for row in s.warnings[-MAX_REPEATED:]),
        *(f"devices   {line}" for line in sides(s.nodes)),
        *(f"pulling   {n.name}: {line}" for n in s.nodes if (line := pulling(n.weights))),
        *(f"receiving {n.name}: by broadcast, {n.broadcast}" for n in s.nodes if n.broadcast),
    ]
    if s.state == INTERRUPTED:
        return [*lines, f"continue  lightrl resume {relative(Path(s.run_dir))}"]
    rows = [
        ("NODE", "ROLE", "STATE", "PID", "VERSION", "RUNNING", "TOKENS/S", "HOST"),
        *map(_row, s.nodes),
    ]
    return [*lines, "", *aligned(rows, lambda _: False)]


def _row(n: NodeRow) -> tuple[str, ...]:
    return (
        n.name,
        ",".join(n.roles),
        n.state,
        str(n.pid),
        "-" if n.policy_version is None else str(n.policy_version),
        f"{n.running}/{n.slots}" if n.slots else "-",
        count(n.tokens_per_s) if n.slots else "-",
        n.host,
    )


def _round(s: Snapshot) -> str:
    if not s.round_kind:
        return "between rounds"
    return f"{s.round_kind} · {s.round_accepted}/{s.round_needed} groups · {responses(s)}"


def _forecast(s: Snapshot) -> Iterator[str]:
    """Yield time and cost of a step with the present number of preemptible nodes, and others."""
    if (c := s.cost) is None or s.state in OVER or s.state == INTERRUPTED:
        return
    if not c.forecast:
        what = "a whole period of short and long rounds" if s.tail is not None else "a step"
        yield f"forecast  none before {what} is done"
        return
    for row in c.forecast:
        takes = "never ends" if row.step_s is None else f"{row.step_s:.2f} s a step"
        price = "" if row.usd is None else f", {usd(row.usd)} US$"
        here = " (now)" if row.preemptible == c.preemptible else ""
        nodes = "node" if row.preemptible == 1 else "nodes"
        yield f"forecast  {row.preemptible} preemptible {nodes}{here}: {takes}{price}"
    worth = "" if c.usd is None else " worth its price"
    asked = "" if c.wanted is None else f"; wanted: {c.wanted}"
    yield f"          from {c.enough} on one more saves nothing{worth}{asked}"


def _readiness(s: Snapshot) -> str:
    if not s.nodes:
        return "waiting for nodes"
    return ", ".join(f"{n.name} {n.state}" for n in s.nodes)
