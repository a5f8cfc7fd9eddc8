"""scripts/gpu itself: limits, going on after failures, what it prints. With parts that need no
GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_lib.parts import PARTS, ROOT, Part, chosen
from gpu_lib.probe import advice, refusal
from gpu_lib.report import as_json, table
from gpu_lib.runner import Runner

MACHINE = {"python": "3.12.3", "driver": None, "versions": {}, "missing": [], "why_no_cuda": None}
FIGURE = "from gpu_lib.notes import figure; figure('speed', 41.5)"
CHILD = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
sys.exit(3)
"""
# Figures of parts that are tests.
TWO_RANKS = "two ranks against one, 3 steps: grad_norm, apart by"
LORA = "adapters in the torch engine, float32: gap to the trainer"
AGREES = "small with random weights, torch engine: reward of step 3"
KILLED = "small, torch engine, killed and resumed: steps done when all was killed"
LORA_RUN = "LoRA of small, rank 16, torch engine: micro-batches of a step"
TESTS = """
import pytest

def test_right(): pass
def test_wrong(): assert 1 == 2
@pytest.mark.skip(reason="no luck")
def test_not_here(): pass
"""


def part(name, code, limit_s=60.0, needs=(), **fields):
    return Part(
        name, "a part of a test", ("-c", code), needs, limit_s, **{"least_s": 1.0, **fields}
    )


def run(tmp_path, parts, seconds=120.0, jobs=2, device="cpu"):
    log = tmp_path / "log"
    log.write_text("")
    results = Runner(device, seconds, log).run(parts, jobs, lambda p: refusal(p, MACHINE, device))
    printed = table(MACHINE, results)
    said = json.loads(as_json(MACHINE, results, device, log))
    assert list(said["parts"]) == [p.name for p in parts]
    assert said["log"] == str(log)
    return said["parts"], printed, log.read_text()


@pytest.mark.e2e
def test_one_that_fails_hangs_or_cannot_run_does_not_keep_the_others_from_running(tmp_path):
    hangs = f"{FIGURE}\nimport threading; threading.Event().wait()"
    parts, printed, log = run(
        tmp_path,
        [
            part("engine/fails", "def deep(): raise ValueError('a reason')\ndeep()"),
            part("engine/hangs", hangs, limit_s=3.0, least_s=1.0),
            part("engine/lacks", FIGURE, needs=("zmq", "no_such_module")),
            part("loop/crashes", "import os; os.abort()"),
            part("loop/works", FIGURE),
            part("speed/last", FIGURE, is_timed=True),
        ],
    )
    assert [p["state"] for p in parts.values()] == [
        "failed",
        "failed",
        "skipped",
        "failed",
        "passed",
        "passed",
    ]
    assert parts["engine/fails"]["why"] == "exit status 1: ValueError: a reason"
    assert parts["engine/hangs"]["why"] == "not done within 3 s"
    assert parts["engine/hangs"]["figures"] == {"speed": 41.5}  # what it had found by then
    assert parts["engine/lacks"]["why"] == "not installed: no_such_module"
    assert parts["loop/crashes"]["why"].startswith("killed by signal 6")
    assert parts["speed/last"]["figures"] == {"speed": 41.5}
    assert "in deep" in log
    assert "threading.py" in log  # where the one that hung was
    for name, p in parts.items():
        assert any(
            line.startswith(f"{name} ") and p["state"] in line for line in printed.splitlines()
        )


@pytest.mark.e2e
def test_time_that_is_over_skips_what_is_left(tmp_path):
    waits = part("speed/first", "import time; time.sleep(0.2)", is_timed=True)
    late = part("speed/second", FIGURE, is_timed=True, least_s=30.0)
    hangs = part("speed/third", "import time; time.sleep(600)", is_timed=True)
    parts, printed, _ = run(tmp_path, [waits, late, hangs], seconds=6.0)
    assert parts["speed/first"]["state"] == "passed"
    assert parts["speed/second"]["why"].endswith("s were left, it needs 30")
    assert parts["speed/third"]["why"].startswith("not done within")
    assert (
        "for what had no time left: scripts/gpu --only speed/second,speed/third\n" in f"{printed}\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")
def test_children_of_a_part_end_with_it(tmp_path):
    parts, _, log = run(tmp_path, [part("loop/parent", CHILD)])
    assert parts["loop/parent"]["why"].startswith("exit status 3")
    state = Path(f"/proc/{int(log.splitlines()[-1])}/stat")
    deadline = time.monotonic() + 30
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.01)


