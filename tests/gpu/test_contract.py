"""What tests/engine asks of every engine, asked of the torch engine on a GPU: the same tests, in
float32.

Kernels are not batch-invariant there, but in float32 so nearly that these few thousand tokens are
the same.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import test_contract, test_equality, test_speculation, test_torch
from tests.engine.conftest import (  # noqa: F401 - fixtures
    EngineClient,
    ask,
    origin_of_engines,
    start,
    tiny,
    torch_engine,
)
from tests.engine.test_speculation import engines, epoch, truth  # noqa: F401 - fixtures

for module in (test_contract, test_equality, test_speculation, test_torch):
    globals().update({name: f for name, f in vars(module).items() if name.startswith("test_")})
del globals()["test_a_response_moved_to_another_vllm_process_equals_the_undisturbed_one"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]


@pytest.fixture
def engine(torch_engine: EngineClient) -> EngineClient:  # noqa: F811
    torch_engine.load(1)
    return torch_engine


@pytest.fixture
def real(engine: EngineClient) -> EngineClient:
    return engine


def test_the_engine_is_on_the_device(device: str, start: Callable[..., Any]) -> None:  # noqa: F811
    assert start("torch").device.startswith(device)
