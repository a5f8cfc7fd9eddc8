"""The prompts of a run as the core gets them: drawn, found again, refused where the data differ."""

import asyncio
import json
import threading
from functools import partial
from pathlib import Path

import pytest

from lightrl.config.schema import Config
from lightrl.coordinator.prompts import Prompts
from lightrl.errors import DataError
from lightrl.wire import unpack_i32
from tests.support.daemons import DEADLINE_S, QUICKSTART, make_config


def config_of(folder: Path, num: int = 12, answer: str = "1") -> Config:
    """Two sets of sums of two digits, and the quickstart's prompts to evaluate on."""
    for name in ("ones", "tens"):
        rows = [{"prompt": f"{10 + i}%{len(name)}=", "id": i, answer: name} for i in range(num)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    sets = [
        {"path": str(folder / "ones.jsonl"), "reward": ["exact_match"]},
        {"path": str(folder / "tens.jsonl"), "name": "others", "answer_key": answer},
    ]
    evaluation = {"path": str(QUICKSTART / "eval.jsonl")}
    return make_config(folder, data={"path": "", "sets": sets}, eval=evaluation)


def test_a_prompt_is_drawn_with_its_tokens_and_found_with_its_row_and_its_set(tmp_path):
    prompts = Prompts(config_of(tmp_path))
    prompts.start()
    drawn = asyncio.run(prompts.draw("train", 20))
    assert len({p.id for p in drawn}) == 20
    assert prompts.settings.num_prompts == 24
    for p in drawn:
        whole = asyncio.run(prompts.get(p.id, is_eval=False))
        assert unpack_i32(p.tokens) == whole.token_ids.tolist()
        one = prompts.train_sets[prompts.scored_as(p.id, is_eval=False)]
        assert whole.row["1"] == {"ones": "ones", "others": "tens"}[one.name]
        assert one.settings.reward == (("exact_match",) if one.name == "ones" else ())
        assert (one.have_answers, one.columns) == (one.name == "others", ("prompt", "id", "1"))
    evaluation = asyncio.run(prompts.draw("eval", 1))
    assert len(evaluation) == prompts.settings.num_eval_prompts == 96
    assert prompts.scored_as(evaluation[0].id, is_eval=True) == 2  # after those to train on
    prompts.close()


def test_a_coordinator_that_comes_later_goes_on_with_the_same_prompts(tmp_path):
    config = config_of(tmp_path)
    first, later = Prompts(config), Prompts(config)
    first.start()
    drawn = asyncio.run(first.draw("train", 40))
    later.go_on_from(30)
    later.start()
    assert asyncio.run(later.draw("train", 10)) == drawn[30:]
    for p in drawn[:30]:
        found, known = later.get(p.id, is_eval=False), first.get(p.id, is_eval=False)
        assert asyncio.run(found) == asyncio.run(known)
    first.close()
    later.close()


def test_other_data_than_a_run_began_with_are_refused(tmp_path):
    prompts = Prompts(config_of(tmp_path))
    prompts.require_same(Prompts(config_of(tmp_path)).digests)
    same_ids = Prompts(config_of(tmp_path, answer="2")).digests
    more = Prompts(config_of(tmp_path, num=13)).digests
    renamed = {k: v.replace(v.split()[1], "0") for k, v in prompts.digests.items()}
    for digests, what in (
        (same_ids, "what rows hold beside their ids or prompts"),
        (more, "the number of rows"),
        (renamed, "prompts, ids or their order"),
    ):
        with pytest.raises(
            DataError, match=f"ones.jsonl: the data differ from .* started with, in {what};"
        ):
            prompts.require_same(digests)


def test_rows_that_change_during_a_run_end_it(tmp_path):
    """Prompts that are ready are drawn as they were; no other row is taken for one of them."""
    config = config_of(tmp_path, num=600)
    prompts = Prompts(config)
    for name in ("ones", "tens"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(reversed(file.read_text().splitlines(True))))
    prompts.start()
    with pytest.raises(DataError, match=r"line \d+: has changed since it was read first"):
        asyncio.run(prompts.draw("train", 400))
    prompts.close()


def test_draws_say_how_long_they_have_waited(tmp_path):
    prompts = Prompts(config_of(tmp_path))
    prompts.start()
    asyncio.run(prompts.draw("train", 4))
    assert prompts.take_waited_s() > 0
    assert prompts.take_waited_s() == 0
    prompts.close()


def test_first_rows_are_read_in_the_thread_that_reads_ahead(tmp_path):
    """Neither rows nor tokenizers are made for two threads, and no event loop waits for them."""

    async def read() -> list[str]:
        prompts, goes_on = Prompts(config_of(tmp_path)), threading.Event()
        prompts.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(prompts.in_turn(partial(goes_on.wait, DEADLINE_S)))
            await asyncio.sleep(0)
            reading = tasks.create_task(prompts.first_rows())
            await asyncio.sleep(0)
            assert not reading.done()  # its turn has not come
            goes_on.set()
        prompts.close()
        return [row.name for row in reading.result()]

    assert asyncio.run(read()) == ["ones", "others", "eval"]