@pytest.mark.e2e
def test_each_test_of_a_part_counts(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    command = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "gpu_lib.notes",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        str(file),
    )
    parts, _, _ = run(tmp_path, [Part("engine/tests", "", command, (), 60.0)])
    found = parts["engine/tests"]
    assert (found["state"], found["passed"]) == ("failed", 1)
    assert [why.partition(": ")[2] for why in found["failed"]] == ["assert 1 == 2 (call)"]
    assert list(found["skipped"].values()) == ["no luck"]
    assert "test_some.py::test_wrong" in found["why"]


def test_parts_are_chosen_by_group_or_by_name():
    assert {p.group for p in chosen("engine,trainer,loop,speed")} == {
        "engine",
        "trainer",
        "loop",
        "speed",
    }
    # the more important first
    assert next(p.name for p in chosen("loop/up, trainer")) == "trainer/step"
    with pytest.raises(ValueError, match="--only nothing"):
        chosen(",")
    with pytest.raises(ValueError, match="--only what: known are engine, trainer, loop, speed"):
        chosen("engine,what")


def test_every_part_has_its_file():
    for p in PARTS:
        files = [word for word in p.command if word.endswith(".py")]
        modules = [word for word in p.command if word.startswith("gpu_lib.speed")]
        assert all((ROOT / file).is_file() for file in files)
        assert all((ROOT / "scripts" / f"{m.replace('.', '/')}.py").is_file() for m in modules)
        assert len(files) + len(modules) == 1


def test_every_test_for_a_gpu_is_in_a_part():
    run = {word for p in PARTS for word in p.command if word.endswith(".py")}
    without_gpu = {"tests/gpu/test_script.py", "tests/gpu/test_boundary.py"}
    there = {str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert run == there - without_gpu


def test_advice_downloads_the_versions_that_lightrl_requires():
    line = advice(["pydantic", "zmq", "peft"])
    assert line.startswith("not installed: pydantic, pyzmq, peft; ")
    first, second = line.split(" && ")
    # pydantic with what it pins, peft without the torch that it would bring
    assert "--no-deps" not in first
    assert "'pydantic>=2.12' 'pyzmq>=26'" in first
    assert "pip download --no-deps" in second
    assert "'peft>=0.21,<0.23'" in second
    assert "\n" not in line


def scripts_gpu(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "gpu"), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=280, check=False
    )


@pytest.mark.e2e
def test_without_a_gpu_it_runs_to_its_end_and_says_why(tmp_path):
    done = scripts_gpu("--out", str(tmp_path / "log"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert {p["state"] for p in said["parts"].values()} == {"skipped"}
    assert all(p["why"].startswith("no CUDA device") for p in said["parts"].values())
    assert len(said["parts"]) == len(PARTS)
    assert said["machine"]["versions"]["torch"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("speed/step", "small, bare loop / rank (goal 0.95)"),
        pytest.param(
            "speed/large-7b",
            "small, a checkpoint staged for the first time: s",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "speed/train-3b", "3B, rank / bare loop: tokens/s (goal 0.95)", marks=pytest.mark.slow
        ),
        pytest.param("trainer/nccl", TWO_RANKS, marks=pytest.mark.slow),
        pytest.param("engine/lora", LORA, marks=pytest.mark.slow),
        pytest.param("loop/agrees", AGREES, marks=pytest.mark.slow),
        pytest.param("loop/real-kills", KILLED, marks=pytest.mark.slow),
        pytest.param("loop/lora-3b", LORA_RUN, marks=pytest.mark.slow),
    ],
)
def test_on_a_cpu_a_part_runs_with_tiny_shapes(tmp_path, name, figure):
    done = scripts_gpu(
        "--device", "cpu", "--only", name, "--minutes", "4", "--out", str(tmp_path / "log")
    )
    assert done.returncode == 0, done.stdout + (tmp_path / "log").read_text()
    found = json.loads(done.stdout.splitlines()[-1])["parts"][name]
    assert found["state"] == "passed"
    assert found["figures"][figure] > 0


@pytest.mark.parametrize(
    "arguments", [("--only", "what"), ("--minutes", "0"), ("--out", "/no/such/folder/log")]
)
def test_bad_arguments_are_one_line(arguments):
    done = scripts_gpu(*arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"gpu: error: {arguments[0]} ")
