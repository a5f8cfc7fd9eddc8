"""GPUs as `lightrl up` and `lightrl check` see them, with an nvidia-smi of scripted output."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightrl.cli import main
from lightrl.config.run_file import load_config
from lightrl.devices import driver, plan
from lightrl.errors import ConfigError
from lightrl.messages.nodes import Role
from tests.support.cli import QUICKSTART, arguments, linux_only, running, until
from tests.support.fake_driver import install, smi_row
from tests.support.paths import python_path

pytestmark = pytest.mark.usefixtures("warm_runs")  # reward workers are forked
TWO = smi_row(0) + smi_row(1)
MODEL_FILES = {"config.json": (QUICKSTART.parent / "model" / "config.json").read_bytes()}


@dataclass(frozen=True)
class Done:
    """What a command printed, and its status."""

    returncode: int
    stdout: str
    stderr: str


Lightrl = Callable[..., Done]
Gpus = Callable[..., None]


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Makes them be there for this process, whose own torch may have been imported."""

    def install_here(
        rows: str, setting: str | None = None, later: str = "", header: str = ""
    ) -> None:
        environment = install(tmp_path / "fake", rows, later=later, header=header)
        monkeypatch.setenv("PATH", environment["PATH"])
        monkeypatch.setattr(driver, "torch_build", lambda: driver.TorchBuild("2.11.0", (13, 0)))
        if setting is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)

    return install_here


