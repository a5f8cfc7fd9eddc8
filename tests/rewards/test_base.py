"""Signatures, answers and the weighted sum, in this process: only functions of our own run here."""

import asyncio
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from lightrl.config.reward import Reward
from lightrl.errors import RewardError
from lightrl.rewards import builtin
from lightrl.rewards.base import Columns, RunProgress, Sample, read_answer
from lightrl.rewards.builtin import BUILTIN, exact_match, load_function, regex_reward
from lightrl.rewards.score import Score, score
from lightrl.rewards.signatures import wrap

SAMPLE = Sample(
    "1+1=",
    " 2 ",
    answer="2",
    row={
        "prompt": "1+1=",
        "answer": "2",
        "data_source": "sums",
        "extra_info": {"index": 7},
        "level": 3,
    },
    response_ids=[4, 1],
    finish_reason="stop",
)


COLUMNS = Columns(frozenset(SAMPLE.row))


def call(function: Any, sample: Sample = SAMPLE) -> Any:
    [result] = scores(function, sample)
    assert not result.failure or result.reward is None
    return result.reward


def scores(function: Any, *samples: Sample, columns: Columns = COLUMNS, **more: Any) -> list[Score]:
    """Of one call with these."""
    wrapped = wrap(function, "rewards.py:f", columns)
    return asyncio.run(score([wrapped], [1.0], samples, **more))


def siblings(*responses: str, **changes: Any) -> list[Sample]:
    return [replace(SAMPLE, response=text, **changes) for text in responses]


def test_a_native_function_gets_the_sample():
    assert call(lambda sample: float(sample.response.strip() == sample.answer)) == 1.0


def test_verls_signature_is_recognised_by_its_names():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, solution_str, ground_truth, extra_info) == (
            "sums",
            " 2 ",
            "2",
            {"index": 7, "num_turns": 2, "rollout_reward_scores": {}},
        )
        return {"score": 0.5, "acc": True, "pred": "2"}

    assert call(compute_score) == 0.5


def test_verls_functions_get_all_of_verls_names_where_they_take_any():
    def compute_score(data_source, solution_str, **kwargs):
        assert sorted(kwargs) == ["extra_info", "ground_truth"]
        return float(kwargs["ground_truth"] == solution_str.strip()) + (data_source == "sums")

    def any_names(**kwargs):
        assert set(kwargs) == {"data_source", "solution_str", "ground_truth", "extra_info"}
        return 3

    assert call(compute_score) == 2.0
    reference = "rewards.py:my_compute_score"
    assert asyncio.run(score([wrap(any_names, reference, COLUMNS)], [1], [SAMPLE]))[0].reward == 3


def test_a_function_of_any_names_that_is_not_called_as_verls_are_is_trls():
    def f(*args, **kwargs):
        assert {"prompts", "completions", "completion_ids", "level"} <= set(kwargs)
        return [float(len(c)) for c in kwargs["completions"]]

    assert [r.reward for r in scores(f, *siblings("a", "bcd"))] == [1.0, 3.0]
    assert call(lambda level, **kwargs: level) == 3


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("verl", {"data_source", "solution_str", "ground_truth", "extra_info"}),
        ("verl_sequence", {"data_source", "solution_str", "ground_truth", "extra_info"}),
        ("verl_batch", {"data_sources", "solution_strs", "ground_truths", "extra_infos"}),
        ("trl", {"prompts", "completions", "completion_ids", "level"}),
        ("verifiers", {"prompt", "completion", "answer", "info", "state"}),
    ],
)
def test_whose_arguments_a_function_gets_can_be_said(form, names):
    def compute_score(**kwargs):
        assert names <= set(kwargs)
        return [1.0]

    wrapped = wrap(compute_score, "rewards.py:compute_score", COLUMNS, form=form)
    [result] = asyncio.run(score([wrapped], [1.0], [SAMPLE]))
    assert result.reward == 1.0


