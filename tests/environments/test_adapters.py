"""Adapters of other frameworks' environments, each in an interpreter that lacks LightRL's packages.

In the default tier with stand-ins that have the documented names (fakes/), since the packages
conflict with LightRL's and take seconds to import; with the packages themselves in the e2e tier,
where `scripts/setup environments` has made their interpreters.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl.config.run_file import load_config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INTERPRETERS = ROOT / ".venv-environments"
LIMIT_S = 120.0

TRL = f"trl:{HERE}/data/trl_higher_lower.py"
VERIFIERS = f"verifiers:{HERE}/data/verifiers_games.py"
GSM8K = {"prompt": "What is 2 + 3?", "reward_spec": {"ground_truth": "5"}}


def call(name: str, index: int = 0, /, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call-{index}", "type": "function", "function": function}


def play(
    source: str,
    *turns: str | dict[str, Any],
    args: dict[str, Any] | None = None,
    row: dict[str, Any] | None = None,
    python: str = "",
) -> dict[str, Any]:
    """What play.py prints. `python`: of the packages; without one the stand-ins are imported."""
    said = [turn if isinstance(turn, dict) else {"content": turn} for turn in turns]
    messages = [each if "cut" in each else {"role": "assistant", **each} for each in said]
    task = {"source": source, "args": args or {}, "row": row or {}, "seed": 7, "turns": messages}
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    env |= {} if python else {"PYTHONPATH": str(HERE / "fakes")}
    done = subprocess.run(
        [python or sys.executable, "-P", str(HERE / "play.py"), str(ROOT / "lightrl")],
        input=json.dumps(task),
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def observed(source: str, *turns: str | dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The observations of an episode, which must be those of a replay beside another episode."""
    played = play(source, *turns, **more)
    assert "failed" not in played, played["failed"]
    once, again = played["episodes"]
    assert once == again
    return once


def failed(source: str, *turns: str | dict[str, Any], **more: Any) -> str:
    line = play(source, *turns, **more)["failed"]
    assert "\n" not in line
    return line


def texts(observations: list[dict[str, Any]]) -> list[str]:
    return [m["content"] for each in observations for m in each["messages"]]


def interpreter(name: str) -> str:
    python = INTERPRETERS / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python.relative_to(ROOT)}: scripts/setup environments")
    return str(python)


def test_gymnasium_reads_the_last_action_and_steps_for_legal_ones_only():
    seen = observed("gym:Walk-v0", "2", "up!", "1 or 2", "9", args={"slips": 0})
    assert texts(seen)[0].endswith("Observations: Discrete(4).\n\nObservation: 0")
    assert texts(seen)[1::2] == ["Observation: 1", "Observation: 2"]
    assert [each["reward"] for each in seen] == [None, 0.0, None, 0.0, None]
    assert seen[-1]["metrics"] == {"illegal_actions": 2.0}
    assert "one action of: 1, 2; the last integer" in texts(seen)[-1]


def test_gymnasium_takes_names_of_actions_and_shows_frames():
    args = {"slips": 0, "actions": ["Back", "Backward"], "render_mode": "ansi", "prompt": "Walk."}
    seen = observed("gym:Walk-v0", "back, no: BACKWARD", "backward", "backward", args=args)
    assert texts(seen)[0].startswith("Walk.\nEach turn, write one action of: back, backward;")
    assert texts(seen)[1:] == ["0[1]23", "01[2]3", "012[3]"]
    assert (seen[-1]["reward"], seen[-1]["done"]) == (1.0, True)


def test_gymnasium_draws_from_the_seed():
    observed("gym:Walk-v0", *["2"] * 20)


def test_textarena_observations_are_the_games_new_messages():
    seen = observed("textarena:Dice-v0", "1000", "[1001]")
    first, wrong, again = texts(seen)
    assert first == "Guess the [sum]."
    assert wrong.startswith("Wrong; now ")
    total = again.removeprefix("Wrong; now ").removesuffix(".")
    seen = observed("textarena:Dice-v0", "1000", "[1001]", total)
    assert seen[-1]["messages"] == [{"role": "user", "content": "Right."}]
    assert (seen[-1]["reward"], seen[-1]["done"]) == (1.0, True)


def test_reasoning_gym_gives_the_score_of_the_last_attempt():
    right, wrong = "<answer>9</answer>", "<answer>8</answer>"
    args, row = {"attempts": 3, "seed": 0, "highest": 100}, {"index": 4}
    seen = observed("reasoning_gym:sums", wrong, "9", right, args=args, row={"index": 3})
    assert [each["reward"] for each in seen] == [None, None, None, 0.1]
    seen = observed("reasoning_gym:sums", wrong, "<answer>8</answer>", args=args, row=row)
    assert [each["reward"] for each in seen] == [None, 1.0]
    assert seen[-1]["metrics"] == {"attempts": 1.0}
    assert texts(seen)[0].startswith("4 + 4?\n\nWrite your final answer")


