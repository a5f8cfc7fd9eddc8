"""Trackers in processes of their own, with stand-ins that have the calls of wandb and MLflow and
write down what they are told; and Prometheus, for real."""

import asyncio
import json
import math
import os
import resource
import urllib.request
from pathlib import Path

import pytest

from lightrl.config.run_file import parse_config
from lightrl.errors import ConfigError
from lightrl.metrics import sinks
from lightrl.metrics.sinks import PrometheusServer, exposed
from lightrl.metrics.tracker import GETS_NO_MORE, allowed_by_mlflow
from lightrl.system import child

DEADLINE_S = 60.0

WANDB = """
import json, os
BOOK = os.environ["BOOK"]

def note(*what):
    with open(BOOK, "a") as f:
        f.write(json.dumps(what) + "\\n")

class Run:
    url = "https://tracker/run"
    def log(self, record, step): note("log", step, record)
    def finish(self): note("finish")

def init(**given):
    config = given.pop("config")
    note("init", given, config["model"]["path"])
    if os.environ.get("REFUSES"):
        raise ValueError("api key not configured\\nsecond line")
    if os.environ.get("HANGS"):
        while not os.path.exists(os.environ["HANGS"]):
            os.sched_yield()
    return Run()
"""
MLFLOW = """
import json, os
from types import SimpleNamespace
BOOK = os.environ["BOOK"]

def _noting(name, answer=None):
    def call(*a, **k):
        with open(BOOK, "a") as f:
            f.write(json.dumps([name, a, k]) + "\\n")
        return answer
    return call

set_experiment, set_tags, log_params, log_metrics, end_run = map(
    _noting, ("set_experiment", "set_tags", "log_params", "log_metrics", "end_run")
)
start_run = _noting("start_run", SimpleNamespace(info=SimpleNamespace(run_id="run-7")))
get_tracking_uri = _noting("uri", "file:mlruns")
"""


@pytest.fixture
def book(tmp_path, monkeypatch):
    """What the stand-ins were told, as a function."""
    place = tmp_path / "packages"
    for name, text in (("wandb", WANDB), ("mlflow", MLFLOW)):
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text(text)
    path = tmp_path / "book"
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("BOOK", str(path))

    def read():
        return [json.loads(line) for line in path.read_text().splitlines()]

    return read


def settings(**logging):
    return parse_config({"model": {"path": "m"}, "data": {"path": "d"}, "logging": logging})


async def tracked(run_dir: Path, backend: str, records, said: list[str], **logging) -> None:
    config = settings(backends=[backend], **logging)
    log = sinks.MetricsLog(run_dir, (backend,), config, said.append)
    for step, record in records:
        log.write(step, record)
    await log.close()


def track(run_dir: Path, backend: str, *records, **logging) -> list[str]:
    said: list[str] = []
    run_dir.mkdir(exist_ok=True)
    asyncio.run(tracked(run_dir, backend, records, said, **logging))
    return said


def test_wandb_gets_everything_and_a_resumed_run_goes_on_under_its_id(tmp_path, book):
    run = tmp_path / "run"
    names = {"project": "p", "group": "g", "tags": ["a", "b"]}
    assert track(run, "wandb", (1, {"lr": 0.5}), (2, {"lr": 0.25}), **names) == []
    (_, given, model), *logged, last = book()
    assert (given["project"], given["group"], given["tags"]) == ("p", "g", ["a", "b"])
    assert (given["resume"], model) == ("allow", "m")
    assert logged == [
        ["log", 1, {"lr": 0.5}],
        ["log", 2, {"lr": 0.25}],
    ]
    assert last == ["finish"]
    track(run, "wandb", (3, {"lr": 0.1}))
    assert book()[4][1]["id"] == given["id"]
    assert book()[5] == ["log", 3, {"lr": 0.1}]


def test_mlflow_gets_parameters_once_and_names_that_it_allows(tmp_path, book):
    run = tmp_path / "run"
    assert track(run, "mlflow", (1, {"eval/x/avg@4": 0.5}), project="p", tags=["a"]) == []
    assert track(run, "mlflow", (2, {"lr": 0.1})) == []
    told = book()
    assert ["set_experiment", ["p"], {}] in told
    assert ["log_metrics", [{"eval/x/avg_at_4": 0.5}], {"step": 1}] in told
    begun = [k["run_id"] for name, _, k in told if name == "start_run"]
    assert begun == [None, "run-7"]
    parameters = {k: v for name, a, _ in told if name == "log_params" for k, v in a[0].items()}
    assert parameters["model.path"] == "m"
    firsts = [i for i, (name, *_) in enumerate(told) if name == "start_run"]
    assert not any(name == "log_params" for name, *_ in told[firsts[1] :])


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("reward/acc (%)", "reward/acc ___"),
        ("reward/len>10=x", "reward/len_10_x"),
        ("reward/größe: a-b.c", "reward/größe: a-b.c"),
        ("reward//../x", "reward/x"),
        ("r" * 300, "r" * 250),
    ],
)
def test_figures_of_reward_functions_may_be_called_anything(name, allowed):
    """Of the real one's rule, which refuses the whole record otherwise."""
    assert allowed_by_mlflow(name) == allowed


