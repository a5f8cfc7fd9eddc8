"""A trainer whose ranks are killed, whose coordinator comes and goes, whose disk refuses: with real
ranks and a scripted coordinator. Whatever happens, every version has the bits that it has when
nothing happens."""

import asyncio
import contextlib
import os
import resource
import shutil
import signal
from itertools import chain

import pytest

from lightrl.config.run_file import parse_config
from lightrl.errors import TrainerError
from lightrl.messages.training import Checkpointed, StepDone, TrainShard
from lightrl.messages.weights import PublishWeights
from lightrl.trainer.algorithm.advantage import train_samples
from lightrl.trainer.batch import plan_micro_batches, with_gradient
from lightrl.trainer.checkpoint.on_disk import latest
from lightrl.trainer.protocol import Accumulate, Update
from tests.support.tiers import e2e
from tests.support.trainer_coordinator import Coordinator, kill, pid_of, turns, until

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("warm_ranks"),
]


@pytest.fixture
def new_config(model_dir):
    def make(steps, ranks=1, deterministic=False, mini_batches=1, **checkpoint):
        return parse_config(
            {
                "run": {"deterministic": deterministic},
                "model": {"path": str(model_dir)},
                "data": {"path": "unused", "max_prompt_length": 8},
                "rollout": {"max_response_length": 32},
                "algorithm": {"name": "dapo", "tis_bounds": (0, 2.0)},
                "train": {
                    "steps": steps,
                    "ranks": ranks,
                    "prompts_per_step": 8,
                    "mini_batches": mini_batches,
                    "max_tokens_per_gpu": 40,
                    "optim": {"lr": 1e-3, "warmup_steps": 3},
                },
                "checkpoint": checkpoint,
            }
        )

    return make


def undisturbed(rank, groups, portions, steps):
    """The digests when nothing happens: of a rank in this process that gets the groups in these
    portions."""
    digests = {0: rank.started.published.file.digest}
    config = rank.config
    made = [train_samples(group, config) for group in groups]
    for step in range(steps):
        rest, size = list(made), 8 // config.train.mini_batches
        for portion in portions[step + 1]:
            if len(rest) < 8 and len(rest) % size == 0:
                done = made[-len(rest) - size : -len(rest)]
                list(rank.perform(Update(step, *totals(done))))
            part, rest = rest[:portion], rest[portion:]
            useful = [with_gradient(samples, config.algorithm) for samples in part]
            [batches] = plan_micro_batches(
                useful, 1, config.train.max_tokens_per_gpu, config.run.deterministic
            )
            list(rank.perform(Accumulate(step, batches)))
        [finished] = rank.perform(Update(step, *totals(made[-size:]), step + 1))
        digests[step + 1] = finished.published.file.digest
    return digests


def totals(made):
    return sum(map(len, made)), sum(len(s.token_ids) // 4 for samples in made for s in samples)


def versions_of(coordinator):
    """As they were said to be there, without what was said of their differences later."""
    said = [m for m in coordinator.sent if isinstance(m, PublishWeights) and not m.deltas]
    return [m.policy_version for m in said]


def full_pipe(path):
    """One that takes nothing; its end."""
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, bytes(1 << 16))
    return path, end


def settings(config):
    return config.model_dump(include={"algorithm", "train", "run", "data", "rollout"})


