"""A machine with torch and little else, as images for GPUs come, can run the torch engine and the
trainer."""

import subprocess
import sys

CODE = """
import sys
for name in ("zmq", "uvloop", "rich", "typer", "jinja2", "vllm", "pynvml"):
    sys.modules[name] = None
import lightrl.engine.process, lightrl.engine.torch.engine, lightrl.trainer.rank.rank
"""
DAEMON = """
import sys
import lightrl.devices.plan, lightrl.engine.vllm.versions, lightrl.launch.checks
assert not {"torch", "vllm", "transformers"} & {*sys.modules}
"""


def test_engine_and_trainer_need_no_network_and_no_screen():
    subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], check=True)


def test_nothing_that_a_daemon_asks_about_gpus_imports_torch():
    subprocess.run([sys.executable, "-c", DAEMON], check=True)