def test_verls_first_versions_put_the_prompt_in_front_of_the_response():
    def compute_score(solution_str, ground_truth):
        return {"1+1= 2 ": 1.0}[solution_str]

    wrapped = wrap(compute_score, "f", COLUMNS, form="verl_sequence")
    assert asyncio.run(score([wrapped], [1.0], [SAMPLE]))[0].reward == 1.0


def test_what_else_a_function_is_called_with_is_in_the_config():
    def compute_score(solution_str, ground_truth, scale, bonus=0.0, method="flexible"):
        return {"score": scale + bonus, "method": method}

    def f(completions, scale, **kwargs):
        return [scale + kwargs["bonus"]] * len(completions)

    options = {"scale": 2.0, "bonus": 1.0, "level": 5}
    for function in (compute_score, f, lambda sample, scale, bonus: scale + bonus):
        wrapped = wrap(function, "f", COLUMNS, options)
        [result] = asyncio.run(score([wrapped], [1.0], [SAMPLE]))
        assert result.reward == 3.0
    assert wrap(compute_score, "f", COLUMNS, options).taken == {"scale", "bonus"}
    level = wrap(lambda completions, level: level, "f", COLUMNS, options)  # goes before a column
    assert asyncio.run(score([level], [1.0], [SAMPLE]))[0].reward == 5.0


def test_a_row_without_a_source_has_an_empty_one():
    for row in ({}, {"data_source": None}):
        sample = replace(SAMPLE, row=row)
        assert call(lambda solution_str, data_source: float(data_source == ""), sample) == 1.0


def test_verls_signature_without_its_optional_parts():
    def compute_score(solution_str, ground_truth):
        return len(solution_str + ground_truth)

    assert call(compute_score) == 4.0


def test_verls_function_of_a_row_without_extra_info_gets_an_empty_one():
    def compute_score(solution_str, ground_truth, extra_info):
        return float(extra_info.get("index", -1))

    assert call(compute_score, replace(SAMPLE, row={"prompt": "1+1="})) == -1.0


def test_trls_signature_gets_a_batch_of_one():
    def f(prompts, completions, level, **columns):
        assert (prompts, completions, level) == (["1+1="], [" 2 "], [3])
        assert columns["answer"] == ["2"]
        assert columns["completion_ids"] == [[4, 1]]
        assert "prompt" not in columns
        return [0.25]

    assert call(f) == 0.25


def test_trls_signature_gets_messages_where_the_prompt_is_messages():
    chat = [{"role": "user", "content": "1+1="}]
    sample = Sample("<user>1+1=", "2", "2", {"chat": chat}, [4], "stop")

    def f(completions, prompts=None):
        assert prompts == [chat]
        assert completions == [[{"role": "assistant", "content": "2"}]]
        return [0.5]

    [result] = scores(f, sample, columns=Columns(frozenset({"chat"}), prompt_key="chat"))
    assert result.reward == 0.5


def test_trls_functions_get_a_conversation_where_plain_text_becomes_one():
    columns = replace(COLUMNS, as_chat=True, system_prompt="be brief")

    def f(prompts, completions):
        assert [m["role"] for m in prompts[0]] == ["system", "user"]
        return [float(len(c[0]["content"])) for c in completions]

    assert [r.reward for r in scores(f, *siblings("a", "bcd"), columns=columns)] == [1.0, 3.0]
    question = replace(SAMPLE, row={"question": "how many?"})

    def g(prompts, completions):
        assert prompts == [[{"role": "user", "content": "how many?"}]]
        return [1.0]

    [result] = scores(g, question, columns=Columns(frozenset({"question"}), as_chat=True))
    assert result.reward == 1.0


def test_an_asynchronous_function_is_awaited():
    async def reward(sample):
        await asyncio.sleep(0)
        return 2

    class Judge:
        async def __call__(self, sample):
            return 3

    assert wrap(reward, "f").is_async
    assert wrap(partial(Judge().__call__), "f").is_async
    assert wrap(Judge(), "f").is_async
    assert call(reward) == 2.0
    assert call(Judge()) == 3.0


