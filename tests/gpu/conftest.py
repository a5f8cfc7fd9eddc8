"""The device that these tests are about, models for it, and figures for scripts/gpu.

Needs no more than torch and transformers, so that what a machine lacks costs only the tests that
need it.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT)]  # gpu_lib, and for child processes tests.gpu

DEVICE = os.environ.get("LIGHTRL_GPU_DEVICE", "cuda")  # cpu: whether these tests work at all


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`device` is the GPU; in the files that say so also a CPU, to be tested where there is no
    GPU."""
    if "device" in metafunc.fixturenames:
        params = [pytest.param(DEVICE, marks=pytest.mark.gpu)]
        if DEVICE != "cpu" and getattr(metafunc.module, "ALSO_ON_CPU", False):
            params.append(pytest.param("cpu"))
        metafunc.parametrize("device", params, indirect=True, scope="session")


@functools.cache
def cuda_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """ "cuda", or "cpu" where it is what engines and ranks would take, too."""
    if request.param == "cuda" and not cuda_count():
        pytest.skip("no CUDA device")
    if request.param == "cpu" and cuda_count():
        pytest.skip("engines and ranks take the GPU that is here")
    return request.param


@pytest.fixture(scope="session")
def vllm(device: str) -> str:
    """Skips where vLLM is missing, or is built for another torch."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    try:
        import vllm.v1.engine.core  # noqa: F401
    except (ImportError, OSError, RuntimeError) as e:
        pytest.skip(f"vLLM cannot be imported: {str(e).splitlines()[0]}")
    return "vllm"


@pytest.fixture(scope="session")
def figure() -> Callable[..., None]:
    from gpu_lib.notes import figure

    return figure
