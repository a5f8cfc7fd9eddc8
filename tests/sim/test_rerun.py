"""`lightrl simulate --workload RUN`: runs whose speeds are known, since they are simulated
themselves, leave what a coordinator writes, and are predicted from that alone."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lightrl.cli import main
from lightrl.config.run_file import load_config, to_toml
from lightrl.core.commands import CloseRound, CloseStep, Command
from lightrl.core.events import Event
from lightrl.core.state import Round
from lightrl.core_settings import settings_of
from lightrl.history.lengths import WorkloadLog
from lightrl.metrics.speeds import Decoded, NodeSpeeds, SpeedRecorder, Start, StepSpeeds
from lightrl.sim.inputs.hardware import EngineProfile
from lightrl.sim.inputs.nodes import SPOT, NodeSpec
from lightrl.sim.inputs.recorded import RecordedRun, read_run
from lightrl.sim.inputs.scenario import Scenario, SimTraining, SimTransfer, Switches
from lightrl.sim.inputs.traces import TraceEvent
from lightrl.sim.inputs.workload import SHORT_TAIL, RewardClass, RewardTimes, Workload
from lightrl.sim.world import World

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "run.toml"
LIMIT, NUM_PROMPTS, NUM_STEPS = 300, 80, 10
OVERRIDES = (
    "train.prompts_per_step=16",
    "rollout.group_size=4",
    "rollout.slots=8",
    f"rollout.max_response_length={LIMIT}",
    f"train.steps={NUM_STEPS}",
    "train.max_tokens_per_gpu=800",
    "eval.path=",
    "run.seed=3",
)
TRUTH = Scenario(
    Workload(
        "truth",
        replace(SHORT_TAIL.scaled(LIMIT), m=4.5, s_p=0.2, s_r=0.4, alpha=-3.0, beta=0.0),
        num_prompts=NUM_PROMPTS,
        prompt_tokens=30,
        reward=RewardTimes((RewardClass(constant_s=0.004, workers=1),), overhead_s=0.003),
    ),
    engines={1: EngineProfile(0.012, 12.0, 1e-6, 2e-4, start_s=0.04)},
    training=SimTraining(token_s=8e-5, step_s=0.07, shard_s=0.02),
    transfer=SimTransfer(load_s=0.06, publish_s=0.05, lost_after_s=0.0),
)
FLEET = (NodeSpec("fast", 8), NodeSpec("slow", 8, slowness=2.0))
COMES_AND_GOES = (TraceEvent(0.0, "spot", True), TraceEvent(14.0, "spot", False))
COMES_AND_GOES += (TraceEvent(22.0, "spot", True),)


@dataclass
class Left:
    """What a run leaves in `folder`, as its coordinator would write it."""

    world: World
    folder: Path

    def __post_init__(self) -> None:
        self._recorder = SpeedRecorder()
        self._log = WorkloadLog(self.folder, 0, [].append)
        self._rounds: dict[int, Round] = {}
        self.records: list[dict[str, float]] = []

    def run(self) -> list[dict[str, float]]:
        self.world.handle = self._handle
        self.world.run()
        self._log.close()
        text = "".join(json.dumps(record) + "\n" for record in self.records)
        (self.folder / "metrics.jsonl").write_text(text)
        return self.records

    def _handle(self, event: Event, now: float) -> list[Command]:
        core = self.world.core
        self._recorder.before(core, event, now)
        commands = core.handle(event, now)
        self._recorder.after(core, event, commands)
        for command in commands:
            if isinstance(command, CloseRound):
                self._log.write(command.round)
                self._rounds[command.round.step] = command.round
            elif isinstance(command, CloseStep):
                self._log.write_step(self._recorder.close_step(core, command))
                self.records.append(self._record(command))
        return commands

    def _record(self, step: CloseStep) -> dict[str, float]:
        kept = [len(r.tokens) for g in self._rounds.pop(step.step).accepted for r in g.kept]
        update_s = TRUTH.training.step_s
        return {
            "step": step.step + 1,
            "timing_s/step": step.rollout_s + step.train_s + step.weights_s,
            "timing_s/rollout": step.rollout_s,
            "timing_s/train_after_rollout": step.train_s,
            "timing_s/weights": step.weights_s,
            "timing_s/accumulate": step.metrics["timing_s/forward_backward"] - update_s,
            "timing_s/optimizer": update_s,
            "timing_s/finish": update_s + TRUTH.transfer.publish_s,
            "num_tokens": sum(kept),
            "num_trained_tokens": sum(kept),
            "response_length/mean": sum(kept) / len(kept),
            "prompt_length/mean": TRUTH.workload.prompt_tokens,
        }


def leave(folder: Path, *overrides: str, slots: int = 8) -> list[dict[str, float]]:
    """A run of TRUTH; its metrics."""
    folder.mkdir(parents=True)
    config = load_config(QUICKSTART, [*OVERRIDES, *overrides])
    (folder / "config.toml").write_text(to_toml(config))
    fleet = [replace(spec, slots=slots) for spec in FLEET]
    switches = Switches(chunk_tokens=16, chunk_s=0.05, prompt_batch=0)
    settings = settings_of(config, NUM_PROMPTS)
    return Left(World(settings, TRUTH, fleet, COMES_AND_GOES, switches), folder).run()


def simulate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *map(str, arguments), "--json"])
    assert not end.value.code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def mean_step_s(records: list[dict[str, float]]) -> float:
    counted = records[1:]
    return sum(r["timing_s/step"] for r in counted) / len(counted)


@pytest.mark.parametrize("tail", ["off", "both"])
def test_a_run_is_predicted_from_what_it_left(tmp_path: Path, capsys, tail: str):
    records = leave(tmp_path / "run", f"round.tail_batching={tail}")
    said = simulate(capsys, "--workload", tmp_path / "run")["prediction"]
    measured, predicted = said["measured"], said["predicted"]
    assert said["steps"] == NUM_STEPS - 1  # not the first
    assert measured["step_s"] == pytest.approx(mean_step_s(records))
    for times in (measured, predicted):
        parts = ("rollout_s", "training_s", "publishing_s", "weights_s")
        assert times["step_s"] == pytest.approx(sum(times[part] for part in parts))
    assert abs(said["error"]) < 0.07
    assert abs(said["median_error"]) < 0.09
    for phase in ("training_s", "publishing_s", "weights_s"):
        assert predicted[phase] == pytest.approx(measured[phase], abs=0.03)


def test_speeds_are_those_of_each_node(tmp_path: Path):
    leave(tmp_path / "run")
    rerun = read_run(tmp_path / "run")
    known = {name: spec.profile for name, spec in rerun.nodes.items()}
    curves = {n: profile.curve for n, profile in known.items() if profile and profile.curve}
    truth = TRUTH.engine
    for batch in (1, 4, 8):
        expected_s = truth.forward(batch)[0] + truth.context_s * 130 * batch
        assert curves["fast"].at(batch) == pytest.approx(expected_s, rel=0.05)
        assert curves["slow"].at(batch) == pytest.approx(2 * expected_s, rel=0.06)
    assert rerun.nodes["spot"].kind == SPOT
    assert rerun.scenario.transfer.ready_s == pytest.approx([0.06] * 3)
    training, rewards = rerun.scenario.training, rerun.scenario.workload.reward
    assert training.token_s == pytest.approx(TRUTH.training.token_s)
    assert (training.step_s, training.shard_s) == pytest.approx((0.07, 0.02))
    # nobody said how much of it was the function's
    assert rewards.classes[0].median_s == pytest.approx(0.007, rel=0.05)


def test_what_nodes_did_is_repeated_in_the_same_step(tmp_path: Path):
    leave(tmp_path / "run")
    changes = read_run(tmp_path / "run").changes
    did = [(step, name, what) for step, many in changes.items() for _, name, what in many]
    assert did == [
        *((0, name, "ready") for name in ("fast", "slow", "spot")),
        (1, "spot", "lost"),
        (2, "spot", "ready"),
    ]


def test_a_change_is_predicted_from_a_run_without_it(tmp_path: Path, capsys):
    """Half of the slots: what a node does with so few was measured at the end of each round."""
    before = mean_step_s(leave(tmp_path / "run"))
    after = mean_step_s(leave(tmp_path / "otherwise", "rollout.slots=4", slots=4))
    assert after > 1.1 * before
    run = ("--workload", tmp_path / "run", "rollout.slots=4")
    said = simulate(capsys, *run)["prediction"]
    assert said["changed"]["step_s"] == pytest.approx(after, rel=0.08)
    assert said["predicted"]["step_s"] == pytest.approx(before, rel=0.06)


def test_names_and_nodes_and_people(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """A run is named as elsewhere; more nodes are as those that there were, and make it quicker."""
    leave(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["simulate", "--workload", "mine", "--nodes", "6"])
    assert not end.value.code
    out = capsys.readouterr().out
    assert "10 steps of 16 prompts x 4 = 64 responses of at most 300 tokens, on 6 nodes" in out
    assert "speeds and times of 9 steps are those of runs/mine" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    assert float(rows["--nodes"][2]) < 0.8 * float(rows["predicted"][1])


def test_another_config_takes_the_lengths_and_speeds_of_a_run(tmp_path: Path, capsys):
    leave(tmp_path / "run")
    options = (QUICKSTART, *OVERRIDES, "rollout.nodes=2", "--workload", tmp_path / "run")
    figures = simulate(capsys, *options)
    assert "prediction" not in figures
    own = simulate(capsys, "--workload", tmp_path / "run", "--nodes", "2")["as configured"]
    assert figures["as configured"]["step_s"] == pytest.approx(own["step_s"])
    assert figures["as configured"]["device_hours"].keys() == {"rollout", "trainer"}


def test_what_a_run_cannot_tell_is_said(tmp_path: Path, capsys):
    leave(tmp_path / "run", "rollout.placement=shared")
    with pytest.raises(SystemExit):
        main(["simulate", "--workload", str(tmp_path / "run"), "speculation.enabled=false"])
    out = capsys.readouterr().out
    assert "drafts are in the measured speeds" in out
    assert "devices are apart here" in out


def test_a_directory_without_a_round_is_refused_in_one_line(tmp_path: Path, capsys):
    (tmp_path / "config.toml").write_text(to_toml(load_config(QUICKSTART, OVERRIDES)))
    with pytest.raises(SystemExit) as end:
        main(["simulate", "--workload", str(tmp_path)])
    assert end.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "the run has trained no step yet" in line


@pytest.mark.parametrize("each_s", [0.1, 0.07, 1 / 3])
def test_a_start_that_takes_its_tokens_alone_takes_no_less(each_s: float):
    """What is left of it is nothing, not less than that by a rounding."""
    starts = [Start(each_s * tokens, tokens, 0, 4) for tokens in (3, 1, 7, 11)]
    node = NodeSpeeds(8, False, {3: Decoded(4.0, 1.0, 100)}, starts)
    step = StepSpeeds(0, 9, {"a": node})
    run = RecordedRun("run", load_config(QUICKSTART), [step], {}, {0: {}})
    profile = run.nodes["a"].profile
    assert profile is not None
    assert profile.start_s == pytest.approx(0.0, abs=1e-9)
    assert profile.prefill_s == pytest.approx(each_s)
