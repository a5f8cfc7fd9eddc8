"""How long an engine step takes at a node, learned from the chunks that it sends.

Owns the estimate, no policy. How many tokens a step brings a response is `gain`'s business; without
speculation that is one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lightrl.core.context_fit import ContextFit
from lightrl.core.curve import HARDLY, Curve, rising
from lightrl.core.line_fit import LineFit

PRIOR_STEP_S = 0.02  # before anything was heard of a node
PRIOR_HALF_BATCH = 128  # responses at which an engine step takes twice as long as with one
FORGET = 0.98  # weight of the past at every observation
PRIOR_WEIGHT = 0.05  # of the assumed shape against one observation
MOST = 1 / (1 - FORGET)  # weight of all observations together
# Relative errors: of what is assumed of a node, of an observation before some were compared, at
# least, and for each size of batch beyond those seen.
SLOWED = 1.25  # times as long as before
PRIOR_ERROR = 0.1
PRIOR_NOISE = 0.05
LEAST_ERROR = 0.01
UNSEEN_ERROR = 0.025
# A node that has become slow, or fast, shows it twice within three chunks; an odd one says nothing.
RECENT = 3
SURPRISING = 0.25  # relative, and at least twice the noise
# Times as fast or slow that it is believed to be at once. Chunks that come late and then together
# are odd by far more, and where all is scaled by that, what is seen of a size for the first time
# meanwhile is wrong for good: the estimate runs away.
MOST_CHANGE = 4.0
ASSUMED = 0.25  # observations for which the line counts in a bin
TRUSTED = 3.0  # observations of a size of batch, from which on others can surprise
SETTLED = 16.0  # and from which on they tell what context costs
# The curve is made anew after so many observations, sooner for a size that was seldom seen.
REMADE_AFTER = 8
REMADE_SHARE = 0.25
REFITTED_AFTER = 32  # the line and what context costs, at the latest
LEAST = 0.05  # of what a step took; the rest of it may be due to context
ALIKE_BATCH = 32  # with which nodes are compared


@dataclass(slots=True)
class _Bin:
    """Steps with nearly as large a batch: decayed count, and means."""

    weight: float = 0.0
    batch: float = 0.0
    # tokens, of all responses
    context: float = 0.0
    # at level 1
    seconds: float = 0.0
    # number of the observation
    seen: int = 0


def size_of(batch: int) -> int:
    """Four for each power of two: ... 8 and 9, 10 and 11, 12 and 13, 14 and 15, 16 to 19, ..."""
    bits = batch.bit_length()
    return 4 * bits + (batch >> (bits - 3) & 3 if bits > 2 else batch - (1 << bits - 1))


class Speed:
    """Seconds of one engine step with B responses that hold C tokens of context between them:

        step_s = level * (f(B) + each * C)

    f runs straight between the means of the bins that were seen, four for each power of two. Beyond
    them it goes on with the slope of a line, by least squares over all steps with exponential
    forgetting. Where only one batch size was seen the slope is undetermined: a weak prior keeps the
    assumed ratio of slope to base. Bins do not fade while their sizes are not seen: a round begins
    with the largest and ends with the smallest.

    The level is what all sizes have in common: a node becomes slow, or fast again. It changes when
    steps take another time than their size and its neighbours did, and not only once. That may be a
    cliff instead, which has moved or was not known: see `_change`.

    Chunks are many: each only adds to sums, and line and curve are made when they are asked for.
    """

    __slots__ = (
        "_age",
        "_base",
        "_bins",
        "_changed",
        "_context_fit",
        "_curve",
        "_each",
        "_fitted",
        "_level_seen",
        "_line",
        "_newest",
        "_noise",
        "_odd",
        "_peak",
        "_slope",
        "_whole",
        "context",
        "level",
        "num_observed",
    )

    def __init__(
        self,
        base: float = PRIOR_STEP_S,
        slope: float = PRIOR_STEP_S / PRIOR_HALF_BATCH,
        num_observed: int = 0,
        each: float = 0.0,
        context: float = 0.0,
    ) -> None:
        """Seconds: `base` + `slope` for each response + `each` for each token of its context."""
        self.num_observed = num_observed
        self.context = context  # tokens, of a response lately
        self.level = 1.0
        self._level_seen = 1.0  # when it was last found slow
        self._base, self._slope, self._each = base, slope, each
        self._fitted = num_observed  # observations that these three rest on
        self._line = LineFit()
        self._context_fit = ContextFit()
        self._bins: dict[int, _Bin] = {}
        self._newest: _Bin | None = None  # that was seen last
        self._noise = PRIOR_NOISE**2  # decayed mean square of relative errors
        self._odd: list[tuple[int, float]] = []  # of late: (number of the observation, log)
        self._changed = 0  # number of the observation
        self._curve: Curve | None = None
        self._age = 0  # of the curve, in observations
        self._peak: tuple[int, int] | None = None  # of the curve up to which limit: where
        self._whole: tuple[int, Curve] | None = None  # after how many observations: `curve`

    @classmethod
    def like(cls, others: Iterable["Speed"]) -> "Speed":
        """What to expect of a node that is like those: of the one that is known best, at their mean
        level. None observed: ordinary."""
        known = [s for s in others if s.num_observed]
        if not known:
            return cls()
        best = max(known, key=lambda s: s.num_observed)
        speed = cls(best._base, best._slope, 0, best.each, best.context)
        bins = best._bins.items()
        speed._bins = {size: replace(b, weight=min(b.weight, TRUSTED), seen=0) for size, b in bins}
        mean = fmean(s.step_s(ALIKE_BATCH) for s in known)
        speed.level = best.level * mean / best.step_s(ALIKE_BATCH)
        return speed

    # What is learned

    def observe(self, batch: int, seconds: float, context: float = 0.0) -> None:
        """With `batch` responses running that held so many tokens between them, a step took so
        long."""
        self.num_observed = num = self.num_observed + 1
        self.context += (context / batch - self.context) * (1 / num if num < MOST else 1 / MOST)
        seconds /= self.level
        size = size_of(batch)
        bin = self._bins.get(size) or _Bin()
        is_usual = False
        if bin.weight >= TRUSTED:
            off = seconds / self._then(bin, context) - 1
            is_usual = -SURPRISING <= off <= SURPRISING
            if is_usual:
                self._noise += (off * off - self._noise) / MOST
        if not is_usual and self._is_odd(size, seconds, context):
            return
        self._line.add(batch, seconds, FORGET)
        if not bin.weight:
            self._bins[size] = bin
        self._newest, bin.seen = bin, num
        self._age += 1
        bin.weight = weight = bin.weight + 1 if bin.weight < MOST else MOST
        b, c, s = batch - bin.batch, context - bin.context, seconds - bin.seconds
        bin.batch += b / weight
        bin.context += c / weight
        bin.seconds += s / weight
        if weight >= SETTLED and context:  # before, much else changes in time
            self._context_fit.add(b, c, s)
        if not num % REFITTED_AFTER:
            self._fit()

    def _then(self, bin: _Bin, context: float) -> float:
        """What a step of that size took, with as much context."""
        return max(bin.seconds + self._each * (context - bin.context), LEAST * bin.seconds)

    def _is_odd(self, size: int, seconds: float, context: float) -> bool:
        """Of an observation that is far from its bin: whether it is no nearer to those beside it
        and does not come of noise. Such a one is not learned; the second one is believed."""
        log, surprised = self._surprise(size, seconds, context)
        if log * log <= max(SURPRISING**2, 4 * self._noise):
            return False
        first = self.num_observed - RECENT
        alike = [(num, odd) for num, odd in self._odd if num > first and (odd > 0) == (log > 0)]
        for _, odd in self._odd[: len(self._odd) - len(alike)]:  # that was nothing but noise
            self._noise += (min(odd * odd, 1.0) - self._noise) / MOST
        self._odd = [*alike, (self.num_observed, log)]
        if alike:
            self._change(size, seconds, log, surprised)
        return True

    def _surprise(self, size: int, seconds: float, context: float) -> tuple[float, int]:
        """How far an observation lies outside of what its bin and those beside it say, as a log,
        and which of them; of a size that is not known yet, of what smaller and larger ones say."""
        bins = self._bins.items()
        ranges = {k: self._range(b, context) for k, b in bins if b.weight >= TRUSTED}
        if size in ranges:
            near = [k for k in ranges if abs(k - size) <= 1]  # a cliff may lie within the bin
            low, high = min(near, key=lambda k: ranges[k][0]), max(near, key=lambda k: ranges[k][1])
        else:
            low = max((k for k in ranges if k < size), default=None)
            high = min((k for k in ranges if k > size), default=None)
        if high is not None and seconds > ranges[high][1]:
            return math.log(seconds / ranges[high][1]), high
        if low is not None and seconds < ranges[low][0]:
            return math.log(max(seconds, 1e-9) / ranges[low][0]), low
        return 0.0, size

    def _range(self, bin: _Bin, context: float) -> tuple[float, float]:
        """What a step of that size may take with so much context: while it is not known what that
        costs, anything up to all of it."""
        then = self._then(bin, context)
        if self._context_fit.n >= SETTLED or not (context and bin.context):
            return then, then
        whole = bin.seconds * context / bin.context
        return min(then, whole), max(then, whole)

    def _change(self, size: int, seconds: float, log: float, surprised: int) -> None:
        """Everything takes exp(log) times as long, it seems; at most MOST_CHANGE for now.

        But a bin that was not seen since the last such change was only believed to have taken part
        in it. If that is the one that is wrong, and those seen since go with this observation, then
        the change was of these only, a cliff, and the others are put right.
        """
        limit = math.log(MOST_CHANGE)
        ratio, fresh = (
            math.exp(max(-limit, min(log, limit))),
            {k for k, b in self._bins.items() if b.seen > self._changed},
        )
        sure = 1 + 2 * math.sqrt(self._noise)
        if not fresh & {size, surprised} and all(
            self._bins[k].seconds < seconds * sure
            if k < size
            else self._bins[k].seconds * sure > seconds
            for k in fresh
        ):
            for known, bin in self._bins.items():
                if known not in fresh:
                    bin.seconds *= ratio
        else:
            self.level *= ratio
            self._changed = self.num_observed
        if size in self._bins:
            self._bins[size].weight = min(self._bins[size].weight, TRUSTED)
        self._odd = []
        self._curve = None

    def _fit(self) -> None:
        """The line, and what context costs."""
        if self._fitted == self.num_observed or (bin := self._newest) is None:
            return
        self._fitted = self.num_observed
        noise = math.sqrt(self._noise)
        self._each = self._context_fit.seconds(bin.batch, bin.context, bin.seconds, noise)
        mean_x, mean_y = self._line.means()
        # The prior in terms of what was measured: base = slope * PRIOR_HALF_BATCH.
        assumed = mean_y / (PRIOR_HALF_BATCH + mean_x)
        slope = self._line.slope(assumed, PRIOR_WEIGHT * PRIOR_HALF_BATCH)
        self._slope = min(max(0.0, slope), 0.95 * mean_y / max(1.0, mean_x))
        self._base = mean_y - self._slope * mean_x

    @property
    def _shape(self) -> Curve:
        """At level 1, without context."""
        newest = self._newest
        if (
            self._curve is None
            or self._age >= REMADE_AFTER
            or (newest is not None and self._age >= newest.weight * REMADE_SHARE)
        ):
            self._fit()
            slope = max(0.0, self._slope - self._each * self.context)
            self._curve, self._age, self._peak = self._through(self._each, slope), 0, None
        return self._curve

    def _through(self, each: float, slope: float) -> Curve:
        """All bins, less so much for each token of their contexts."""
        if not self._bins:
            return Curve((1,), (self._base + slope,), (slope,))
        points: list[tuple[int, float, float]] = []
        for _, bin in sorted(self._bins.items()):
            without = max(bin.seconds - each * bin.context, LEAST * bin.seconds)
            assumed = self._base + slope * bin.batch
            seconds = (bin.weight * without + ASSUMED * assumed) / (bin.weight + ASSUMED)
            points.append((int(bin.batch), seconds, bin.weight))
        return rising(points, slope)

    # What it says

    @property
    def base(self) -> float:
        """Of the line: seconds, contexts as they were."""
        self._fit()
        return self.level * self._base

    @property
    def slope(self) -> float:
        """Of the line: seconds for one more response."""
        self._fit()
        return self.level * self._slope

    @property
    def each(self) -> float:
        """Seconds for a token of context, in each step."""
        self._fit()
        return self.level * self._each

    @property
    def curve(self) -> Curve:
        """Seconds of a step against its batch, with contexts as they were at each size."""
        if self._whole is None or self._whole[0] != self.num_observed:
            self._fit()
            known, level = self._through(0.0, self._slope), self.level
            self._whole = self.num_observed, known.scaled(level)
        return self._whole[1]

    def step_s(self, batch: int, context: float | None = None) -> float:
        """Seconds until each of `batch` responses has what one step brings it; each holds `context`
        tokens, None = as many as of late."""
        held = self.context if context is None else context
        return self.level * (self._shape.at(batch) + self._each * held * batch)

    def finishes_in(self, left: Sequence[float], reads: float) -> float:
        """Seconds until all responses are done that have so many steps left, fewest first; `reads`:
        tokens of context, summed over all these steps."""
        return self.level * (self._shape.finishes_in(left) + self._each * reads)

    def has_become_slow(self) -> bool:
        """Its steps take much longer than when this was last so; each time once."""
        level = self.level
        if level == self._level_seen:
            return False
        self._level_seen = min(self._level_seen, level)
        if level <= SLOWED * self._level_seen:
            return False
        self._level_seen = level
        return True

    def peak(self, limit: int) -> int:
        """The largest batch up to `limit` before throughput falls off: of more than these, the
        rest does better to wait. What may be an error is no fall."""
        if len(self._bins) < 2:
            return limit
        shape = self._shape
        if self._peak is None or self._peak[0] != limit:
            peak = (self.curve if self._each else shape).peak(limit)
            is_sure = 2 * self.error(peak + 1) < HARDLY
            self._peak = limit, peak if is_sure else limit
        return self._peak[1]

    def error(self, batch: int) -> float:
        """Standard error of step_s(batch), as a share of it."""
        if not self._bins:
            return PRIOR_ERROR
        size = size_of(batch)
        nearest = min(self._bins, key=lambda known: abs(known - size))
        seen = math.sqrt(self._noise / self._bins[nearest].weight)
        return max(LEAST_ERROR, seen) + UNSEEN_ERROR * abs(nearest - size)
