"""The limit of open files: raised for daemons, not for their children; some set aside; too few are
said."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.coordinator.descriptors import require_room
from lightrl.errors import ConfigError
from lightrl.launch.checks.files import require_files
from lightrl.system import open_files
from tests.support.daemons import QUICKSTART, make_config

EXHAUST = """
import errno, os, resource
from lightrl.system import open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
open_files.raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (112, 128)
def until_none(open):
    count = 0
    try:
        while True:
            open(os.devnull, os.O_RDONLY)
            count += 1
    except OSError as e:
        assert e.errno == errno.EMFILE
    return count
assert until_none(os.open) > 90
assert until_none(open_files.insist) == 16
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (112, 128)
"""

CHILD = """
import asyncio, resource
from lightrl.system import open_files
from lightrl.rewards.protocol import COMMANDS, EVENTS
from lightrl.system.child import Child
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 90))
open_files.raise_limit()
async def main():
    child = await Child.start("lightrl.rewards.worker:main", "w", COMMANDS, EVENTS)
    print(resource.prlimit(child.pid, resource.RLIMIT_NOFILE))
    await child.stop()
asyncio.run(main())
"""


def said_by(code: str) -> str:
    command = (sys.executable, "-c", code)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_limit_is_raised_and_what_is_set_aside_serves_files_alone():
    said_by(EXHAUST)


def test_children_have_the_limit_that_the_daemon_was_started_with():
    assert said_by(CHILD).strip() == "(50, 90)"


def test_more_nodes_than_there_can_be_open_files_is_one_line(tmp_path: Path):
    limit = open_files.raised_limit()
    require_room(make_config(tmp_path, rollout={"nodes": limit - 100}))
    with pytest.raises(
        ConfigError, match=r"rollout.nodes = .* raise the hard limit \(ulimit -Hn \d+\)"
    ) as e:
        require_files(make_config(tmp_path, rollout={"nodes": limit}))
    assert "\n" not in str(e.value)


def test_groups_that_are_too_large_for_a_message_are_one_line(tmp_path: Path):
    long = tmp_path / "long"  # a model that reads so much
    shutil.copytree(QUICKSTART / "model", long)
    text = json.loads((long / "config.json").read_text()) | {"max_position_embeddings": 1 << 16}
    (long / "config.json").write_text(json.dumps(text))

    def groups_of(size: int):
        lengths = {"group_size": size, "max_response_length": 1 << 15}
        train = {"max_tokens_per_gpu": 1 << 16}
        model = {"path": str(long)}
        return make_config(tmp_path, rollout=lengths, train=train, model=model)

    require_files(groups_of(512))
    with pytest.raises(
        ConfigError, match="33,554,432 tokens; at most 32,505,856 fit into one message"
    ):
        require_files(groups_of(1024))
