"""Every benchmark that scripts/README.md names runs to its end with tiny sizes. What the figures
are worth is not looked at."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 900

# Arguments that make it small. A benchmark may have several rows, one for each kind of work.
SMALL = {
    "balance": "--seeds 1 --rounds 1 --curves knee --fleets even",
    "bare_grpo.py": "--steps 2 --eval-every 0",
    "broadcast": "--mb 4 --turns 1",
    "checkpoint": "--millions 2 --repeat 1",
    "core": "--responses 1000 --repeat 1 --notify 64",
    "coupling": "--quick --vocabulary 4096",
    "data": "--rows 20000 --group 5000 --steps 3 --step-s 0.1",
    "endpoints": "--sessions 20 --seconds 1",
    "episodes": "--open 40 --nodes 2 --steps 1",
    "evaluation": "--steps 2 --fleets 4x64",
    "evaluation emulated": "--steps 2 --parts emulated",
    "harvest": "--steps 2 --mb 1 --arms foreseen",
    "journal": "--megabytes 20",
    "learning": "--smoke --parts emulated",
    "learning real": "--smoke --parts real --modes plain,continue",
    "long_contexts": "--responses 256 --handed 32 --at-once 64 --tokens 1024",
    "memory": "--tiny",
    "nodes": "--nodes 40 --limits 1024:4096 --steps 3",
    "offload": "--fleets 1",
    "planner": "--steps 2 --cases 0",
    "planner emulated": "--steps 2 --parts emulated --cases 0",
    "predict": "--parts quickstart --steps 6",
    "quickstart": "--steps 3 --contenders bare,torch",
    "rewards": "--responses 64",
    "sandbox": "--responses 64",
    "sharing": "--millions 2 --hidden 128 --repeat 1",
    "sharing_engine": "--millions 30 --repeat 1",
    "sharing_step": "--steps 2 --repeat 1 --hidden 64 --prompts 2",
    "spec": "--sections lookup --repeat 1",
    "spec torch": "--sections engine --quick --engines torch --batches 1",
    "spec vllm": "--sections engine --quick --engines vllm --batches 1",
    "strangers": "--steps 60 --connections 50",
    "tail emulated": "--steps 2 --parts emulated",
    "tail": "--steps 2 --parts real --modes off",
    "train": "--only quickstart --repeat 1",
    "train tiny": "--tiny --only 0.5B --repeat 1",
    "vs_trl": "--steps 2 --every 1",
    "weights": "--only pull --mb 4 --repeat 1",  # lines and joiners need root
}
# Exit status 1 is a verdict about figures, which such sizes do not allow.
JUDGES = frozenset({"predict", "memory"})
NEEDS = {"spec vllm": "vllm", "tail": "vllm", "vs_trl": "trl", "data": "pyarrow"}


def test_no_benchmark_is_left_out():
    documented = re.findall(r"^\| `bench/(\w+)` \|", (ROOT / "scripts/README.md").read_text(), re.M)
    files = {path.name for path in (ROOT / "scripts/bench").iterdir() if path.is_file()}
    tried = {name.split()[0] for name in SMALL}
    assert set(documented) <= tried
    assert files == tried


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_to_its_end(tmp_path, name):
    if (needed := NEEDS.get(name)) is not None and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    if name == "sandbox" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    command = [sys.executable, str(ROOT / "scripts/bench" / name.split()[0]), *SMALL[name].split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    assert done.returncode == 0 or name in JUDGES, (done.stdout + done.stderr)[-4000:]
    json.loads(done.stdout.splitlines()[-1])
