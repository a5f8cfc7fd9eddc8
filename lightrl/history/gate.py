"""Whether speculation pays, and how wide a draft may be: measured, not assumed, for one engine and
its load.

Owns the cost model of an engine's steps. A step decodes one token for each of its responses; every
drafted token makes the forward pass wider. What a step without drafts takes is a line in the number
of responses. What a drafted token adds is kept by the size of the pass in steps of half an octave,
since hardware verifies a few tokens for nothing and many at their full price. Passes are widened
twofold at most at a time, so that no trial costs much, and what keeps losing is tried ever more
rarely. Never reads a clock.
"""

from dataclasses import dataclass, field
from math import log2

from lightrl.core.curve import LineFit

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # drafted tokens of a response that may be allowed
MEMORY = 0.9  # weight of a known time against one more observation
ACCEPTANCE_MEMORY = 0.95
FIRST_ACCEPTANCE = 0.8
MARGIN = 1.03  # speculation must be better by so much, and a wider draft than a narrower one
SLOW = 1.25  # a step that takes longer by this factor was held up, unless the next one is as slow
FIRST_STEPS = 8  # without drafts before the first with them
# steps after which an open gate measures a step without drafts, sooner if it gains little
PROBE_EVERY = 64
MIN_PROBE_EVERY = 6
# in a row, in which a closed gate tries again: after PROBE_EVERY steps, then twice as many,
PROBE_STEPS = 3
PROBE_RARELY = 2048  # up to so many
# by so much every PROBE_EVERY steps do passes look cheaper that are not taken: they may be, now
FADING = 0.9


@dataclass(slots=True)
class Plain:
    """Seconds of a step without drafts: base + slope * responses, by least squares that forget."""

    line: LineFit = field(default_factory=LineFit)
    count: int = 0
    was_slow: bool = False

    def knows(self, batch: int) -> bool:
        """Enough steps were seen, and with about as many responses."""
        return self.count >= FIRST_STEPS and self.line.n > 2.5 and self._is_near(batch)

    def observe(self, batch: int, seconds: float) -> None:
        keep = MEMORY
        if self.count:
            usual_s = self.step_s(batch)
            if not self._is_near(batch):
                # the load has changed: all that was known becomes one point of the line
                keep = 1 / self.line.n
            else:
                is_slow = seconds > SLOW * usual_s
                if seconds < usual_s / 2 or (is_slow and self.was_slow):
                    keep = 0.0  # no step is twice as fast as it can be, or held up twice in a row
                elif is_slow:
                    seconds = usual_s
                self.was_slow = is_slow
        self.line.add(batch, seconds, keep)
        self.count += 1

    def step_s(self, batch: int) -> float:
        x, y = self.line.means()
        # Where one batch size was seen only: half of a step is for the step, half for what is in
        # it.
        slope = self.line.slope(prior=0.5 * y / x, weight=0.01 * x * x)
        slope = min(max(slope, 0.0), y / x)
        return max(y + slope * (batch - x), 0.1 * y)

    def _is_near(self, batch: int) -> bool:
        mean = self.line.means()[0]
        return mean <= 2 * batch and batch <= 2 * mean


@dataclass(slots=True)
class _Price:
    """Of a drafted token in passes of about one size."""

    seconds: float
    count: int = 1
    was_slow: bool = False
    is_fresh: bool = True

    def observe(self, seconds: float, is_fast: bool, is_slow: bool) -> None:
        if is_fast or (is_slow and self.was_slow):
            self.seconds = seconds
        elif not is_slow:
            self.seconds = MEMORY * self.seconds + (1 - MEMORY) * seconds
        self.count += 1
        self.was_slow = is_slow
        self.is_fresh = True


