"""The reward pool with real worker processes and functions that misbehave in every way."""

import asyncio
import resource
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lightrl.config import schema
from lightrl.errors import RewardError
from lightrl.rewards import worker
from lightrl.rewards.protocol import RewardResult, RewardSet, WorkerSetup
from lightrl.rewards.runner import RewardPool, WorkerProcess
from tests.support.reward_pool import LIMIT_S, job, reward_set, run_jobs
from tests.support.tiers import e2e

MISBEHAVE = """
import os, time

def reward(sample):
    match sample.row.get("do", "pass"):
        case "raise":
            raise ValueError("no number in it\\nsecond line")
        case "exit":
            raise SystemExit(3)
        case "crash":
            os._exit(3)
        case "hang":
            while True:
                pass
        case "work":
            end = time.perf_counter() + sample.row["seconds"]
            while time.perf_counter() < end:
                pass
        case "none":
            return None
        case "nan":
            return float("nan")
        case "dict":
            return {"score": 0.5, "length": len(sample.response_ids), "note": "text"}
        case "print":
            print("seen by the log")
        case "environment":
            return float(any(k.startswith("LIGHTRL_") for k in os.environ))
    return 1.0
"""


def test_one_worker_survives_every_kind_of_answer_and_exception(model_files, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTRL_KEY", "secret")
    kinds = ["pass", "none", "nan", "raise", "dict", "print", "environment"]
    results = run_jobs(MISBEHAVE, [job(k, do=k) for k in kinds], model_files, tmp_path)
    assert [r.failure for r in results.values()] == [
        "",
        "no score",
        "reward: returned nan, which is not finite",
        "ValueError: no number in it",
        "",
        "",
        "",
    ]
    assert [r.reward for r in results.values()] == [1.0, None, None, None, 0.5, 1.0, 0.0]
    assert results["dict"].metrics == {"length": 4.0}
    assert results["dict"].extras == {"note": "text"}
    assert {r.text for r in results.values()} == {"abc"}
    log = (tmp_path / "reward-0.log").read_text()
    assert "seen by the log" in log
    assert "second line" in log  # the whole traceback


def test_only_the_hanging_and_crashing_jobs_fail_and_none_is_lost(model_files, tmp_path):
    kinds = ["pass", "hang", "pass", "crash", "pass", "exit", "pass"]
    jobs = [job(f"{i}", attempt=i, do=kind) for i, kind in enumerate(kinds)]
    results = run_jobs(MISBEHAVE, jobs, model_files, tmp_path, timeout_s=1.0)
    failures = [results[f"{i}"].failure for i in range(len(kinds))]
    assert failures == ["", "timeout", "", "crashed", "", "SystemExit: 3", ""]
    assert results["1"].duration_s >= 1.0
    assert [results[f"{i}"].reward for i in (0, 2, 4, 6)] == [1.0] * 4
    assert [results[f"{i}"].attempt for i in range(len(kinds))] == list(range(len(kinds)))


@pytest.mark.e2e
def test_waiting_behind_others_does_not_count_against_the_limit(model_files, tmp_path):
    jobs = [job(f"{i}", do="work", seconds=0.15) for i in range(10)]
    results = run_jobs(MISBEHAVE, jobs, model_files, tmp_path, timeout_s=1.0)
    assert Counter(r.failure for r in results.values()) == {"": 10}
    assert sum(r.duration_s for r in results.values()) > 1.0


@pytest.mark.e2e
def test_waiting_for_a_turn_does_not_count_against_the_limit(model_files, tmp_path):
    """A judge that takes so many calls at once, say."""
    source = """
import asyncio

class Judge:
    turns = asyncio.Semaphore(2)

    async def __call__(self, sample):
        await asyncio.sleep(0.2)
        return 1.0

reward = Judge()
"""
    jobs = [job(f"{i}") for i in range(24)]
    results = run_jobs(source, jobs, model_files, tmp_path, timeout_s=1.5)
    assert Counter(r.failure for r in results.values()) == {"": 24}
    assert max(r.duration_s for r in results.values()) < 1.5


def test_two_workers_score_each_job_once_whatever_the_order(model_files, tmp_path):
    source = "def reward(sample):\n    return sample.row['number'] + len(sample.response)\n"
    jobs = [job(f"{i}", "a" * (i % 7), number=i) for i in range(300)]
    results = run_jobs(source, jobs, model_files, tmp_path, workers=2)
    assert {name: r.reward for name, r in results.items()} == {
        f"{i}": float(i + i % 7) for i in range(300)
    }


TIMED = """
import os, time
from lightrl.rewards.code.reward import time_limit

def reward(sample):
    time.sleep(0.01)
    return {"reward": 1.0, "limit": time_limit(sample.slowest_s), "worker": os.getpid()}
"""


def test_all_workers_give_a_prompt_the_same_time(model_files, tmp_path):
    times = {"slow": 4.0, "quick": 0.1, "new": None}
    jobs = [
        replace(job(f"{name}{i}"), slowest_s=seconds)
        for i in range(16)
        for name, seconds in times.items()
    ]
    results = run_jobs(TIMED, jobs, model_files, tmp_path, workers=3)
    assert len({r.metrics["worker"] for r in results.values()}) > 1
    for name, limit_s in (("slow", 6.0), ("quick", 2.0), ("new", 30.0)):
        found = {r.metrics["limit"] for r in results.values() if r.response.startswith(name)}
        assert found == {limit_s}


def test_asynchronous_calls_overlap_and_only_the_hanging_one_times_out(model_files, tmp_path):
    source = """
import asyncio, os
barrier = asyncio.Barrier(3)

async def reward(sample):
    if sample.row.get("do") == "hang":
        await asyncio.Event().wait()
    await barrier.wait()  # nobody gets past it alone
    return {"reward": 1.0, "pid": os.getpid()}
"""
    jobs = [job("a"), job("hang", do="hang"), job("b"), job("c")]
    results = run_jobs(source, jobs, model_files, tmp_path, timeout_s=1.0)
    assert {name: r.failure for name, r in results.items()} == {
        "a": "",
        "b": "",
        "c": "",
        "hang": "timeout",
    }
    assert len({results[name].metrics["pid"] for name in "abc"}) == 1


def test_a_group_is_scored_in_one_call_and_each_response_has_its_own_result(model_files, tmp_path):
    source = """
def reward(completions, trainer_state, log_metric, log_extra, level, **kwargs):
    log_metric("compared", len(completions))
    log_extra("seen", [text.upper() for text in completions])
    assert level == [3] * len(completions)
    order = sorted(completions, key=len)
    scores = [order.index(text) / trainer_state.max_steps for text in completions]
    return [None if text == "b" else score for text, score in zip(completions, scores)]
"""
    jobs = [job(text, text, attempt=k, level=3) for k, text in enumerate(["abc", "b", "cd"])]
    results = run_jobs(source, jobs, model_files, tmp_path, as_group=True)
    assert [r.reward for r in results.values()] == [0.2, None, 0.1]
    assert [r.failure for r in results.values()] == ["", "no score", ""]
    assert [(r.text, r.attempt) for r in results.values()] == [("abc", 0), ("b", 1), ("cd", 2)]
    assert results["abc"].metrics == {"compared": 3.0}
    assert results["cd"].extras == {"seen": "CD"}
    assert len({r.duration_s for r in results.values()}) == 1


def test_a_call_is_told_how_far_the_run_is_and_its_time_is_divided(model_files, tmp_path):
    source = """
import time

def reward(completions, trainer_state):
    time.sleep(0.4)
    return [trainer_state.global_step + trainer_state.epoch / 10] * len(completions)
"""
    jobs = [replace(job(name), step=7, epoch=2) for name in "abcd"]
    results = run_jobs(source, jobs, model_files, tmp_path, as_group=True)
    assert [r.reward for r in results.values()] == [7.2] * 4
    assert 0.1 <= results["a"].duration_s < 0.4


def test_each_set_has_functions_weights_and_an_answer_column_of_its_own(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def one(samples): return [1.0] * len(samples)\ndef two(sample): return 2.0\n"
    )
    one, two = (f"{tmp_path}/rewards.py:{name}" for name in ("one", "two"))
    sets = (
        RewardSet((one,), (0.5,), "prompt", "answer", (), True),
        RewardSet((two, one), (3.0, 4.0), "text", "gold", (), True),
        RewardSet((two,), (1.0,), "prompt", "answer", (), True),
    )

    def scorers(**reward: Any) -> list[worker.Scorer]:
        setup = WorkerSetup(schema.Reward(**reward).model_dump_json(), sets, "", 1)
        return worker.load_scorers(setup)

    loaded = scorers()
    assert [[f.name for f in s.functions] for s in loaded] == [["one"], ["two", "one"], ["two"]]
    assert [s.weights for s in loaded] == [(0.5,), (3.0, 4.0), (1.0,)]
    assert [s.columns.answer_key for s in loaded] == ["answer", "gold", "answer"]
    assert [s.by_group for s in loaded] == [True, True, False]
    assert not any(s.by_group for s in scorers(batch="response"))


def test_a_group_whose_call_crashes_fails_as_a_whole_and_no_other(model_files, tmp_path):
    source = """
import os

def reward(samples):
    return [1.0] * len(samples) if samples[0].row.get("do") != "crash" else os._exit(3)
"""
    crashed = run_jobs(
        source, [job("a", do="crash"), job("b", do="crash")], model_files, tmp_path, as_group=True
    )
    assert [r.failure for r in crashed.values()] == ["crashed", "crashed"]


@pytest.mark.e2e
def test_the_limit_is_that_of_each_call(model_files, tmp_path):
    source = """
import time

def first(sample):
    time.sleep(0.7)
    return 1.0

def second(sample):
    return first(sample)
"""
    names = ("first", "second")
    results = run_jobs(source, [job("a")], model_files, tmp_path, functions=names, timeout_s=1.0)
    assert (results["a"].reward, results["a"].failure) == (2.0, "")
    assert results["a"].duration_s > 1.0


def test_a_blocked_asynchronous_worker_is_killed_and_the_others_get_their_score(
    model_files, tmp_path
):
    source = """
async def reward(sample):
    while sample.row.get("do") == "block":
        pass
    return 1.0
"""
    jobs = [job("block", do="block"), job("a"), job("b")]
    results = run_jobs(source, jobs, model_files, tmp_path, timeout_s=0.2)
    assert results["block"].failure == "timeout"
    assert (results["a"].reward, results["b"].reward) == (1.0, 1.0)


@pytest.mark.e2e
def test_calls_under_way_beside_one_that_blocks_are_made_again(model_files, tmp_path):
    source = """
import asyncio, pathlib, time
MARK = pathlib.Path(__file__).with_name("mark")

async def reward(sample):
    if sample.row["do"] == "block":
        while not MARK.exists():
            await asyncio.sleep(0)
        time.sleep(1000)
    if not MARK.exists():  # in the worker that is killed
        MARK.touch()
        await asyncio.Event().wait()
    return 1.0
"""
    jobs = [job("block", do="block"), job("a", do="wait")]
    results = run_jobs(source, jobs, model_files, tmp_path, timeout_s=2.0)
    assert (results["block"].failure, results["a"].reward) == ("timeout", 1.0)


def test_long_responses_are_cut_and_numbers_beyond_64_bits_travel(model_files, tmp_path):
    source = (
        "def reward(sample):\n    return float(sample.answer == 10**30 and len(sample.response) "
        "== 25_000)\n"
    )
    results = run_jobs(source, [job("a", "a" * 25_000, answer=10**30)], model_files, tmp_path)
    assert results["a"].reward == 1.0
    assert len(results["a"].text) == worker.MAX_TEXT


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def reward(text):\n    return 0\n", r"rewards.py:reward\(text\): unknown signature"),
        *e2e(
            [("def other(sample):\n    return 0\n", "no such function; rewards.py defines other")]
        ),
        (
            "def reward(completions, solution, **columns):\n    return [0]\n",
            "rewards.py:reward: requires solution, which no row has; the columns are level",
        ),
        (
            "import not_there\n",
            "cannot be imported: ModuleNotFoundError: No module named 'not_there'",
        ),
        *e2e([("def reward(sample\n", "cannot be imported: SyntaxError")]),
        ("import os\nos._exit(4)\n", "ended with exit status 4"),
    ],
)
def test_a_function_that_cannot_be_used_is_reported_at_the_start(
    model_files, tmp_path, source, reason
):
    with pytest.raises(RewardError, match=reason) as caught:
        run_jobs(source, [job("a", level=3)], model_files, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_job_whose_answer_came_before_the_kill_is_not_blamed(model_files, tmp_path):
    """The limit of job 0 ran out and its worker was killed, but its answer was in the pipe
    already."""
    reward = schema.Reward()
    setup = WorkerSetup(reward.model_dump_json(), (reward_set(reward),), str(model_files), 1)

    async def blamed() -> list[RewardResult]:
        w = WorkerProcess(reward, setup, "reward-0", tmp_path / "reward-0.log", print)
        w._timed_out = 0
        return w.failures()

    assert asyncio.run(blamed()) == []


def test_workers_that_die_without_a_job_end_the_pool(model_files, tmp_path):
    source = """
import os, threading
end = lambda: (threading.main_thread().join(0.05), os._exit(5))
threading.Thread(target=end, daemon=True).start()

def reward(sample):
    return 1.0
"""
    (tmp_path / "rewards.py").write_text(source)
    settings = schema.Reward(functions=(f"{tmp_path}/rewards.py:reward",))

    async def scenario() -> None:
        sets = (reward_set(settings),)
        setup = WorkerSetup(settings.model_dump_json(), sets, str(model_files))
        pool = RewardPool(settings, setup, tmp_path, lambda _: None, print)
        try:
            await pool.start()
            await pool.run()
        finally:
            await pool.stop()

    with pytest.raises((RewardError, ExceptionGroup)) as caught:
        asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    if isinstance(caught.value, ExceptionGroup):
        assert caught.group_contains(RewardError, match="exit status 5")


def test_a_model_directory_without_a_usable_tokenizer_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    reward = schema.Reward()
    setup = WorkerSetup(reward.model_dump_json(), (reward_set(reward),), str(tmp_path))
    pool = RewardPool(reward, setup, tmp_path, lambda _: None, print)
    with pytest.raises(RewardError, match=r"tokenizer\.json: cannot be loaded"):
        asyncio.run(asyncio.wait_for(pool.start(), LIMIT_S))


def test_a_worker_that_is_killed_while_it_starts_is_started_again(model_files, tmp_path):
    source = """
import os, pathlib, signal
mark = pathlib.Path(__file__).with_name("mark")
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)

def reward(sample):
    return 1.0
"""
    assert run_jobs(source, [job("a")], model_files, tmp_path)["a"].reward == 1.0


def test_a_worker_that_lacks_a_descriptor_waits_for_one(model_files, tmp_path):
    (tmp_path / "rewards.py").write_text("def reward(sample):\n    return 1.0\n")
    settings = schema.Reward(functions=(f"{tmp_path}/rewards.py:reward",))
    told: list[str] = []

    async def scenario() -> None:
        sets = (reward_set(settings),)
        setup = WorkerSetup(settings.model_dump_json(), sets, str(model_files))
        pool = RewardPool(settings, setup, tmp_path, lambda _: None, told.append)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
        try:
            starting = asyncio.create_task(pool.start())
            while not told:  # noqa: ASYNC110 - a line tells nobody
                await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await starting
        await pool.stop()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert told == ["reward-0 cannot be started: Too many open files; trying again"]


def test_a_function_may_run_event_loops_of_its_own(model_files, tmp_path):
    source = (
        "import asyncio, signal\n\n"
        "async def graded(text):\n    await asyncio.sleep(0)\n    return float(len(text))\n\n"
        "def runs(completions, **kwargs):\n"
        "    async def all_of_them():\n"
        "        return await asyncio.gather(*map(graded, completions))\n"
        "    return asyncio.run(all_of_them())\n\n"
        "def reuses(sample):\n"
        "    try:\n        loop = asyncio.get_event_loop()\n"
        "    except RuntimeError:\n"
        "        loop = asyncio.new_event_loop()\n        asyncio.set_event_loop(loop)\n"
        "    return loop.run_until_complete(graded(sample.response))\n\n"
        "def limits_its_time(sample):\n"
        "    signal.alarm(60)\n    signal.alarm(0)\n    return 1\n\n"
        "async def waits(sample):\n    await asyncio.sleep(0)\n    return 1\n"
    )
    jobs = [job(str(i), "abc"[: 1 + i % 3]) for i in range(12)]
    alone = ("runs", "reuses", "limits_its_time")
    for names in (alone, (*alone, "waits")):
        results = run_jobs(source, jobs, model_files, tmp_path, names)
        assert {r.failure for r in results.values()} == {""}
        expected = [2 * (1 + i % 3) + len(names) - 2 for i in range(12)]
        assert [results[str(i)].reward for i in range(12)] == expected


def test_functions_of_a_job_are_called_before_those_of_the_next(model_files, tmp_path):
    source = (
        "order = []\n"
        "def first(sample):\n    order.append(sample.row['k'])\n    return 0\n"
        "def second(sample):\n    order.append(sample.row['k'])\n"
        "    return {'reward': 0, 'in_a_row': order[-2:] == [sample.row['k']] * 2}\n"
    )
    jobs = [job(str(k), k=k) for k in range(9)]
    results = run_jobs(source, jobs, model_files, tmp_path, ("first", "second"))
    assert [r.metrics["second/in_a_row"] for r in results.values()] == [1.0] * 9


def test_functions_of_one_name_have_figures_of_their_own(model_files, tmp_path):
    source = (
        "def accuracy(sample):\n    return 1\n"
        "def made(weight):\n    def graded(sample):\n        return weight\n    return graded\n"
        "low, high = made(2), made(3)\n"
    )
    (tmp_path / "others.py").write_text("def accuracy(sample):\n    return 4\n")
    (tmp_path / "rewards.py").write_text(source)
    places = ("rewards.py:accuracy", "others.py:accuracy", "rewards.py:low", "rewards.py:high")
    named = [f"{tmp_path}/{place}" for place in (*places, "rewards.py:low")]
    reward = schema.Reward(functions=tuple(named))
    sets = (replace(reward_set(reward), weights=(1.0,) * 5),)
    [scorer] = worker.load_scorers(WorkerSetup(reward.model_dump_json(), sets, "", 0))
    assert [f.name for f in scorer.functions] == [
        "rewards.accuracy",
        "others.accuracy",
        "rewards.low",
        "rewards.high",
        "rewards.low-2",
    ]


def test_a_keyword_argument_that_no_function_takes_is_said(tmp_path):
    (tmp_path / "keywords.py").write_text("def f(sample, scale): return scale")
    functions = (f"{tmp_path}/keywords.py:f", "exact_match")
    for kwargs, unknown in (({"scale": 2}, ""), ({"scale": 2, "scael": 1}, "scael")):
        reward = schema.Reward(functions=functions, kwargs=kwargs)
        setup = WorkerSetup(reward.model_dump_json(), (reward_set(reward),), "", 0)
        if not unknown:
            worker.load_scorers(setup)
            continue
        with pytest.raises(RewardError) as caught:
            worker.load_scorers(setup)
        assert str(caught.value) == (
            "reward.kwargs.scael: no function has a parameter 'scael', or **kwargs"
        )


@pytest.mark.parametrize(
    ("call", "failure"),
    [
        ("sys.exit('no licence')", "SystemExit: no licence"),
        *e2e(
            [
                ("sys.exit(3)", "SystemExit: 3"),
                ("raise KeyboardInterrupt", "KeyboardInterrupt"),
                ("raise GeneratorExit('over')", "GeneratorExit: over"),
            ]
        ),
        ("raise asyncio.CancelledError('by itself')", "CancelledError: by itself"),
    ],
)
@pytest.mark.parametrize("kind", ["def", *e2e(["async def"])])
def test_a_call_that_would_end_its_process_has_its_reason(
    model_files, tmp_path, call, failure, kind
):
    source = (
        "import asyncio, sys\n"
        f"{kind} reward(sample):\n    if sample.row.get('ends'):\n        {call}\n    return 1.0\n"
    )
    jobs = [job("a", ends=True), job("b")]
    results = run_jobs(source, jobs, model_files, tmp_path, workers=1)
    assert results["a"].failure.startswith(failure)
    assert results["b"].reward == 1.0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        *e2e(
            [
                ("raise KeyboardInterrupt('stopped')", "KeyboardInterrupt: stopped"),
            ]
        ),
        ("import sys\nsys.exit('no licence')", "SystemExit: no licence"),
    ],
)
def test_an_import_that_would_end_its_process_has_its_reason(model_files, tmp_path, body, reason):
    source = f"{body}\ndef reward(sample):\n    return 1.0\n"
    with pytest.raises(RewardError, match=f"rewards.py:reward: cannot be imported: {reason}"):
        run_jobs(source, [job("a")], model_files, tmp_path, workers=1)