def test_trls_functions_get_the_whole_group_and_trls_extras():
    def f(prompts, completions, level, missing, trainer_state, log_metric, log_extra):
        assert prompts == ["1+1="] * 3
        assert (level, missing) == ([3, 3, 3], [None, None, None])
        log_metric("compared", len(completions))
        log_extra("text", [text.upper() for text in completions])
        best = max(map(len, completions))
        done = trainer_state.global_step / trainer_state.max_steps
        return [done if len(text) == best else 0.0 for text in completions]

    results = scores(
        f,
        *siblings("a", "bcd", "ef"),
        columns=Columns(COLUMNS.names | {"missing"}),  # of other rows
        state=RunProgress(5, 10),
    )
    assert [r.reward for r in results] == [0.0, 0.5, 0.0]
    assert [r.metrics for r in results] == [{"compared": 3.0}] * 3
    assert [r.extras for r in results] == [{"text": "A"}, {"text": "BCD"}, {"text": "EF"}]


def test_what_is_logged_several_times_in_a_call_is_its_mean():
    def f(completions, log_metric):
        for text in completions:
            log_metric("length", len(text))
        return [0.0] * len(completions)

    assert [r.metrics for r in scores(f, *siblings("a", "bcd"))] == [{"length": 2.0}] * 2


def test_what_is_no_finite_number_is_not_logged():
    def f(completions, log_metric):
        for value in (float("inf"), -float("inf"), float("nan"), 2.0):
            log_metric("x", value)
        log_metric("y", float("nan"))
        return [0.5] * len(completions)

    assert [(r.reward, r.metrics) for r in scores(f, SAMPLE)] == [(0.5, {"x": 2.0})]


def test_trls_functions_get_the_tokens_of_each_completion_under_both_names():
    samples = [replace(SAMPLE, response_ids=[k] * k) for k in (1, 2)]

    def f(completion_ids, completions_ids):
        assert completion_ids == completions_ids == [[1], [2, 2]]
        return list(map(len, completion_ids))

    assert [r.reward for r in scores(f, *samples)] == [1.0, 2.0]


def test_asynchronous_functions_overlap_in_a_group_and_with_each_other():
    met = asyncio.Barrier(4)  # two functions, two samples: nobody gets past it alone

    async def first(sample):
        await met.wait()
        return 1.0

    async def second(sample):
        await met.wait()
        return 2.0

    async def both() -> list[Score]:
        functions = [wrap(f, f.__name__) for f in (first, second)]
        async with asyncio.timeout(60):
            return await score(functions, [1.0, 1.0], siblings("a", "b"))

    assert [r.reward for r in asyncio.run(both())] == [3.0, 3.0]


def test_what_a_function_fails_for_in_a_list_costs_the_others_nothing():
    def f(completions, **kwargs):
        return [1.0, None, "0.5", math.nan, {"reward": 0.25, "note": 1}]

    results = scores(f, *siblings("a", "b", "c", "d", "e"))
    assert [r.reward for r in results] == [1.0, None, None, None, 0.25]
    assert [r.failure for r in results] == [
        "",
        "no score",
        "f: returned str, not a number, dict or None",
        "f: returned nan, which is not finite",
        "",
    ]


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ([1.0], "returned 1 scores for 2 responses"),
        (1.0, "returned float, not a list of 2 scores"),
        (None, "returned NoneType, not a list of 2 scores"),
    ],
)
def test_a_list_of_another_length_is_no_score_for_any(answer, failure):
    results = scores(lambda completions: answer, *siblings("a", "b"))
    assert [(r.reward, r.failure) for r in results] == [(None, failure)] * 2


def test_an_exception_is_no_score_for_the_responses_of_its_call_alone():
    def reward(sample):
        return {"a": 1.0, "b": 0.0}[sample.response]

    results = scores(reward, *siblings("a", "x", "b"))
    assert [r.reward for r in results] == [1.0, None, 0.0]
    assert [r.failure for r in results] == ["", "KeyError: 'x'", ""]


