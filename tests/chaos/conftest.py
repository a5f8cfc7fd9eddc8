"""scripts/chaos as users call it, and one undisturbed run that all these tests compare with."""

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
ENGINE, STEPS = "emulated", 8
LIMIT_S = 300  # of one run; a tenth of that on a machine that does nothing else
# The same lengths and the same rewards; only nothing takes any time.
AT_ONCE = "rollout.engine_args={t0_ms=0.0,mean_length=25.0}"

Chaos = Callable[..., dict[str, Any]]
CommandIn = Callable[[Path], tuple[str, ...]]


def run_chaos(*arguments: str) -> dict[str, Any]:
    """The last line of scripts/chaos."""
    done = subprocess.run(
        [SCRIPTS / "chaos", "--json", "--limit", str(LIMIT_S), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Chaos:
    """A short run on the emulated engine, with these arguments more; the reference is run once."""
    reference = tmp_path_factory.mktemp("chaos") / "reference.json"
    settings = ("--engine", ENGINE, "--steps", str(STEPS), "--reference", str(reference))
    return lambda *more: run_chaos(*settings, *more)


@pytest.fixture(scope="session")
def undisturbed(chaos: Chaos) -> dict[str, Any]:
    """The digests of that run when nothing happens to it."""
    return chaos("--events", "0", AT_ONCE)["reference"]


@pytest.fixture(scope="session")
def command_in() -> CommandIn:
    """What starts that run in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        setup = importlib.import_module("chaos_lib.setup")
    return lambda folder: setup.command(folder, ENGINE, STEPS, 0)
