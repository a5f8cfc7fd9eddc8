"""What a dry run and a check say of moving the weights: of a 7B, without one being there."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightrl.config.run_file import load_config
from lightrl.daemon.weights import version_bytes
from lightrl.devices import memory
from lightrl.devices.assign import Assignment, Part
from lightrl.devices.driver import NO_DRIVER, Gpu
from lightrl.devices.memory import has_bfloat16_instructions
from lightrl.launch.checks import checklist
from lightrl.launch.checks import weights as weights_plan
from lightrl.launch.checks.checklist import Launch
from lightrl.launch.checks.notes import device_notes
from lightrl.messages.nodes import Role
from lightrl.weights.machine import scratch
from lightrl.weights.machine.scratch import scratch_dir
from lightrl.weights.machine.store import Store
from lightrl.weights.version.tensors import dtype_name, served_dtype

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "run.toml"
PARAMETERS = 7_615_616_512
CONFIG = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path):
    """Of a run whose model has 7.6e9 parameters, as the header of its file says."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [PARAMETERS], "data_offsets": [0, 0]}})
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode()
    )
    return load_config(QUICKSTART, [f"model.path={tmp_path}"])


def test_bytes_memory_and_seconds_follow_from_the_model(config):
    version, line, *_ = weights_plan.describe(config, NO_DRIVER)
    assert version.startswith("15.2 GB a version in bfloat16; ")
    assert "holds up to 3, 45.7 GB, in memory or on disk" in version
    assert "122 s at 1 Gbit/s, 12.2 s at 10 Gbit/s, 1.22 s at 100 Gbit/s" in line


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        (["rollout.nodes=2"], "idle ones elsewhere get it by broadcast, busy and --preemptible"),
        (["weights.broadcast=off"], "map its file, others pull it"),
        (["async.max_staleness=1"], "others pull it: broadcasts do not act with async.max_st"),
        (["rollout.nodes=0", "rollout.engine=emulated"], "map its file, others pull it"),
        (["weights.broadcast=always"], "all nodes get it by broadcast, but --preemptible ones"),
    ],
)
def test_who_gets_a_version_how(config, changes, way):
    changed = load_config(QUICKSTART, [f"model.path={config.model.path}", *changes])
    assert way in weights_plan.describe(changed, NO_DRIVER)[2]


def test_what_ranks_park_on_their_host_is_said_and_whether_it_has_that(config):
    gpu = Gpu(0, "GPU-a", "H100", 80 << 30, 80 << 30)
    machine = replace(NO_DRIVER, gpus=(gpu,))
    shared = load_config(
        QUICKSTART, [f"model.path={config.model.path}", "rollout.placement=shared", "train.ranks=2"]
    )
    assert weights_plan.room_to_park(config, machine) is None  # devices of its own
    assert weights_plan.room_to_load(config, NO_DRIVER) is None
    text = "rank 0 holds the whole model in float32 while it loads it, 30.5 GB; 30.0 GB are free"
    found = weights_plan.room_to_load(config, machine, available=30_000_000_000)
    assert found == weights_plan.Room(False, text)
    what = (
        "while engines sample, 2 ranks park 91.4 GB in memory of the host, beside 45.7 GB of "
        "versions, and 30.5 GB more within a step"
    )
    found = weights_plan.room_to_park(shared, machine, available=168_000_000_000)
    assert found == weights_plan.Room(True, what)
    found = weights_plan.room_to_park(shared, machine, available=167_000_000_000)
    assert not found.is_enough
    assert found.text.startswith(f"{what}: 167.0 GB are free; more ")
    on_cpu = weights_plan.room_to_park(shared, NO_DRIVER, available=0)
    assert on_cpu.is_enough
    assert on_cpu.text in weights_plan.describe(shared, NO_DRIVER)


def test_what_nccl_cannot_do_here_is_said(config):
    def with_mode(mode):
        weights = config.weights.model_copy(update={"broadcast": mode})
        return config.model_copy(update={"weights": weights})

    shared = Assignment(("GPU-a",), (Part(("GPU-a",), 0.5),))
    [line] = device_notes(with_mode("always"), shared)
    assert "NCCL has no two members on one GPU: the engines here map the trainer's file" in line
    beside = Assignment(("GPU-a",), (Part(("GPU-b",)),))
    [line] = device_notes(with_mode("always"), beside)
    assert "NCCL skips the trainer's machine" in line
    assert not list(device_notes(with_mode("auto"), shared))
    assert not list(device_notes(with_mode("always"), Assignment(engines=(Part(),))))


def test_a_dtype_that_is_asked_for_counts_and_not_the_stored_one(config):
    wider = config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": "float32"})}
    )
    assert weights_plan.describe(wider, NO_DRIVER)[0].startswith("30.5 GB a version in float32; ")