def test_reasoning_gym_scores_an_answer_that_it_cannot_read_as_0():
    seen = observed("reasoning_gym:sums", "<answer>nine</answer>")
    assert (seen[-1]["reward"], seen[-1]["done"]) == (0.0, True)


@pytest.mark.parametrize("name", ["echo", "skyrl_gym:Echo"])
def test_skyrl_class_gets_the_row_and_its_config(name: str):
    args = {"max_turns": 2, "bonus": 0.5}
    seen = observed(f"skyrl:{name}", "5", "6", args=args, row=GSM8K)
    assert texts(seen)[0] == "What is 2 + 3?"
    assert texts(seen)[1].startswith("Again, 0.")
    assert [(each["reward"], each["done"]) for each in seen[1:]] == [(1.5, False), (0.5, True)]


def test_trl_methods_are_tools():
    calls = [call("guess", number=4), call("guess", 1, number=40), call("wait", 2, seconds=-1)]
    calls += [call("nope", 3), call("wait", 4, seconds=1)]
    row = {"prompt": [{"role": "user", "content": "Guess."}], "number": 4}
    seen = observed(f"{TRL}:HigherLower", {"tool_calls": calls}, "It is 4.", row=row)
    assert texts(seen)[:2] == ["Guess. The number is between 1 and 20.", "Right."]
    errors = ["40 is out of range.", "seconds is negative.", "Tool nope not found."]
    assert texts(seen)[2:5] == [str({"error": error}) for error in errors]
    assert texts(seen)[5] == "{'waited': 1}"
    assert [tool["function"]["name"] for tool in seen[0]["tools"]] == ["guess", "wait"]
    assert seen[1]["messages"][3]["tool_call_id"] == "call-3"
    assert (seen[1]["num_tool_calls"], seen[2]["reward"], seen[2]["done"]) == (5, 1.0, True)


def test_trl_rewards_may_be_asynchronous_and_numbers_are_drawn_from_the_seed():
    turns = [{"tool_calls": [call("guess", number=k)]} for k in range(1, 21)]
    assert observed(f"{TRL}:Scored", *turns, "Done.")[-1]["reward"] == 0.2


def test_trl_episode_that_a_limit_ends_has_its_reward():
    turn = {"tool_calls": [call("guess", number=3)]}
    row = {"prompt": "Guess.", "number": 4}
    for name, reward in (("HigherLower", 0.1), ("Scored", 0.2)):
        ended = observed(f"{TRL}:{name}", turn, {"cut": None}, row=row)[-1]
        assert (ended["reward"], ended["done"], ended["messages"]) == (reward, True, [])


def check_tools(python: str) -> None:
    calls = [call("multiply", a=1, b=8)]
    turn = {"content": "", "tool_calls": calls}
    seen = observed(f"{VERIFIERS}:load_tools", turn, "It is 8.", row={"index": 5}, python=python)
    assert texts(seen)[:2] == ["1 * 8?", "8"]
    assert seen[0]["tools"][0]["function"]["name"] == "multiply"
    assert seen[1]["messages"][0]["tool_call_id"] == "call-0"
    assert (seen[1]["num_tool_calls"], seen[1]["done"]) == (1, False)
    assert (seen[2]["reward"], seen[2]["done"], seen[2]["metrics"]["correct"]) == (1.0, True, 1.0)
    row = {"prompt": [{"role": "user", "content": "2 * 4?"}], "answer": "8"}
    assert observed(f"{VERIFIERS}:load_tools", "9", row=row, python=python)[-1]["reward"] == 0.0


def test_verifiers_tools_answer_until_a_turn_has_no_call():
    check_tools("")


def test_verifiers_turns_end_by_stop_conditions_and_are_scored_by_the_rubric():
    source = f"{VERIFIERS}:load_doubling"
    seen = observed(source, "8", "10", "1")
    assert texts(seen) == ["Double 4.", "Double 5.", "Double 6."]
    assert [each["reward"] for each in seen] == [None, None, None, 1.0]
    seen = observed(source, "8", "no")
    assert (seen[-1]["reward"], seen[-1]["done"]) == (0.5, True)
    seen = observed(source, "8", "stop")
    assert (texts(seen)[-1], seen[-1]["reward"]) == ("Bye.", 0.5)
    for cut, reward in ((None, 0.5), ({"role": "assistant", "content": "1"}, 0.5)):
        assert observed(source, "8", {"cut": cut})[-1]["reward"] == reward


def test_verifiers_failures_are_no_score():
    broken = failed(f"{VERIFIERS}:load_broken", "no")
    assert broken == "reward broken: OSError: the judge does not answer"
    ranked = failed(f"{VERIFIERS}:load_ranked")
    assert ranked.endswith("load_ranked: ranked scores groups, and not one episode")
    assert "can only append" in failed(f"{VERIFIERS}:load_forgetting", "8")
    missing = failed("verifiers:nope")
    assert missing.startswith("verifiers:nope: ValueError: Could not import 'nope' environment.")


