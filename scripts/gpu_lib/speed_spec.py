"""The speculation table of scripts/bench/spec on the device: the quickstart's model, and a 0.5B
shape.

python -m gpu_lib.speed_spec
"""

import importlib.util
import json
import subprocess
import sys

from gpu_lib.notes import figure
from gpu_lib.parts import ROOT
from gpu_lib.shapes import on_device

IS_GPU = on_device() == "cuda"
KEPT = ("tokens/s off", "on", "ratio", "tok/forward", "acceptance", "same")


def main() -> None:
    engines = ["vllm"] if IS_GPU and importlib.util.find_spec("vllm") is not None else ["torch"]
    failed = []
    for model, dtype in (("0.5b", "bfloat16"), ("quickstart", "float32")):
        for engine in engines:
            batches = "1,32,128" if IS_GPU else "8"
            command = [
                "--sections",
                "engine",
                "--engines",
                engine,
                "--models",
                model,
                "--batches",
                batches,
            ]
            command += ["--dtype", dtype, "--repeat", "1", "--steps", "4" if IS_GPU else "1"]
            command += ["--device", "auto" if IS_GPU else "cpu"]
            script = ROOT / "scripts" / "bench" / "spec"
            done = subprocess.run(
                [sys.executable, script, *command], stdout=subprocess.PIPE, text=True
            )
            if done.returncode:
                failed.append(f"{model} with {engine}")
                continue
            for row in json.loads(done.stdout.strip().splitlines()[-1])["engine"]:
                for name in KEPT:
                    label = (
                        f"speculation, {model} {dtype}, {engine} engine, {row['batch']} at "
                        f"once: {name}"
                    )
                    figure(label, round(row[name], 3))
    if failed:
        sys.exit(f"scripts/bench/spec failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
