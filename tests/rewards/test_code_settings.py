"""The keys of the rewards "code" and "judge": what is refused, and what the functions get."""

import pytest

from lightrl.config.run_file import parse_config
from lightrl.errors import ConfigError
from lightrl.rewards.builtin import load_function
from tests.rewards.test_sandbox import pytestmark  # noqa: F401 - where no sandbox can be had

BASE = {"model": {"path": "m"}, "data": {"path": "d"}}


def refused(**reward) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config({**BASE, "reward": reward})
    return str(raised.value)


def test_settings_that_cannot_act_are_refused():
    assert "set it to 60" in refused(functions="code")
    assert "needs reward.judge.url" in refused(functions="judge")
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", "concurrency": 2}
    told = refused(functions="judge", judge=judge, workers=3)
    assert "reward.judge.concurrency = 2: is less than reward.workers = 3" in told
    assert 'without "code"' in refused(functions="exact_match", code={"partial": True})
    assert 'without "judge"' in refused(functions="exact_match", judge={"url": "http://x/v1"})


def test_code_is_a_reward_like_others():
    config = parse_config(
        {**BASE, "reward": {"functions": "code", "timeout_s": 60, "code": {"partial": True}}}
    )
    function = load_function("code", config.reward)
    assert function.name == "code"
    assert not function.is_async
