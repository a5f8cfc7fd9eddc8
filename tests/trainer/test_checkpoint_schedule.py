"""When checkpoints are exported, and who waits for that: ranks whose exports take as long as a test
likes."""

import asyncio

import pytest

from lightrl.trainer.checkpoint.on_disk import EXPORT
from lightrl.trainer.checkpoint_schedule import CheckpointSchedule
from lightrl.trainer.protocol import Save, Saved
from tests.support.trainer_coordinator import turns


class Exporting:
    """All ranks, which have copied immediately. The test reports what becomes of it."""

    def __init__(self):
        self.sent = []

    def send_all(self, command):
        self.sent.append(command)

    async def replies(self, kind):
        return [kind(self.sent[-1].step)]


@pytest.fixture
def path(tmp_path):
    return lambda step: str(tmp_path / f"step_{step}")


def test_with_an_export_of_every_checkpoint_training_waits_for_it_and_says_so(
    config, tmp_path, path, caplog
):
    async def scenario():
        saves = CheckpointSchedule(
            tmp_path, config(checkpoint={"interval": 1, "export": "every"}), lambda _: None
        )
        ranks = Exporting()
        for step in (1, 2, 3):
            going_on = asyncio.create_task(saves.after_step(ranks, step))
            await turns()
            assert going_on.done() == (step == 1)
            if step > 1:
                assert len(ranks.sent) == step - 1
                saves.handle(Saved(path(step - 1), is_export=True))
                await going_on
            assert ranks.sent[-1] == Save(step, path(step), export=True)
            saves.handle(Saved(path(step)))
        stopped = asyncio.create_task(saves.after_step(ranks, 4))
        await turns()
        saves.stop()
        await stopped
        assert len(ranks.sent) == 3

    asyncio.run(scenario())
    warnings = [line for line in caplog.messages if "waits until" in line]
    assert warnings[0].startswith(f"training waits until {path(1)} is exported: checkpoint.export")


@pytest.mark.parametrize("export", ["last", "every", "never"])
@pytest.mark.parametrize("is_end", [True, False])
def test_only_the_end_of_a_run_has_time_for_an_export(config, tmp_path, path, export, is_end):
    async def scenario():
        saves = CheckpointSchedule(tmp_path, config(checkpoint={"export": export}), lambda _: None)
        ranks = Exporting()
        last = asyncio.create_task(saves.save_last(ranks, 5, is_end))
        await turns()
        saves.handle(Saved(path(5)))
        assert await last == ""
        return ranks.sent

    has_export = is_end and export != "never"
    assert asyncio.run(scenario()) == [Save(5, path(5), has_export)]


@pytest.mark.parametrize("export", ["last", "never"])
def test_an_export_that_its_ranks_did_not_live_to_write_is_said(
    config, tmp_path, path, export, caplog
):
    async def lives():
        saves = CheckpointSchedule(tmp_path, config(checkpoint={"export": export}), lambda _: None)
        saves.begin_life(5)  # of others, which had saved this step
        await saves.exported()
        messages = list(caplog.messages)
        (tmp_path / "step_5" / EXPORT).mkdir(parents=True)
        await saves.exported()
        assert caplog.messages == messages
        return messages

    missing = f"{path(5)} has no export; lightrl export makes one"
    assert asyncio.run(lives()) == ([missing] if export == "last" else [])
