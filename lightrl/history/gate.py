"""Decide whether speculation pays, and how wide drafts may be, from measured step times.

A step decodes one token for each of its responses; every drafted token makes the forward pass
wider. The time of a step without drafts is modelled as linear in the number of responses. The cost
of a drafted token is stored by the size of the pass, in half octaves, since hardware verifies a few
tokens for nothing and many at full cost. A pass grows at most twofold at a time, so that a trial
costs little, and widths that keep losing are tried more and more rarely. Reads no clock.
"""

from dataclasses import dataclass, field
from math import log2

from lightrl.core.nodes.line_fit import LineFit

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # candidates: drafted tokens of a response
MEMORY = 0.9  # weight of the old value against one new observation
ACCEPTANCE_MEMORY = 0.95
FIRST_ACCEPTANCE = 0.8
MARGIN = 1.03  # least gain of speculation, and of a wider draft over a narrower one
SLOW = 1.25  # a step slower by this factor is an outlier, unless the next one is as slow
FIRST_STEPS = 8  # without drafts before the first step with drafts
# steps after which an open gate measures a step without drafts; fewer if it gains little
PROBE_EVERY = 64
MIN_PROBE_EVERY = 6
# length of a probe of a closed gate; the first follows after PROBE_EVERY steps, each later one
PROBE_STEPS = 3
PROBE_RARELY = 2048  # after twice as many, up to this
# factor every PROBE_EVERY steps on the cost of pass sizes not used since: it may have fallen
FADING = 0.9


@dataclass(slots=True)
class Plain:
    """Seconds of a step without drafts: base + slope * responses, by decayed least squares."""

    line: LineFit = field(default_factory=LineFit)
    count: int = 0
    was_slow: bool = False

    def knows(self, batch: int) -> bool:
        """Return whether enough steps of about this size were observed."""
        return self.count >= FIRST_STEPS and self.line.n > 2.5 and self._is_near(batch)

    def observe(self, batch: int, seconds: float) -> None:
        keep = MEMORY
        if self.count:
            usual_s = self.step_s(batch)
            if not self._is_near(batch):
                # the load has changed: earlier observations become one point of the line
                keep = 1 / self.line.n
            else:
                is_slow = seconds > SLOW * usual_s
                if seconds < usual_s / 2 or (is_slow and self.was_slow):
                    keep = 0.0  # the old value was wrong: start over
                elif is_slow:
                    seconds = usual_s
                self.was_slow = is_slow
        self.line.add(batch, seconds, keep)
        self.count += 1

    def step_s(self, batch: int) -> float:
        x, y = self.line.means()
        # With one batch size only: half of the time is fixed, half is proportional.
        slope = self.line.slope(prior=0.5 * y / x, weight=0.01 * x * x)
        slope = min(max(slope, 0.0), y / x)
        return max(y + slope * (batch - x), 0.1 * y)

    def _is_near(self, batch: int) -> bool:
        mean = self.line.means()[0]
        return mean <= 2 * batch and batch <= 2 * mean


@dataclass(slots=True)
class _Price:
    """Seconds of a drafted token in passes of one size class."""

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
    """Chooses the width of drafts.

    Example: gate.width(8) -> 4, then gate.observe(8, 26, 0.004) after drafting 18 tokens.
    """

    max_width: int
    # a pass is padded to the longest draft
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
        """Probability that a drafted token is accepted if those before it were."""
        return self._accepted / self._tried

    def width(self, batch: int) -> int:
        """Return the most tokens to draft for each of `batch` responses; 0 means none."""
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
        """Record how many of `batch` responses got a draft."""
        if num_with_draft:  # else the prompts have no history yet
            self._drafted += (1 - MEMORY) * (num_with_draft / batch - self._drafted)

    def verified(self, accepted: int, rejected: int) -> None:
        """Record accepted tokens, and drafts of which a token was rejected."""
        self._accepted += accepted
        self._tried += accepted + rejected

    def observe(self, batch: int, num_tokens: int, seconds: float) -> None:
        """Record a step without prefill: `num_tokens` in its pass, padding included."""
        if num_tokens <= batch:
            self.plain.observe(batch, seconds)
        elif self.plain.count:
            self._forget(ACCEPTANCE_MEMORY)
            plain_s, extra = self.plain.step_s(batch), num_tokens - batch
            if seconds < plain_s / SLOW:
                self.plain.observe(batch, seconds)  # an upper bound of a step without drafts
                return
            usual_s = plain_s + extra * self._token_s(num_tokens, plain_s / batch)
            added_s = (min(seconds, 3 * usual_s) - plain_s) / extra
            price = self._prices.get(_size(num_tokens))
            if price is None:
                self._prices[_size(num_tokens)] = _Price(added_s)
            else:
                price.observe(added_s, seconds * SLOW < usual_s, seconds > SLOW * usual_s)

    def _best(self, batch: int) -> tuple[int, float]:
        """Return the best width and its speedup over no drafts."""
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
        """Return the seconds of a drafted token in a pass of `num_tokens`.

        An unknown size costs as much as the next smaller known one, or else a quarter of a decoded
        token.
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
