"""Measure how long an engine stops for a version, beside a bare copy or reload of the same
bytes, and by how much its own memory grows meanwhile."""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.bench.weights_lib import files
from scripts.bench.weights_lib.nodes import ROOT
from scripts.bench.weights_lib.table import Options, Row

ENGINE = "scripts.bench.weights_lib.pause_engine"
GOALS = {"torch": 1.2, "vllm": 1.3}
BARE = {"torch": "a bare copy", "vllm": "a bare reload_weights"}
MOST_MB = 64


def rows(options: Options) -> Iterator[Row]:
    kinds = [kind for kind in GOALS if kind == "torch" or importlib.util.find_spec("vllm")]
    for mb in options.sizes:
        for dtype in ("bfloat16", "float32"):
            with files.folder() as folder:
                _run("make", str(folder), str(mb), dtype)
                for kind in kinds:
                    yield from of_engine(folder, kind, mb, dtype, options.repeat)


def of_engine(folder: Path, kind: str, mb: int, dtype: str, repeat: int) -> Iterator[Row]:
    reported = _run("measure", str(folder), kind, dtype, str(repeat))
    found = json.loads(reported.splitlines()[-1])
    load, bare = (statistics.median(found["seconds"][name]) for name in ("load", "bare"))
    what = f"{kind}, {dtype}: beside {BARE[kind]}"
    yield Row("pause", what, mb, load, "s", bare, GOALS[kind], is_at_most=True)
    first, grown, own = (found["grown_bytes"][name] / 1e6 for name in ("first", "load", "bare"))
    yield Row("pause", "  its own memory grew by", mb, grown, "MB", MOST_MB, 1.0, is_at_most=True)
    yield Row("pause", "  at its first load", mb, first, "MB", MOST_MB, 1.0, is_at_most=True)
    yield Row("pause", "  that of the bare one", mb, own, "MB")


def _run(*words: str) -> str:
    """What an engine's process prints."""
    done = subprocess.run(
        [sys.executable, "-m", ENGINE, *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"pause: {' '.join(words)} failed")
    return done.stdout
