"""The prompts of a run as the core gets them: drawn, found again, refused where the data differ."""

import json
from pathlib import Path

import pytest

from lightrl.config import Config
from lightrl.coordinator.prompts import Prompts
from lightrl.errors import DataError
from lightrl.wire import unpack_i32
from tests.support.daemons import QUICKSTART, make_config


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
    drawn = prompts.draw("train", 20)
    assert len({p.id for p in drawn}) == 20
    assert prompts.settings.num_prompts == 24
    for p in drawn:
        whole = prompts.get(p.id, is_eval=False)
        assert unpack_i32(p.tokens) == whole.token_ids.tolist()
        one = prompts.set_of(p.id, is_eval=False)
        assert whole.row["1"] == {"ones": "ones", "others": "tens"}[one.name]
        assert one.settings.reward == (("exact_match",) if one.name == "ones" else ())
        assert (one.have_answers, one.columns) == (one.name == "others", ("prompt", "id", "1"))
    evaluation = prompts.draw("eval", 1)
    assert len(evaluation) == prompts.settings.num_eval_prompts == 96
    assert prompts.set_of(evaluation[0].id, is_eval=True).name == "eval"
    prompts.close()


def test_a_coordinator_that_comes_later_goes_on_with_the_same_prompts(tmp_path):
    config = config_of(tmp_path)
    first, later = Prompts(config), Prompts(config)
    first.start()
    drawn = first.draw("train", 40)
    later.go_on_from(30)
    later.start()
    assert later.draw("train", 10) == drawn[30:]
    for p in drawn[:30]:
        assert later.get(p.id, is_eval=False) == first.get(p.id, is_eval=False)
    first.close()
    later.close()


def test_other_data_than_a_run_began_with_are_refused(tmp_path):
    prompts = Prompts(config_of(tmp_path))
    prompts.require_same(Prompts(config_of(tmp_path, answer="2")).digest)  # not another prompt
    with pytest.raises(DataError, match=r"tens.jsonl: the prompts differ from those the run start"):
        prompts.require_same(Prompts(config_of(tmp_path, num=13)).digest)


def test_draws_say_how_long_they_have_waited(tmp_path):
    prompts = Prompts(config_of(tmp_path))
    prompts.start()
    prompts.draw("train", 4)
    assert prompts.take_waited_s() > 0
    assert prompts.take_waited_s() == 0
    prompts.close()
