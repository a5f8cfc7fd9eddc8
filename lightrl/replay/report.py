"""`lightrl replay RUN` as text and as JSON. Reads what log.py has made of the journal."""

from pathlib import Path
from typing import Any

from lightrl.errors import LightRLError
from lightrl.metrics.display import aligned, printable
from lightrl.replay.log import Replay, ToldResponse, ToldRound, ToldRun, read_run
from lightrl.wire import to_json, unpack_i32

IDS_A_LINE = 16


def replay_lines(run_dir: Path, step: int | None, response: str) -> list[str]:
    """A table of rounds; with `step` that of its responses; with `response` its tokens.

    Raises LightRLError if there is no journal, or nothing in it about what was asked for.
    """
    told = read_run(run_dir, response)
    if response:
        lines = _response_lines(_response(told, response))
    elif step is not None:
        lines = _step_lines(told.replay, _rounds(told, step))
    else:
        lines = [
            *_table([_ROUND, *map(_round_row, told.replay.rounds)]),
            "",
            _stand(told.replay),
        ]
        if told.replay.first_step:
            lines.append(
                f"the journal begins at step {told.replay.first_step}: journal.keep_history "
                "keeps all of it"
            )
    return [*lines, *(f"DAMAGED   {line}" for line in told.damage)]


def replay_json(run_dir: Path, step: int | None, response: str) -> str:
    """All of it as one line."""
    told = read_run(run_dir, response)
    replay = told.replay
    rounds = replay.rounds if step is None else _rounds(told, step)
    whole: dict[str, Any] = {
        "run_dir": str(run_dir),
        "segments": told.files,
        "damage": told.damage,
        "first_step": replay.first_step,
        "steps_done": replay.steps_done,
        "version": replay.version,
        "rounds": [{**_fields(r), "reward": r.reward} for r in rounds],
    }
    if response:
        one = _response(told, response)
        whole["response"] = {**_fields(one), "token_ids": unpack_i32(one.token_ids)}
    elif step is not None:
        whole["responses"] = [
            {name: value for name, value in _fields(r).items() if name != "token_ids"}
            for r in replay.responses.values()
            if r.step == step
        ]
    return to_json(whole).decode()


def _fields(value: ToldRound | ToldResponse) -> dict[str, Any]:
    return dict(vars(value))


def _rounds(told: ToldRun, step: int) -> list[ToldRound]:
    rounds = [r for r in told.replay.rounds if r.step == step]
    if not rounds:
        known = sorted({r.step for r in told.replay.rounds})
        holds = f"it holds steps {known[0]} to {known[-1]}" if known else "it holds no round"
        raise LightRLError(f"step {step}: not in the journal; {holds}")
    return rounds


def _response(told: ToldRun, name: str) -> ToldResponse:
    if name not in told.replay.responses:
        raise LightRLError(
            f"{name}: no such response in the journal; lightrl replay --step N names them"
        )
    return told.replay.responses[name]


_ROUND = (
    *("STEP", "ROUND", "PROMPTS", "RESPONSES", "TOKENS", "SCORED", "REWARD", "SHARDS", "TRAINED"),
    *("DIGEST", "STATE"),
)
_RESPONSE = ("RESPONSE", "TOKENS", "VERSIONS", "ENDED", "REWARD", "TRAINED", "ATTEMPTS")


def _round_row(r: ToldRound) -> tuple[str, ...]:
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


def _step_lines(replay: Replay, rounds: list[ToldRound]) -> list[str]:
    responses = [r for r in replay.responses.values() if r.step == rounds[0].step]
    return [
        *_table([_ROUND, *map(_round_row, rounds)]),
        "",
        *_table([_RESPONSE, *map(_response_row, responses)]),
    ]


def _response_row(r: ToldResponse) -> tuple[str, ...]:
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


def _response_lines(r: ToldResponse) -> list[str]:
    lines, ids, first = _table([_RESPONSE, _response_row(r)]), unpack_i32(r.token_ids), 0
    for version, count in r.spans:
        lines += ["", f"version {version}, tokens {first} to {first + count - 1}"]
        for at in range(first, first + count, IDS_A_LINE):
            lines.append("  " + " ".join(map(str, ids[at : min(at + IDS_A_LINE, first + count)])))
        first += count
    return lines


def _stand(replay: Replay) -> str:
    version = "no version" if replay.version is None else f"version {replay.version}"
    held = f"{replay.num_open:,} open responses of {replay.open_tokens:,} tokens"
    return f"ends after {replay.steps_done} steps, {version}; {held}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Numbers to the right, words to the left."""

    def is_number(i: int) -> bool:
        return len(rows) > 1 and all(row[i][:1].isdigit() or row[i] == "-" for row in rows[1:])

    return aligned(rows, is_number)