def test_a_tracker_that_refuses_costs_one_line(tmp_path, book, monkeypatch):
    monkeypatch.setenv("REFUSES", "1")
    [line] = track(tmp_path / "run", "wandb", (1, {"lr": 0.5}))
    assert f"ValueError: api key not configured; {GETS_NO_MORE}" in line
    assert sinks.read(tmp_path / "run") == [{"step": 1, "lr": 0.5}]


def test_a_resumed_run_sends_what_was_not_sent(tmp_path, book, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setenv("REFUSES", "1")
    track(run, "wandb", (1, {"lr": 0.5}))
    monkeypatch.delenv("REFUSES")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "l\n[]\n{"lr": 1}\n{"step": 2, "lr": null}\n{"step": 3')
    assert track(run, "wandb", (4, {"lr": 0.1})) == []
    first, second, third = (told for told in book() if told[0] == "log")
    assert (first[1:], second[1], third[1:]) == ([1, {"lr": 0.5}], 2, [4, {"lr": 0.1}])
    assert math.isnan(second[2]["lr"])
    size = (run / "metrics.jsonl").stat().st_size
    assert (run / "tracker-wandb").read_text().split()[1:] == [str(size)]


async def _lacking(run: Path, told: list[str]) -> None:
    """Strangers have all descriptors when the tracker is to start, until that is said."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def report(line: str) -> None:
        told.append(line)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    log = sinks.MetricsLog(run, ("wandb",), settings(backends=["wandb"]), report)
    log.write(1, {"lr": 0.5})
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
    try:
        await log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_tracker_is_started_once_there_are_descriptors(tmp_path, book, monkeypatch):
    monkeypatch.setattr(child, "START_AGAIN_S", 0)
    run = tmp_path / "run"
    run.mkdir()
    told: list[str] = []
    asyncio.run(_lacking(run, told))
    assert told == ["the wandb tracker cannot be started: Too many open files; trying again"]
    assert book()[1:] == [["log", 1, {"lr": 0.5}], ["finish"]]


async def _hanging(run: Path, goes_on: Path) -> None:
    log = sinks.MetricsLog(run, ("wandb",), settings(backends=["wandb"]), [].append)
    for step in range(1000):
        log.write(step, {"lr": 0.5})
    await asyncio.to_thread(goes_on.touch)
    await log.close()


def test_nobody_waits_for_a_tracker_that_hangs(tmp_path, book, monkeypatch):
    goes_on, run = tmp_path / "go", tmp_path / "run"
    run.mkdir()
    monkeypatch.setenv("HANGS", str(goes_on))
    asyncio.run(_hanging(run, goes_on))
    assert [told[1] for told in book() if told[0] == "log"] == list(range(1000))


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        return answer.read().decode()


def test_prometheus_sees_the_newest_figures():
    pytest.importorskip("prometheus_client")
    server = PrometheusServer("127.0.0.1:0", "run-1")
    server.write({"reward/mean": 0.25, "eval/x/avg@4": 1.0})
    server.write({"reward/mean": 0.5})
    text = scraped(server.port)
    server.close()
    assert 'lightrl_reward_mean{run="run-1"} 0.5' in text
    assert 'lightrl_eval_x_avg_4{run="run-1"} 1.0' in text
    assert "0.25" not in text
    assert exposed("perf/tokens_per_gpu_s") == "lightrl_perf_tokens_per_gpu_s"


@pytest.mark.parametrize(
    "address", ["9109", ":9109", "localhost", "localhost:x", "h:99999", "a b:1"]
)
def test_what_is_no_address_is_one_line(address):
    with pytest.raises(ConfigError, match=r"logging.prometheus = .*: expected host:port"):
        settings(prometheus=address)
    assert settings(prometheus="*:9109").logging.prometheus == "*:9109"


def test_a_port_in_use_is_one_line():
    pytest.importorskip("prometheus_client")
    server = PrometheusServer("127.0.0.1:0", "run-1")
    with pytest.raises(ConfigError, match="Address already in use"):
        PrometheusServer(f"127.0.0.1:{server.port}", "run-2")
    server.close()
