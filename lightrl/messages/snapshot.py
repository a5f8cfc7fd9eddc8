"""The state of a run for its watchers: the only source of `lightrl status` and `top`.

Under the rules of message.py.
"""

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from lightrl.messages.fields import (
    EVALS,
    MAX_METRICS,
    MAX_WATCH_S,
    ROWS,
    LongText,
    Metrics,
    Name,
    Role,
    Word,
)
from lightrl.messages.weights import WeightsProgress


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The forecast of a step with `preemptible` nodes. Example: StepForecast(3, 12.5, 0.04)."""

    preemptible: int
    # None: it would never end
    step_s: float | None
    # US$; None: prices are not known
    usd: float | None


@dataclass(frozen=True, slots=True)
class CostRow:
    """Costs of the run so far in US$, None where prices are not known, and a forecast."""

    # nodes that take part
    reserved: int
    preemptible: int
    usd: float | None = None
    usd_per_step: float | None = None
    # of those that were sampled and kept
    usd_per_million_tokens: float | None = None
    # with one preemptible node fewer, as it is, with one and two more; (): not known yet
    forecast: tuple[StepForecast, ...] = ()
    # preemptible nodes beyond which another one saves nothing; None: not known yet
    enough: int | None = None
    # preemptible nodes requested; None: there is no scale command, or not known yet
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class TailRow:
    """Tail batching as an operator sees it; the figures are of the whole run so far."""

    # "prompts", "both"
    mode: str
    # deferred prompts that wait for a long round
    queue: int
    # rounds
    num_short: int
    # rounds, those that flush an epoch's rest included
    num_long: int
    # mean tokens of what is trained
    kept_length: float
    # and of all that was launched, as estimated
    launched_length: float
    kept_reward: float
    # of all that has a score
    scored_reward: float


@dataclass(frozen=True, slots=True)
class WaitRow:
    """The reason why the run waits, as core/waits.py decides. Example: WaitRow("scores", 12.5, 31,
    1, 4)."""

    # last checkpoint, leaving, trainer lost, trainer, devices, ranks, checkpoint, training,
    # rollout, prompts, engines, weights, scores, tail
    kind: Word
    # for so long
    lasted_s: float
    # nodes that are missing, responses or prompts, by kind
    num: int = 0
    # nodes that are needed, or reward workers
    of: int = 0
    # of which step; of weights the version. None: of none
    step: int | None = None
    is_eval: bool = False
    # that it waits for: the first of them by name, and how many there are
    nodes: Annotated[tuple[Word, ...], ROWS] = ()
    num_nodes: int = 0
    # how long it took in the steps before; None: not known
    usual_s: float | None = None
    # after which the run ends; None: it waits as long as it takes
    left_s: float | None = None
    # what to do about it, in one line; "" = nothing
    hint: LongText = ""


@dataclass(frozen=True, slots=True)
class Watch:
    """Request snapshots, now and every `every_s` seconds (0 = just one). Example: Watch(0.5)."""

    every_s: Annotated[float, Meta(ge=0, le=MAX_WATCH_S)] = 0.0


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node as an operator sees it."""

    name: Word
    roles: Annotated[tuple[Role, ...], Meta(max_length=3)]
    # joining loading ready updating releasing released draining gone
    state: Word
    host: Word
    pid: int
    device: Word = ""
    policy_version: int | None = None
    running: int = 0
    slots: int = 0
    tokens_per_s: float = 0.0
    kv_usage: float = 0.0
    heard_s_ago: float = 0.0
    loop_lag_ms: float = 0.0
    # of the version that it pulls
    weights: WeightsProgress | None = None
    broadcast: Word = ""  # by which its next version comes: forming sending
    # None: it shares no devices; else for how long it is in its state, and so on its side
    state_s: float | None = None
    # whose devices those are; which part of them, None: they change sides as a whole
    shares: Word = ""
    part: int | None = None


@dataclass(frozen=True, slots=True)
class SampleText:
    """One finished response as text, for the sample browser."""

    response: Name
    prompt: LongText
    text: LongText
    reward: float | None
    num_tokens: int
    step: int


@dataclass(frozen=True, slots=True)
class WarningRow:
    """The latest warning of a kind. Example: WarningRow("rollout-0 lost (restarted)", 2, 31.5)."""

    text: LongText
    # how often one of this kind came
    num: int
    # when it came last, since the start
    elapsed_s: float


INTERRUPTED = "interrupted"  # the state of a run whose coordinator died before its end


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment, and all that the terminal UI and `lightrl status` show.

    Histories hold one value per finished step, oldest first, at most the last 500.
    """

    run: str
    run_dir: str
    # starting running evaluating finishing finished stopped failed
    state: str
    # optimizer steps done
    step: int
    num_steps: int
    policy_version: int | None
    elapsed_s: float
    nodes: Annotated[tuple[NodeRow, ...], ROWS] = ()
    # "" between rounds, "plain", "short", "long", "flush", "eval"
    round_kind: str = ""
    # groups that have all the scores they need
    round_accepted: int = 0
    round_needed: int = 0
    responses_running: int = 0
    responses_queued: int = 0
    # for an environment
    responses_waiting: int = 0
    # of the rounds that are open
    responses_done: int = 0
    wait: WaitRow | None = None  # None: it waits for nothing
    tail: TailRow | None = None  # None: no tail batching
    max_staleness: int = 0  # 0 = synchronous
    cost: CostRow | None = None
    # of the whole run
    rollout_tokens: int = 0
    tokens_per_s: float = 0.0
    rewards: Annotated[tuple[float, ...], ROWS] = ()
    # mean response length per step
    lengths: Annotated[tuple[float, ...], ROWS] = ()
    step_seconds: Annotated[tuple[float, ...], ROWS] = ()
    # (steps done, mean reward of each set)
    evals: Annotated[tuple[tuple[int, Metrics], ...], EVALS] = ()
    # (upper bound in tokens, responses), last step
    length_histogram: Annotated[tuple[tuple[int, int], ...], ROWS] = ()
    # of the last step
    metrics: Metrics = field(default_factory=dict[str, float])
    # reward failures, lost nodes, bad frames, ...
    counters: Annotated[dict[Word, int], Meta(max_length=MAX_METRICS)] = field(
        default_factory=dict[str, int]
    )
    # (seconds since the start, one line), oldest first
    events: Annotated[tuple[tuple[float, LongText], ...], ROWS] = ()
    # one of each kind, the latest last
    warnings: Annotated[tuple[WarningRow, ...], ROWS] = ()
    # latest first
    samples: Annotated[tuple[SampleText, ...], ROWS] = ()