@dataclass(slots=True)
class Gate:
    """Example: gate.width(8) -> 4, then gate.observe(8, 26, 0.004) after a step that drafted 18
    tokens."""

    max_width: int
    # every response takes as much of a pass as the one with the longest draft
    is_padded: bool = False
    plain: Plain = field(default_factory=Plain)
    # by `_size` of the pass
    _prices: dict[int, _Price] = field(default_factory=dict[int, _Price])
    _accepted: float = FIRST_ACCEPTANCE
    _tried: float = 1.0
    # share of responses that have a draft, in steps with drafts
    _drafted: float = 1.0
    # steps since the last probe
    _since: int = 0
    # steps until a closed gate probes
    _patience: int = PROBE_EVERY
    # steps that are left of a probe
    _probing: int = 0
    _open_steps: int = 0

    @property
    def acceptance(self) -> float:
        """The probability that a drafted token is kept if those before it were."""
        return self._accepted / self._tried

    def width(self, batch: int) -> int:
        """Tokens that may be drafted for each of `batch` responses in the next step; 0 = none."""
        if not self.plain.knows(batch):
            return 0
        best, gain = self._best(batch)
        self._since += 1
        if best:
            self._patience, self._probing = PROBE_EVERY, 0
            self._fade()
            if self._since < max(MIN_PROBE_EVERY, min(2 * (gain - 1), 1) * PROBE_EVERY):
                return best
            self._since = 0
            return 0
        if self._since >= self._patience:
            self._since, self._probing = 0, PROBE_STEPS
            self._patience = min(2 * self._patience, PROBE_RARELY)
            self._forget(1 / max(1.0, self._tried))
        self._probing -= self._probing > 0
        return 1 if self._probing else 0

    def drafted(self, batch: int, num_with_draft: int) -> None:
        """Of `batch` responses for which a draft was allowed so many got one."""
        if num_with_draft:  # else nothing is known of this prompt yet, and nothing was spent
            self._drafted += (1 - MEMORY) * (num_with_draft / batch - self._drafted)

    def verified(self, accepted: int, rejected: int) -> None:
        """Of drafted tokens so many were kept, and so many were the first of their draft that was
        not."""
        self._accepted += accepted
        self._tried += accepted + rejected

    def observe(self, batch: int, num_tokens: int, seconds: float) -> None:
        """A step without prefill: `batch` responses, a pass of `num_tokens` tokens, padding
        included."""
        if num_tokens <= batch:
            self.plain.observe(batch, seconds)
        elif self.plain.count:
            self._forget(ACCEPTANCE_MEMORY)
            plain_s, extra = self.plain.step_s(batch), num_tokens - batch
            if seconds < plain_s / SLOW:
                self.plain.observe(batch, seconds)  # without drafts it would have taken no longer
                return
            usual_s = plain_s + extra * self._token_s(num_tokens, plain_s / batch)
            added_s = (min(seconds, 3 * usual_s) - plain_s) / extra
            price = self._prices.get(_size(num_tokens))
            if price is None:
                self._prices[_size(num_tokens)] = _Price(added_s)
            else:
                price.observe(added_s, seconds * SLOW < usual_s, seconds > SLOW * usual_s)

    def _best(self, batch: int) -> tuple[int, float]:
        """The width, and by what factor it is better than none."""
        plain_s = self.plain.step_s(batch)
        best, best_rate = 0, batch / plain_s
        a, share = min(self.acceptance, 0.995), self._drafted
        widest = 2 + max(max(self._prices, default=0), _size(batch))
        for width in WIDTHS:
            extra = batch * width * (1.0 if self.is_padded else share)
            if width > self.max_width or (width > 1 and _size(batch + extra) > widest):
                break
            gained = batch * share * a * (1 - a**width) / (1 - a)
            rate = (batch + gained) / (
                plain_s + extra * self._token_s(batch + extra, plain_s / batch)
            )
            if rate > MARGIN * best_rate:
                best, best_rate = width, rate
        return best, best_rate * plain_s / batch

    def _fade(self) -> None:
        self._open_steps += 1
        if self._open_steps % PROBE_EVERY == 0:
            for price in self._prices.values():
                price.seconds *= 1 if price.is_fresh else FADING
                price.is_fresh = False

    def _token_s(self, num_tokens: float, decoded_s: float) -> float:
        """Of a drafted token in a pass of `num_tokens`. Unknown: as in the next smaller pass that
        is known, for from there on it costs what it does in doubt; nothing known: a quarter of a
        decoded one.
        """
        size = _size(num_tokens)
        known = [s for s, price in self._prices.items() if s <= size and price.count > 1]
        if known:
            return max(self._prices[max(known)].seconds, 0.0)
        return max(min((p.seconds for p in self._prices.values()), default=decoded_s / 4), 0.0)

    def _forget(self, keep: float) -> None:
        self._accepted, self._tried = keep * self._accepted, keep * self._tried


def _size(num_tokens: float) -> int:
    return round(2 * log2(num_tokens))