def test_an_exception_whose_text_cannot_be_sent_is_no_score_either():
    class Nameless(Exception):
        def __str__(self):
            raise ValueError

    def f(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "a":
            return {"score": 1, "file": "\udcff"}
        raise (ValueError("\udcff.txt") if solution_str == "b" else Nameless)

    said = scores(f, *siblings("a", "b", "c"))
    assert said[0].extras == {"file": r"\udcff"}
    assert said[1].failure == r"ValueError: \udcff.txt"
    assert said[2].failure == "Nameless: Nameless without text"


def test_of_several_functions_one_that_fails_leaves_no_sum():
    functions = [wrap(lambda sample: 1.0, "a"), wrap(lambda sample: 1 / 0, "b")]
    functions.append(wrap(lambda sample: {}["x"], "c"))  # the first reason is told
    [result] = asyncio.run(score(functions, [1.0, 1.0, 1.0], [SAMPLE]))
    assert (result.reward, result.failure) == (None, "ZeroDivisionError: division by zero")


def test_verls_batch_form_gets_columns_of_a_batch_as_arrays_and_what_is_made_of_it_as_lists():
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        assert (data_sources == "sums").tolist() == [True, True]
        assert extra_infos.shape == (2,)
        assert extra_infos[data_sources == "sums"][1]["index"] == 7
        extra_infos[0]["mine"] = 1  # is not the others'
        assert extra_infos[1] == {"index": 7, "num_turns": 2, "rollout_reward_scores": {}}
        assert isinstance(solution_strs, list)
        assert ground_truths == ["2", "2"]
        return [{"score": float(s == g)} for s, g in zip(solution_strs, ground_truths, strict=True)]

    assert wrap(compute_score, "f").takes_list
    assert [r.reward for r in scores(compute_score, *siblings("2", "3"))] == [1.0, 0.0]


def test_a_native_function_of_lists_gets_all_samples():
    results = scores(lambda samples: [len(samples)] * 2, *siblings("a", "b"))
    assert [r.reward for r in results] == [2.0, 2.0]


def test_rubric_functions_get_messages_and_what_else_they_name():
    def correct(prompt, completion, answer, info, state, level):
        assert prompt[-1]["content"] == prompt[-1].content == "1+1="
        assert (info, level, state["answer"]) == ({}, 3, "2")
        assert not state["is_truncated"]
        return float(answer in completion[-1]["content"])

    def is_cut(completion, state):
        return float(state["is_truncated"])

    assert call(is_cut, replace(SAMPLE, finish_reason="length")) == 1.0

    def diversity(completions, answers) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        return [float(texts.count(text) == 1) for text in texts]

    assert [r.reward for r in scores(correct, *siblings("2", "3"))] == [1.0, 0.0]
    assert [r.reward for r in scores(diversity, *siblings("2", "3", "3"))] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (lambda completions, solution: [0], "solution"),
        (lambda solution_str, ground_truth, difficulty: 0, "difficulty"),
        (lambda completion, parser: 0, "parser"),
        (lambda prompts, completions, environments, seed: [0], "environments, seed"),
    ],
)
def test_what_nobody_provides_is_said_before_anything_is_scored(function, missing):
    with pytest.raises(RewardError) as caught:
        wrap(function, "rewards.py:f", COLUMNS)
    assert str(caught.value) == (
        f"rewards.py:f: requires {missing}, which no row has; the columns are "
        "answer, data_source, extra_info, level, prompt"
    )


@pytest.mark.parametrize("name", ["exact_match", "regex", "math"])
def test_a_reward_that_compares_needs_a_row_with_an_answer(name):
    without = Columns(frozenset({"prompt"}), have_answers=False)
    with pytest.raises(RewardError, match=r"no row has an answer: data\.answer_key = 'answer'; "):
        load_function(name, Reward(regex="(.+)"), without)
    load_function("regex", Reward(regex="a"), without)  # compares with nothing


