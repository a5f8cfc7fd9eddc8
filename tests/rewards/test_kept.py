"""Reward functions whose files change while they are used."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import schema
from lightrl.rewards import kept
from lightrl.rewards.protocol import RewardResult, WorkerSetup
from lightrl.rewards.runner import RewardPool
from tests.support.reward_pool import LIMIT_S, job, reward_set

REWARD = """
import os
from pathlib import Path
from helper import worth

def reward(sample):
    if sample.row.get("do") == "crash":
        os._exit(3)
    from late import bonus
    return worth() + bonus() + float(Path(__file__).with_name("data").read_text())
"""


def project(folder: Path) -> str:
    (folder / "rewards.py").write_text(REWARD)
    (folder / "helper.py").write_text("def worth(): return 1.0\n")
    (folder / "late.py").write_text("def bonus(): return 0.5\n")
    (folder / "data").write_text("0.25")
    return f"{folder}/rewards.py:reward"


def edit(folder: Path) -> None:
    for name in ("rewards.py", "helper.py", "late.py"):
        file = folder / name
        if not file.exists():
            continue
        file.write_text(file.read_text().replace("return ", "return 100.0 + "))


async def rewards(model_files: Path, folder: Path, sources: dict[str, bytes]) -> list[Any]:
    """Of a response before and one after a crash, between which the files are edited."""
    settings = schema.Reward(functions=(f"{folder}/rewards.py:reward",))
    found: asyncio.Queue[RewardResult] = asyncio.Queue()
    sets = (reward_set(settings),)
    setup = WorkerSetup(settings.model_dump_json(), sets, str(model_files), sources=sources)
    pool = RewardPool(settings, setup, folder, found.put_nowait, print)
    results = []
    async with asyncio.timeout(LIMIT_S):
        await pool.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pool.run())
            for each in (job("a"), job("b", do="crash"), job("c")):
                pool.submit(each)
                results.append(await found.get())
                edit(folder)
            await pool.stop()
    return [r.reward for r in results if r.response != "b"]


def test_a_worker_that_starts_again_scores_as_before(model_files, tmp_path):
    name = project(tmp_path)
    sources, line = kept.sources([name], tmp_path / "run" / "rewards", is_new=False)
    assert line == ""
    assert {Path(path).name for path in sources} == {"rewards.py", "helper.py", "late.py"}
    assert asyncio.run(rewards(model_files, tmp_path, sources)) == [1.75, 1.75]


def test_a_worker_starts_again_without_the_file(model_files, tmp_path):
    name = project(tmp_path)
    sources, _ = kept.sources([name], tmp_path / "run" / "rewards", is_new=False)
    (tmp_path / "rewards.py").unlink()
    assert asyncio.run(rewards(model_files, tmp_path, sources)) == [1.75, 1.75]


def test_byte_code_of_an_edited_file_is_not_loaded(model_files, tmp_path):
    name = project(tmp_path)
    sources, _ = kept.sources([name], tmp_path / "run" / "rewards", is_new=False)
    edit(tmp_path)
    assert asyncio.run(rewards(model_files, tmp_path, {}))[0] > 100  # leaves __pycache__
    assert asyncio.run(rewards(model_files, tmp_path, sources)) == [1.75, 1.75]


def test_a_resumed_run_scores_by_its_copy_and_names_what_changed(tmp_path):
    name, place = project(tmp_path), tmp_path / "run" / "rewards"
    began, _ = kept.sources([name], place, is_new=False)
    assert kept.sources([name], place, is_new=False) == (began, "")
    (tmp_path / "helper.py").write_text("def worth(): return 2.0\n")
    (tmp_path / "late.py").unlink()
    resumed, line = kept.sources([name], place, is_new=False)
    assert resumed == began
    assert line.startswith(f"{tmp_path}/helper.py and 1 more changed since the run began: the copy")
    assert 'reward.source = "files"' in line
    taken, line = kept.sources([name], place, is_new=True)
    assert taken[f"{tmp_path}/helper.py"] == b"def worth(): return 2.0\n"
    assert line.endswith("the new files score from here on")
    assert kept.sources([name], place, is_new=False) == (taken, "")


PACKAGE = {
    "proj/__init__.py": "",
    "proj/rules/__init__.py": "from .weights import W\n",
    "proj/rules/weights.py": "W = 1.0\n",
    "proj/rules/main.py": "import json, torch\nfrom ..common import text\nfrom . import extra\n"
    "from lightrl.errors import RewardError\n",
    "proj/rules/extra.py": "import at_root.deep\n",
    "proj/common/__init__.py": "",
    "proj/common/text.py": "",
    "proj/common/unused.py": "",
    "at_root/__init__.py": "",
    "at_root/deep.py": "def broken(:\n",
    "json.py": "",
}


def test_what_a_file_imports_is_found_in_its_package_and_the_working_directory(
    tmp_path, monkeypatch
):
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    sources, _ = kept.sources(["proj/rules/main.py:f"], tmp_path / "run", is_new=False)
    names = {str(Path(path).relative_to(tmp_path)) for path in sources}
    assert names == {
        *(
            "proj/__init__.py",
            "proj/rules/main.py",
            "proj/rules/extra.py",
            "proj/rules/__init__.py",
        ),
        *("proj/common/__init__.py", "proj/common/text.py", "proj/rules/weights.py"),
        *("at_root/__init__.py", "at_root/deep.py", "json.py"),
    }


@pytest.mark.parametrize("body", ["from .missing import x\n", "x = (\n"])
def test_a_file_that_cannot_be_imported_is_kept_as_it_is(tmp_path, body):
    (tmp_path / "rewards.py").write_text(body)
    functions = [f"{tmp_path}/rewards.py:f", f"{tmp_path}/none.py:f"]
    sources, line = kept.sources(functions, tmp_path / "run", is_new=False)
    assert (sources, line) == ({f"{tmp_path}/rewards.py": body.encode()}, "")


def test_modules_of_pythonpath_are_kept_and_unreadable_ones_are_left_out(tmp_path, monkeypatch):
    for name in ("project/f.py", "library/scores/__init__.py", "library/scores/broken.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import scores.broken\n")
    # root may read anything
    monkeypatch.setattr(os, "access", lambda path, _: path.name != "broken.py")
    monkeypatch.setenv("PYTHONPATH", f":{tmp_path}/library")
    sources, _ = kept.sources([f"{tmp_path}/project/f.py:f"], tmp_path / "run", is_new=False)
    assert set(sources) == {f"{tmp_path}/project/f.py", f"{tmp_path}/library/scores/__init__.py"}
