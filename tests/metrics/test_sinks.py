"""metrics.jsonl: what is written is read back, after crashes and resumes too."""

import asyncio
import importlib.util
import json
import math

import pytest

from lightrl.config.run_file import parse_config
from lightrl.errors import ConfigError
from lightrl.metrics import sinks

CONFIG = parse_config({"model": {"path": "m"}, "data": {"path": "d"}})


def write(run_dir, *records, backends=("jsonl",)):
    log = sinks.MetricsLog(run_dir, backends, CONFIG, [].append)
    for step, record in records:
        log.write(step, record)
    asyncio.run(log.close())


def test_records_are_on_disk_at_once_one_json_object_per_line(tmp_path):
    log = sinks.MetricsLog(tmp_path, ("jsonl",), CONFIG, [].append)
    log.write(1, {"reward/mean": 0.5, "lr": 1e-6})
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "reward/mean": 0.5, "lr": 1e-6}
    asyncio.run(log.close())


def test_values_that_are_not_finite_are_null_in_the_file_and_nan_when_read(tmp_path):
    write(tmp_path, (1, {"loss": math.inf}))
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None}
    assert math.isnan(sinks.read(tmp_path)[0]["loss"])


def test_a_resumed_run_appends_and_its_records_replace_repeated_steps(tmp_path):
    write(tmp_path, (1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 3.0}))
    with (tmp_path / "metrics.jsonl").open("ab") as f:
        f.write(b'{"step": 4, "a"')  # torn by a crash
    write(tmp_path, (2, {"a": 20.0}), (3, {"a": 30.0}))
    assert sinks.read(tmp_path) == [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": 20.0},
        {"step": 3, "a": 30.0},
    ]


def test_an_evaluation_takes_nothing_from_the_step_before_it(tmp_path):
    write(tmp_path, (0, {"eval/x": 0.1}), (1, {"a": 1.0}), (1, {"eval/x": 0.2}))
    assert sinks.read(tmp_path) == [
        {"step": 0, "eval/x": 0.1},
        {"step": 1, "a": 1.0, "eval/x": 0.2},
    ]
    write(tmp_path, (1, {"a": 2.0}))  # trained again, not yet evaluated
    assert sinks.read(tmp_path)[1:] == [{"step": 1, "a": 2.0}]


def test_a_run_without_records(tmp_path):
    assert sinks.read(tmp_path) == []
    write(tmp_path)
    assert sinks.read(tmp_path) == []


def test_the_newest_steps_are_as_among_all_of_them(tmp_path):
    steps = [(k, {"a": float(k)}) for k in range(1, 7)]
    write(tmp_path, (0, {"eval/x": 0.1}), *steps[:4], (4, {"eval/x": 0.2}))
    with (tmp_path / "metrics.jsonl").open("ab") as f:
        f.write(b'{"step": 5, "a"')  # torn by a crash
    write(tmp_path, *steps[3:5], (5, {"eval/x": 0.3}), steps[5])
    everything = sinks.read(tmp_path)
    assert everything[4:6] == [{"step": 4, "a": 4.0}, {"step": 5, "a": 5.0, "eval/x": 0.3}]
    for num in range(1, 9):
        assert sinks.read(tmp_path, num) == everything[-num:]
        assert sinks.read(tmp_path, num, until=4) == everything[:5][-num:]


@pytest.mark.parametrize("backend", ["tensorboard", "wandb", "mlflow"])
def test_a_backend_that_is_not_installed_says_what_to_install(tmp_path, backend):
    if importlib.util.find_spec(backend) is not None:
        pytest.skip(f"{backend} is installed")
    with pytest.raises(ConfigError, match=f"pip install {backend}"):
        write(tmp_path, backends=("jsonl", backend))


def test_tensorboard_gets_every_value(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    write(
        tmp_path, (1, {"reward/mean": 0.5}), (2, {"reward/mean": 0.75}), backends=("tensorboard",)
    )
    [file] = (tmp_path / "tensorboard").iterdir()
    events = [e for e in loader.EventFileLoader(str(file)).Load() if e.summary.value]
    assert [(e.step, e.summary.value[0].tag) for e in events] == [
        (1, "reward/mean"),
        (2, "reward/mean"),
    ]
    assert len(sinks.read(tmp_path)) == 2  # sinks.jsonl is always written
