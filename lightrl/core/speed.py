"""How fast a node decodes, learned from the chunks that it sends. Owns two small estimates, no
policy.

`Speed` says how long an engine step takes, `Gain` how many tokens of it a response gets. Without
speculation that is one, and a step is a token.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median

from lightrl.core.context_fit import ContextFit
from lightrl.core.curve import HARDLY, Curve, rising
from lightrl.core.line_fit import LineFit

PRIOR_STEP_S = 0.02  # before anything was heard of a node
PRIOR_HALF_BATCH = 128  # responses at which an engine step takes twice as long as with one
FORGET = 0.98  # weight of the past at every observation
PRIOR_WEIGHT = 0.05  # of the assumed shape against one observation
# Relative errors: of what is assumed of a node, of an observation before some were compared, at
# least, and for each size of batch beyond those seen.
PRIOR_ERROR = 0.1
PRIOR_NOISE = 0.05
LEAST_ERROR = 0.01
UNSEEN_ERROR = 0.025
# A node that has become slow, or fast, shows it twice within three chunks; an odd one says nothing.
RECENT = 3
SURPRISING = 0.25  # relative, and at least twice the noise
SURPRISED = 0.1  # weight of a surprise in the noise: a cliff within a bin surprises but once
ASSUMED = 0.25  # observations for which the line counts in a bin
TRUSTED = 3.0  # observations of a size of batch, from which on others can surprise
SETTLED = 16.0  # and from which on they tell what context costs
# The curve is made anew after so many observations, sooner for a size that was seldom seen.
REMADE_AFTER = 8
REMADE_SHARE = 0.25
REFITTED_AFTER = 32  # the line and what context costs, at the latest
LEAST = 0.05  # of what a step took; the rest of it may be due to context
FORGET_GAIN = 0.95  # as FORGET; drafts become longer as the batch becomes smaller
PRIOR_TOKENS = 4.0  # of a response, by which the first gain is believed
MOST = 1 / (1 - FORGET)  # weight of all observations together


@dataclass(slots=True)
class _Bin:
    """Steps with nearly as large a batch: decayed count, and means."""

    # of the node, when this was last seen
    level: float
    weight: float = 0.0
    batch: float = 0.0
    # tokens, of all responses
    context: float = 0.0
    seconds: float = 0.0
    # decayed mean square of relative deviations
    noise: float = PRIOR_NOISE**2


def _size(batch: int) -> int:
    """Four for each power of two: ... 8 and 9, 10 and 11, 12 and 13, 14 and 15, 16 to 19, ..."""
    bits = batch.bit_length()
    return 4 * bits + (batch >> (bits - 3) & 3 if bits > 2 else batch - (1 << bits - 1))


class Speed:
    """Seconds of one engine step with B responses that hold C tokens of context between them:

        step_s = f(B) + context_s * C

    f runs straight between the means of the bins that were seen, four for each power of two. Beyond
    them it goes on with the slope of a line: base + slope * B, by least squares over all steps with
    exponential forgetting. Where only one batch size was seen the slope is undetermined: a weak
    prior keeps the assumed ratio of slope to base. Bins do not fade while their sizes are not seen:
    a round begins with the largest and ends with the smallest. If steps of one size take another
    time than the curve says, and not only once, all of it is raised or lowered in proportion, until
    another size contradicts.

    Chunks are many: each only adds to sums, and line and curve are made when they are asked for.
    """

    __slots__ = (
        "_age",
        "_base",
        "_batch",
        "_bins",
        "_context_fit",
        "_context_s",
        "_curve",
        "_fitted",
        "_line",
        "_newest",
        "_noise",
        "_odd",
        "_peak",
        "_slope",
        "context",
        "level",
        "num_observed",
    )

    def __init__(
        self,
        base: float = PRIOR_STEP_S,
        slope: float = PRIOR_STEP_S / PRIOR_HALF_BATCH,
        num_observed: int = 0,
        context_s: float = 0.0,
        context: float = 0.0,
    ) -> None:
        self.num_observed = num_observed
        self.context = context  # tokens, of a response lately
        self.level = 1.0  # by how much all of it seems to have been raised so far
        self._base, self._slope, self._context_s = base, slope, context_s
        self._fitted = num_observed  # observations that these three rest on
        self._line = LineFit()
        self._context_fit = ContextFit()
        self._bins: dict[int, _Bin] = {}
        self._noise = PRIOR_NOISE**2  # decayed mean square of relative errors
        # Odd steps of late: (number of the observation, batch, seconds, context)
        self._odd: list[tuple[int, int, float, float]] = []
        self._curve: Curve | None = None
        self._age = 0  # of the curve, in observations
        self._peak: tuple[int, int] | None = None  # of the curve up to which limit: where
        self._newest: _Bin | None = None  # that was seen last,
        self._batch = 0  # with this batch

    @classmethod
    def like(cls, others: Iterable["Speed"]) -> "Speed":
        """What to expect of a node that is like those: their mean line. None observed: ordinary."""
        known = [s for s in others if s.num_observed]
        if not known:
            return cls()
        context = fmean(s.context_s for s in known), fmean(s.context for s in known)
        return cls(fmean(s.base for s in known), fmean(s.slope for s in known), 0, *context)

    @property
    def base(self) -> float:
        """Of the line: seconds, contexts as they were."""
        self._fit()
        return self._base

    @property
    def slope(self) -> float:
        """Of the line: seconds for one more response."""
        self._fit()
        return self._slope

    @property
    def context_s(self) -> float:
        """Seconds for a token of context, in each step."""
        self._fit()
        return self._context_s

    def observe(self, batch: int, seconds: float, context: float = 0.0) -> None:
        """With `batch` responses running that held so many tokens between them, a step took so
        long."""
        self.num_observed = num = self.num_observed + 1
        self._line.add(batch, seconds, FORGET)
        self.context += (context / batch - self.context) * (1 / num if num < MOST else 1 / MOST)
        bin = self._newest
        if bin is None or batch != self._batch:
            bin = self._see(batch)
        if bin.level != self.level:
            self._compare_levels(bin, seconds, context)
        is_odd, weight = False, bin.weight
        if weight >= TRUSTED:
            own = bin.seconds + self._context_s * (context - bin.context)
            off = seconds / own - 1 if own > LEAST * bin.seconds else math.inf
            if -SURPRISING <= off <= SURPRISING:
                off *= off
                bin.noise += (off - bin.noise) / MOST
                self._noise += (off - self._noise) / MOST
            else:
                is_odd = self._is_odd(bin, batch, seconds, context)
                weight = bin.weight
        bin.weight = weight = weight + 1 if weight < MOST else MOST
        b, c, s = batch - bin.batch, context - bin.context, seconds - bin.seconds
        bin.batch += b / weight
        bin.context += c / weight
        bin.seconds += s / weight
        if weight >= SETTLED and context and not is_odd:  # before, much else changes in time
            self._context_fit.add(b, c, s)
        self._age += 1
        if not num % REFITTED_AFTER:
            self._fit()

    def _see(self, batch: int) -> _Bin:
        size = _size(batch)
        bin = self._bins.get(size)
        if bin is None:
            bin = self._bins[size] = _Bin(self.level)
        self._newest, self._batch = bin, batch
        return bin

    def _is_odd(self, bin: _Bin, batch: int, seconds: float, context: float) -> bool:
        """Of an observation that is far from its bin: whether it is no less far from the curve, and
        does not come of noise."""
        own = max(bin.seconds + self._context_s * (context - bin.context), LEAST * bin.seconds)
        # it may be at the other end of its bin
        ratios = (seconds / own, seconds / self._expect(batch, context))
        off = min((math.log(max(r, 1e-9)) for r in ratios), key=abs)
        square = min(off * off, 1.0)
        bin.noise += (square - bin.noise) / MOST
        self._noise += (square - self._noise) / MOST
        if abs(off) <= SURPRISING or off * off <= 4 * bin.noise:
            return False
        bin.noise += SURPRISED * (square - bin.noise)
        recent = [o for o in self._odd if o[0] > self.num_observed - RECENT]
        self._odd = recent = [*recent, (self.num_observed, batch, seconds, context)]
        logs = [math.log(max(s / self._expect(b, c), 1e-9)) for _, b, s, c in recent]
        alike = sorted((x for x in logs if (x > 0) == (off > 0)), key=abs)
        if len(alike) < 2:
            return True
        log = alike[(len(alike) - 1) // 2]
        if abs(log) > max(SURPRISING, 2 * math.sqrt(bin.noise)):
            self._change_level(bin, math.exp(log))
        return True

    def _change_level(self, bin: _Bin, ratio: float) -> None:
        """Everything seems to take so many times as long; this size of batch certainly does."""
        bin.seconds = median(s for _, _, s, _ in self._odd)
        bin.context = fmean(c for *_, c in self._odd)
        bin.weight = RECENT
        self.level *= ratio
        bin.level = self.level
        self._line.scale(ratio)
        self._odd = []
        self._curve, self._fitted = None, -1

    def _compare_levels(self, bin: _Bin, seconds: float, context: float) -> None:
        """A size of batch that was not seen since the level changed takes what it took then, or in
        proportion to the level. If the first, it was a cliff: the change was of a few sizes."""
        ratio = self.level / bin.level
        then = bin.seconds + self._context_s * (context - bin.context)
        if seconds < then * math.sqrt(ratio) if ratio > 1 else seconds > then * math.sqrt(ratio):
            for other in self._bins.values():
                if other.level == self.level:
                    other.level = bin.level
            self.level = bin.level
            self._line.scale(1 / ratio)
        else:
            bin.seconds *= ratio
            bin.level = self.level
        self._curve, self._fitted = None, -1

    @property
    def curve(self) -> Curve:
        """Without context."""
        newest = self._newest
        if (
            self._curve is None
            or self._age >= REMADE_AFTER
            or (newest is not None and self._age >= newest.weight * REMADE_SHARE)
        ):
            self._fit()
            self._curve, self._age, self._peak = self._make_curve(), 0, None
        return self._curve

    def _fit(self) -> None:
        """The line, and what context costs."""
        if self._fitted == self.num_observed or (bin := self._newest) is None:
            return
        self._fitted = self.num_observed
        noise = math.sqrt(self._noise)
        self._context_s = self._context_fit.seconds(bin.batch, bin.context, bin.seconds, noise)
        mean_x, mean_y = self._line.means()
        # The prior in terms of what was measured: base = slope * PRIOR_HALF_BATCH.
        assumed = mean_y / (PRIOR_HALF_BATCH + mean_x)
        slope = self._line.slope(assumed, PRIOR_WEIGHT * PRIOR_HALF_BATCH)
        self._slope = min(max(0.0, slope), 0.95 * mean_y / max(1.0, mean_x))
        self._base = mean_y - self._slope * mean_x

    def _make_curve(self) -> Curve:
        slope = max(0.0, self._slope - self._context_s * self.context)
        if not self._bins:
            return Curve((1,), (self._base + slope,), (slope,))
        points: list[tuple[int, float, float]] = []
        for _, bin in sorted(self._bins.items()):
            if not bin.weight:
                continue
            now = bin.seconds * self.level / bin.level
            without = max(now - self._context_s * bin.context, LEAST * now)
            assumed = self._base + slope * bin.batch
            seconds = (bin.weight * without + ASSUMED * assumed) / (bin.weight + ASSUMED)
            points.append((int(bin.batch), seconds, bin.weight))
        return rising(points, slope)

    def _expect(self, batch: float, context: float) -> float:
        return self.curve.at(batch) + self._context_s * context

    def step_s(self, batch: float, context: float | None = None) -> float:
        """Seconds until each of `batch` responses has what one step brings it; each holds `context`
        tokens, None = as many as of late."""
        return self._expect(batch, batch * (self.context if context is None else context))

    def peak(self, limit: int) -> int:
        """The largest batch up to `limit` before throughput falls off: of more than these, the
        rest does better to wait. What may be an error is no fall."""
        if len(self._bins) < 2:
            return limit
        curve = self.curve
        if self._peak is None or self._peak[0] != limit:
            peak = self._with_context(curve).peak(limit)
            is_sure = 2 * self.error(peak + 1) < HARDLY
            self._peak = limit, peak if is_sure else limit
        return self._peak[1]

    def best_rate(self, limit: int) -> float:
        """Engine steps of responses a second, at the best batch up to `limit`."""
        return self._with_context(self.curve).best_rate(limit)

    def error(self, batch: int) -> float:
        """Standard error of step_s(batch), as a share of it."""
        if not self._bins:
            return PRIOR_ERROR
        size = _size(batch)
        nearest = min(self._bins, key=lambda known: abs(known - size))
        seen = math.sqrt(self._noise / self._bins[nearest].weight)
        return max(LEAST_ERROR, seen) + UNSEEN_ERROR * abs(nearest - size)

    def _with_context(self, curve: Curve) -> Curve:
        each = self._context_s * self.context
        if not each:
            return curve
        seconds = (s + each * b for b, s in zip(curve.batches, curve.seconds, strict=True))
        return Curve(curve.batches, tuple(seconds), tuple(s + each for s in curve.slopes))


@dataclass(slots=True)
class Gain:
    """Tokens that one engine step brings a response with history to draft from; without, it is one.

    All responses of a node take part in each of its steps, so neighbours tell it, and no clock is
    needed:

        gain = tokens of a response with history / tokens of one without,    at least 1

    both summed over the chunks in which there were both, with exponential forgetting. Of a chunk
    only those count that ran all the time since the one before. While a node has but one of the two
    kinds the gain stays, and `Speed` takes up what is wrong with it: a node that never had both
    counts tokens as steps.
    """

    tokens: float = 1.0
    # decayed sums of means
    _with: float = field(init=False)
    _without: float = field(init=False, default=PRIOR_TOKENS)
    # Of the chunk at hand: responses, those with history, and of each kind (responses, tokens) that
    # ran on.
    _num: int = field(init=False, default=0)
    _num_with: int = field(init=False, default=0)
    _ran_with: int = field(init=False, default=0)
    _tokens_with: int = field(init=False, default=0)
    _ran_without: int = field(init=False, default=0)
    _tokens_without: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._with = self.tokens * PRIOR_TOKENS

    def observe(self, has_history: bool, num_tokens: int, is_whole: bool) -> None:
        """A response got tokens; `is_whole`: it runs since before the last chunk, and still
        does."""
        self._num += 1
        self._num_with += has_history
        if not is_whole:
            return
        if has_history:
            self._ran_with += 1
            self._tokens_with += num_tokens
        else:
            self._ran_without += 1
            self._tokens_without += num_tokens

    def close(self) -> float:
        """The chunk is over. Returns how many tokens a step brought its responses, on average."""
        if self._ran_with and self._ran_without:
            self._with = FORGET_GAIN * self._with + self._tokens_with / self._ran_with
            self._without = FORGET_GAIN * self._without + self._tokens_without / self._ran_without
            self.tokens = max(1.0, self._with / self._without)
        mean = 1.0 + (self.tokens - 1.0) * self._num_with / self._num if self._num else 1.0
        self._num = self._num_with = 0
        self._ran_with = self._tokens_with = self._ran_without = self._tokens_without = 0
        return mean
