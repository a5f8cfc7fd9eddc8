"""What is simulated: a workload, the hardware under it, and how much of LightRL is switched on.

Owns the table of presets. Reading a workload from a file: `files.py`, from a run: `recorded.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lightrl.sim.inputs.hardware import (
    EngineProfile,
    SimPrices,
    SimSpeculation,
    SimTraining,
    SimTransfer,
)
from lightrl.sim.inputs.workload import (
    FITTED_8K,
    FITTED_16K,
    LONG_REASONING,
    LONG_TAIL,
    SHORT_TAIL,
    RewardClass,
    RewardTimes,
    Workload,
)

OffloadRule: TypeAlias = Literal["off", "foreseen", "window"]


@dataclass(frozen=True)
class Scenario:
    """All that a simulation needs beside the run's config."""

    workload: Workload
    # by parallelism, in multiples of the smallest engine's; the planner may switch between them
    engines: Mapping[int, EngineProfile] = field(default_factory=lambda: {1: EngineProfile()})
    training: SimTraining = field(default_factory=SimTraining)
    transfer: SimTransfer = field(default_factory=SimTransfer)
    prices: SimPrices = field(default_factory=SimPrices)
    # tokens in the KV cache of a spot node; 0 = as on the others
    spot_kv_tokens: int = 0
    # used where `Switches.speculation` is on
    speculation: SimSpeculation = field(default_factory=SimSpeculation)
    # engines send a chunk at least this often, as those of a run do
    chunk_s: float = math.inf

    @property
    def engine(self) -> EngineProfile:
        return self.engines[min(self.engines)]

    @property
    def is_colocated(self) -> bool:
        return self.training.placement == "colocated"


@dataclass(frozen=True, slots=True)
class Switches:
    """Mechanisms of the shell around the core; those of the core are in its Settings."""

    # training begins while responses still run
    streaming: bool = True
    # False: all rewards are computed after the rollout
    async_rewards: bool = True
    speculation: bool = False
    # rule by which rollout nodes switch to training within a round (colocated only)
    offload: OffloadRule = "off"
    # engine parallelism follows the preemptions
    planner: bool = False
    # False: a response that moves restarts from its prompt
    token_collection: bool = True
    chunk_tokens: int = 32
    # a finish is sent immediately where no more responses run; else with the next chunk
    prompt_batch: int = 16
    # a chunk is sent after this many seconds at the latest, a finish after a fifth of that
    chunk_s: float = math.inf


DEFAULT = Switches()


def generic(max_response_tokens: int) -> Scenario:
    """Return a guess: the shape of a published tail, scaled to the limit."""
    note = "nothing is known of this model: lengths, speeds and times are guesses; give --workload"
    lengths = SHORT_TAIL.scaled(max_response_tokens)
    return Scenario(Workload("generic", lengths, note=note))


# Bytes of the parameters in bfloat16, `total_size` in model.safetensors.index.json of each model at
# https://huggingface.co/Qwen.
QWEN2_5_7B = 2 * 7_615_616_512
QWEN2_5_14B = 2 * 14_770_033_664
QWEN2_5_32B = 2 * 32_763_876_352
QWEN3_14B = 2 * 14_768_307_200

GPUS_PER_MACHINE = 8
# Measured here without a GPU (weights/README.md), because no system publishes these rates. One core
# casts, copies and hashes 2.2 GB/s (4.4 GB/s with two); each rank that publishes has one. A torch
# engine copies its part of a version out of the mapped file at 5.9 GB/s for each device.
PUBLISH_BYTES_PER_S = 2.2e9 * GPUS_PER_MACHINE
LOAD_BYTES_PER_S = 5.9e9


def transfer(
    num_bytes: float, engine_gpus: int, machines: int, line: float, sender_line: float = 0.0
) -> SimTransfer:
    """Return the transfer of a version of `num_bytes` to engines on `engine_gpus` GPUs each.

    `machines` train as one: the ranks of all but one send their rows to that one, and their engines
    get the version from it, both over its line. `line`: bytes per second of a machine, shared by
    its engines; `sender_line`: of the trainer, 0 = the same.
    """
    sender = sender_line or line
    others = (machines - 1) / machines + (machines > 1)
    return SimTransfer(
        num_bytes=num_bytes,
        receiver_bytes_per_s=line * (engine_gpus / GPUS_PER_MACHINE),
        sender_bytes_per_s=sender,
        publish_s=others * num_bytes / sender,
        publish_bytes_per_s=PUBLISH_BYTES_PER_S,
        load_s=0.0,
        load_bytes_per_s=LOAD_BYTES_PER_S * engine_gpus,
    )


_MIX = RewardTimes(  # math, code, judge in equal parts
    classes=(
        RewardClass(share=1 / 3, constant_s=0.018, workers=1),
        RewardClass(
            share=1 / 3,
            median_s=1.0,
            sigma=0.1,
            prompt_sigma=0.6,
            hanging=0.05,
            limit_s=30.0,
            workers=44,
        ),
        # On the GPUs that sample, its layers are read from the host: twice the latency, twice the
        # workers.
        RewardClass(share=1 / 3, constant_s=3.0, workers=96, beside=2.0),
    )
)

