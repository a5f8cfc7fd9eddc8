"""Replicas that accumulate whole groups, fed by a `Trainer` as in a run: each for
itself, or with the next groups only once all are done ("lockstep").

Owns the workload, the feeding and the figures of one contender of scripts/bench/train.
"""

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from lightrl.config.run_file import parse_config
from lightrl.config.schema import Config
from lightrl.messages.broadcasts import VersionTaken
from lightrl.messages.message import Message
from lightrl.messages.training import ShardsTaken, StepDone, TrainGroup, TrainResponse, TrainShard
from lightrl.messages.weights import PublishWeights
from lightrl.trainer import step
from lightrl.trainer.rank_processes import Place
from lightrl.trainer.served import ServedVersions
from lightrl.trainer.step import Replicas
from lightrl.trainer.trainer import Trainer
from lightrl.weights.serve.server import WeightServer
from lightrl.wire import pack_f32, pack_i32

GROUPS, RESPONSES, PROMPT = 48, 4, 8
LIMIT = 2048  # tokens of a micro-batch, and of the longest response with its prompt
TICKS_S = os.sysconf("SC_CLK_TCK")


def groups_of(vocabulary: int) -> list[TrainGroup]:
    """Some prompts run long: lengths of groups are log-normal, those of their responses alike."""
    rng = random.Random(1)
    made = []
    for i in range(GROUPS):
        most = min(LIMIT - PROMPT, max(20, rng.lognormvariate(5.0, 1.3)))
        responses = []
        for j in range(RESPONSES):
            ids = [rng.randrange(2, vocabulary) for _ in range(round(most * rng.uniform(0.7, 1)))]
            logprobs = pack_f32([-1.0] * len(ids))
            responses.append(TrainResponse(f"p{i}#{j}", pack_i32(ids), logprobs, float(j), "stop"))
        prompt = [rng.randrange(2, vocabulary) for _ in range(PROMPT)]
        made.append(TrainGroup(f"p{i}", pack_i32(prompt), tuple(responses)))
    return made


def config_of(contender: str, engine: str, model: Path, steps: int) -> Config:
    emulated = {"engine": "emulated", "engine_args": {"train_token_ms": 0.05}}
    return parse_config(
        {
            "model": {"path": str(model)},
            "data": {"path": "unused", "max_prompt_length": PROMPT},
            "rollout": {"max_response_length": LIMIT - PROMPT}
            | (emulated if engine == "emulated" else {}),
            "algorithm": {"name": "dr_grpo", "loss_norm": 20},
            "train": {
                "engine": engine,
                "steps": steps,
                "prompts_per_step": GROUPS,
                "ranks": 2,
                "replicas": 1 if contender == "shared" else 2,
                "max_tokens_per_gpu": LIMIT,
                "optim": {"lr": 1e-5},
            },
            "checkpoint": {"interval": 0, "export": "never"},
            "weights": {"canary": 0, "delta": "off", "broadcast": "off"},
        }
    )


class Lockstep(Replicas):
    """No replica gets its next groups before all of them are done with theirs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._served: set[int] = set()

    @property
    def idle(self) -> list[int]:
        idle = super().idle
        if len(idle) == len(self._unanswered):
            self._served.clear()
        return [replica for replica in idle if replica not in self._served]

    def accumulate(self, replica: int, *args: Any) -> None:
        self._served.add(replica)
        super().accumulate(replica, *args)


def measured(
    contender: str, engine: str, model: Path, vocabulary: int, folder: Path, steps: int
) -> dict[str, Any]:
    """One warm step, then `steps` that count; seconds from the first group that is sent to the end
    of the step, without publishing. `engine`: "emulated" ranks sleep as long as their tokens take,
    as if each had a device of its own."""
    if contender == "lockstep":
        setattr(step, "Replicas", Lockstep)  # noqa: B010
    config = config_of(contender, engine, model, steps + 1)
    groups = groups_of(vocabulary)
    done = asyncio.run(_fed(config, folder, groups))[1:]
    lengths = [len(g.prompt) + len(r.token_ids) for g in groups for r in g.responses]
    tokens = sum(lengths) // 4
    return {
        "tokens": tokens,
        "seconds": [step.seconds for step in done],
        "cpu_seconds": [step.cpu_seconds for step in done],
        "peak_mb": max(step.peak_mb for step in done),
        "passes": max(step.passes for step in done),
        "computed": tokens,
        "flops": 0.0,
        "peak_flops": 0.0,
        "note": "",
    }


@dataclass(frozen=True)
class Done:
    """A step."""

    seconds: float
    cpu_seconds: float
    # of the rank that had most
    peak_mb: float
    # of the rank that had most
    passes: float


async def _fed(config: Config, folder: Path, groups: list[TrainGroup]) -> list[Done]:
    """A group comes when the one before it was taken: one waits at any time, as where engines are
    faster than the trainer, but not by much."""
    done: list[Done] = []
    begun = (0.0, 0.0)

    def feed(number: int, index: int) -> None:
        is_last = index == len(groups) - 1
        trainer.handle(TrainShard(number, index, number, (groups[index],), is_last, len(groups)))

    def send(message: Message) -> None:
        nonlocal begun
        match message:
            case PublishWeights(version):
                trainer.handle(VersionTaken(version, wants_delta=False))
                if version == 0:
                    begun = (perf_counter(), cpu_s())
                    feed(0, 0)
            case ShardsTaken(number, index) if index + 1 < len(groups):
                feed(number, index + 1)
            case StepDone(number, metrics=metrics):
                now, used = perf_counter(), cpu_s()
                took_s = now - begun[0] - metrics["timing_s/publish"]
                passes = metrics["perf/micro_batches"]
                done.append(Done(took_s, used - begun[1], peak_mb(), passes))
                begun = (now, used)
                if number + 1 < config.train.steps:
                    feed(number + 1, 0)
            case _:
                pass

    for name in ("logs", "weights"):
        (folder / name).mkdir(parents=True)
    server = WeightServer()
    await server.start("127.0.0.1")
    versions = ServedVersions(server)
    trainer = Trainer(config, Place(folder, folder / "weights"), versions, send, lambda: None)
    try:
        await trainer.run()
    finally:
        await trainer.close()
        await server.close()
    return done


def ranks() -> list[Path]:
    """All children of this process that live."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path("/proc") / pid for pid in children]


def cpu_s() -> float:
    stats = [(rank / "stat").read_text().rpartition(")")[2].split() for rank in ranks()]
    return max(1, sum(int(stat[11]) + int(stat[12]) for stat in stats)) / TICKS_S


def peak_mb() -> float:
    stati = [(rank / "status").read_text() for rank in ranks()]
    return max(int(s.split("VmHWM:")[1].split()[0]) for s in stati) / 1000
