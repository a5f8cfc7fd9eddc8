"""A process with a vLLM engine that needs no GPU, without the time that its imports take.

An origin (warm.py) that imports this file has imported all that such an engine needs.
"""

import importlib
import os
import runpy
import socket
from multiprocessing.connection import Connection

import lightrl.engine.model_dir  # noqa: F401
from lightrl.engine.vllm.engine import CPU_ENVIRONMENT, ENVIRONMENT

os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)  # each child has its own instead
for name in (
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.lora.worker_manager",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.engine.core",
    "vllm.v1.executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu_model_runner",
):
    importlib.import_module(name)


def run_file(sock: socket.socket) -> None:
    """A child's target: runs the file that comes first as "lightrl_child", with CONNECTION and
    SPEC."""
    connection = Connection(sock.detach())
    file, spec = connection.recv()
    runpy.run_path(file, {"CONNECTION": connection, "SPEC": spec}, "lightrl_child")
