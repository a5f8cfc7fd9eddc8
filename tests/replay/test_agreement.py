"""The log is read once: what `lightrl status` says of a killed run, what `lightrl replay` tells and
what a resume goes on from are the same, and are where the coordinator was when it was killed."""

from dataclasses import fields
from pathlib import Path

import pytest

from lightrl.config.run_file import load_config
from lightrl.coordinator.journaling import FOLDER
from lightrl.core.coordinator import Coordinator
from lightrl.core.log_entries import LogEntry
from lightrl.core.recovery import recover
from lightrl.core_settings import settings_of
from lightrl.journal.read import LOG, newest
from lightrl.replay.log import interrupted, read_run
from tests.core.world import World
from tests.support.cli import QUICKSTART
from tests.support.journals import left_behind, note

NUM_PROMPTS = 7
MODES = {
    "plain": (),
    "tail": ("round.tail_batching=both", "round.eta=1.5"),
    "asynchronous": ("async.max_staleness=1",),
    "sampling": ("algorithm.dynamic_sampling=true", "reward.on_failure=0.0"),
    "sets": (
        "eval.path=",
        'eval.sets=[{name="a", path="a.jsonl", max_response_length=3}, '
        '{name="b", path="b.jsonl", samples=3, temperature=1}]',
    ),
}
COMMON = (
    *("train.prompts_per_step=3", "rollout.group_size=2", "train.steps=9"),
    *("rollout.max_response_length=12", "eval.interval=1", "async.max_staleness=0"),
)


EVAL_SIZES = {"eval": 2, "a": 1, "b": 1}  # as far as a run has such a set


def lived(world: World, num_events: int) -> list[tuple[int, list[LogEntry]]]:
    """The segments of its journal, as left_behind takes them."""
    segments: list[list[LogEntry]] = []
    for _ in range(num_events):
        world.live(1, coordinator_lives=True)
        if not segments or world.driver.segment is not segments[-1]:
            segments.append(world.driver.segment)
    told = note(0.0, NUM_PROMPTS, EVAL_SIZES)
    return [(began.step, [began, told, *rest]) for began, *rest in segments]


@pytest.mark.parametrize("num_events", [3, 60, 1200])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(s, marks=pytest.mark.e2e) for s in range(2, 6))]
)
def test_status_replay_and_resume_agree_on_where_a_killed_run_stands(
    tmp_path: Path, seed: int, mode: str, num_events: int
):
    config = load_config(QUICKSTART, [*COMMON, *MODES[mode]])
    settings = settings_of(config, NUM_PROMPTS, eval_sizes=EVAL_SIZES, vocabulary=100)
    given = {f.name: getattr(settings, f.name) for f in fields(settings)}
    # of broadcasts nothing is written down
    given |= {"chunk_tokens": 1, "patience_s": 1e9, "slots": 3, "broadcast": "off"}
    del given["max_response_tokens"]  # is MAX_TOKENS
    given["max_unscored_steps"] = 0  # two responses of an evaluation may well have no score
    world = World(seed, **given)
    segments = lived(world, num_events)
    run_dir = left_behind(tmp_path / "one", *COMMON, *MODES[mode], segments=segments)

    resumed = Coordinator(settings, 0.0)
    recover(resumed, newest(run_dir / FOLDER, LOG)[1], 0.0)
    status, told = interrupted(run_dir), read_run(run_dir)
    assert told.damage == []
    assert status is not None
    replay = told.replay
    killed = world.core
    assert killed.fleet.published is not None
    version = killed.fleet.published.policy_version
    assert (status.step, status.policy_version) == (killed.step, version)
    assert status.nodes == ()
    assert (replay.steps_done, replay.version) == (killed.step, version)
    assert (resumed.step, resumed.fleet.published.policy_version) == (killed.step, version)

    open_responses = killed.table.responses
    assert list(resumed.table.responses) == list(open_responses)
    assert replay.num_open == len(open_responses)
    assert replay.open_tokens == sum(len(r.tokens) for r in open_responses.values())
    waiting = status.responses_queued + status.responses_done
    assert waiting == sum(r.state in {"queued", "running", "done"} for r in open_responses.values())
    assert status.rollout_tokens == sum(
        getattr(killed.table.counters, kind) for kind in ("rollout_tokens", "eval_tokens")
    )
    for name, r in open_responses.items():
        again = resumed.table.responses[name]
        assert (again.spans, again.finish_reason) == (r.spans, r.finish_reason)
        assert (again.scored, again.reward) == (r.scored, r.reward)
        if r.tokens:
            one = replay.responses[name]
            assert (one.step, one.spans) == (r.group.round.step, r.spans)
            assert (one.finish_reason, one.is_scored) == (r.finish_reason, r.scored)
            assert one.reward == (None if one.failure else r.reward)

    assert num_events < 1200 or len(segments) > 1
    for round in replay.rounds:
        if round.kind != "eval":
            assert round.is_done == (round.step < killed.step)
            sent = [g for shard in world.shards.get(round.step, ()) for g in shard.groups]
            assert round.num_trained == sum(len(g.responses) for g in sent)
