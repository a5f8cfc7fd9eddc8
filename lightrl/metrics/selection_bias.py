"""What is trained against what was launched: the length bias of racing, measured.

Racing keeps the shorter responses of a prompt, and the prompts with shorter responses; a deferred
response that restarts may be another sample. These figures measure by how much that shortens what
is trained, for each round and over the whole run. They correct nothing.

Over the run, `length_bias` compares the trained responses with the first attempts at all launched
responses. A first attempt that was aborted is a censored observation. It is completed where a later
round continued it, and where a restart has repeated all of its tokens; another response in its
place is no observation of it. So censoring depends only on what was sampled until then, as the
estimator requires. Prompts of similar lengths make the standard error too small.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightrl.core.arrays import encode
from lightrl.core.rounds.backlog import Backlog
from lightrl.core.rounds.rounds import staleness
from lightrl.core.state import HeldResponse, Response, Round

MIN_AT_RISK = 10  # observations up to whose length a mean is estimated, if some are censored


@dataclass(slots=True)
class Tally:
    """Counts of launched and of trained responses; lengths in tokens."""

    # length -> responses
    finished: dict[int, int] = field(default_factory=dict[int, int])
    aborted: dict[int, int] = field(default_factory=dict[int, int])
    at_limit: int = 0
    scored: int = 0
    scored_reward: float = 0.0
    # length -> trained responses
    kept: dict[int, int] = field(default_factory=dict[int, int])
    kept_at_limit: int = 0
    kept_reward: float = 0.0

    def add(
        self,
        of: Response | HeldResponse,
        num_tokens: int,
        is_kept: bool = False,
        count: int = 1,
        is_launched: bool = True,
    ) -> None:
        """Add the outcome of a response. `is_kept`: it is trained; `count` -1 removes what was
        added; `is_launched`: it is not a restart of another one."""
        is_at_limit = of.finish_reason == "length"
        if is_launched:
            lengths = self.finished if of.finish_reason is not None else self.aborted
            lengths[num_tokens] = lengths.get(num_tokens, 0) + count
            self.at_limit += count * is_at_limit
        if of.reward is not None:
            self.scored += count
            self.scored_reward += count * of.reward
        if is_kept:
            self.kept[num_tokens] = self.kept.get(num_tokens, 0) + count
            self.kept_at_limit += count * is_at_limit
            self.kept_reward += count * (of.reward or 0.0)

    def figures(self, limit: int) -> dict[str, float]:
        """`limit`: tokens at which a response is cut off.

        Aborted responses count with the tokens that they had, so launched_length and
        launched_at_limit are lower bounds. The estimates (_km) are upper bounds where none of the
        longest could finish: see `kaplan_meier`.
        """
        launched = sum(self.finished.values()) + sum(self.aborted.values())
        num_kept = sum(self.kept.values())
        tokens = sum(
            n * count for counts in (self.finished, self.aborted) for n, count in counts.items()
        )
        launched_km = kaplan_meier(self.finished, self.aborted, limit)
        return {
            "kept_length": sum(n * k for n, k in self.kept.items()) / max(1, num_kept),
            "launched_length": tokens / max(1, launched),
            "launched_length_km": launched_km.mean,
            "kept_at_limit": self.kept_at_limit / max(1, num_kept),
            "launched_at_limit": self.at_limit / max(1, launched),
            "launched_at_limit_km": launched_km.share_left,
            "kept_reward": self.kept_reward / max(1, num_kept),
            "scored_reward": self.scored_reward / max(1, self.scored),
        }

    def bias(self, limit: int) -> dict[str, float]:
        """Return the mean length of kept over that of launched responses, minus 1, and its standard
        error; both means of min(length, length_bias_up_to), which is `limit` where enough
        observations reach it. The errors of both means count as independent, although they are
        partly of the same responses: where these are the same, the standard error is too large."""
        up_to = horizon(self.finished, self.aborted, limit)
        kept = kaplan_meier(self.kept, {}, up_to)
        launched = kaplan_meier(self.finished, self.aborted, up_to)
        ratio = kept.mean / launched.mean if launched.mean else 1.0
        errors = math.hypot(kept.error, ratio * launched.error)
        return {
            "length_bias": ratio - 1 if self.kept else 0.0,
            "length_bias_se": errors / launched.mean if launched.mean else 0.0,
            "length_bias_up_to": float(up_to),
        }


def compare(before: bytes, response: Response) -> Counter[str]:
    """Compare a restart with the earlier attempt, whose tokens are `before`, int32. Return sums for
    `restart_figures`; none if the restart has not begun."""
    after, is_over = encode(response.tokens), response.finish_reason is not None
    if not after and not is_over:
        return Counter()
    num_common = common_tokens(before, after)
    return Counter(
        num=1,
        same_share=int(4 * num_common == len(before)),
        common_tokens=num_common,
        shorter_share=int(is_over and len(after) < len(before)),
    )


def restart_figures(sums: Mapping[str, int]) -> dict[str, float]:
    num = sums.get("num", 0)
    return {f"restart_{name}": n / num for name, n in sums.items() if num and name != "num"}


@dataclass(slots=True)
class BiasState:
    """All that `Bias` stores, as it is in the journal."""

    # kind -> rounds
    num_rounds: dict[str, int] = field(default_factory=dict[str, int])
    max_wait_steps: int = 0
    tally: Tally = field(default_factory=Tally)
    # as often as they were sampled
    tokens: int = 0
    untrained_tokens: int = 0
    # sums of `compare`
    restarts: dict[str, int] = field(default_factory=dict[str, int])


class Bias:
    """The bias over a run. Each launched response counts once."""

    def __init__(self, max_response_tokens: int) -> None:
        self.state = BiasState()
        self._limit = max_response_tokens

    def add(self, round: Round, backlog: Backlog, count: bool = True) -> dict[str, float]:
        """Add a closed training round; return its figures. `count` False: it was added before."""
        if not count:
            return Bias(self._limit).add(round, backlog)
        state = self.state
        own, restarts = Tally(), Counter[str]()
        kept = {r.id for group in round.accepted for r in group.kept}
        for r in (r for group in round.groups.values() for r in group.responses):
            num, is_kept = r.num_sampled, r.id in kept
            own.add(r, num, is_kept)
            held = r.group.held[r.index] if r.index < len(r.group.held) else None
            is_launched = held is None or r.carried > 0 or not held.tokens
            if held is not None and not is_launched:
                compared = compare(held.tokens, r)
                restarts.update(compared)
                is_launched = bool(compared["same_share"])
            if held is not None and is_launched:  # of the round that deferred it
                state.tally.add(held, held.num_sampled, count=-1)
            state.tally.add(r, num, is_kept, is_launched=is_launched)
        tokens = sum(r.num_new for group in round.groups.values() for r in group.responses)
        state.tokens += tokens
        state.untrained_tokens += round.aborted_tokens
        for name, num in restarts.items():
            state.restarts[name] = state.restarts.get(name, 0) + num
        state.num_rounds[round.kind] = state.num_rounds.get(round.kind, 0) + 1
        since = [one.since for one in (*round.groups.values(), *backlog.deferred)]
        waits = max([0, *(round.step - step for step in since)])
        state.max_wait_steps = max(state.max_wait_steps, waits)
        return {
            **own.figures(self._limit),
            **restart_figures(restarts),
            **_deferred_staleness(round),
            "aborted_tokens": float(round.aborted_tokens),
            "aborted_share": round.aborted_tokens / max(1, tokens),
            "put_off": float(sum(p.since == round.step for p in backlog.deferred)),
            "queue": float(len(backlog.deferred)),
            "max_wait_steps": float(waits),
        }

    def figures(self) -> dict[str, float]:
        """Return the figures of the run so far."""
        state = self.state
        return {
            **state.tally.figures(self._limit),
            **state.tally.bias(self._limit),
            **restart_figures(state.restarts),
            "aborted_tokens": float(state.untrained_tokens),
            "aborted_share": state.untrained_tokens / max(1, state.tokens),
        }


def _deferred_staleness(round: Round) -> dict[str, float]:
    """Return trained version minus the oldest one, of trained responses of an earlier round."""
    of_kept = [r for g in round.accepted for r in g.kept if r.carried]
    gaps = [staleness(r.spans, round.step).oldest_gap for r in of_kept]
    mean = sum(gaps) / max(1, len(gaps))
    return {"deferred_staleness": mean, "deferred_staleness_max": float(max(gaps, default=0))}


def common_tokens(a: bytes, b: bytes) -> int:
    """Return the number of tokens before the first that differs; both int32."""
    if b.startswith(a):
        return len(a) // 4
    size = min(len(a), len(b)) // 4
    differ = np.frombuffer(a, "<i4", size) != np.frombuffer(b, "<i4", size)
    return int(differ.argmax()) if differ.any() else size


class Estimate(NamedTuple):
    """An estimate of a distribution of lengths, restricted to a limit."""

    # of min(length, limit)
    mean: float
    # share that reaches the limit
    share_left: float
    # standard error of the mean
    error: float


def horizon(finished: Mapping[int, int], aborted: Mapping[int, int], limit: int) -> int:
    """Return the length up to which a mean can be estimated: MIN_AT_RISK observations are as long.
    `limit` if none of the longest was aborted."""
    num_left, is_censored = MIN_AT_RISK, False
    for length in sorted(finished.keys() | aborted.keys(), reverse=True):
        is_censored |= aborted.get(length, 0) > 0
        num_left -= finished.get(length, 0) + aborted.get(length, 0)
        if num_left <= 0:
            return length if is_censored else limit
    return limit


def kaplan_meier(finished: Mapping[int, int], aborted: Mapping[int, int], limit: int) -> Estimate:
    """Estimate the lengths of all responses as if none had been aborted; lengths above `limit`
    count as `limit`.

    `finished` and `aborted` count responses by their tokens; one aborted after n tokens would have
    had more than n. S(t), the share longer than t, falls at each length at which responses finished
    by their share of all that had reached it (Kaplan and Meier 1958); the mean is the area below
    it. Beyond the longest that finished it stays level: where the longest were aborted, mean and
    share are upper bounds. The standard error is Greenwood's for a restricted mean: the sum of
    A(t)^2 d / (n (n - d)) over these lengths, A(t) being the area beyond t, d those that finished
    at t, n all that had reached it (Klein and Moeschberger 2003, equation 4.5.2).

    Example: kaplan_meier({2: 1, 4: 1}, {3: 1}, 10)[:2] == (2 + 2/3 * 2, 0.0): S is 1, from 2 on
    2/3, from 4 on 0.
    """
    at_risk = sum(finished.values()) + sum(aborted.values())
    share, area, before = 1.0 if at_risk else 0.0, 0.0, 0
    falls: list[tuple[float, float]] = []  # (area until there, d / (n (n - d)))
    for length in sorted(n for n in finished.keys() | aborted.keys() if n < limit):
        area += share * (length - before)
        before = length
        if died := finished.get(length, 0):
            share *= 1 - died / at_risk
            falls.append((area, died / (at_risk * max(1, at_risk - died))))
        at_risk -= died + aborted.get(length, 0)
    area += share * (limit - before)
    variance = sum((area - until) ** 2 * part for until, part in falls)
    return Estimate(area, share, math.sqrt(variance))
