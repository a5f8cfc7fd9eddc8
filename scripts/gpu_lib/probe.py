"""What this machine has: Python, packages, driver, GPU; and why a part cannot run on it.

torch is asked in a process of its own: it may crash, hang, or hold memory of the GPU ever after.
Needs nothing but the standard library.
"""

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from typing import Any

from gpu_lib.parts import ROOT, RUN, TESTS, Part

LIMIT_S = 120.0
LEAST_FREE_GIB = 4.0
# that are not named as their module
DISTRIBUTIONS = {"zmq": "pyzmq", "pytest_timeout": "pytest-timeout"}
# They need torch, which the machine has; pip would download it again.
WITHOUT_DEPENDENCIES = ("peft", "safetensors", "torch", "transformers", "vllm")
NAMED = (
    "torch",
    "transformers",
    "vllm",
    "numpy",
    "safetensors",
    "tokenizers",
    "triton",
    "msgspec",
    "pydantic",
    "pyzmq",
)

ASK_TORCH = """
import json, warnings
reported = {"why": None}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    reported["cuda"] = torch.version.cuda
    try:
        available = torch.cuda.is_available()
        if available:
            free, total = torch.cuda.mem_get_info()
            torch.ones(1, device="cuda").add(1).item()
            reported |= {
                "gpu": torch.cuda.get_device_name(), "count": torch.cuda.device_count(),
                "capability": list(torch.cuda.get_device_capability()),
                "free_gib": round(free / 2**30, 2), "total_gib": round(total / 2**30, 2),
                "nccl": list(torch.cuda.nccl.version()),
            }
    except (RuntimeError, AssertionError) as e:
        available, reported["why"] = False, str(e).strip().splitlines()[0]
if not available and not reported["why"]:
    reasons = [str(w.message).strip().splitlines()[0] for w in caught if "CUDA" in str(w.message)]
    reported["why"] = reasons[0] if reasons else "no CUDA device"
print(json.dumps(reported))
"""


def probe() -> dict[str, Any]:
    """Names, versions and numbers; "why_no_cuda" is None where torch can compute on a GPU."""
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": os.cpu_count(),
        "driver": _driver(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "versions": {name: _version(name) for name in NAMED},
        "missing": [name for name in (*RUN, *TESTS) if find_spec(name) is None],
    }
    if "torch" in machine["missing"]:
        return machine | {
            "why_no_cuda": f"{sys.executable} has no torch; run scripts/gpu by a Python that has"
        }
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        reported = json.loads(asked.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return machine | {"why_no_cuda": f"torch does not answer within {LIMIT_S:.0f} s"}
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or [f"exit status {e.returncode}"])[-1]
        return machine | {"why_no_cuda": f"torch cannot be imported: {last}"}
    return machine | reported | {"why_no_cuda": _why_no_cuda(reported)}


def _why_no_cuda(reported: dict[str, Any]) -> str | None:
    if reported["why"] and reported["cuda"] is None:
        return "no CUDA device: torch is built for CPU"
    if reported["why"] and os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return f"{reported['why']} (CUDA_VISIBLE_DEVICES = {os.environ['CUDA_VISIBLE_DEVICES']!r})"
    if not reported["why"] and reported["free_gib"] < LEAST_FREE_GIB:
        free = f"{reported['free_gib']:g} of {reported['total_gib']:g} GiB"
        return f"{free} are free on the GPU, {LEAST_FREE_GIB:g} are needed"
    return reported["why"]


def refusal(part: Part, machine: dict[str, Any], device: str) -> str | None:
    """Why `part` cannot run here, in one line."""
    if device == "cuda" and machine["why_no_cuda"]:
        return str(machine["why_no_cuda"])
    lacking = [DISTRIBUTIONS.get(name, name) for name in part.needs if find_spec(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def advice(missing: list[str]) -> str:
    """Return how to bring `missing` modules to a machine without a network, in one line.

    The versions are those that pyproject.toml requires. Example: advice(["zmq"]).
    """
    names = [DISTRIBUTIONS.get(name, name) for name in missing]
    alone = [name for name in names if name in WITHOUT_DEPENDENCIES]
    others = [name for name in names if name not in WITHOUT_DEPENDENCIES]
    given = (("", others), (" --no-deps", alone))
    downloads = [_download(options, some) for options, some in given if some]
    return (
        f"not installed: {', '.join(names)}; without a network carry their wheels: "
        f"{' && '.join(downloads)}, then pip install --no-index --no-deps --target DIR *.whl and "
        "PYTHONPATH=DIR"
    )


def _download(options: str, names: list[str]) -> str:
    required = _required()
    wanted = " ".join(shlex.quote(required.get(name, name)) for name in names)
    tag = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"pip download{options} --only-binary=:all: --python-version {tag} --platform "
        f"manylinux_2_28_x86_64 --platform manylinux2014_x86_64 {wanted}"
    )


def _required() -> dict[str, str]:
    """By name, the requirements of LightRL with all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = (project["dependencies"], *project["optional-dependencies"].values())
    requirements = [text.partition(";")[0].strip() for some in lists for text in some]
    return {re.split(r"[\[<>=~!]", text)[0]: text for text in requirements}


def _version(name: str) -> str | None:
    for distribution in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        reported = subprocess.run(
            query, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return reported.strip().splitlines()[0] if reported.strip() else None
