"""How long responses are, how long rewards take, how much training costs: what a run has to do.

Owns these models and their presets. A length is a pure function of (workload seed, prompt, epoch,
noise of the response), so that moving, racing and restarting do not change it, as with coupled
sampling. Must not know engines, nodes or the core. Reading them from files is in `scenario`.

The length model has two levels (fitted to figure 12 of RollPacker, arXiv 2509.21009): a prompt has
a difficulty z and, correlated with it, a chance q that one of its responses runs away. Both persist
over epochs with a drift that leaves the rank of almost all prompts (RhymeRL, arXiv 2508.18588).
With `luck`, that much of q is drawn anew each time a group is sampled with new noise, and does not
stay with the prompt.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

from lightrl.emulation import RESTART_CHANGE
from lightrl.errors import SimError

_INVERSE = NormalDist().inv_cdf
_UNIT = 2.0**-53


def uniforms(*key: object) -> tuple[float, float, float]:
    """Three numbers in (0, 1) that depend on the key alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=24).digest()
    return (_uniform(digest[:8]), _uniform(digest[8:16]), _uniform(digest[16:]))


def _uniform(eight: bytes) -> float:
    return ((int.from_bytes(eight, "little") >> 11) + 0.5) * _UNIT


class LengthDistribution(Protocol):
    """Tokens of a response, 1 <= length <= limit; the limit itself means that it was cut off."""

    def length(
        self, prompt: str, epoch: int, noise: int, limit: int, group: str = "", index: int = 0
    ) -> int:
        """`group` names what was sampled together, `index` which of it this is."""
        ...


@dataclass(frozen=True)
class LengthModel:
    """Symbols as in the module's text: lognormal(m + s_p z, s_r), or with chance q a runaway.

    q = sigmoid(alpha + beta v), v = sqrt(1 - luck^2) u + luck N with u correlated to z by rho, and
    N drawn for each group; a runaway has over cap U^tau tokens.
    """

    cap: int = 8192
    m: float = 6.174
    s_p: float = 0.05
    s_r: float = 0.43
    alpha: float = -1.27
    beta: float = 2.486
    rho: float = 0.819
    tau: float = 2.717
    over: float = 1.3
    luck: float = 0.0
    # share of new noise in z and u, each epoch
    drift: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        spread = (self.s_p, self.s_r, self.tau)
        if self.cap < 1 or min(spread) < 0 or not -1 <= self.rho <= 1 or not 0 <= self.drift <= 1:
            raise SimError(
                f"length model: {self}: cap >= 1, spreads >= 0, -1 <= rho <= 1, 0 <= drift <= 1"
            )
        if not 0 <= self.luck <= 1 or self.over <= 0:
            raise SimError(f"length model: {self}: 0 <= luck <= 1, over > 0")

    def length(
        self, prompt: str, epoch: int, noise: int, limit: int, group: str = "", index: int = 0
    ) -> int:
        z, u = _latent(self, prompt, epoch)
        v = (
            u
            if not self.luck
            else math.sqrt(1 - self.luck**2) * u + self.luck * _chance(self.seed, group)
        )
        q = 1 / (1 + math.exp(-(self.alpha + self.beta * v)))
        chance, size, _ = uniforms(self.seed, prompt, noise)
        if chance < q:
            tokens = self.over * self.cap * size**self.tau
        else:
            tokens = math.exp(min(50.0, self.m + self.s_p * z + self.s_r * _INVERSE(size)))
        return max(1, min(int(tokens), self.cap, limit))

    def scaled(self, cap: int) -> "LengthModel":
        """The same shape for another limit."""
        return replace(self, cap=cap, m=self.m + math.log(cap / self.cap))


@lru_cache(maxsize=200_000)
def _latent(model: LengthModel, prompt: str, epoch: int) -> tuple[float, float]:
    """z and u of a prompt in an epoch: two first-order autoregressions."""
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
def _chance(seed: int, group: str) -> float:
    return _INVERSE(uniforms(seed, group, "luck")[0])


@dataclass(frozen=True)
class EmpiricalLengths:
    """Lengths that were seen, per prompt; a response draws one of its prompt's.

    A prompt that was not seen takes those of one that was, chosen by its name.
    """

    by_prompt: Mapping[str, Sequence[int]]
    seed: int = 0
    _names: list[str] = field(init=False, repr=False, default_factory=list[str])

    def __post_init__(self) -> None:
        if not self.by_prompt or any(not lengths for lengths in self.by_prompt.values()):
            raise SimError("workload: it needs at least one length for each of its prompts")
        self._names.extend(sorted(self.by_prompt))

    def length(
        self, prompt: str, epoch: int, noise: int, limit: int, group: str = "", index: int = 0
    ) -> int:
        lengths = self.by_prompt.get(prompt)
        if lengths is None:
            lengths = self.by_prompt[
                self._names[int(uniforms(self.seed, prompt)[0] * len(self._names))]
            ]
        draw, _, _ = uniforms(self.seed, prompt, noise)
        return max(1, min(lengths[int(draw * len(lengths))], limit))


