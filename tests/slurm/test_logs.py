"""What the jobs of a run write, here without Slurm: one log, in the form that its config sets."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.cli import DEADLINE_S, EMULATED, QUICKSTART, SMALL, arguments

pytestmark = pytest.mark.e2e


def test_all_that_both_jobs_write_is_json(tmp_path: Path):
    config = ("run.name=one", *SMALL, *EMULATED, "train.steps=2", "logging.json=true")
    run_dir = str(tmp_path / "runs" / "one")
    jobs = {"node": (run_dir,), "head": (str(QUICKSTART), *config)}  # the node waits for the run
    started: list[subprocess.Popen[bytes]] = []
    try:
        for part, what in jobs.items():
            with (tmp_path / part).open("wb") as out:
                command = arguments("slurm-job", part, *what)
                started.append(subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out))
        assert [job.wait(DEADLINE_S) for job in started] == [0, 0]
    finally:
        for job in started:
            job.kill()
            job.wait()
    roles = {
        part: {json.loads(line)["role"] for line in (tmp_path / part).read_text().splitlines()}
        for part in jobs
    }
    assert "coordinator,trainer" in roles["head"] <= {"coordinator,trainer", "rank", "launcher"}
    assert "rollout" in roles["node"] <= {"rollout", "engine", "launcher"}