def test_verls_function_needs_a_row_with_an_answer():
    without = Columns(frozenset({"prompt"}), answer_key="solutoin", have_answers=False)
    with pytest.raises(RewardError, match="requires ground_truth, and no row has an answer: "):
        wrap(lambda solution_str, ground_truth: 0, "f", without)
    wrap(lambda solution_str, ground_truth=None: 0, "f", without)


@pytest.mark.parametrize(
    ("pattern", "response", "reward"),
    [
        (r"#### (\S+)", "#### 3 or rather #### 2", 1.0),
        (r"#### (\S+)", "#### 2 or rather #### 3", 0.0),
        (r"#### (\S+)", "2", 0.0),
        (r"^<think>.*</think>", "<think>so</think> 3", 1.0),
        (r"^<think>.*</think>", "3", 0.0),
    ],
)
def test_regex(pattern, response, reward):
    function = regex_reward(pattern)
    assert function(Sample("", response, "2", {}, [], "stop")) == reward


@pytest.mark.parametrize(
    "function",
    [lambda: 0, lambda text: 0, lambda sample, other: 0, lambda *args: 0],
)
def test_an_unknown_signature_is_refused_with_those_that_are_known(function):
    with pytest.raises(
        RewardError, match=r"rewards.py:f\(.*unknown signature; expected reward\(sample\)"
    ):
        wrap(function, "rewards.py:f")


@pytest.mark.parametrize(
    ("answer", "reward", "figures", "texts"),
    [
        (1, 1.0, {}, {}),
        (True, 1.0, {}, {}),
        (None, None, {}, {}),
        ([0.5], 0.5, {}, {}),
        ({"reward": 1, "steps": 4, "note": "good"}, 1.0, {"steps": 4.0}, {"note": "good"}),
        ({"score": 0, "acc": False}, 0.0, {"acc": 0.0}, {}),
        ({"reward": 1, "score": 7}, 7.0, {"reward": 1.0}, {}),
        ({"reward": None, "acc": math.inf}, None, {}, {"acc": math.inf}),
        (MappingProxyType({"score": 1, "pred": None}), 1.0, {}, {"pred": None}),
    ],
)
def test_answers_that_are_scores(answer, reward, figures, texts):
    assert read_answer(answer) == (reward, figures, texts)


def test_texts_that_a_function_returns_are_kept_beside_the_score():
    def graded(sample):
        return {"score": 1, "pred": "x" * 1000, "steps": [1, 2], "acc": True}

    [alone] = scores(graded, SAMPLE)
    assert (alone.metrics, alone.extras) == ({"acc": 1.0}, {"pred": "x" * 200, "steps": "[1, 2]"})
    both = [wrap(graded, "f"), wrap(lambda sample: 1, "rewards.py:g")]
    [of_two] = asyncio.run(score(both, [1.0, 1.0], [SAMPLE]))
    assert of_two.extras["graded/steps"] == "[1, 2]"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (math.nan, "nan, which is not finite"),
        (math.inf, "inf, which is not finite"),
        ({"reward": -math.inf}, "-inf, which is not finite"),
        (1e155, "returned 1e.155, which is outside the range of float32"),
        ({"score": -3.5e38}, "-3.5e.38, which is outside the range of float32"),
        (10**400, "returned inf, which is not finite"),
        (-(10**400), "returned -inf, which is not finite"),
        ("1.0", "returned str, not a number"),
        ([1.0, 2.0], "returned list"),
        ({"acc": 1.0}, 'no "reward" or "score"; its keys are acc'),
    ],
)
def test_answers_that_are_not_scores(answer, reason):
    with pytest.raises(RewardError, match=reason):
        read_answer(answer)


def test_several_functions_are_summed_by_weight_and_none_is_left_out():
    def right(sample):
        return 1.0

    def style(sample):
        return {"reward": 0.5, "commas": 2}

    def silent(sample):
        return None

    functions = [wrap(f, f.__name__) for f in (right, style, silent)]
    [result] = asyncio.run(score(functions, [1.0, 0.2, 5.0], [SAMPLE]))
    assert result.reward == pytest.approx(1.1)
    assert result.metrics == {"right": 1.0, "style": 0.5, "style/commas": 2.0}
    [silence] = asyncio.run(score(functions[2:], [1.0], [SAMPLE]))
    assert (silence.reward, silence.failure) == (None, "no score")


