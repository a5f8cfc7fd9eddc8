"""Print the report of log.py as text and as JSON, for `lightrl replay RUN`."""

from pathlib import Path
from typing import Any

from lightrl.errors import LightRLError
from lightrl.metrics.display import aligned, printable
from lightrl.replay.log import JournalReport, Replay, ResponseReport, RoundReport, read_run
from lightrl.wire import to_json, unpack_i32

IDS_A_LINE = 16
MAX_RECORD = 2000  # characters of the messages of an observation


def replay_lines(run_dir: Path, step: int | None, response: str) -> list[str]:
    """Return a table of rounds, of the responses of `step`, or of the tokens of `response`.

    Raises LightRLError if there is no journal, or it does not hold the step or response.
    """
    report = read_run(run_dir, response)
    if response:
        lines = _response_lines(_response(report, response))
    elif step is not None:
        lines = _step_lines(report.replay, _rounds(report, step))
    else:
        lines = [
            *_table([_ROUND, *map(_round_row, report.replay.rounds)]),
            "",
            _summary(report.replay),
        ]
        if report.replay.first_step:
            lines.append(
                f"the journal begins at step {report.replay.first_step}: journal.keep_history "
                "keeps all of it"
            )
    return [*lines, *(f"DAMAGED   {line}" for line in report.damage)]


def replay_json(run_dir: Path, step: int | None, response: str) -> str:
    """Return the report as one line of JSON."""
    report = read_run(run_dir, response)
    replay = report.replay
    rounds = replay.rounds if step is None else _rounds(report, step)
    whole: dict[str, Any] = {
        "run_dir": str(run_dir),
        "segments": report.files,
        "damage": report.damage,
        "first_step": replay.first_step,
        "steps_done": replay.steps_done,
        "version": replay.version,
        "rounds": [{**_fields(r), "reward": r.reward} for r in rounds],
    }
    if response:
        one = _response(report, response)
        whole["response"] = {**_fields(one), "token_ids": unpack_i32(one.token_ids)}
    elif step is not None:
        whole["responses"] = [
            {name: value for name, value in _fields(r).items() if name != "token_ids"}
            for r in replay.responses.values()
            if r.step == step
        ]
    return to_json(whole).decode()


def _fields(value: RoundReport | ResponseReport) -> dict[str, Any]:
    return dict(vars(value))


def _rounds(report: JournalReport, step: int) -> list[RoundReport]:
    rounds = [r for r in report.replay.rounds if r.step == step]
    if not rounds:
        known = sorted({r.step for r in report.replay.rounds})
        holds = f"it holds steps {known[0]} to {known[-1]}" if known else "it holds no round"
        raise LightRLError(f"step {step}: not in the journal; {holds}")
    return rounds


def _response(report: JournalReport, name: str) -> ResponseReport:
    if name not in report.replay.responses:
        raise LightRLError(
            f"{name}: no such response in the journal; lightrl replay --step N names them"
        )
    return report.replay.responses[name]


_ROUND = (
    *("STEP", "ROUND", "PROMPTS", "RESPONSES", "TOKENS", "SCORED", "REWARD", "SHARDS", "TRAINED"),
    *("DIGEST", "STATE"),
)
_RESPONSE = ("RESPONSE", "TOKENS", "VERSIONS", "ENDED", "REWARD", "TRAINED", "ATTEMPTS")


def _round_row(r: RoundReport) -> tuple[str, ...]:
    counts = (r.num_prompts, r.num_responses, r.num_tokens, r.num_scored)
    is_eval = r.kind == "eval"
    return (
        str(r.step),
        r.kind,
        *(f"{n:,}" for n in counts),
        "-" if r.reward is None else f"{r.reward:.3f}",
        *(("-", "-") if is_eval else (f"{r.num_shards:,}", f"{r.num_trained:,}")),
        r.digest[:12] or "-",
        "done" if r.is_done or is_eval else ("published" if r.digest else "open"),
    )


def _step_lines(replay: Replay, rounds: list[RoundReport]) -> list[str]:
    responses = [r for r in replay.responses.values() if r.step == rounds[0].step]
    return [
        *_table([_ROUND, *map(_round_row, rounds)]),
        "",
        *_table([_RESPONSE, *map(_response_row, responses)]),
    ]


def _response_row(r: ResponseReport) -> tuple[str, ...]:
    reward = "-" if r.reward is None else f"{r.reward:.3f}"
    return (
        printable(r.response),
        f"{r.num_tokens:,}",
        ",".join(f"v{version}:{count}" for version, count in r.spans) or "-",
        r.finish_reason or "-",
        f"failed: {printable(r.failure)[:60]}" if r.failure else reward,
        "yes" if r.is_trained else "-",
        str(r.attempt),
    )


def _response_lines(r: ResponseReport) -> list[str]:
    lines, ids, first = _table([_RESPONSE, _response_row(r)]), unpack_i32(r.token_ids), 0
    for number, turn in enumerate(r.turns):
        given = "" if turn.reward is None else f", reward {turn.reward:g}"
        lines += ["", f"observation {number}, {turn.num_inserted} tokens{given}"]
        lines += [f"  {printable(turn.record)[:MAX_RECORD]}"]
        for at in range(turn.start, turn.end, IDS_A_LINE):
            lines.append("  " + " ".join(map(str, ids[at : min(at + IDS_A_LINE, turn.end)])))
    for version, count in r.spans if not r.turns else []:
        lines += ["", f"version {version}, tokens {first} to {first + count - 1}"]
        for at in range(first, first + count, IDS_A_LINE):
            lines.append("  " + " ".join(map(str, ids[at : min(at + IDS_A_LINE, first + count)])))
        first += count
    return lines


def _summary(replay: Replay) -> str:
    version = "no version" if replay.version is None else f"version {replay.version}"
    held = f"{replay.num_open:,} open responses of {replay.open_tokens:,} tokens"
    return f"ends after {replay.steps_done} steps, {version}; {held}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Align numbers right and words left."""

    def is_number(i: int) -> bool:
        return len(rows) > 1 and all(row[i][:1].isdigit() or row[i] == "-" for row in rows[1:])

    return aligned(rows, is_number)