@pytest.mark.parametrize("mini_batches", [4, *e2e([1])])
def test_a_rank_killed_while_it_starts_computes_or_has_updated_is_as_if_it_had_not_been(
    new_config, new_rank, groups, tmp_path, mini_batches
):
    """Not deterministic: what was trained is trained again by the portions that were recorded."""
    config = new_config(steps=3, interval=0, mini_batches=mini_batches)

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)
        on, killed = coordinator.on, []

        async def starting():
            await until(lambda: pid_of(0))
            killed.append("starting")
            kill()

        async def computing():
            killed.append("computing")
            kill(number=signal.SIGSTOP)
            for shard in coordinator.shards(0)[:2]:
                coordinator.trainer.handle(shard)
                await turns()
            kill()

        async def publishing():
            """The optimizer step is done when another version's file is taken for the new one,
            which cannot become complete: nobody reads what should be its manifest."""
            folder = coordinator.published
            keys = {path.name.split(".")[1] for path in folder.glob("*.bin")}
            full = [full_pipe(folder / f"version_2.{key}.manifest") for key in keys]
            assert not list(folder.glob("draft.*"))
            coordinator.feed(1)
            await until(lambda: list(folder.glob("draft.*")))
            killed.append("publishing")
            kill()
            for fifo, end in full:
                fifo.unlink()
                os.close(end)

        async def told():
            killed.append("published, StepDone not yet said")
            kill()

        on["published", 0], on["published", 1], on["published", 2] = computing, publishing, told
        coordinator.spawn(starting())
        await coordinator.run_and_close()
        return coordinator, killed

    coordinator, killed = asyncio.run(run())
    assert len(killed) == coordinator.num_hellos - 1 == 4
    assert max(map(len, coordinator.portions.values())) > 1
    expected = undisturbed(new_rank(**settings(config)), groups, coordinator.portions, 3)
    assert coordinator.digests == expected
    assert len(set(expected.values())) == 4
    assert coordinator.sent[-1] == Checkpointed(3, 0)


@pytest.mark.e2e
def test_a_rank_that_hangs_is_killed_and_its_step_trained_again(
    new_config, new_rank, groups, tmp_path, caplog
):
    config = new_config(steps=2, interval=0)
    config = config.model_copy(update={"node": config.node.model_copy(update={"patience_s": 1.0})})

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)

        async def hanging():
            kill(number=signal.SIGSTOP)
            coordinator.feed(1)

        coordinator.on["published", 1] = hanging
        await coordinator.run_and_close()
        return coordinator

    coordinator = asyncio.run(run())
    assert coordinator.num_hellos >= 2
    assert "lightrl-rank-0" in (said := caplog.text)
    assert "hangs: no answer for 3 s; starting again from step 0" in said
    assert coordinator.digests == undisturbed(
        new_rank(**settings(config)), groups, coordinator.portions, 2
    )


@pytest.mark.e2e
def test_two_deterministic_ranks_killed_around_a_checkpoint_publish_the_same_bits(
    new_config, groups, tmp_path
):
    """Versions 3 and 4 are computed three times: going on, and twice from the checkpoint of step
    2."""
    config = new_config(steps=5, ranks=2, deterministic=True, interval=2)

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)
        checkpoints = tmp_path / "run" / "checkpoints"
        pointer = checkpoints / ".latest.draft"

        def wait_for_a_reader():
            """In the next save."""
            os.mkfifo(pointer)

        async def saving():
            await until((checkpoints / "step_4").exists)
            kill()
            pointer.unlink()

        def published():
            coordinator.on["done", 3] = saving
            kill(rank=1)

        on = coordinator.on
        on["saved", 2], on["published", 4] = wait_for_a_reader, published
        await coordinator.run_and_close()
        assert not on
        assert coordinator.num_hellos == 3
        versions = versions_of(coordinator)
        # a checkpoint counts once `latest` names it; until then training goes on, maybe to its end
        lives = [0, 1, 2, 3, 4], [2, 3, 4], [2, 3, 4, 5]
        assert versions in ([*chain(*lives)], [*chain(lives[0], lives[2], lives[2])])
        assert len(set(coordinator.digests.values())) == 6
        assert latest(checkpoints) == checkpoints / "step_5"
        assert not list(checkpoints.glob(".*"))

    asyncio.run(run())


