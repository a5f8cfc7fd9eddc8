"""The run that is disturbed: the quickstart, with what makes it repeat and recover within seconds.

Owns its settings. Starts nothing.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from chaos_lib.processes import MARK
from chaos_lib.weights_plan import Way

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "run.toml"
EVAL_INTERVAL = 4
LEASE_S = 1.5
SETTINGS = (
    "run.name=run",
    "run.deterministic=true",
    "rollout.group_size=4",
    "train.prompts_per_step=16",
    f"eval.interval={EVAL_INTERVAL}",
    "checkpoint.interval=2",
    "node.heartbeat_s=0.25",
    f"node.lease_s={LEASE_S}",
    "node.grace_s=10",
    f"reward.env={MARK}",  # by which its workers are found
)
# Tokens are arbitrary, so the reward is arbitrary, too; it varies, or there would be no advantage.
# Ranks are emulated with the engines; a step of 1,600 tokens takes them as long as it takes a real
# one.
EMULATED = (
    "rollout.engine_args={t0_ms=8.0,mean_length=25.0,train_token_ms=0.1,train_step_ms=60.0}",
    "train.engine=emulated",
    "algorithm.name=grpo",
)
# On several machines, with versions that take a while.
WEIGHTS_TIMEOUT_S = 5.0
WEIGHTS = ("run.bind=tcp://0.0.0.0:*", f"weights.timeout_s={WEIGHTS_TIMEOUT_S}")
WAYS: dict[Way, tuple[str, ...]] = {
    "pull": ("weights.broadcast=off",),
    # at this rate few elements change
    "delta": ("weights.broadcast=off", "train.optim={lr=1e-11}", "algorithm.name=grpo"),
    "broadcast": ("weights.broadcast=auto", "algorithm.name=grpo"),
}
# Of 8 MB: more than the buffers of a line take, and than a difference has. In float32, so that
# batches of all sizes give the same tokens.
MODEL = """
import sys
from scripts.make_quickstart import new_model
new_model(0, 256, 2).save_pretrained(sys.argv[1])
"""
WEIGHTS_EMULATED = (
    "rollout.engine_args={t0_ms=8.0,mean_length=25.0,train_token_ms=0.1,train_step_ms=60.0,"
    "version_mb=17.0,load_ms=400.0}",
)
# More than it may take until the next step is done, after whatever was done is over: what nobody
# may wait longer for, a pull, what starts again, a step.
PATIENCE_S = WEIGHTS_TIMEOUT_S + 1.5 + 10 + 5
# Five turns; what it says depends on the row, the turn and what the model said.
ENVIRONMENT = """
class Five:
    def reset(self, row, seed):
        self.seed, self.turn = seed, 0
        return f"{seed % 90}+1="

    def step(self, text):
        self.turn += 1
        return f"{(self.seed + len(text)) % 9}+{self.turn}=", len(text) % 5 / 10, self.turn == 5
"""
REWARD = "def reward(sample):\n    return sum(sample.response_ids) % 11 / 10\n"


def ways(way: Way, folder: Path) -> tuple[str, ...]:
    """Settings of runs in `folder` whose versions come to nodes in this way."""
    if way == "pull":
        return WAYS[way]
    model = folder / "model"
    if not model.exists():
        shutil.copytree(CONFIG.parent / "model", model)
        subprocess.run([sys.executable, "-c", MODEL, model], cwd=CONFIG.parents[2], check=True)
    return (*WAYS[way], f"model.path={model}", _arbitrary(folder))


def environments(folder: Path, engine: str) -> tuple[str, ...]:
    """Settings of runs with episodes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "five.py").write_text(ENVIRONMENT)
    args = "t0_ms=8.0,mean_length=5.0,train_token_ms=0.1,train_step_ms=60.0"
    emulated = (f"rollout.engine_args={{{args}}}",) if engine == "emulated" else ()
    turns = ("environment.max_turn_length=12", "environment.max_length=120")
    return (f"environment.source={folder / 'five.py'}:Five", *turns, *emulated)


def _arbitrary(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arbitrary.py").write_text(REWARD)
    return f"reward.functions={folder / 'arbitrary.py'}:reward"


def command(folder: Path, engine: str, steps: int, nodes: int, *overrides: str) -> tuple[str, ...]:
    """What to give `lightrl`, so that the run directory is `folder`/run, which may be made by
    it."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = [
        *SETTINGS,
        f"run.dir={folder}",
        f"rollout.engine={engine}",
        f"rollout.nodes={nodes}",
        f"train.steps={steps}",
    ]
    if engine == "emulated":
        settings += [*EMULATED, _arbitrary(folder)]
    return ("up", str(CONFIG), *settings, *overrides, "--no-tui")
