"""The ratios of scripts/bench/train on the device: 16k tokens in each micro-batch, activations
computed again, the rank against a bare loop.

    python -m gpu_lib.speed_train 0.5B
"""

import json
import subprocess
import sys

from gpu_lib.notes import figure
from gpu_lib.parts import ROOT
from gpu_lib.shapes import on_device


def main() -> None:
    name = sys.argv[1]
    command = [sys.executable, ROOT / "scripts" / "bench" / "train", "--only", name]
    command += ["--device", "cuda"] if on_device() == "cuda" else ["--tiny"]
    command += ["--repeat", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"scripts/bench/train failed for {name}")
    found = json.loads(done.stdout.strip().splitlines()[-1])[name]
    for contender, about in (("bare", "bare loop"), ("packed", "rank")):
        figure(f"{name}, {about}: tokens/s", round(found[contender]["tokens_s"]))
        figure(f"{name}, {about}: MFU", round(found[contender]["mfu"], 4))
        figure(f"{name}, {about}: peak, GiB", round(found[contender]["peak_mb"] * 1e6 / 2**30, 2))
    figure(f"{name}, rank / bare loop: tokens/s (goal 0.95)", round(found["packed"]["ratio"], 3))
    figure(f"{name}, rank / bare loop: peak (goal 1.1)", round(found["packed"]["peak_ratio"], 3))


if __name__ == "__main__":
    main()
