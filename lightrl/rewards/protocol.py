"""What the pool gives to a reward worker and gets back: environment variables, jobs, results, and
the messages of the pipe.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from lightrl.rewards.episodes import EpisodeRecord
from lightrl.wire import Codec

# Environment variables that programs need, no secrets. An allow list, since names of secrets are
# not known; `reward.env` adds to it.
USUAL = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TMPDIR", "TEMP", "TMP", "XDG_*"),
    *("LANG", "LANGUAGE", "LC_*", "TZ", "TERM"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LOCALE_ARCHIVE", "NIX_LD*"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*", "CC", "CXX", "JAVA_HOME"),
    *("NLTK_DATA", "MPLCONFIGDIR", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "NUMBA_*", "KMP_*", "MALLOC_*", "TOKENIZERS_*"),
    *("CUDA_*", "NVIDIA_*", "ROCR_*", "HIP_*", "HSA_*", "TORCH_*", "TORCHINDUCTOR_*", "TRITON_*"),
    *("HF_DATASETS_*", "TRANSFORMERS_*"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),  # also in lower case
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
NEVER = "LIGHTRL_*"  # the key of the run


@dataclass(frozen=True, slots=True)
class RewardJob:
    """A finished response. `row`: all columns of its prompt. `tokens` is copied only when a worker
    gets the job. `prompts`: index of the set of its prompt. `step`, `epoch`: of the run.

    Example: RewardJob("p7@0#3", 1, "39%3=", {"answer": "36"}, array("i", [5, 8, 1]), "stop")
    """

    response: str
    # of the response; in the result too, so that a late one is recognised
    attempt: int
    prompt_text: str
    row: dict[str, Any]
    tokens: "array[int]"
    finish_reason: str
    prompts: int = 0
    step: int = 0
    epoch: int = 0
    # seconds of the slowest test of a right answer to the prompt so far; None = not known
    slowest_s: float | None = None
    # None: a single turn
    episode: EpisodeRecord | None = None


# Responses of one prompt that are scored together, often a single one.
Jobs: TypeAlias = tuple[RewardJob, ...]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """`reward` is None exactly if `failure` is not empty.

    `failure`: "" = scored, "no score" = the functions returned None, "timeout", "crashed", or the
    exception in one line, e.g. "ValueError: could not convert string to float: 'x'".
    """

    response: str
    attempt: int
    reward: float | None
    metrics: dict[str, float]
    # decoded response, cut at worker.MAX_TEXT characters; "" after a timeout or crash
    text: str
    # of its call, divided by the responses in it
    duration_s: float
    failure: str
    # logged by the functions, by column
    extras: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardSet:
    """Prompts whose responses are scored by the same functions, and their columns."""

    functions: tuple[str, ...]
    weights: tuple[float, ...]
    prompt_key: str
    answer_key: str
    # of any row
    columns: tuple[str, ...]
    have_answers: bool
    # as data.as_chat and data.system_prompt
    as_chat: bool = False
    system_prompt: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first command."""

    # the config's section, as JSON
    reward: str
    sets: tuple[RewardSet, ...]
    tokenizer_dir: str
    # of the run
    num_steps: int = 0
    # absolute path -> content of modules that are imported from here, see kept.py
    sources: dict[str, bytes] = field(default_factory=dict)

    @property
    def named(self) -> str:
        """The functions of all sets, in a message. Example: "math, reward.py:reward"."""
        return ", ".join(dict.fromkeys(name for each in self.sets for name in each.functions))


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished response."""

    response: str
    attempt: int
    # int32
    token_ids: bytes
    finish_reason: str
    # None: a single turn
    episode: EpisodeRecord | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Responses of one prompt to score, in one call where functions take lists. `row` is JSON,
    `prompts` an index into `WorkerSetup.sets`."""

    number: int
    prompts: int
    prompt_text: str
    row: bytes
    responses: tuple[Finished, ...]
    # of the run
    step: int
    epoch: int
    # as in RewardJob
    slowest_s: float | None


@dataclass(frozen=True, slots=True)
class ScoreJobs:
    """Jobs to run, in this order."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """`is_async`: jobs overlap, because a function is asynchronous. `by_group`: of each set,
    whether a job must have all responses of a prompt."""

    is_async: bool
    by_group: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker cannot serve; it ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """A call of user code for this job begins now."""

    number: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A job is done."""

    number: int
    results: tuple[RewardResult, ...]


WorkerCommand: TypeAlias = WorkerSetup | ScoreJobs
WorkerEvent: TypeAlias = WorkerReady | WorkerFailed | Started | Scored
COMMANDS: Codec[WorkerCommand] = Codec(WorkerCommand)
EVENTS: Codec[WorkerEvent] = Codec(WorkerEvent)


def inherited(environment: Mapping[str, str], more: Iterable[str]) -> dict[str, str]:
    """The variables of `environment` that match USUAL or one of the patterns in `more`.

    Example: inherited({"PATH": "/bin", "HF_TOKEN": "x"}, ()) is {"PATH": "/bin"}.
    """
    patterns = (*USUAL, *more)
    return {
        name: value
        for name, value in environment.items()
        if any(_matches(name, pattern) for pattern in patterns) and not fnmatchcase(name, NEVER)
    }


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or (
        name.endswith("_proxy") and fnmatchcase(name.upper(), pattern)
    )