@pytest.mark.e2e
def test_a_flipped_bit_in_the_newest_checkpoint_costs_one_interval(
    new_config, new_rank, groups, tmp_path, caplog
):
    config = new_config(steps=5, deterministic=True, interval=2, keep_last=2)

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)
        newest = tmp_path / "run" / "checkpoints" / "step_4"

        def damaged():
            state = next((newest / "state").glob("*.distcp"))
            data = bytearray(state.read_bytes())
            data[len(data) // 2] ^= 16
            state.write_bytes(data)
            kill()

        coordinator.on["saved", 4] = damaged
        await coordinator.run_and_close()
        versions = versions_of(coordinator)
        again = versions.index(2, 3)
        assert versions[again:] == [2, 3, 4, 5]
        assert versions[:again] in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])
        assert not newest.with_name("step_4.damaged").exists()  # there is one of step 5
        said = [m for m in coordinator.sent if isinstance(m, Checkpointed)]
        two = Checkpointed(2, 0)  # as long as there is one only, the model counts
        assert said == [two, Checkpointed(4, 2), two, Checkpointed(4, 2), Checkpointed(5, 4)]
        return coordinator

    coordinator = asyncio.run(run())
    assert coordinator.digests == undisturbed(
        new_rank(**settings(config)), groups, coordinator.portions, 5
    )
    said = caplog.text
    assert said.count("distcp: damaged; moved aside as step_4.damaged, going back to step_2") == 1
    assert "starting again from step 2" in said


def test_the_coordinator_may_come_back_at_any_moment(new_config, new_rank, groups, tmp_path):
    """Also: nothing is said or taken between a broken connection and the welcome."""
    config = new_config(steps=4)
    # so that ranks which are stopped when a step is done have nothing left to do
    weights = config.weights.model_copy(update={"delta": "off"})
    config = config.model_copy(update={"weights": weights})

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)
        trainer, sent = coordinator.trainer, coordinator.sent
        trainer.rejoin()  # while nothing has started yet
        done = []

        async def waiting():
            trainer.pause()
            num_sent = len(sent)
            for shard in coordinator.shards(0):
                trainer.handle(shard)
                await turns()
            assert len(sent) == num_sent
            coordinator.rejoin()
            assert sent[-1] == sent[num_sent - 1]  # the very same version, place and ticket
            done.append("waiting")

        async def computing():
            kill(number=signal.SIGSTOP)
            first, second, *_ = coordinator.shards(1)
            trainer.handle(first)
            await turns()
            trainer.handle(second)
            coordinator.rejoin()
            assert [type(m) for m in sent[-2:]] == [PublishWeights, StepDone]
            assert sent[-1].step == 0
            kill(number=signal.SIGCONT)
            done.append("computing")

        async def begun_anew():
            """By the coordinator, which does not say why."""
            for shard in [*coordinator.shards(2)[:3], *coordinator.shards(2)[:2]]:
                trainer.handle(shard)
                await turns()
            trainer.handle(coordinator.shards(0)[1])  # late
            coordinator.feed(2)
            done.append("begun anew")

        async def finishing():
            """A step without any signal needs no gradients: the ranks are told to finish it at
            once."""
            kill(number=signal.SIGSTOP)
            trainer.handle(TrainShard(3, 0, 3, (groups[5],), True, 1))
            await turns()
            num_sent = len(sent)
            coordinator.rejoin()
            await turns()
            assert len(sent) == num_sent  # it stands nowhere
            kill(number=signal.SIGCONT)
            done.append("finishing")

        coordinator.on["published", 0] = waiting
        for step, happens in enumerate([computing, begun_anew, finishing]):
            coordinator.on["published", step + 1] = lambda: None  # the shards come later:
            coordinator.on["done", step] = happens  # nothing is left to be said of that step
        await coordinator.run()
        assert done == ["waiting", "computing", "begun anew", "finishing"]
        news = sent[-3:]
        assert [type(m) for m in news] == [PublishWeights, StepDone, Checkpointed]
        coordinator.rejoin()
        assert sent[-3:] == news
        assert len(sent) == sent.index(news[0]) + 6
        await coordinator.close()
        return coordinator

    coordinator = asyncio.run(run())
    assert coordinator.num_hellos == 1
    rank = new_rank(**settings(config))
    expected = undisturbed(rank, groups, coordinator.portions, 3)
    no_signal = len(groups[5].responses), sum(len(r.token_ids) // 4 for r in groups[5].responses)
    [finished] = rank.perform(Update(3, *no_signal, 4))
    assert coordinator.digests == expected | {4: finished.published.file.digest}


@pytest.mark.parametrize("mini_batches", [8, *e2e([1])])
def test_a_trainer_that_is_preempted_saves_first_and_another_one_goes_on(
    new_config, new_rank, groups, tmp_path, mini_batches
):
    """Within a step, of which updates that were made are not saved."""
    config = new_config(steps=3, interval=0, mini_batches=mini_batches)

    async def run():
        first = Coordinator(config, tmp_path / "run", groups)

        async def preempted():
            for shard in first.shards(2)[:2]:  # part of a step
                first.trainer.handle(shard)
            await turns()
            first.trainer.stop()

        first.on["published", 2] = preempted
        await first.run_and_close()
        assert first.sent[-1] == Checkpointed(2, 0)
        assert not first.trainer.all_steps_done

        second = Coordinator(config, tmp_path / "run", groups)
        second.portions, second.digests = first.portions, first.digests
        await second.run_and_close()
        published, saved = second.sent[:2]
        assert (published.policy_version, published.portions) == (2, ())
        assert saved == Checkpointed(2, 0)
        assert second.trainer.all_steps_done
        return second.digests, first.portions

    digests, portions = asyncio.run(run())
    assert digests == undisturbed(new_rank(**settings(config)), groups, portions, 3)


@pytest.mark.e2e
def test_a_disk_that_refuses_a_checkpoint_is_asked_again(new_config, groups, tmp_path, caplog):
    config = new_config(steps=3, interval=1)

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)
        coordinator.waits = True
        checkpoints = tmp_path / "run" / "checkpoints"
        checkpoints.touch()  # in the way

        def refuse():
            shutil.rmtree(checkpoints)
            checkpoints.touch()

        coordinator.on["done", 1], coordinator.on["saved", 2] = checkpoints.unlink, refuse
        with pytest.raises(TrainerError, match=r"step_3 was not saved: .*Not a directory"):
            await coordinator.run_and_close()
        return [m for m in coordinator.sent if isinstance(m, StepDone | Checkpointed)]

    said = asyncio.run(run())
    assert [m.step for m in said if isinstance(m, StepDone)] == [0, 1, 2]
    [saved] = [i for i, m in enumerate(said) if isinstance(m, Checkpointed)]
    assert saved >= 2  # beside the training of step 2
    assert said[saved].step == 2
    lines = caplog.text.splitlines()
    assert sum("step_1 was not saved" in line for line in lines) == 1
    assert sum("step_3 was not saved" in line for line in lines) == 3


