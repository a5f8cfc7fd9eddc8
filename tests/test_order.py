"""The order of the tests: the longest files first, as tests/durations.json has them."""

import json

import pytest

from tests.conftest import DURATIONS, ROOT

SECONDS: dict[str, float] = json.loads(DURATIONS.read_bytes())


def test_the_longest_files_come_first(request: pytest.FixtureRequest):
    files = [item.path.relative_to(ROOT).as_posix() for item in request.session.items]
    seconds = [SECONDS.get(file, 0.0) for file in files]
    assert seconds == sorted(seconds, reverse=True)


def test_recorded_files_exist():
    """One that was moved would run last: its line in tests/durations.json moves with it."""
    assert [file for file in SECONDS if not (ROOT / file).is_file()] == []