@pytest.mark.parametrize(
    ("source", "args", "reason"),
    [
        ("gym:Nope-v1", {}, "LookupError: Environment `Nope-v1` doesn't exist."),
        ("gym:Walk-v0", {"actions": ["up"]}, "args.actions has 1 words for Discrete(2)"),
        ("gym:Pendulum-v1", {}, "its actions are Box(), and must be Discrete"),
        ("gym:Walk-v0", {"slip": 1}, "unexpected keyword argument 'slip'"),
        ("textarena:Chess-v0", {}, "The number of players has to be 2, received 1"),
        ("reasoning_gym:nope", {}, "ValueError: Dataset 'nope' not registered"),
        ("reasoning_gym:sums", {"attempts": 0}, "args.attempts is 0, and must be at least 1"),
        ("skyrl:nope", {}, "LookupError: No registered env with id: nope"),
        ("skyrl:json:dumps", {}, "is no BaseTextEnv: it has no init"),
        ("trl:json:JSONDecoder", {}, "has no method reset"),
        ("verifiers:group", {}, "EnvGroup is no MultiTurnEnv or ToolEnv"),
    ],
)
def test_sources_that_cannot_be_used_are_told_in_one_line(
    source: str, args: dict[str, Any], reason: str
):
    line = failed(source, args=args)
    assert line.startswith(f"{source}: ")
    assert reason in line


@pytest.mark.parametrize("package", ["gymnasium", "textarena", "reasoning-gym", "skyrl-gym"])
def test_missing_package_is_told_with_the_command_that_installs_it(package: str):
    source = {"gymnasium": "gym", "skyrl-gym": "skyrl"}.get(package, package.replace("-", "_"))
    line = failed(f"{source}:any", python=sys.executable)
    assert line.endswith(f"in {sys.executable}: {sys.executable} -m pip install '{package}'")


@pytest.mark.parametrize("file", sorted(HERE.glob("configs/*.toml")), ids=lambda file: file.stem)
def test_configs_of_real_packages_are_valid_and_short(file: Path):
    config = load_config(file, ["model.path=m"])
    assert config.environment.source
    assert len(file.read_text().splitlines()) <= 15


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"])
def test_real_gymnasium(name: str):
    turns = ["1", "hm", "0", "1", "0", "1"]
    seen = observed(f"gym:{name}", *turns, python=interpreter("games"))
    assert seen[1]["reward"] is not None
    if not seen[1]["done"]:
        assert "no legal action" in texts(seen)[2]


@pytest.mark.e2e
def test_real_textarena():
    python = interpreter("games")
    turns = [f"[{k}]" for k in range(1, 21)]
    args = {"max_turns": 30}
    seen = observed("textarena:GuessTheNumber-v0", *turns, args=args, python=python)
    assert (seen[-1]["reward"], seen[-1]["done"]) == (1.0, True)
    moves = ["[A C]", "A B", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
    seen = observed("textarena:TowerOfHanoi-v0", *moves, python=python)
    assert (seen[-1]["reward"], seen[-1]["done"]) == (1.0, True)
    observed("textarena:2048-v0", *["[up]", "[left]"] * 5, python=python)  # draws at each step


@pytest.mark.e2e
def test_real_reasoning_gym():
    args, wrong = {"attempts": 3}, "<answer>1</answer>"
    more = {"args": args, "row": {"index": 3}, "python": interpreter("games")}
    seen = observed("reasoning_gym:countdown", wrong, "hm", wrong, **more)
    assert [each["reward"] for each in seen] == [None, None, None, 0.05]
    assert "Calculate" in texts(seen)[0]


@pytest.mark.e2e
def test_real_skyrl_gym():
    module = "skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv"
    for name in ("gsm8k_multi_turn", module):
        more = {"args": {"max_turns": 3}, "row": GSM8K, "python": interpreter("games")}
        seen = observed(f"skyrl:{name}", "#### 4", "hm", "#### 5", **more)
        assert [each["reward"] for each in seen[1:]] == [pytest.approx(0.2 / 3), 0.0, 1.0]
        assert seen[-1]["done"]


@pytest.mark.e2e
@pytest.mark.parametrize("release", ["0.1", "0.2"])
def test_real_verifiers(release: str):
    python = interpreter("verifiers") if release == "0.2" else sys.executable
    check_tools(python)  # each start takes seconds
    seen = observed(f"{VERIFIERS}:load_doubling", "8", "stop", python=python)
    assert (texts(seen)[1:], seen[-1]["reward"]) == (["Double 5.", "Bye."], 0.5)
    broken = failed(f"{VERIFIERS}:load_broken", "no", python=python)
    assert broken == "reward broken: OSError: the judge does not answer"