@pytest.mark.parametrize(
    ("shared_gb", "disk_gb", "folder", "text"),
    [
        (46, 1, "shared", "3 versions of 15.2 GB fit into {shared}"),
        (45, 46, "disk", "fit into {disk}, which is slower"),
        (1, 40, None, "need 45.7 GB; free are 1.0 GB in {shared}, 40.0 GB in {disk}: set TMPDIR"),
    ],
)
def test_memory_and_disk_are_held_against_the_model(
    config, tmp_path, monkeypatch, shared_gb, disk_gb, folder, text
):
    """As the run itself will."""
    roots = {"shared": tmp_path / "shared", "disk": tmp_path / "disk"}
    free = {roots["shared"]: shared_gb, roots["disk"]: disk_gb}
    monkeypatch.setattr(scratch, "_shared", lambda: roots["shared"])
    monkeypatch.setattr(scratch, "_disk", lambda: roots["disk"])
    monkeypatch.setattr(scratch, "free_bytes", lambda root: int(free[root] * 1e9))
    for root in roots.values():
        root.mkdir()
    found = weights_plan.room(config, NO_DRIVER)
    assert found is not None
    assert found.is_enough == (folder is not None)
    assert text.format(**roots) in found.text
    store = Store(b"check")
    store.open()
    place = store._place("0.bin", int(PARAMETERS * 2))
    with scratch_dir("ranks", PARAMETERS * 2) as ranks:
        for path in (place.parent.parent, ranks.parent):
            assert path == roots["shared" if folder == "shared" else "disk"]
    store.close()


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float8", None])
@pytest.mark.parametrize("asked", ["auto", "float16"])
def test_check_and_daemon_and_rank_mean_the_same_dtype(
    config, tmp_path, monkeypatch, on_gpu, stored, asked
):
    """What a version weighs, before there is one."""
    config_json = json.dumps(CONFIG | {"dtype": stored}).encode()
    (tmp_path / "config.json").write_bytes(config_json)
    (tmp_path / "model.safetensors").unlink()
    model = config.model.model_copy(update={"dtype": asked})
    config = config.model_copy(update={"model": model})
    machine = replace(NO_DRIVER, gpus=(Gpu(0, "GPU-0", "H100", 1 << 36, 1 << 36),))
    size = weights_plan.version_size(config, machine if on_gpu else NO_DRIVER)
    assert size is not None
    assert version_bytes(config, {"config.json": config_json}, on_gpu) == size.num_bytes
    known = getattr(torch, stored) if stored in memory.BYTES_OF else None
    served = served_dtype(asked, SimpleNamespace(dtype=known), "cuda" if on_gpu else "cpu")
    assert size.dtype == dtype_name(served)


@pytest.mark.parametrize(
    ("asked", "dtype", "line"),
    [
        ("auto", "float32", "auto is float32: this CPU has no instructions for bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16 is slow: this CPU has no instructions for it"),
        ("float32", "float32", ""),
    ],
)
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_named(
    config, monkeypatch, asked, dtype, line
):
    model = config.model.model_copy(update={"dtype": asked})
    config = config.model_copy(update={"model": model})

    def found(has: bool, gpus: tuple[Gpu, ...] = (), roles: tuple[Role, ...] = ()) -> list[str]:
        monkeypatch.setattr(memory, "has_bfloat16_instructions", lambda: has)
        launch = Launch(config, roles)
        vars(launch)["machine"] = replace(NO_DRIVER, gpus=gpus)
        texts = [finding.text for finding in checklist._dtype(launch)]
        assert launch.require_config().model.dtype == (dtype if texts else asked)
        return texts

    assert found(has=True) == []
    assert found(has=False, gpus=(Gpu(0, "GPU-0", "H100", 1 << 36, 1 << 36),)) == []
    assert found(has=False, roles=("coordinator",)) == []  # its trainer may have a GPU
    assert [line in text for text in found(has=False)] == [True] * bool(line)


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", True),
        ("flags\t\t: fpu avx512f", False),
        ("Features\t: fp asimd bf16", True),  # arm64
        ("model name\t: bf16", False),
    ],
)
def test_instructions_are_read_from_the_flags_of_the_cpu(tmp_path, flags, has):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nbugs\t\t:\n")
    assert has_bfloat16_instructions(tmp_path / "cpuinfo") is has


def test_nothing_is_said_where_nothing_is_known(config):
    elsewhere = config.model_copy(
        update={"model": config.model.model_copy(update={"path": "org/name"})}
    )
    assert weights_plan.describe(elsewhere, NO_DRIVER) == []
    assert weights_plan.room(elsewhere, NO_DRIVER) is None