def complete_censored(
    seen: Mapping[str, Sequence[tuple[int, bool]]], seed: int
) -> dict[str, list[int]]:
    """Lengths per prompt from (tokens, finished): one that was given up had at least so many
    tokens.

    It gets the length of a finished one, of any prompt, that was longer; if there is none, its own.
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


@dataclass(frozen=True, slots=True)
class RewardClass:
    """One kind of reward function: constant_s plus a lognormal time; a share never ends by itself.

    A judge on the GPUs that sample takes `beside` times as long while they do, for as many more at
    once.
    """

    # of the prompts
    share: float = 1.0
    constant_s: float = 0.0
    # of the lognormal part
    median_s: float = 0.0
    sigma: float = 0.0
    # of what the prompt has in common: its tests
    prompt_sigma: float = 0.0
    # share of its responses that run into the limit
    hanging: float = 0.0
    limit_s: float = 30.0
    # of its own, that run at once; 0 = as many as needed
    workers: int = 0
    beside: float = 1.0

    def __post_init__(self) -> None:
        least = min(
            self.share, self.constant_s, self.median_s, self.sigma, self.prompt_sigma, self.workers
        )
        if least < 0 or self.limit_s <= 0 or self.beside <= 0:
            raise SimError(f"reward: {self}: shares and times must not be negative")
        if self.share > 1 or not 0 <= self.hanging <= 1:
            raise SimError(f"reward: {self}: shares are at most 1")


@dataclass(frozen=True)
class RewardTimes:
    """Seconds of a reward. `adaptive` = the limit is min(max(floor, factor x usual time),
    limit)."""

    classes: tuple[RewardClass, ...] = (RewardClass(),)
    adaptive: bool = False
    floor_s: float = 2.0
    factor: float = 1.5
    seed: int = 0
    # beside the function: from a finish to its start, and back
    told_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.classes or abs(sum(c.share for c in self.classes) - 1) > 1e-6:
            raise SimError(
                f"reward: the shares of the classes sum to {sum(c.share for c in self.classes):g}"
            )
        if self.floor_s < 0 or self.factor < 0:
            raise SimError("reward: floor_s and factor must not be negative")

    def kind(self, prompt: str) -> int:
        """Which of the classes scores this prompt."""
        pick, _, _ = uniforms(self.seed, prompt, "reward class")
        for k, candidate in enumerate(self.classes):
            if pick < candidate.share:
                return k
            pick -= candidate.share
        return len(self.classes) - 1

    def seconds(self, prompt: str, noise: int) -> float:
        """The usual time of an adaptive limit is the slowest of many right answers: two
        deviations."""
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


@dataclass(frozen=True)
class Workload:
    """What a run has to do, whatever it runs on."""

    name: str
    lengths: LengthDistribution
    num_prompts: int = 16_384
    prompt_tokens: int = 200
    reward: RewardTimes = RewardTimes()
    # Chance that a response which restarts under newer weights, with the same noise, is as long as
    # before; by default that of emulated engines. Where it is not, being put off selects: see
    # `report.Figures.length_bias`. One that is continued (round.deferred) is as long in any case.
    same_again: float = (1 - RESTART_CHANGE) ** 2
    # of a run: its prompts with their epochs, in the order in which they were drawn
    order: tuple[tuple[str, int], ...] = ()
    # and which share of a step's tokens had a gradient, by step; of others the mean
    signal: Mapping[int, float] = field(default_factory=dict[int, float])
    # what a reader must know of its origin
    note: str = ""

    def __post_init__(self) -> None:
        if self.num_prompts < 1 or self.prompt_tokens < 1:
            raise SimError(
                f"workload {self.name}: num_prompts and prompt_tokens must be at least 1"
            )
        if not 0 <= self.same_again <= 1:
            raise SimError(
                f"workload {self.name}: same_again = {self.same_again}: is between 0 and 1"
            )


class Cursor:
    """The prompts in the order of their epochs, as the data loader would draw them."""

    def __init__(self, num_prompts: int, seed: int) -> None:
        self._num_prompts = num_prompts
        self._seed = seed
        self.epoch = 0
        self._order: list[str] = []
        self._next = 0

    def draw(self) -> tuple[str, int]:
        """(prompt, epoch)."""
        if self._next == len(self._order):
            self.epoch += bool(self._order)
            names = [f"p{i}" for i in range(self._num_prompts)]
            self._order = sorted(names, key=lambda n: uniforms(self._seed, n, self.epoch)[0])
            self._next = 0
        self._next += 1
        return self._order[self._next - 1], self.epoch


# Fitted to figure 12 and table 2 of RollPacker together, with batch-dependent decoding: 16 bars, 16
# figures and about 12 free numbers for each of the two. What they say of a whole round holds to
# about a tenth; single numbers do not: m and s_p trade against t0, tau against over. Almost all of
# the risk is drawn anew with each sampling of a group (`luck`), which is what figure 12 wants of
# put-off prompts; it is not what independent samples of one prompt would do, and may hide what a
# retry in the measured system does differently.
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
# Nobody has published the lengths of RLBoost's 14B workload, only their limit and the data set,
# OpenR1-Math. Of that its authors say that R1 solves 75 % of the problems in less than 8,000 tokens
# and needs up to 16,000 for most of the others: a quarter is above 8,200 here and 8 % at the limit.
# Most of the spread is the problem's (Seer, arXiv 2511.14617: siblings are of similar length); how
# much, nobody has published.
LONG_REASONING = LengthModel(cap=14_336, m=8.5, s_p=0.65, s_r=0.40, alpha=-50.0, beta=0.0)
