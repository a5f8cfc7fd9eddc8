"""The parts of scripts/gpu, the most important first: what each runs, what it needs, how long it
may take.

Needs nothing but the standard library. Starts nothing.
"""

from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("engine", "trainer", "loop", "speed")

# inside one process
ENGINE = ("torch", "transformers", "numpy", "safetensors", "msgspec", "blake3")
CHILD = (*ENGINE, "pydantic", "zstandard")  # as a process of its own, with a config
RUN = (*CHILD, "zmq", "typer", "rich", "jinja2", "uvloop")  # `lightrl up`
TESTS = ("pytest", "pytest_timeout")


@dataclass(frozen=True)
class Part:
    """`command` is given to the Python that runs us."""

    # "engine/torch": its group and its own name
    name: str
    what: str
    command: tuple[str, ...]
    # modules
    needs: tuple[str, ...]
    # at most, whatever time is left
    limit_s: float
    # not begun with less
    least_s: float = 20.0
    # runs alone
    is_timed: bool = False

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


def tests(name: str, what: str, target: str, needs: tuple[str, ...], limit_s: float) -> Part:
    """`target`: a file of tests/gpu, with words for pytest's -k after it."""
    file, _, words = target.partition(" ")
    select = ("-k", words) if words else ()
    # A warning of a library in another version than the one in CI is no failure of ours.
    command = (
        "-m",
        "pytest",
        "-m",
        "gpu",
        "--e2e=gpu",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        "-p",
        "gpu_lib.notes",
    )
    command = (*command, f"tests/gpu/{file}", *select)
    return Part(name, what, command, (*needs, *TESTS), limit_s)


def measured(name: str, what: str, script: str, needs: tuple[str, ...], limit_s: float) -> Part:
    """`script`: a module of gpu_lib, with its arguments."""
    module, *words = script.split()
    return Part(
        name, what, ("-m", f"gpu_lib.{module}", *words), needs, limit_s, 30.0, is_timed=True
    )


PARTS = (
    tests(
        "engine/torch",
        "torch engine: coupled sampling in bfloat16 and float32, memory",
        "test_torch_engine.py",
        ENGINE,
        300,
    ),
    tests(
        "engine/contract",
        "every engine's contract, the torch engine's process in float32",
        "test_contract.py",
        CHILD,
        150,
    ),
    tests(
        "trainer/step",
        "one rank: the step and checkpoints against CPU, memory",
        "test_trainer.py",
        CHILD,
        240,
    ),
    tests(
        "trainer/packing",
        "packed kernels against padded SDPA; what a large head adds to the peak",
        "test_packing.py",
        CHILD,
        120,
    ),
    tests(
        "loop/up",
        "lightrl up on the one GPU: 20 steps, the reward rises",
        "test_loop.py rises",
        RUN,
        300,
    ),
    tests(
        "loop/agrees",
        "0.5B: engine and trainer agree over 20 steps, the reward rises",
        "test_real_shape.py agree",
        RUN,
        420,
    ),
    tests(
        "loop/real-kills",
        "0.5B: engine and rank killed, the run killed and resumed, it learns",
        "test_real_shape.py killed",
        RUN,
        420,
    ),
    tests(
        "loop/lora-3b",
        "LoRA of 3B, trainer and engine within 23 GiB",
        "test_real_shape.py lora",
        (*RUN, "peft"),
        420,
    ),
    tests(
        "engine/lora",
        "adapters replace each other in an engine",
        "test_lora.py",
        (*CHILD, "peft"),
        300,
    ),
    tests(
        "engine/vllm",
        "vLLM: contract, CUDA graphs, reloads, speculation, sleep",
        "test_vllm_engine.py",
        (*CHILD, "vllm"),
        420,
    ),
    tests(
        "trainer/nccl", "groups of NCCL beside gloo, of one and of two", "test_nccl.py", CHILD, 120
    ),
    tests(
        "loop/kills",
        "engine and rank killed, the run killed and resumed",
        "test_loop.py killed",
        RUN,
        300,
    ),
    tests(
        "loop/deterministic",
        "the same run twice gives the same digests",
        "test_loop.py deterministic",
        RUN,
        420,
    ),
    replace(
        tests(
            "trainer/timing",
            "times are the device's, and taking them holds nothing up",
            "test_timing.py",
            ("torch",),
            60,
        ),
        is_timed=True,
    ),
    tests(
        "trainer/broadcast",
        "broadcast over NCCL between two GPUs",
        "test_broadcast.py",
        ENGINE,
        240,
    ),
    measured(
        "speed/engine-0.5b",
        "tokens/s of a 0.5B shape against a bare loop",
        "speed_engine 0.5b",
        CHILD,
        400,
    ),
    measured(
        "speed/step",
        "a training step of 0.5B against a bare PyTorch loop",
        "speed_step 0.5b",
        CHILD,
        120,
    ),
    measured(
        "speed/train-0.5b",
        "scripts/bench/train: 0.5B, 16k tokens, checkpointed; MFU",
        "speed_train 0.5B",
        CHILD,
        300,
    ),
    measured(
        "speed/deterministic",
        "train.deterministic: what a fixed order in attention's backward pass costs",
        "speed_deterministic 0.5b",
        CHILD,
        180,
    ),
    measured(
        "speed/train-3b",
        "the same of 3B",
        "speed_train 3B",
        CHILD,
        420,
    ),
    measured(
        "speed/large-7b",
        "7B with the optimizer on the host: load, step, stage",
        "speed_large 7b",
        CHILD,
        420,
    ),
    measured(
        "speed/serve-3b",
        "from a published version of 3B to an engine that serves it",
        "speed_serve 3b",
        CHILD,
        120,
    ),
    measured(
        "speed/first-token", "from lightrl up to the first token", "speed_first_token", RUN, 150
    ),
    measured(
        "speed/engine-3b",
        "tokens/s of a 3B shape against a bare loop",
        "speed_engine 3b",
        CHILD,
        400,
    ),
    measured("speed/spec", "history speculation off and on", "speed_spec", CHILD, 240),
    measured(
        "speed/common-prefix",
        "how far the same noise repeats a response of 4,096 tokens",
        "speed_common_prefix 0.5b",
        (*CHILD, "vllm"),
        300,
    ),
)


def chosen(only: str) -> list[Part]:
    """The parts that `only` names by group or by name, in their order. Raises ValueError for other
    words."""
    wanted = {word.strip() for word in only.split(",") if word.strip()}
    known = {*GROUPS, *(part.name for part in PARTS)}
    if not wanted or wanted - known:
        wrong = ", ".join(sorted(wanted - known)) or "nothing"
        raise ValueError(
            f"--only {wrong}: known are {', '.join(GROUPS)} and the parts that --list names"
        )
    return [part for part in PARTS if wanted & {part.group, part.name}]
