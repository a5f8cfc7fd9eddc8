"""The emulated rank: it speaks as a real one does, and its versions show exactly what was
trained."""

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from lightrl.config.run_file import parse_config
from lightrl.engine.base import EngineSpec
from lightrl.engine.emulated import EmulatedEngine
from lightrl.errors import TrainerError
from lightrl.messages.training import Checkpointed
from lightrl.messages.weights import PublishWeights
from lightrl.trainer.checkpoint.checksums import find_corruption
from lightrl.trainer.checkpoint.on_disk import latest
from lightrl.trainer.protocol import (
    EMULATED_TARGET,
    Accumulate,
    Done,
    RankStarted,
    ResetStep,
    Save,
    Saved,
    StepFinished,
    Update,
)
from lightrl.wire import pack_f32, pack_i32
from tests.support.tiers import e2e
from tests.support.trainer_coordinator import Coordinator, kill, turns

pytestmark = pytest.mark.usefixtures("warm_emulated")

DEADLINE_S = 60
STEPS = 5
EMULATED = {"rollout": {"engine": "emulated"}, "train": {"engine": "emulated"}}


def perform(rank, *commands):
    return [event for command in commands for event in rank.perform(command)]


def finish(step, samples):
    return Update(step, len(samples), sum(len(s.token_ids) // 4 for s in samples), step + 1)


def digest(rank, batches, step=0):
    samples = [s for batch in batches for s in batch]
    _, finished = perform(rank, Accumulate(step, tuple(batches)), finish(step, samples))
    return finished.published.file.digest


def test_neither_it_nor_its_daemon_needs_torch():
    code = (
        "import sys, lightrl.trainer.rank.emulated, lightrl.trainer.trainer; print('torch' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_it_says_what_a_real_rank_says_but_for_what_only_a_model_knows(
    new_emulated, new_rank, samples, tmp_path
):
    def said(rank, folder):
        path = tmp_path / folder / "step_1"
        batches = (tuple(samples[:9]), (), tuple(samples[9:]))
        commands = (
            Accumulate(0, batches),
            ResetStep(0),
            Accumulate(0, batches),
            finish(0, samples),
        )
        command = Save(1, str(path), export=True)
        events = perform(rank, *commands)
        events += rank.save(command) if folder == "real" else perform(rank, command)
        events += perform(rank, Accumulate(1, ()))
        assert find_corruption(path) == ""
        return [rank.started, *events]

    emulated, real = said(new_emulated(), "emulated"), said(new_rank(), "real")
    assert [type(e) for e in emulated] == [type(e) for e in real]
    one, other = emulated[4].metrics, real[4].metrics
    assert set(one) == {
        "num_tokens",
        "num_trained_tokens",
        "perf/micro_batches",
        "timing_s/forward_backward",
        "timing_s/optimizer",
        "timing_s/publish",
        "weights/publish_s",
    }
    for name in ("num_tokens", "num_trained_tokens", "perf/micro_batches"):
        assert one[name] == other[name], name
    assert emulated[0].device == "emulated"
    published = [e.published for e in emulated if isinstance(e, RankStarted | StepFinished)]
    assert [p.file.num_bytes for p in published] == [4096, 4096]


def test_a_version_is_one_that_the_emulated_engine_loads(new_emulated, samples, model_dir):
    rank = new_emulated()
    published = perform(rank, finish(0, samples))[0].published
    engine = EmulatedEngine(EngineSpec("emulated", str(model_dir), "auto", 64, 4))
    for event in (published, rank.started.published):
        engine.load_weights(event.file)
    assert published.file.digest != rank.started.published.file.digest


@pytest.mark.parametrize(
    "change",
    [
        {"response": "p0@0#9"},
        {"prompt": pack_i32([1])},
        {"token_ids": pack_i32([5]), "rollout_logprobs": pack_f32([-1.0])},
        {"advantage": 0.125},
        {"finish_reason": "length"},
    ],
)
def test_whatever_is_other_in_one_sample_makes_another_version(new_emulated, samples, change):
    batches = [samples[:4], samples[4:8]]
    expected = digest(new_emulated(), batches)
    assert digest(new_emulated(), batches) == expected
    changed = [samples[:4], [*samples[4:7], replace(samples[7], **change)]]
    assert digest(new_emulated(), changed) != expected


def test_order_and_cut_and_number_make_another_version(new_emulated, samples):
    a, b, c, d = samples[:4]
    ways = [
        [[a, b], [c, d]],
        [[b, a], [c, d]],
        [[c, d], [a, b]],
        [[a, b, c, d]],
        [[a, b], [c, d, d]],
        [[a, b], [c]],
        [[a, b], [c, d], [d]],
        [],
    ]
    assert len({digest(new_emulated(), way) for way in ways}) == len(ways)

    def of_two_steps(*steps):
        rank = new_emulated()
        return [digest(rank, [way], step) for step, way in enumerate(steps)][-1]

    assert of_two_steps([a], [b]) == of_two_steps([a], [b])
    assert len({of_two_steps([a], [b]), of_two_steps([b], [a]), of_two_steps([c], [b])}) == 3


def test_what_was_given_before_the_step_began_anew_does_not_count(new_emulated, samples):
    one, other = new_emulated(), new_emulated()
    events = perform(one, Accumulate(0, (tuple(samples[:3]),)), ResetStep(0))
    assert events == [Done(0), Done(0)]
    # How many pieces it comes in does not count, either.
    perform(one, Accumulate(0, (tuple(samples[3:5]),)))
    # the totals differ
    assert digest(one, [samples[5:]]) != digest(other, [samples[3:5], samples[5:]])
    one, other = new_emulated(), new_emulated()
    perform(
        one,
        Accumulate(0, (tuple(samples[:3]),)),
        ResetStep(0),
        Accumulate(0, (tuple(samples[3:5]),)),
    )
    _, finished = perform(one, Accumulate(0, (tuple(samples[5:]),)), finish(0, samples[3:]))
    assert finished.published.file.digest == digest(other, [samples[3:5], samples[5:]])


def test_where_a_mini_batch_ends_makes_another_version(new_emulated, samples):
    def after(*parts):
        rank = new_emulated()
        for part in parts[:-1]:
            sent = Update(0, len(part), 3 * len(part))
            perform(rank, Accumulate(0, (tuple(part),)), sent)
        last = parts[-1]
        commands = [Accumulate(0, (tuple(last),))] if last else []
        *_, finished = perform(rank, *commands, Update(0, len(last), 3 * len(last), 1))
        return finished.published.file.digest

    some = samples[:9]
    whole, cut, elsewhere = after(some), after(some[:3], some[3:]), after(some[:4], some[4:])
    assert len({whole, cut, elsewhere}) == 3
    # The step had no other groups: what has been updated was its last mini-batch.
    assert after(some, []) == whole


def test_a_restored_rank_goes_on_with_the_same_versions(new_emulated, samples, tmp_path):
    rank = new_emulated()
    for step in range(2):
        digest(rank, [samples[step:]], step)
    path = tmp_path / "run" / "checkpoints" / "step_2"
    said = [Done(2), Saved(str(path)), Saved(str(path), is_export=True)]
    assert perform(rank, Save(2, str(path), export=True)) == said
    assert latest(path.parent) == path
    again = new_emulated(start_step=2)
    assert again.started.published.file.policy_version == 2
    assert again.started.published.file.digest != new_emulated().started.published.file.digest
    assert digest(again, [samples], 2) == digest(rank, [samples], 2)
    with pytest.raises(TrainerError, match="step_3: no complete checkpoint"):
        new_emulated(start_step=3)
    state = path / "state" / "digest"
    state.write_bytes(bytes(16))
    assert find_corruption(path) == "state/digest: damaged"
    with pytest.raises(TrainerError, match="step 2: the restored weights have another digest"):
        new_emulated(start_step=2)


def test_a_disk_that_refuses_and_commands_out_of_order_are_named(new_emulated, tmp_path):
    rank = new_emulated()
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "step_0")
    _, failed = perform(rank, Save(0, path))
    assert isinstance(failed, Saved)
    assert "Not a directory" in failed.error
    with pytest.raises(TrainerError, match=r"^Accumulate of step 3, but the rank is at step 0$"):
        perform(rank, Accumulate(3, ()))
    with pytest.raises(
        TrainerError, match=r"^rollout.engine_args.train_ms = 3: known are .*train_step_ms"
    ):
        new_emulated(engine_args={"train_ms": 3})


def test_it_takes_as_long_as_it_is_told(new_emulated, samples):
    tokens = sum(len(s.token_ids) // 4 for s in samples)
    rank = new_emulated(engine_args={"train_token_ms": 0.5, "train_step_ms": 30.0, "t0_ms": 9e9})
    *_, finished = perform(rank, Accumulate(0, (tuple(samples),)), finish(0, samples))
    assert finished.metrics["timing_s/forward_backward"] >= 0.0005 * tokens
    assert finished.metrics["timing_s/optimizer"] >= 0.03


def on_two(start, processes, steps):
    """The digests of two ranks that get these batches in each step."""

    async def run():
        async with (
            processes(start(**EMULATED), 2, EMULATED_TARGET) as ranks,
            asyncio.timeout(DEADLINE_S),
        ):
            first, second = [await rank.receive() for rank in ranks]
            assert second.published is None
            digests = [first.published.file.digest]
            for step, batches_R in enumerate(steps):
                for rank, batch in zip(ranks, batches_R, strict=True):
                    rank.send(Accumulate(step, (tuple(batch),)))
                    rank.send(finish(step, [s for batch in batches_R for s in batch]))
                finished = [[await rank.receive() for _ in range(2)][1] for rank in ranks]
                digests.append(finished[0].published.file.digest)
                assert all(isinstance(event, StepFinished) for event in finished)
                given = sum(len(s.token_ids) // 4 for batch in batches_R for s in batch)
                assert [e.metrics["num_trained_tokens"] for e in finished] == [given, given]
            return digests

    return asyncio.run(run())


def test_two_ranks_publish_what_both_were_given(start, processes, samples):
    a, b, c, d = samples[:4]
    expected = on_two(start, processes, [([a, b], [c]), ([d], [])])
    assert len(set(expected)) == 3
    assert on_two(start, processes, [([a, b], [c]), ([d], [])]) == expected
    assert on_two(start, processes, [([a], [b, c]), ([], [d])])[1] != expected[1]
    assert on_two(start, processes, [([c], [a, b])])[1] != expected[1]
    # Only what the second rank is given is another sample, of as many tokens.
    other = replace(c, response="p0@0#9")
    assert on_two(start, processes, [([a, b], [other])])[1] != expected[1]


# Through the trainer node, with a scripted coordinator.


@pytest.fixture
def new_config(model_dir):
    def make(ranks=1, deterministic=True, engine_args=None, **checkpoint):
        return parse_config(
            {
                "run": {"deterministic": deterministic},
                "model": {"path": str(model_dir)},
                "data": {"path": "unused"},
                "rollout": {"engine": "emulated", "engine_args": engine_args or {}},
                "train": {
                    "engine": "emulated",
                    "steps": STEPS,
                    "ranks": ranks,
                    "max_tokens_per_gpu": 40,
                },
                "checkpoint": checkpoint,
            }
        )

    return make


def trained(config, folder, groups, prepare=lambda coordinator: None):
    """The coordinator of a trainer that has done all steps."""

    async def run():
        coordinator = Coordinator(config, folder, groups)
        prepare(coordinator)
        await coordinator.run_and_close()
        return coordinator

    return asyncio.run(run())


@pytest.mark.parametrize("ranks", [2, *e2e([1])])
def test_ranks_killed_anywhere_end_with_the_versions_of_ranks_that_were_not(
    new_config, groups, tmp_path, ranks
):
    config = new_config(ranks=ranks, interval=2)
    calm = trained(config, tmp_path / "calm", groups)
    assert len(set(calm.digests.values())) == STEPS + 1

    def disturb(coordinator):
        async def computing():
            kill(number=signal.SIGSTOP)
            for shard in coordinator.shards(1)[:2]:
                coordinator.trainer.handle(shard)
                await turns()
            kill()

        coordinator.on["published", 1] = computing
        coordinator.on["published", 3] = lambda: kill(rank=ranks - 1)
        coordinator.on["saved", 4] = kill

    disturbed = trained(config, tmp_path / "disturbed", groups, disturb)
    assert not disturbed.on
    assert disturbed.num_hellos >= 4
    assert disturbed.digests == calm.digests
    assert disturbed.sent[-1] == Checkpointed(STEPS, 4)


def test_portions_that_were_recorded_give_the_same_version_and_others_do_not(
    new_config, groups, tmp_path
):
    """Not deterministic: how many groups were planned together is what the coordinator has written
    down."""
    config = new_config(deterministic=False, interval=0)

    def killed(coordinator):
        coordinator.on["published", 3] = kill

    disturbed = trained(config, tmp_path / "run", groups, killed)
    assert disturbed.num_hellos == 2  # `Coordinator.take` compares versions that come again
    other = trained(config, tmp_path / "other", groups[1:] + groups[:1])
    assert all(other.digests[step] != disturbed.digests[step] for step in range(1, STEPS + 1))


def test_a_group_without_signal_counts_as_well(new_config, groups, tmp_path):
    config = new_config()
    changed = list(groups)
    first, *rest = groups[5].responses
    changed[5] = replace(groups[5], responses=(replace(first, response="p5@1#0"), *rest))
    one, other = trained(config, tmp_path / "a", groups), trained(config, tmp_path / "b", changed)
    assert one.digests[0] == other.digests[0]
    assert one.digests[1] != other.digests[1]


def test_a_version_goes_before_its_file_is_needed_for_another_one(new_config, groups, tmp_path):
    """The newest two are there to be pulled; a third file would be made if one that the server
    reads were needed."""
    seen = []

    def watch(coordinator):
        def look(version):
            files = coordinator.published.glob("*.bin")
            seen.append(sorted(f.name.split(".")[0] for f in files))
            coordinator.feed(version)

        for version in range(STEPS):
            coordinator.on["published", version] = partial(look, version)

    trained(new_config(), tmp_path / "run", groups, watch)
    assert seen == [["version_0"], *([f"version_{v - 1}", f"version_{v}"] for v in range(1, STEPS))]


def test_a_damaged_checkpoint_costs_one_interval(new_config, groups, tmp_path, caplog):
    config = new_config(interval=2, keep_last=2)
    calm = trained(config, tmp_path / "calm", groups)
    newest = tmp_path / "run" / "checkpoints" / "step_4"

    def disturb(coordinator):
        def damaged():
            state = newest / "state" / "digest"
            state.write_bytes(bytes([state.read_bytes()[0] ^ 1]) + state.read_bytes()[1:])
            kill()

        coordinator.on["saved", 4] = damaged

    disturbed = trained(config, tmp_path / "run", groups, disturb)
    assert disturbed.digests == calm.digests
    assert not newest.with_name("step_4.damaged").exists()  # a later one is sound
    versions = [m.policy_version for m in disturbed.sent if isinstance(m, PublishWeights)]
    assert versions[versions.index(2, 3) :] == [2, 3, 4, 5]
    said = caplog.text
    assert "state/digest: damaged; moved aside as step_4.damaged, going back to step_2" in said


def test_a_rank_that_hangs_is_killed_and_its_step_trained_again(
    new_config, groups, tmp_path, caplog
):
    config = new_config(interval=0)
    config = config.model_copy(update={"node": config.node.model_copy(update={"patience_s": 0.5})})
    calm = trained(config, tmp_path / "calm", groups)

    def disturb(coordinator):
        async def hanging():
            kill(number=signal.SIGSTOP)
            coordinator.feed(1)

        coordinator.on["published", 1] = hanging

    disturbed = trained(config, tmp_path / "run", groups, disturb)
    assert "hangs: no answer for 1.5 s; starting again from step 0" in caplog.text
    assert disturbed.digests == calm.digests


def test_another_trainer_goes_on_from_the_checkpoint_of_one_that_was_stopped(
    new_config, groups, tmp_path
):
    config = new_config(interval=0)
    calm = trained(config, tmp_path / "calm", groups)

    def stopped(coordinator):
        async def stop():
            for shard in coordinator.shards(3)[:2]:  # part of a step
                coordinator.trainer.handle(shard)
            await turns()
            coordinator.trainer.stop()

        coordinator.on["published", 3] = stop

    first = trained(config, tmp_path / "run", groups, stopped)
    assert first.sent[-1] == Checkpointed(3, 0)
    second = trained(config, tmp_path / "run", groups)
    assert first.digests | second.digests == calm.digests
    assert min(second.digests) == 3
