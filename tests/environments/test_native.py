"""What the methods of a user's class may take and return, without processes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from lightrl.environments.worker.base import Observation, UserError
from lightrl.environments.worker.frames import to_fields
from lightrl.environments.worker.load import import_object
from lightrl.environments.worker.native import NativeEpisode, to_observation, wants_message

USER = {"role": "user", "content": "a"}


def by_text(text):
    pass


def by_name(message):
    pass


def by_annotation(turn: dict[str, Any]):
    pass


def named_but_text(message: str):
    pass


def test_step_gets_the_message_by_annotation_or_name_and_else_the_text():
    taken = [wants_message(f) for f in (by_text, by_name, by_annotation, named_but_text)]
    assert taken == [False, True, True, False]


class Counted:
    num_steps = 0

    def reset(self):
        return "?"

    def step(self, text):
        self.num_steps += 1
        return "!"

    def get_reward(self):
        return self.num_steps


class CountedLater(Counted):
    async def get_reward(self):
        return self.num_steps


@pytest.mark.parametrize("target", [Counted, CountedLater])
def test_get_reward_is_asked_when_a_limit_ends_an_episode(target):
    episode = NativeEpisode(target())
    episode.step({"role": "assistant", "content": "12"})
    assert asyncio.run(episode.end(None)) == Observation([], 1, done=True)
    assert not hasattr(NativeEpisode(WithoutReward()), "end")


class WithoutReward:
    get_reward = 0.0  # no method

    def step(self, text):
        return text


@pytest.mark.parametrize(
    ("reset", "taken"),
    [
        (lambda row, seed: f"{row} {seed}", "{'n': 1} 9"),
        (lambda seed, row: f"{row} {seed}", "{'n': 1} 9"),
        (lambda task, number: f"{task} {number}", "{'n': 1} 9"),
        (lambda row: f"{row}", "{'n': 1}"),
        (lambda seed: f"{seed}", "9"),
        (lambda: "nothing", "nothing"),
        (lambda row, *, seed=None, size=3: f"{seed} {size}", "9 3"),
        (lambda *given: f"{given}", "({'n': 1}, 9)"),
    ],
)
def test_reset_takes_row_and_seed_or_less(reset, taken):
    class Target:
        step = staticmethod(by_text)

    target = Target()
    target.reset = reset  # pyright: ignore[reportAttributeAccessIssue]
    assert NativeEpisode(target).reset({"n": 1}, 9).messages[0]["content"] == taken


@pytest.mark.parametrize(
    ("returned", "observation"),
    [
        ("a", Observation([USER])),
        (USER, Observation([USER])),
        ([USER, USER], Observation([USER, USER])),
        (("a", 1, True), Observation([USER], 1, True)),
        ((None, 1, True), Observation([], 1, True)),
        ({"messages": [USER], "reward": 2}, Observation([USER], 2)),
        ({"observation": "a", "metrics": {"x": 1}}, Observation([USER], metrics={"x": 1})),
        ({"done": True}, Observation([], done=True)),
    ],
)
def test_step_returns_text_messages_a_tuple_or_a_dict(returned, observation):
    assert to_observation(returned, "step") == observation


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        ({"observaton": "a"}, "step returned a dict with 'observaton', not observation, messages,"),
        (7, "step returned int, not text, a list of messages or a dict"),
        (("a", 1.0, False, {}), "step returned a tuple of 4, not "),
        (["a"], "step returned a list of str, not of messages with role"),
        ([{"role": "user"}], "step returned a message with None as content, not text"),
        ([], "step returned no messages"),
        (("a", "1", False), "reward of step is str, not a finite number"),
        (("a", 1e300, False), "reward of step is 1e[+]300, not a finite number"),
        (("a", 1.0, "no"), "done of step is str, not True or False"),
    ],
)
def test_other_values_are_one_line(returned, line):
    with pytest.raises(UserError, match=f"^{line}") as raised:
        to_fields(to_observation(returned, "step"), "step")
    assert "\n" not in str(raised.value)


def test_numbers_and_arrays_of_numpy_are_converted():
    message = {**USER, "board": np.eye(2), "score": np.int64(3)}
    metrics = {"a": np.float32(0.5), "b": np.nan, "c": "text", "d": np.array(2)}
    observation = Observation([message], np.float32(0.25), np.bool_(True), metrics)  # pyright: ignore
    fields = to_fields(observation, "step")
    assert fields["messages"] == [{**USER, "board": [[1.0, 0.0], [0.0, 1.0]], "score": 3}]
    assert (fields["reward"], fields["done"]) == (0.25, True)
    assert fields["metrics"] == {"a": 0.5, "d": 2.0}


def test_content_in_parts_becomes_one_text():
    parts = [{"type": "text", "text": "a"}, "b"]
    fields = to_fields(Observation([{"role": "user", "content": parts}]), "reset")
    assert fields["messages"] == [{"role": "user", "content": "ab"}]


def test_files_are_imported_with_their_neighbours_and_as_members_of_packages(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    package = tmp_path / "games_for_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rules_for_test.py").write_text("LIMIT = 3")
    (package / "game.py").write_text("from .rules_for_test import LIMIT")
    (tmp_path / "json.py").write_text("import beside_for_test\nNAME = beside_for_test.NAME")
    (tmp_path / "beside_for_test.py").write_text("NAME = 'beside'")
    assert import_object(f"{package}/game.py:LIMIT") == 3
    assert import_object(f"{tmp_path}/json.py:NAME") == "beside"  # though another json is known
    with pytest.raises(UserError, match=r"nothing.py: no such file"):
        import_object(f"{tmp_path}/nothing.py:NAME")
    with pytest.raises(UserError, match=r"no such name; .*json.py defines none"):
        import_object(f"{tmp_path}/json.py:Other")