@pytest.mark.parametrize(
    ("response", "answer", "finish_reason", "reward"),
    [
        (" 2\n", "2", "stop", 1.0),
        ("2", 2, "stop", 1.0),
        ("2", "2", "length", 0.0),
        ("2 ", "3", "stop", 0.0),
        ("", None, "stop", None),
    ],
)
def test_exact_match(response, answer, finish_reason, reward):
    assert exact_match(Sample("", response, answer, {}, [], finish_reason)) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so it is \\boxed{1/2}", "\\frac{1}{2}", 1.0),
        ("The answer is 1,234.", "long text\n#### 1,234", 1.0),
        ("it is $x^2+1$", "$1+x^2$", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("", "4", 0.0),
        ("4", None, None),
    ],
)
def test_math(response, answer, reward):
    pytest.importorskip("math_verify")
    sample = Sample("", response, answer, {}, [], "stop")
    [result] = asyncio.run(score([load_function("math")], [1.0], [sample]))
    assert result.reward == reward


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("exact_macth", "'exact_macth': no such reward; did you mean exact_match"),
        ("zzz", "'zzz': no such reward; built-in are exact_match, regex, math"),
        ("nowhere.py:f", "nowhere.py:f: no such file"),
        ("module:f", 'expected a built-in name or "path.py:function"'),
    ],
)
def test_a_reference_that_leads_nowhere(reference, reason):
    with pytest.raises(RewardError, match=reason):
        load_function(reference)


@pytest.mark.parametrize(
    "huge", [1e155, -1e155, 3.5e38, 10**400, math.inf, math.nan], ids=lambda _: ""
)
def test_a_reward_that_no_float32_holds_costs_its_own_response_the_score(huge):
    def f(completions, **kwargs):
        return [1.0, huge, {"reward": 0.5, "seen": huge}]

    plain, wrong, figure = scores(f, *siblings("a", "b", "c"))
    assert (plain.reward, plain.failure) == (1.0, "")
    assert wrong.reward is None
    assert re.fullmatch(r"f: returned \S+, which is (not finite|outside .* float32)", wrong.failure)
    assert (figure.reward, figure.metrics, list(figure.extras)) == (0.5, {}, ["seen"])


def test_a_sum_that_no_float32_holds_is_no_score_and_names_its_functions():
    def first(sample):
        return 3e38

    def second(sample):
        return 3e38 if sample.response == "b" else -1e38

    functions = [wrap(f, "rewards.py:f", COLUMNS) for f in (first, second)]
    functions = [replace(f, name=n) for f, n in zip(functions, ("first", "second"), strict=True)]
    a, b = asyncio.run(score(functions, [1.0, 1.0], siblings("a", "b")))
    assert (a.reward, a.failure) == (3e38 - 1e38, "")
    assert b.reward is None
    assert b.failure == "the sum of first, second is 6e+38, which is outside the range of float32"


def test_what_a_function_logs_that_no_float32_holds_is_no_figure():
    def f(completions, log_metric, **kwargs):
        log_metric("size", 1e308)
        log_metric("size", 1e308)
        log_metric("size", 4.0)
        return [1.0]

    [only] = scores(f, *siblings("a"))
    assert (only.reward, only.metrics, only.failure) == (1.0, {"size": 4.0}, "")


def test_the_readme_and_the_config_name_every_built_in_function():
    source = Path(builtin.__file__)
    table = source.with_name("README.md").read_text(encoding="utf-8").partition("| Built in |")[2]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert rows == list(BUILTIN)
    settings = source.parents[1] / "config" / "reward.py"
    assert ", ".join(BUILTIN) in settings.read_text(encoding="utf-8")