@pytest.fixture
def lightrl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Lightrl:
    """A command, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*command: str) -> Done:
        with pytest.raises(SystemExit) as end:
            main(list(command))
        said = capsys.readouterr()
        return Done(int(end.value.code or 0), said.out, said.err)

    return run


def test_gpus_that_are_not_there_are_one_line_of_the_command_before_anything_starts(
    tmp_path: Path,
):
    environment = install(tmp_path / "fake", smi_row(0)) | {"CUDA_VISIBLE_DEVICES": "3"}
    done = subprocess.run(
        arguments("up", str(QUICKSTART), "--no-tui"),
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "CUDA_VISIBLE_DEVICES = 3: there is no GPU 3 here, only 0" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("rows", "overrides", "setting", "line"),
    [
        (smi_row(0), (), "3", "CUDA_VISIBLE_DEVICES = 3: there is no GPU 3 here, only 0"),
        (smi_row(0), ("train.ranks=2",), None, "train.ranks = 2: each needs a GPU of its own"),
        (smi_row(0), ("train.devices=[1]",), None, "train.devices: there is no GPU 1 to use here"),
        (
            smi_row(0),
            ("train.devices=0",),
            "",
            "train.devices: names GPUs, but CUDA_VISIBLE_DEVICES = ''",
        ),
        (
            smi_row(0),
            ("train.devices=[0,0]", "train.ranks=2"),
            None,
            "train.devices = [0, 0]: names GPU 0 twice",
        ),
        (
            smi_row(0, driver="470.1"),
            (),
            None,
            "driver 470.1 is too old for torch 2.11.0 (CUDA 13.0)",
        ),
        ("", ("train.devices=0",), None, "train.devices: names GPUs, but there is none here"),
    ],
)
def test_what_a_run_wants_and_cannot_have_is_refused_in_one_line(
    gpus: Gpus, rows: str, overrides: tuple[str, ...], setting: str | None, line: str
):
    gpus(rows, setting)
    with pytest.raises(ConfigError) as refused:
        plan.for_run(load_config(QUICKSTART, overrides))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "overrides", "setting", "line"),
    [
        (smi_row(0), (), "3", "CUDA_VISIBLE_DEVICES = 3: there is no GPU 3 here, only 0"),
        (
            smi_row(0),
            ("rollout.devices=[1]",),
            None,
            "rollout.devices: there is no GPU 1 to use here",
        ),
        (
            smi_row(0, driver="470.1"),
            (),
            None,
            "driver 470.1 is too old for torch 2.11.0 (CUDA 13.0)",
        ),
    ],
)
def test_a_coordinator_in_the_foreground_refuses_them_before_it_starts(
    tmp_path: Path,
    gpus: Gpus,
    lightrl: Lightrl,
    rows: str,
    overrides: tuple[str, ...],
    setting: str | None,
    line: str,
):
    gpus(rows, setting)
    roles = ("--role", "coordinator,trainer,rollout")
    done = lightrl("up", str(QUICKSTART), *roles, *overrides)
    assert done.returncode == 1
    assert line in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_the_dry_run_shows_who_gets_what_and_why(gpus: Gpus, lightrl: Lightrl):
    gpus(smi_row(0))
    done = lightrl("up", str(QUICKSTART), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "devices     rank 0: GPU 0 (NVIDIA H100 80GB HBM3)" in done.stdout
    assert "engine 1: GPU 0 (NVIDIA H100 80GB HBM3), gpu_memory_utilization = 0.44" in done.stdout
    assert (
        "has 79.2 GiB free of 79.6 GiB - 1.1 GiB of a training rank = 78.1 GiB for 2 engines"
        in done.stdout
    )
    assert "a training rank needs 1.1 GiB on a GPU" in done.stdout
    assert "               0.0 GiB  optimizer (adamw)\n" in done.stdout


def test_the_dry_run_of_shared_devices_adds_up_no_memory(
    gpus: Gpus, lightrl: Lightrl, monkeypatch: pytest.MonkeyPatch
):
    gpus(TWO)
    shared = ("rollout.placement=shared", "train.nodes=2", "rollout.nodes=3", "--dry-run")
    done = lightrl("up", str(QUICKSTART), *shared)
    assert done.returncode == 0, done.stderr
    assert "rollout-0, rollout-2: in turn with trainer-0\n" in done.stdout
    assert "rollout-1: in turn with trainer-1\n" in done.stdout
    h100 = "(NVIDIA H100 80GB HBM3), in turn with training ranks, gpu_memory_utilization"
    assert f"engine 0: GPU 0 {h100} = 0.44\n" in done.stdout
    assert f"engine 1: GPU 1 {h100} = 0.9\n" in done.stdout
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = lightrl("up", str(QUICKSTART), *shared)
    assert "rollout-0, rollout-2: in turn with trainer-0\n" in done.stdout


def test_the_dry_run_of_several_sizes_says_which_engine_lies_where(
    gpus: Gpus, lightrl: Lightrl, monkeypatch: pytest.MonkeyPatch
):
    gpus(TWO + smi_row(2))
    sizes = ("rollout.engine=vllm", "rollout.nodes=2", "rollout.parallel=[1,2]", "--dry-run")
    done = lightrl("up", str(QUICKSTART), *sizes)
    assert done.returncode == 0, done.stderr
    assert (
        "engines of 1 GPU: rollout-0-tp1 to rollout-1-tp1, 128 slots each, awake fir" in done.stdout
    )
    assert "engines of 2 GPUs: rollout-0-tp2, 256 slots each, asleep at first\n" in done.stdout
    h100 = "(NVIDIA H100 80GB HBM3)"
    share = "gpu_memory_utilization = 0.91\n"
    assert f"engine 1 of 1, in turn with others: GPU 2 {h100}, {share}" in done.stdout
    assert f"engine 2 of 2, in turn with others: GPU 1 {h100}, GPU 2 {h100}, {share}" in done.stdout
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = lightrl("up", str(QUICKSTART), *sizes)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "rollout.parallel: its engines span several GPUs, and no GPU can be used" in done.stderr


def test_the_dry_run_of_one_daemon_wants_its_own_gpus_alone(gpus: Gpus, lightrl: Lightrl):
    """Of four trainer nodes one is here, beside the coordinator."""
    gpus(TWO)
    trainers = ("train.nodes=4", "train.ranks=2", "train.replicas=4")
    command = ("up", str(QUICKSTART), *trainers, "--dry-run")
    done = lightrl(*command)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "train.nodes x train.ranks = 8: each needs a GPU of its own, and 2 can" in done.stderr
    done = lightrl(*command, "--role", "coordinator,trainer")
    assert done.returncode == 0, done.stderr
    told = "4 nodes x 2 ranks, one of them here, 4 replicas of 2 ranks; micro"
    assert told in done.stdout
    assert "rank 1: GPU 1 (NVIDIA H100 80GB HBM3)\n" in done.stdout
    assert "rollout     no daemon here: the run waits until nodes join" in done.stdout
    assert "engine 0" not in done.stdout
    command = ("up", str(QUICKSTART), "--role", "coordinator,rollout", "--slots", "7", "--dry-run")
    done = lightrl(*command)
    assert done.returncode == 0, done.stderr
    assert "1 daemon (auto) x 7 slots = 7 concurrent responses" in done.stdout
    assert "engine 0: GPU 0 (NVIDIA H100 80GB HBM3)\n" in done.stdout
    assert "rank" not in done.stdout.partition("devices     ")[2].partition("weights     ")[0]


def test_check_names_what_is_wrong_and_goes_on(gpus: Gpus, lightrl: Lightrl):
    gpus(TWO, "7", header="CUDA Version: 12.2")
    done = lightrl("check", str(QUICKSTART))
    assert "CUDA_VISIBLE_DEVICES = 7: there is no GPU 7 here, only 0, 1" in done.stdout
    assert "open files" in done.stdout


@pytest.mark.e2e
@linux_only
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch looks for the GPUs")
def test_each_child_sees_its_own_gpu(tmp_path):
    environment = install(tmp_path / "fake", TWO + smi_row(2))
    with running(tmp_path, "train.steps=500", "train.ranks=2", **environment) as run:
        said = until(run, "join it from this machine")
        assert any("rank 0: GPU 0" in line for line in said)
        until(run, "s/step")  # ranks and engine run
        seen = {name: settings_of(pid) for name, pid in children(run.pid)}
        run.send_signal(signal.SIGINT)
        run.wait(90)
    children_seen = [seen[name] for name in ("lightrl-rank-0", "lightrl-rank-1", "torch-engine")]
    assert [child["CUDA_VISIBLE_DEVICES"] for child in children_seen] == ["0", "1", "2"]
    assert {child["CUDA_DEVICE_ORDER"] for child in children_seen} == {"PCI_BUS_ID"}


BROKEN = 'raise ImportError("/x/vllm/_C.abi3.so: undefined symbol: _ZN3c106detail")\n'


def with_broken_vllm(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    (tmp_path / "packages" / "vllm" / "__init__.py").write_text(BROKEN)
    return {"PYTHONPATH": python_path(tmp_path / "packages")}


@pytest.mark.slow
def test_a_vllm_built_for_another_torch_gives_way_to_the_torch_engine(tmp_path):
    with running(
        tmp_path, "train.steps=1", "rollout.engine=auto", **with_broken_vllm(tmp_path)
    ) as run:
        until(run, "finished 1 steps")
    log = (tmp_path / "runs" / "one" / "logs" / "rollout-0.log").read_text()
    assert "the torch engine takes over: vLLM cannot be used: ImportError: " in log
    assert "undefined symbol: _ZN3c106detail" in log


@pytest.mark.e2e
def test_and_is_one_line_where_it_was_asked_for(tmp_path):
    with running(tmp_path, "rollout.engine=vllm", **with_broken_vllm(tmp_path)) as run:
        said = until(run, "vLLM cannot be used: ImportError: ")
        assert 'or set rollout.engine = "torch"' in said[-1]
        assert run.wait(90) == 1


@pytest.mark.parametrize(
    ("role", "overrides", "setting", "line"),
    [
        ("rollout", (), None, "() [(('0',), 0.0)]"),
        # of where the run was started
        ("rollout", ("rollout.devices=[7]",), None, "() [(('0',), 0.0)]"),
        ("rollout", (), "1", "() [(('1',), 0.0)]"),
        ("rollout", (), "5", "CUDA_VISIBLE_DEVICES = 5: there is no GPU 5 here, only 0, 1"),
        ("trainer", ("train.ranks=2",), None, "('0', '1') []"),
        ("trainer", ("train.devices=1",), None, "('1',) []"),
    ],
)
def test_a_node_that_joins_finds_its_own(
    gpus: Gpus, role: Role, overrides: tuple[str, ...], setting: str | None, line: str
):
    gpus(TWO, setting)
    assert found_by_a_node(role, overrides) == line


def test_memory_that_a_dying_process_still_holds_is_waited_for(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
):
    gpus(smi_row(0, free=100), later=smi_row(0))
    monkeypatch.setattr(plan, "PAUSE_S", 0.01)
    assert found_by_a_node("trainer", ()) == "('0',) []"


def found_by_a_node(role: Role, overrides: Sequence[str]) -> str:
    config = load_config(QUICKSTART, overrides)
    try:
        found = plan.for_daemon(config, (role,), MODEL_FILES, 4, has_coordinator=False)
    except ConfigError as e:
        return str(e)
    return f"{found.ranks} {[(part.tokens, part.memory) for part in found.engines]}"


def children(pid: int) -> list[tuple[str, int]]:
    """(name, pid) of the children that daemons below `pid` have: the name that system/child.py was
    given."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "from lightrl.system.child import run; run()" in command:
            found.append((command[command.index("-c") + 2], int(child)))
        found += children(int(child))
    return found


def settings_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
