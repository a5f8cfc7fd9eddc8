"""The time from `lightrl up` of the quickstart to its first token and to its first step.

The first token counts when the coordinator has it in its journal, at most 50 ms after its arrival.

    python -m gpu_lib.speed_first_token
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_lib.notes import figure
from gpu_lib.parts import ROOT
from lightrl.journal.codec import PackedTokens

LIMIT_S = 140.0
EVERY_S = 0.05
TOKENS = PackedTokens.__name__.encode()  # as a fact of the journal is named
SETTINGS = (
    "run.name=one",
    "run.bind=tcp://127.0.0.1:*",
    "rollout.nodes=1",
    "train.steps=2",
    "eval.path=",
)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lightrl-gpu-") as folder:
        config = ROOT / "configs" / "quickstart" / "run.toml"
        command = [
            sys.executable,
            "-P",
            "-m",
            "lightrl.cli",
            "up",
            str(config),
            *SETTINGS,
            "--no-tui",
        ]
        started = time.perf_counter()
        with (
            open(Path(folder) / "out", "w") as out,
            subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT) as process,
        ):
            try:
                first_token = wait_for_token(Path(folder), process, started)
                process.wait(max(1.0, LIMIT_S - (time.perf_counter() - started)))
            finally:
                process.kill()
        if process.returncode:
            sys.exit((Path(folder) / "out").read_text()[-3000:])
        figure("lightrl up to the first token, s", round(first_token, 2))
        lines = (Path(folder) / "runs/one/metrics.jsonl").read_text().splitlines()
        steps = [s for line in lines if (s := json.loads(line).get("timing_s/step")) is not None]
        figure("quickstart: s of the first step", round(steps[0], 2))
        figure(
            "lightrl up of 2 steps, from start to end, s", round(time.perf_counter() - started, 2)
        )


def wait_for_token(folder: Path, process: "subprocess.Popen[bytes]", started: float) -> float:
    """Seconds until the journal holds tokens."""
    while (seconds := time.perf_counter() - started) < LIMIT_S:
        if process.poll() is not None:
            sys.exit((folder / "out").read_text()[-3000:])
        if any(
            TOKENS in p.read_bytes() for p in (folder / "runs").glob("one/journal/*") if p.is_file()
        ):
            return seconds
        time.sleep(EVERY_S)
    sys.exit(f"no token within {LIMIT_S:.0f} s")


if __name__ == "__main__":
    main()
