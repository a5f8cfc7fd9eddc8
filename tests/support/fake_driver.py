"""An nvidia-smi that answers as one was told to, and a torch that says which CUDA it was built
for."""

import json
import os
import sys
from pathlib import Path

from tests.support.paths import python_path

SMI = """#!{python} -S
import json, sys
answers = json.load(open({answers!r}))
key = " ".join(a.split("=")[0] for a in sys.argv[1:2])
code, text, *later = answers.get(key, (1, "unknown option " + key))
if later:  # from the second call on
    answers[key] = [code, later[0]]
    json.dump(answers, open({answers!r}, "w"))
sys.stdout.write(text)
sys.exit(code)
"""
TORCH = """import sys
sys.path.remove({folder!r})
del sys.modules["torch"]
import torch  # the real one, for whoever imports it
"""


def smi_row(
    index: int,
    total: int = 81559,
    free: int = 81076,
    mig: str = "Disabled",
    driver: str = "580.95.05",
):
    """Memory in MiB."""
    return f"{index}, GPU-{index}abc-00, {total}, {free}, {driver}, {mig}, NVIDIA H100 80GB HBM3\n"


def install(
    folder: Path,
    rows: str,
    *,
    cuda: str | None = "13.0",
    code: int = 0,
    later: str = "",
    **others: str,
) -> dict[str, str]:
    """An environment in which both are found. `later`: the rows from the second time on. `others`:
    L= the answer to -L, header= that without options."""
    path = folder / "bin"
    path.mkdir(parents=True)
    answers = {
        "--query-gpu": (code, rows, *([later] if later else ())),
        "-L": (0, others.get("L", "")),
        "": (0, others.get("header", "")),
    }
    (folder / "answers.json").write_text(json.dumps(answers))
    smi = path / "nvidia-smi"
    smi.write_text(SMI.format(python=sys.executable, answers=str(folder / "answers.json")))
    smi.chmod(0o755)
    packages = folder / "packages"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "__init__.py").write_text(TORCH.format(folder=str(packages)))
    built = repr(cuda) if cuda else "None"
    (packages / "torch" / "version.py").write_text(
        f"from typing import Optional\n__version__ = '2.11.0'\ncuda: Optional[str] = {built}\n"
    )
    return {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": python_path(packages)}
