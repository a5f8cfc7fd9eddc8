"""A run that was left behind, for tests: its directory, its config, and a journal of two steps."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightrl.config.run_file import load_config, to_toml
from lightrl.core.events import PromptsDrawn, ResponseScored
from lightrl.core.log_entries import (
    LogEntry,
    RoundOpened,
    RoundSnapshot,
    ShardSent,
    ShellNote,
    SnapshotBegan,
    SnapshotEnded,
    TokensTaken,
    VersionPublished,
)
from lightrl.core.rounds.backlog import Deferred
from lightrl.core.settings import EvalSet
from lightrl.core.state import DrawnPrompt
from lightrl.journal.read import LOG
from lightrl.journal.write import JournalWriter
from lightrl.keys import write_key
from lightrl.messages.responses import FinishReason, ResponseTokens, Sampling
from lightrl.messages.training import StepDone, TrainGroup, TrainResponse, TrainShard
from lightrl.metrics.rounds import Records
from lightrl.wire import pack_f32, pack_i32, to_json
from tests.core.conftest import SETTINGS
from tests.support.cli import QUICKSTART

PROMPT = DrawnPrompt("p1", 0, pack_i32([5, 6]))
OTHER = DrawnPrompt("p2", 0, pack_i32([7]))


def tokens(
    response: str,
    offset: int,
    ids: Sequence[int],
    attempt: int = 1,
    end: FinishReason | None = None,
) -> ResponseTokens:
    return ResponseTokens(
        response, attempt, offset, pack_i32(ids), pack_f32([-0.5] * len(ids)), end
    )


def shard(step: int, group: str, *members: tuple[Sequence[int], float]) -> ShardSent:
    """`members`: token ids and reward of each response."""
    trained = [
        TrainResponse(f"{group}#{k}", pack_i32(ids), pack_f32([-0.5] * len(ids)), reward, "stop")
        for k, (ids, reward) in enumerate(members)
    ]
    groups = (TrainGroup(group, PROMPT.tokens, tuple(trained)),)
    return ShardSent(TrainShard(step, 0, step, groups, last=True, num_groups=1))


def note(
    elapsed_s: float, num_prompts: int = 1000, eval_sizes: dict[str, int] | None = None
) -> ShellNote:
    """What a coordinator knows of the run when it begins a segment."""
    records = Records("one", "", "head", 9, 105)
    records.evals = [(0, {"held": 0.25})]
    sizes = (eval_sizes or {}).items()
    sets = tuple(EvalSet(name, num, 1, Sampling(0.0), 9) for name, num in sizes)
    settings = replace(SETTINGS, num_prompts=num_prompts, eval_sets=sets)
    return ShellNote(records.note(elapsed_s, {}, settings))


FIRST: list[LogEntry] = [
    *(SnapshotBegan(), note(0.0), SnapshotEnded(), VersionPublished(0, "aa" * 16)),
    *(RoundOpened(0, "plain"), PromptsDrawn((PROMPT,))),
    TokensTaken(0, (tokens("p1@0#0", 0, [11, 12]), tokens("p1@0#1", 0, [21]))),
    TokensTaken(0, (tokens("p1@0#0", 2, [13], end="stop"), tokens("p1@0#1", 1, [], end="stop"))),
    *(ResponseScored("p1@0#0", 1, 1.0), ResponseScored("p1@0#1", 1, 0.0)),
    shard(0, "p1@0", ([11, 12, 13], 1.0), ([21], 0.0)),
    *(RoundOpened(1, "plain"), PromptsDrawn((OTHER,))),
    TokensTaken(0, (tokens("p2@0#0", 0, [31, 32]),)),
    *(VersionPublished(1, "bb" * 16, (1,)), StepDone(0, 1, {"loss/policy": 0.5})),
]
SECOND: list[LogEntry] = [  # begins with what of the first one still stands
    *(SnapshotBegan(1, 2, version=1, digests={1: ("bb" * 16,)}), note(61.0)),
    RoundSnapshot(1, "plain", 1, (Deferred(OTHER, 0, 1),), False),
    *(TokensTaken(0, (tokens("p2@0#0", 0, [31, 32], attempt=2),)), SnapshotEnded()),
    TokensTaken(1, (tokens("p2@0#0", 2, [33, 34, 35], attempt=2),)),
]


def left_behind(
    run_dir: Path, *overrides: str, segments: Sequence[tuple[int, list[LogEntry]]] = ()
) -> Path:
    """As a coordinator that was killed leaves it."""
    (run_dir / "logs").mkdir(parents=True)
    where = (f"run.name={run_dir.name}", f"run.dir={run_dir.parent}", "run.bind=tcp://127.0.0.1:*")
    where += ("train.prompts_per_step=1", "rollout.group_size=2", "async.max_staleness=1")
    (run_dir / "config.toml").write_text(to_toml(load_config(QUICKSTART, [*where, *overrides])))
    write_key(run_dir / "key")
    metrics = [
        {"step": 0, "eval/held/avg@1": 0.25},
        {"step": 1, "reward/mean": 0.5, "response_length/mean": 3.0, "timing_s/step": 61.0},
    ]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(to_json(m) + b"\n" for m in metrics))
    asyncio.run(_write(run_dir / "journal", segments or ((0, FIRST), (1, SECOND))))
    return run_dir


async def _write(folder: Path, segments: Sequence[tuple[int, list[LogEntry]]]) -> None:
    trouble: list[str] = []
    writer: JournalWriter[LogEntry] = JournalWriter(folder, LOG, 1, trouble.append)
    for step, facts in segments:
        base = next(i for i, fact in enumerate(facts) if isinstance(fact, SnapshotEnded)) + 1
        writer.begin(step, facts[:base])
        for fact in facts[base:]:
            writer.append(fact)
    await writer.close()
    assert not trouble