# Published acceptance, taken low. With history: 65 to 79 % of drafted tokens (RhymeRL, arXiv
# 2508.18588); in the first epoch a forward pass gives 1.7 tokens (Seer, table 2: no references).
# A verified token costs as much as a decoded one.
_HISTORY = SimSpeculation(acceptance=0.65, first_acceptance=0.41, max_window=16, verify_cost=1.0)

# Engines of two, four and eight GPUs with a 32B model. 85 % of 80 GB each hold the weights once, 65
# GB, and keys and values, 256 KiB a token: where four small engines have room for 1.08 M tokens,
# one large one has for 1.8 M. That twice the GPUs are 1.7 times as fast is an assumption.
_LARGE = {
    size: EngineProfile(
        0.020 / 1.7**k, 107, 4e-8 / 1.7**k, 2e-5 / 1.7**k, kv_tokens=(136 * size - 65) * 3800
    )
    for k, size in enumerate((1, 2, 4))
}

_INFINIBAND = 50e9  # 400 Gbit/s, of each machine of eight

# Of RollPacker, section 7.1: calibrated against its figure 12 and table 2, see scripts/studies. A
# node is an engine: one GPU for 7B, two for 14B. A token of context costs the reading of its keys
# and values at 70 % of 3.35 TB/s. Prices: of H100 by the hour, 83.79 dollars for eight, 5.32 for
# two spot ones.
#
# Of RLBoost (arXiv 2510.19225), section 7: eight reserved GPUs as four engines, spot nodes of two;
# a network card of 200 Gbit/s and one of 50 each. All rates are what H100s can do (989 TFLOP/s and
# 3.35 TB/s each), of which decoding gets 75 % and computing 40 %: an engine step of Qwen3-14B on
# two reads 29.5 GB in 5.9 ms and adds up 80 times over NVLink (20 us each), is bound by computing
# above about 300 tokens, and a token of prefill is 2 x 14.8e9 operations; its keys and values take
# 160 KiB. A trained token is 12 x 14.8e9 operations of all eight, and 8 % for attention: forward,
# twice as much backward, forward again (checkpointing), and once each for the old log-probabilities
# and those of the reference. SGLang takes 60 % of the 84.5 GB that it finds free on each GPU for
# weights and cache: 438,000 tokens on a spot node, 347,000 where 7.4 and 3.7 GB of the actor and
# the reference lie already.
PRESETS: dict[str, Callable[[], Scenario]] = {
    "rollpacker-7b-8k": lambda: Scenario(
        Workload("rollpacker-7b-8k", FITTED_8K, reward=_MIX),
        engines={1: EngineProfile(0.0086, 165, 57_344 / 2.345e12, 5e-5, kv_tokens=980_000)},
        training=SimTraining(9.4e-6, 14.4, response_s=0.04, switch_s=3.0, placement="colocated"),
        transfer=transfer(QWEN2_5_7B, engine_gpus=1, machines=2, line=_INFINIBAND),
        prices=SimPrices(node=10.47, spot=2.66),
        speculation=_HISTORY,
    ),
    "rollpacker-14b-16k": lambda: Scenario(
        Workload("rollpacker-14b-16k", FITTED_16K, reward=_MIX),
        engines={1: EngineProfile(0.0131, 165, 196_608 / 4.69e12, 8e-5, kv_tokens=540_000)},
        training=SimTraining(9.4e-6, 8.0, response_s=0.0906, switch_s=3.0, placement="colocated"),
        transfer=transfer(QWEN2_5_14B, engine_gpus=2, machines=4, line=_INFINIBAND),
        prices=SimPrices(node=20.95, spot=5.32),
        speculation=_HISTORY,
    ),
    "rlboost-14b-14k": lambda: Scenario(
        Workload("rlboost-14b-14k", LONG_REASONING),
        engines={1: EngineProfile(0.0075, 300, 163_840 / 5.03e12, 3.7e-5, kv_tokens=347_000)},
        spot_kv_tokens=438_000,
        training=SimTraining(6.06e-5, 5.0, switch_s=3.0, placement="colocated"),
        transfer=transfer(QWEN3_14B, engine_gpus=2, machines=1, line=25e9, sender_line=25e9),
        prices=SimPrices(node=83.79 / 4, spot=5.32),
        speculation=_HISTORY,
    ),
    "rollpacker-32b-32k": lambda: Scenario(
        Workload("rollpacker-32b-32k", LONG_TAIL, reward=_MIX),
        engines=_LARGE,
        training=SimTraining(token_s=6e-5, step_s=5.0, switch_s=3.0, placement="colocated"),
        transfer=transfer(QWEN2_5_32B, engine_gpus=2, machines=8, line=_INFINIBAND),
    ),
}
