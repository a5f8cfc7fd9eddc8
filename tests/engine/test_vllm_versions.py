"""Which releases of vLLM are supported, and what is read from the installed one."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightrl.engine.vllm import lora as vllm_lora
from lightrl.engine.vllm.versions import (
    BATCH_INVARIANT,
    has_batch_invariant_kernels,
    is_too_old,
    outside,
    torch_mismatch,
    why_not_batch_invariant,
)
from tests.support.cli import arguments
from tests.support.paths import python_path


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.26.0", None),
        ("0.32.1", None),
        ("0.25.1", "vLLM 0.25.1 is older than"),
        ("0.33.0", "vLLM 0.33.0 is newer than"),
        ("1.0.0", "newer"),
        ("dev", None),  # unknown
        ("0.1.dev1+g0123abc", None),
    ],
)
def test_versions_outside_the_window_have_a_warning(version, said):
    assert (outside(version) is None) if said is None else (said in outside(version))
    assert is_too_old(version) == ("older" in (said or ""))


def test_an_older_release_is_refused_in_one_line(monkeypatch):
    vllm = pytest.importorskip("vllm")
    from lightrl.engine.vllm.engine import Api
    from lightrl.errors import EngineUnusable

    monkeypatch.setattr(vllm, "__version__", "0.25.1")
    with pytest.raises(EngineUnusable, match=r"^vLLM 0\.25\.1 is older than .*, or set"):
        Api()


@pytest.mark.parametrize("renames_itself", [False, True])
def test_weights_below_adapters_get_the_names_that_a_release_loads(monkeypatch, renames_itself):
    spec = SimpleNamespace() if renames_itself else None
    monkeypatch.setattr(vllm_lora, "find_spec", lambda _: spec)
    modules = ("layers.0.attn.qkv_proj", "layers.0.attn.qkv_proj.base_layer", "layers.0.norm")
    model = SimpleNamespace(
        packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up": ["gate"]},
        named_modules=lambda: [(name, None) for name in modules],
    )
    names = ["layers.0.attn.q_proj.weight", "layers.0.mlp.gate.weight", "layers.0.norm.weight"]
    found = [name for name, _ in vllm_lora.base_layer_names(model, [(n, None) for n in names])]
    first = names[0] if renames_itself else "layers.0.attn.q_proj.base_layer.weight"
    assert found == [first, *names[1:]]


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
    assert "vLLM 0.19.1 is older than the releases that LightRL supports, 0.26 to 0.32" in line
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
    assert why_not_batch_invariant() == "this vLLM does not have the setting VLLM_BATCH_INVARIANT"


@pytest.mark.e2e
def test_kernels_that_ignore_their_batch_are_found_in_the_worker(envs, monkeypatch):
    module = pytest.importorskip("vllm.model_executor.determinism.batch_invariant")
    assert not has_batch_invariant_kernels()
    monkeypatch.setattr(module, "_batch_invariant_MODE", True)  # as `enable_batch_invariant_mode`
    assert has_batch_invariant_kernels()
