"""What is understood of nvidia-smi's answers, and which torch can use which driver."""

import pytest

from lightrl.devices.driver import (
    NO_DRIVER,
    TorchBuild,
    _without_smi,
    look,
    parse_gpus,
    torch_build,
    torch_problem,
    with_slices,
)
from tests.support.fake_driver import install, smi_row

LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0abc-00)
  MIG 3g.20gb     Device  0: (UUID: MIG-6f1d)
  MIG 1g.5gb+me   Device  1: (UUID: MIG-7a2e)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-1abc-00)
"""


def never() -> str:
    raise AssertionError("was not to be asked")


def test_gpus_with_memory_name_and_driver():
    gpus, driver = parse_gpus(smi_row(0) + smi_row(1, 16384, 200))
    assert driver == "580.95.05"
    assert [(g.index, g.uuid, g.total, g.free) for g in gpus] == [
        (0, "GPU-0abc-00", 81559 << 20, 81076 << 20),
        (1, "GPU-1abc-00", 16384 << 20, 200 << 20),
    ]
    assert gpus[0].name == "NVIDIA H100 80GB HBM3"


def test_a_gpu_without_memory_of_its_own():
    ((gpu,), _) = parse_gpus("0, GPU-1, [N/A], [N/A], 580.95.05, [N/A], NVIDIA GB10\n")
    assert (gpu.total, gpu.free, gpu.is_mig) == (None, None, False)


def test_slices_of_a_divided_gpu():
    gpus, _ = parse_gpus(smi_row(0, mig="Enabled") + smi_row(1))
    first, second = with_slices(gpus, LISTED)
    assert [(s.uuid, s.profile, s.total) for s in first.slices] == [
        ("MIG-6f1d", "3g.20gb", 20 * 10**9),
        ("MIG-7a2e", "1g.5gb+me", 5 * 10**9),
    ]
    assert second.slices == ()


@pytest.mark.parametrize(
    ("version", "cuda", "driver", "header", "problem"),
    [
        ("2.11.0+cu130", (13, 0), "580.95.05", None, ""),
        ("2.11.0+cu130", (13, 1), "590.44.01", None, ""),
        ("2.11.0+cu128", (12, 8), "535.104.05", None, ""),  # minor versions are compatible
        (
            "2.11.0+cu130",
            (13, 0),
            "535.104.05",
            "CUDA Version: 12.2 |",
            "driver 535.104.05 is too old for torch",
        ),
        # a compatibility package
        ("2.11.0+cu130", (13, 0), "535.104.05", "CUDA Version: 13.0 |", ""),
        ("2.11.0+cu130", (13, 0), "535.104.05", "", "needs driver 580.65 or newer"),
        ("2.8.0+cu126", (12, 6), "470.82.01", "CUDA Version: 11.4", "needs driver 525.60 or newer"),
        ("2.13.0+cpu", None, "580.95.05", None, "torch 2.13.0+cpu is built for CPU"),
        ("9.0", (19, 0), "580.95.05", None, ""),  # of which nothing is known here
    ],
)
def test_which_torch_can_use_which_driver(version, cuda, driver, header, problem):
    asked = never if header is None else lambda: header
    said = torch_problem(TorchBuild(version, cuda), driver, asked)
    assert problem in said
    assert bool(problem) == bool(said)
    assert "\n" not in said


def test_the_installed_torch_is_read_without_importing_it():
    build = torch_build()
    assert build is not None
    import torch

    assert build.version == torch.__version__
    assert build.cuda == (
        tuple(map(int, torch.version.cuda.split("."))) if torch.version.cuda else None
    )


def test_a_machine_without_a_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _without_smi(tmp_path) == NO_DRIVER


def test_gpus_are_counted_where_the_drivers_tools_are_missing(tmp_path):
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    found = _without_smi(tmp_path)
    assert [(g.index, g.total) for g in found.gpus] == [(0, None), (1, None)]


def test_a_gpu_that_is_divided_is_asked_for_its_slices(tmp_path, monkeypatch):
    rows = smi_row(0, mig="Enabled") + smi_row(1)
    for name, value in install(tmp_path, rows, L=LISTED).items():
        monkeypatch.setenv(name, value)
    divided, whole = look().gpus
    assert (divided.is_mig, [s.uuid for s in divided.slices]) == (True, ["MIG-6f1d", "MIG-7a2e"])
    assert (whole.is_mig, whole.slices) == (False, ())


@pytest.mark.parametrize(
    ("rows", "code", "problem"),
    [
        ("No devices were found\n", 6, ""),
        (
            "NVIDIA-SMI has failed because it couldn't\ncommunicate\n",
            9,
            "nvidia-smi fails: NVIDIA-SMI has failed",
        ),
        ("what is this\n", 0, "nvidia-smi cannot be understood: unexpected line 'what is this'"),
    ],
)
def test_answers_that_are_none(tmp_path, monkeypatch, rows, code, problem):
    for name, value in install(tmp_path, rows, code=code).items():
        monkeypatch.setenv(name, value)
    found = look()
    assert found.gpus == ()
    assert problem in found.problem
    assert bool(problem) == bool(found.problem)