@pytest.mark.e2e
def test_training_goes_on_beside_a_save_and_one_that_fails_late_is_tried_again(
    new_config, groups, tmp_path, caplog
):
    """Also: that a save takes longer than the grace of a preempted node is said."""
    config = new_config(steps=6, interval=3)
    config = config.model_copy(update={"node": config.node.model_copy(update={"grace_s": 0.001})})

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)
        checkpoints = tmp_path / "run" / "checkpoints"
        checkpoints.mkdir()
        pointer = checkpoints / ".latest.draft"
        os.mkfifo(pointer)  # whoever writes it waits for a reader

        async def refuse():
            await until((checkpoints / "step_3").exists)
            assert not any(isinstance(m, Checkpointed) for m in coordinator.sent)
            reader = os.open(pointer, os.O_RDONLY | os.O_NONBLOCK)
            await until(lambda: "step_3 was not saved" in caplog.text)
            os.close(reader)
            pointer.unlink(missing_ok=True)
            coordinator.feed(4)

        coordinator.on["published", 4] = refuse
        await coordinator.run_and_close()
        said = [m.step for m in coordinator.sent if isinstance(m, Checkpointed)]
        # The ranks may, or may not, have ended step 4 before the failure was known.
        assert said in ([4, 6], [5, 6])
        assert latest(checkpoints) == checkpoints / "step_6"
        assert (checkpoints / "step_6" / "hf" / "model.safetensors").exists()
        assert not (checkpoints / f"step_{said[0]}" / "hf").exists()

    asyncio.run(run())
    assert caplog.text.count("was not saved") == 1
    assert "more than node.grace_s = 0.001" in caplog.text


