"""What a run has to do: how long responses are, how long rewards take, and in which order prompts
are drawn.

A length is a pure function of (workload seed, prompt, epoch, noise of the response), so that
moving, racing and restarting do not change it, as with coupled sampling. Does not know engines,
nodes or the core.

The length model has two levels (fitted to figure 12 of RollPacker, arXiv 2509.21009): a prompt has
a difficulty z and, correlated with it, a probability q that one of its responses runs away. Both
persist over epochs with a drift that keeps the rank of almost all prompts (RhymeRL, arXiv
2508.18588). `luck` is the share of q that is drawn again for each group sampled with new noise.
"""

import hashlib
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, Protocol, TypeAlias

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    with_config,
)

from lightrl.emulation import RESTART_CHANGE
from lightrl.errors import SimError
from lightrl.sim.inputs.hardware import STRICT

Drawn: TypeAlias = tuple[str, int]  # a prompt in an epoch
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]

_INVERSE = NormalDist().inv_cdf
_UNIT = 2.0**-53


def uniforms(*key: object) -> tuple[float, float, float]:
    """Return three numbers in (0, 1) that depend on the key alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=24).digest()
    return (_uniform(digest[:8]), _uniform(digest[8:16]), _uniform(digest[16:]))


def _uniform(eight: bytes) -> float:
    return ((int.from_bytes(eight, "little") >> 11) + 0.5) * _UNIT


class LengthDistribution(Protocol):
    """Tokens of a response, 1 <= length <= limit; a length of `limit` means that it was cut off."""

    def length(
        self, prompt: str, epoch: int, noise: int, limit: int, group: str = "", index: int = 0
    ) -> int:
        """`group` names the responses that are sampled together, `index` is the place in it."""
        ...


@with_config(STRICT)
@dataclass(frozen=True)
class LengthModel:
    """Lengths with a long tail: lognormal(m + s_p z, s_r), or with probability q a runaway.

    q = sigmoid(alpha + beta v), v = sqrt(1 - luck^2) u + luck N with u correlated to z by rho, and
    N drawn for each group; a runaway has over cap U^tau tokens.
    """

    cap: PositiveInt = 8192
    m: float = 6.174
    s_p: NonNegativeFloat = 0.05
    s_r: NonNegativeFloat = 0.43
    alpha: float = -1.27
    beta: float = 2.486
    rho: Annotated[float, Field(ge=-1, le=1)] = 0.819
    tau: NonNegativeFloat = 2.717
    over: PositiveFloat = 1.3
    luck: Share = 0.0
    # share of new noise in z and u, each epoch
    drift: Share = 0.2
    seed: int = 0

    def length(
        self, prompt: str, epoch: int, noise: int, limit: int, group: str = "", index: int = 0
    ) -> int:
        z, v = _latent(self, prompt, epoch)
        if self.luck:
            v = math.sqrt(1 - self.luck**2) * v + self.luck * _group_noise(self.seed, group)
        q = 1 / (1 + math.exp(-(self.alpha + self.beta * v)))
        chance, size, _ = uniforms(self.seed, prompt, noise)
        if chance < q:
            tokens = self.over * self.cap * size**self.tau
        else:
            tokens = math.exp(min(50.0, self.m + self.s_p * z + self.s_r * _INVERSE(size)))
        return max(1, min(int(tokens), self.cap, limit))

    def scaled(self, cap: int) -> "LengthModel":
        """Return the same shape for another limit."""
        return replace(self, cap=cap, m=self.m + math.log(cap / self.cap))


@lru_cache(maxsize=200_000)
def _latent(model: LengthModel, prompt: str, epoch: int) -> tuple[float, float]:
    """Return z and u of a prompt in an epoch: two first-order autoregressions."""
    z = u = 0.0
    keep = math.sqrt(1 - model.drift**2)
    for e in range(epoch + 1):
        a, b, _ = uniforms(model.seed, prompt, "latent", e)
        fresh_z = _INVERSE(a)
        fresh_u = model.rho * fresh_z + math.sqrt(1 - model.rho**2) * _INVERSE(b)
        z = fresh_z if e == 0 else keep * z + model.drift * fresh_z
        u = fresh_u if e == 0 else keep * u + model.drift * fresh_u
    return z, u


@lru_cache(maxsize=20_000)
def _group_noise(seed: int, group: str) -> float:
    return _INVERSE(uniforms(seed, group, "luck")[0])


@dataclass(frozen=True)
class EmpiricalLengths:
    """Measured lengths. A response has the length that was measured for it (`by_response`), else
    one that is drawn from those of its prompt, else from those of a prompt chosen by its name."""

    by_prompt: Mapping[str, Sequence[int]]
    seed: int = 0
    # (prompt, epoch, index) -> length
    by_response: Mapping[tuple[str, int, int], int] = field(
        default_factory=dict[tuple[str, int, int], int]
    )
    _names: list[str] = field(init=False, repr=False, default_factory=list[str])

    def __post_init__(self) -> None:
        if not self.by_prompt or any(not lengths for lengths in self.by_prompt.values()):
            raise SimError("workload: it needs at least one length for each of its prompts")
        self._names.extend(sorted(self.by_prompt))

    def length(
        self, prompt: str, epoch: int, noise: int, limit: int, group: str = "", index: int = 0
    ) -> int:
        length = self.by_response.get((prompt, epoch, index))
        if length is None:
            lengths = self.by_prompt.get(prompt)
            if lengths is None:
                place = int(uniforms(self.seed, prompt)[0] * len(self._names))
                lengths = self.by_prompt[self._names[place]]
            length = lengths[int(uniforms(self.seed, prompt, noise)[0] * len(lengths))]
        return max(1, min(length, limit))


def complete_censored(
    seen: Mapping[str, Sequence[tuple[int, bool]]], seed: int
) -> dict[str, list[int]]:
    """Return lengths per prompt, made from (tokens, finished).

    A response that was aborted gets the length of a longer one that finished, of any prompt; its
    own where there is none.
    """
    finished = sorted(tokens for responses in seen.values() for tokens, done in responses if done)
    lengths: dict[str, list[int]] = {}
    for prompt, responses in seen.items():
        lengths[prompt] = []
        for k, (tokens, done) in enumerate(responses):
            first = bisect_right(finished, tokens)
            if done or first == len(finished):
                lengths[prompt].append(max(1, tokens))
            else:
                draw = uniforms(seed, "censored", prompt, k)[0]
                lengths[prompt].append(finished[first + int(draw * (len(finished) - first))])
    return lengths


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class RewardClass:
    """One kind of reward function: constant_s plus a lognormal time.

    A judge on the GPUs that sample takes `beside` times as long while they sample, and has as many
    more workers.
    """

    # of the prompts
    share: Share = 1.0
    constant_s: NonNegativeFloat = 0.0
    # of the lognormal part
    median_s: NonNegativeFloat = 0.0
    sigma: NonNegativeFloat = 0.0
    # of the part that all responses of a prompt have in common: its tests
    prompt_sigma: NonNegativeFloat = 0.0
    # share of responses whose reward runs into the limit
    hanging: Share = 0.0
    limit_s: PositiveFloat = 30.0
    # parallel workers; 0 = unlimited
    workers: NonNegativeInt = 0
    beside: PositiveFloat = 1.0


@with_config(STRICT)
@dataclass(frozen=True)
class RewardTimes:
    """Seconds of a reward. `adaptive` = the limit is min(max(floor, factor x usual time),
    limit)."""

    classes: tuple[RewardClass, ...] = (RewardClass(),)
    adaptive: bool = False
    floor_s: NonNegativeFloat = 2.0
    factor: NonNegativeFloat = 1.5
    seed: int = 0
    # added to the function: from a finish to its start, and back
    overhead_s: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        total = sum(c.share for c in self.classes)
        if abs(total - 1) > 1e-6:
            raise SimError(f"reward: the shares of the classes sum to {total:g}")

    def kind(self, prompt: str) -> int:
        """Return the index of the class that scores this prompt."""
        pick, _, _ = uniforms(self.seed, prompt, "reward class")
        for k, candidate in enumerate(self.classes):
            if pick < candidate.share:
                return k
            pick -= candidate.share
        return len(self.classes) - 1

    def seconds(self, prompt: str, noise: int) -> float:
        """Return the seconds of one reward. The usual time of an adaptive limit is that of the
        slowest of many correct responses: two deviations."""
        chosen = self.classes[self.kind(prompt)]
        if not chosen.hanging and not chosen.median_s:
            return min(chosen.constant_s, chosen.limit_s)
        hangs, size, _ = uniforms(self.seed, prompt, noise, "reward")
        median = chosen.median_s
        if chosen.prompt_sigma:
            tests, _, _ = uniforms(self.seed, prompt, "tests")
            median *= math.exp(chosen.prompt_sigma * _INVERSE(tests))
        limit = chosen.limit_s
        if self.adaptive:
            usual = chosen.constant_s + median * math.exp(2 * chosen.sigma)
            limit = min(max(self.floor_s, self.factor * usual), limit)
        if hangs < chosen.hanging:
            return limit
        return min(chosen.constant_s + median * math.exp(chosen.sigma * _INVERSE(size)), limit)


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class SimEnvironment:
    """Environments of episodes, and the nodes that have them."""

    # of a reset or a step, lognormal
    mean_s: NonNegativeFloat = 1.0
    sigma: NonNegativeFloat = 1.0
    # of an episode, mean; uniform from 1 to 2 turns - 1
    turns: PositiveInt = 4
    # of an observation but the first, which has the tokens of a prompt
    observation_tokens: PositiveInt = 100
    nodes: PositiveInt = 1
    # episodes that a node holds at most
    slots: PositiveInt = 512

    def seconds(self, noise: int, turn: int) -> float:
        """Return the seconds until observation `turn`, from 0, of one episode."""
        size = _INVERSE(uniforms(noise, turn, "environment")[0])
        return self.mean_s * math.exp(self.sigma * (size - self.sigma / 2))

    def num_turns(self, noise: int) -> int:
        return 1 + int(uniforms(noise, "turns")[0] * (2 * self.turns - 1))


@dataclass(frozen=True)
class Workload:
    """The work of a run, independent of hardware."""

    name: str
    lengths: LengthDistribution
    num_prompts: int = 16_384
    prompt_tokens: int = 200
    reward: RewardTimes = RewardTimes()
    # of runs with episodes
    environment: SimEnvironment = SimEnvironment()
    # Probability that a response which restarts under newer weights, with the same noise, has the
    # same length; the default is that of emulated engines. Otherwise deferring a prompt selects:
    # see `report.Figures.length_bias`. A continued response (round.deferred) keeps its length.
    same_again: float = (1 - RESTART_CHANGE) ** 2
    # prompts of a recorded run, in the order in which they were drawn
    order: tuple[Drawn, ...] = ()
    # share of a step's tokens that had a gradient, by step; the mean is used for other steps
    signal: Mapping[int, float] = field(default_factory=dict[int, float])
    # its origin, for people
    note: str = ""


class Cursor:
    """Draws prompts as the data loader does: first those of `order`, then the rest of its last
    epoch, then one shuffled epoch after the other."""

    def __init__(self, num_prompts: int, seed: int, order: Sequence[Drawn] = ()) -> None:
        names = list(dict.fromkeys(prompt for prompt, _ in order))
        self._names = names + [f"p{i}" for i in range(num_prompts - len(names))]
        self._seed = seed
        self.epoch = order[0][1] if order else 0
        last = order[-1][1] if order else 0
        drawn = {prompt for prompt, epoch in order if epoch == last}
        self._next = deque(order)
        self._shuffle(last, (name for name in self._names if name not in drawn))

    def draw(self) -> Drawn:
        """Return the next (prompt, epoch)."""
        if not self._next:
            self._shuffle(self.epoch + 1, self._names)
        prompt, self.epoch = self._next.popleft()
        return prompt, self.epoch

    def _shuffle(self, epoch: int, names: Iterable[str]) -> None:
        shuffled = sorted(names, key=lambda n: uniforms(self._seed, n, epoch)[0])
        self._next.extend((name, epoch) for name in shuffled)


# Fitted to figure 12 and table 2 of RollPacker together, with batch-dependent decoding: 16 bars, 16
# figures and about 12 free numbers for each of the two. Figures of a whole round are right to about
# a tenth; single numbers are not: m and s_p trade against t0, tau against over. Almost all of the
# risk is drawn again with each sampling of a group (`luck`), as figure 12 implies for deferred
# prompts; independent samples of one prompt would not behave so, and it may hide a difference of a
# retry in the measured system.
FITTED_8K = LengthModel(
    cap=8192,
    m=6.9,
    s_p=0.426,
    s_r=0.43,
    alpha=-2.44,
    beta=2.65,
    rho=1.0,
    tau=2.6,
    over=1.12,
    luck=0.995,
)
FITTED_16K = LengthModel(
    cap=16384,
    m=6.42,
    s_p=0.66,
    s_r=0.70,
    alpha=-3.31,
    beta=1.5,
    rho=1.0,
    tau=1.75,
    over=1.48,
    luck=0.995,
)
SHORT_TAIL = LengthModel()  # 8k, fitted to figure 12 alone with a constant time for each token
LONG_TAIL = LengthModel(
    cap=32768, m=6.547, s_p=0.495, s_r=0.146, alpha=-3.719, beta=1.5, rho=0.821, tau=1.414
)
# The lengths of RLBoost's 14B workload are not published, only their limit and the data set,
# OpenR1-Math. Its authors report that R1 solves 75 % of the problems in less than 8,000 tokens and
# needs up to 16,000 for most of the others: here a quarter is above 8,200 and 8 % at the limit.
# Most of the spread is the problem's (Seer, arXiv 2511.14617: siblings are of similar length); the
# share is not published.
LONG_REASONING = LengthModel(cap=14_336, m=8.5, s_p=0.65, s_r=0.40, alpha=-50.0, beta=0.0)