@pytest.mark.e2e
def test_ranks_that_die_again_and_again_are_given_up(new_config, groups, tmp_path, caplog):
    config = new_config(steps=1, ranks=2)

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)
        dead = set()

        async def murder():
            while True:
                dead.add(await until(lambda: (pid := pid_of(1)) not in dead and pid))
                kill(rank=1)

        coordinator.spawn(murder())
        gave_up = (
            "^lightrl-rank-1 .*killed by SIGKILL.*; started again 3 times without finishing a step$"
        )
        with pytest.raises(TrainerError, match=gave_up):
            await coordinator.run_and_close()
        assert len(dead) == 4
        assert coordinator.sent == []
        assert coordinator.num_hellos == 1

    asyncio.run(run())
    assert caplog.text.count("; starting again from step 0") == 3


def test_a_model_that_cannot_be_loaded_is_not_tried_again(new_config, groups, tmp_path, caplog):
    config = new_config(steps=1)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(tmp_path / "x")})}
    )

    async def run():
        with pytest.raises(TrainerError, match="no such directory"):
            await Coordinator(config, tmp_path / "run", groups).run_and_close()

    asyncio.run(run())
    assert "starting again" not in caplog.text


@pytest.mark.e2e
@pytest.mark.parametrize("lacking", ["the trainer", "serving version 1"])
def test_what_lacks_a_descriptor_waits_for_one(new_config, groups, tmp_path, caplog, lacking):
    async def run():
        coordinator = Coordinator(new_config(steps=1), tmp_path / "run", groups)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

        def has_said():
            return "cannot be started: Too many open files; trying again" in caplog.text

        async def run_out():
            if lacking == "the trainer":
                kill()
            else:
                coordinator.feed(0)
            resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
            try:
                await until(has_said)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        coordinator.on["published", 0] = run_out
        await coordinator.run_and_close()
        assert coordinator.sent[-1] == Checkpointed(1, 0)

    asyncio.run(run())
    assert caplog.text.count("Too many open files") == 1


def test_a_version_is_followed_by_its_difference_to_the_one_before(new_config, groups, tmp_path):
    """And what is served of both is what was said of them."""
    config = new_config(steps=4)
    model = config.model.model_copy(update={"dtype": "bfloat16"})
    train = config.train.model_copy(
        update={"optim": config.train.optim.model_copy(update={"lr": 1e-6})}
    )
    config = config.model_copy(update={"model": model, "train": train})

    async def run():
        coordinator = Coordinator(config, tmp_path / "run", groups)
        served = []

        def look():
            held = coordinator.server._held
            served.append({digest.hex(): v.size for digest, v in held.items()})

        for step in range(4):
            coordinator.on["done", step] = look
        await coordinator.run_and_close()
        return coordinator, served

    coordinator, served = asyncio.run(run())
    published = [m for m in coordinator.sent if isinstance(m, PublishWeights)]
    assert [(m.policy_version, len(m.deltas)) for m in published] == [
        (0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0)
    ]  # fmt: skip
    whole = {m.policy_version: m for m in published if not m.deltas}
    for message in published:
        for offer in message.deltas:
            assert (offer.base, offer.target) == (
                whole[message.policy_version - 1].digest,
                whole[message.policy_version].digest,
            )
            assert 0 < offer.num_bytes < message.num_bytes / 5
    # of the first difference on, all are served as long as they are small
    assert served[-1].keys() >= {offer.digest for m in published for offer in m.deltas}
    assert not list(coordinator.published.glob("draft.*.delta"))
