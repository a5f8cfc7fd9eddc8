"""What is trained against what was launched for it: the length bias of racing, measured.

Racing keeps the shorter responses of a prompt, and the prompts whose responses are shorter; a
response that was put off and restarts may come back as another one. These figures say by how much
all that shortens what is trained, for each round and over the whole run. Decides nothing, corrects
nothing.

Over the run, `length_bias` compares the trained responses with the first attempts at all responses
that were launched. A first attempt that was given up is a censored observation. It is completed
where a later round continued it, and where a restart has repeated all of its tokens; another
response in its place is no observation of it. So censoring depends on what was sampled until then
alone, as the estimator requires. Prompts of similar lengths make the standard error too small.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightrl.core.arrays import encode
from lightrl.core.backlog import Backlog
from lightrl.core.rounds import staleness
from lightrl.core.state import GroupState, Response, Round

# A mean is restricted to the lengths that so many observations reach, if some are censored.
MIN_AT_RISK = 10


class ResponseOutcome(NamedTuple):
    """What became of one response that was launched."""

    num_tokens: int
    # False: it was given up with so many tokens
    finished: bool
    # it was cut off at its maximal length
    at_limit: bool
    # None: it has no score
    reward: float | None
    # it is trained
    kept: bool


@dataclass(slots=True)
class Tally:
    """Launched responses, and those of them that are trained; lengths in tokens."""

    # length -> responses
    finished: dict[int, int] = field(default_factory=dict[int, int])
    given_up: dict[int, int] = field(default_factory=dict[int, int])
    at_limit: int = 0
    scored: int = 0
    scored_reward: float = 0.0
    # length -> trained responses
    kept: dict[int, int] = field(default_factory=dict[int, int])
    kept_at_limit: int = 0
    kept_reward: float = 0.0

    def add(self, fate: ResponseOutcome, count: int = 1, is_launched: bool = True) -> None:
        """`count` -1 takes back what was added; `is_launched`: it is no restart of another one."""
        if is_launched:
            lengths = self.finished if fate.finished else self.given_up
            lengths[fate.num_tokens] = lengths.get(fate.num_tokens, 0) + count
            self.at_limit += count * fate.at_limit
        if fate.reward is not None:
            self.scored += count
            self.scored_reward += count * fate.reward
        if fate.kept:
            self.kept[fate.num_tokens] = self.kept.get(fate.num_tokens, 0) + count
            self.kept_at_limit += count * fate.at_limit
            self.kept_reward += count * (fate.reward or 0.0)

    def figures(self, limit: int) -> dict[str, float]:
        """`limit`: tokens at which a response is cut off.

        Those given up count with the tokens they had, so launched_length and launched_at_limit are
        lower bounds. Their estimates (_km) are upper bounds where none of the longest was allowed
        to finish: see `kaplan_meier`.
        """
        launched = sum(self.finished.values()) + sum(self.given_up.values())
        num_kept = sum(self.kept.values())
        tokens = sum(
            n * count for counts in (self.finished, self.given_up) for n, count in counts.items()
        )
        launched_km = kaplan_meier(self.finished, self.given_up, limit)
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
        """Mean length of what is kept over that of what was launched, minus 1, and its standard
        error; both means of min(length, length_bias_up_to), which is `limit` where enough
        observations reach it. The errors of both means count as independent, though they are partly
        of the same responses: where these are the same, the standard error is too large."""
        up_to = horizon(self.finished, self.given_up, limit)
        kept = kaplan_meier(self.kept, {}, up_to)
        launched = kaplan_meier(self.finished, self.given_up, up_to)
        ratio = kept.mean / launched.mean if launched.mean else 1.0
        errors = math.hypot(kept.error, ratio * launched.error)
        return {
            "length_bias": ratio - 1 if self.kept else 0.0,
            "length_bias_se": errors / launched.mean if launched.mean else 0.0,
            "length_bias_up_to": float(up_to),
        }


def compare(before: bytes, response: Response) -> Counter[str]:
    """A restart with the earlier attempt, of which `before` are the tokens, int32. Empty if it has
    not begun. Sums over restarts, divided by their number, are the figures restart_*."""
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


@dataclass(frozen=True, slots=True)
class BiasNote:
    """All that `Bias` knows, as plain data."""

    num_rounds: dict[str, int]
    max_wait_steps: int
    tally: Tally
    # prompt, epoch, index -> so far
    put_off: list[tuple[str, int, dict[int, ResponseOutcome]]]
    # prompt, epoch, step
    since: list[tuple[str, int, int]]
    tokens: int
    untrained_tokens: int
    # see `compare`
    restarts: dict[str, int]


class Bias:
    """Over a run. Each response that is launched counts once, as the module's text says. Tokens
    count as often as they were sampled.
    """

    def __init__(self, max_response_tokens: int) -> None:
        self.num_rounds: Counter[str] = Counter()  # kind -> rounds
        self.max_wait_steps = 0
        self._limit = max_response_tokens
        self._tally = Tally()
        self._restarts = Counter[str]()
        self._put_off: dict[
            tuple[str, int], dict[int, ResponseOutcome]
        ] = {}  # (prompt, epoch) -> index -> so far
        # (prompt, epoch) -> the step that first put it off
        self._since: dict[tuple[str, int], int] = {}
        self._tokens = 0
        self._untrained_tokens = 0

    def add(self, round: Round, backlog: Backlog, count: bool = True) -> dict[str, float]:
        """Takes in a training round that has closed; returns its figures. Not `count`: it is in
        already."""
        if not count:
            return Bias(self._limit).add(round, backlog)
        kept = {r.id for group in round.accepted for r in group.kept}
        own, restarts = Tally(), Counter[str]()
        for group in round.groups.values():
            prompt = group.prompt.id, group.prompt.epoch
            fates = {r.index: _fate(r, r.id in kept) for r in group.responses}
            before = self._put_off.pop(prompt, {})
            for r in group.responses:
                fate = fates[r.index]
                own.add(fate)
                held = group.held[r.index].tokens if r.index < len(group.held) else b""
                goes_on = r.carried > 0 or not held
                if not goes_on:
                    compared = compare(held, r)
                    restarts.update(compared)
                    goes_on = bool(compared["same_share"])
                if goes_on and r.index in before:
                    self._tally.add(before[r.index], -1)
                self._tally.add(fate, is_launched=goes_on or r.index not in before)
            if group.state is GroupState.DEFERRED:
                self._put_off[prompt] = before | fates
        self._restarts.update(restarts)
        tokens = sum(r.num_new for group in round.groups.values() for r in group.responses)
        self._tokens += tokens
        self._untrained_tokens += round.aborted_tokens
        self.num_rounds[round.kind] += 1
        put_off = sum(p.since == round.step for p in backlog.put_off)
        waits = self._waits(round, backlog)
        self.max_wait_steps = max(self.max_wait_steps, waits)
        return {
            **own.figures(self._limit),
            **restart_figures(restarts),
            **_deferred_staleness(round),
            "aborted_tokens": float(round.aborted_tokens),
            "aborted_share": round.aborted_tokens / max(1, tokens),
            "put_off": float(put_off),
            "queue": float(len(backlog.put_off)),
            "max_wait_steps": float(waits),
        }

    def note(self) -> BiasNote:
        return BiasNote(
            dict(self.num_rounds),
            self.max_wait_steps,
            self._tally,
            [(prompt, epoch, fates) for (prompt, epoch), fates in self._put_off.items()],
            [(prompt, epoch, step) for (prompt, epoch), step in self._since.items()],
            self._tokens,
            self._untrained_tokens,
            dict(self._restarts),
        )

    def recall(self, note: BiasNote) -> None:
        """Goes on from what another process knew."""
        self.num_rounds = Counter(note.num_rounds)
        self.max_wait_steps = note.max_wait_steps
        self._tally, self._restarts = note.tally, Counter(note.restarts)
        self._put_off = {(prompt, epoch): fates for prompt, epoch, fates in note.put_off}
        self._since = {(prompt, epoch): step for prompt, epoch, step in note.since}
        self._tokens, self._untrained_tokens = note.tokens, note.untrained_tokens

    def figures(self) -> dict[str, float]:
        """Of the run so far."""
        return {
            **self._tally.figures(self._limit),
            **self._tally.bias(self._limit),
            **restart_figures(self._restarts),
            "aborted_tokens": float(self._untrained_tokens),
            "aborted_share": self._untrained_tokens / max(1, self._tokens),
        }

    def _waits(self, round: Round, backlog: Backlog) -> int:
        """Steps for which a prompt of this round, or one in the queue, has been put off; the
        most."""
        self._since |= {(p.prompt.id, p.prompt.epoch): p.since for p in backlog.put_off}
        steps = [round.step - since for since in self._since.values()]
        for group in round.groups.values():
            if group.state is not GroupState.DEFERRED:
                self._since.pop((group.prompt.id, group.prompt.epoch), None)
        return max([0, *steps])


def _fate(r: Response, kept: bool) -> ResponseOutcome:
    return ResponseOutcome(
        len(r.tokens), r.finish_reason is not None, r.finish_reason == "length", r.reward, kept
    )


def _deferred_staleness(round: Round) -> dict[str, float]:
    """Trained version minus the oldest one, of trained responses that an earlier round began."""
    of_kept = [r for g in round.accepted for r in g.kept if r.carried]
    gaps = [staleness(r.spans, round.step).oldest_gap for r in of_kept]
    mean = sum(gaps) / max(1, len(gaps))
    return {"deferred_staleness": mean, "deferred_staleness_max": float(max(gaps, default=0))}


def common_tokens(a: bytes, b: bytes) -> int:
    """Tokens until the first that differs, or one of them ends; both int32."""
    if b.startswith(a):
        return len(a) // 4
    size = min(len(a), len(b)) // 4
    differ = np.frombuffer(a, "<i4", size) != np.frombuffer(b, "<i4", size)
    return int(differ.argmax()) if differ.any() else size


class Estimate(NamedTuple):
    """Of a distribution of lengths, restricted to a length."""

    # of min(length, that length)
    mean: float
    # share that is as long
    share_left: float
    # standard error of the mean
    error: float


def horizon(finished: Mapping[int, int], given_up: Mapping[int, int], limit: int) -> int:
    """The length up to which a mean can be estimated: MIN_AT_RISK observations are as long. `limit`
    if none of the longest was given up."""
    num_left, is_censored = MIN_AT_RISK, False
    for length in sorted(finished.keys() | given_up.keys(), reverse=True):
        is_censored |= given_up.get(length, 0) > 0
        num_left -= finished.get(length, 0) + given_up.get(length, 0)
        if num_left <= 0:
            return length if is_censored else limit
    return limit


def kaplan_meier(finished: Mapping[int, int], given_up: Mapping[int, int], limit: int) -> Estimate:
    """Of all responses, if those given up had gone on; lengths above `limit` count as `limit`.

    `finished` and `given_up` count responses by their tokens; one given up after n tokens would
    have had more than n. S(t), the share longer than t, falls at each length that responses
    finished at by their share of all that had come so far (Kaplan and Meier 1958); the mean is the
    area below it. Beyond the longest that finished it stays level: where the longest were given up,
    mean and share are upper bounds. The standard error is Greenwood's for a restricted mean: the
    sum of A(t)^2 d / (n (n - d)) over these lengths, A(t) being the area beyond t, d those that
    finished at t, n all that had come so far (Klein and Moeschberger 2003, equation 4.5.2).

    Example: kaplan_meier({2: 1, 4: 1}, {3: 1}, 10)[:2] == (2 + 2/3 * 2, 0.0): S is 1, from 2 on
    2/3, from 4 on 0.
    """
    at_risk = sum(finished.values()) + sum(given_up.values())
    share, area, before = 1.0 if at_risk else 0.0, 0.0, 0
    falls: list[tuple[float, float]] = []  # (area until there, d / (n (n - d)))
    for length in sorted(n for n in finished.keys() | given_up.keys() if n < limit):
        area += share * (length - before)
        before = length
        if died := finished.get(length, 0):
            share *= 1 - died / at_risk
            falls.append((area, died / (at_risk * max(1, at_risk - died))))
        at_risk -= died + given_up.get(length, 0)
    area += share * (limit - before)
    variance = sum((area - until) ** 2 * part for until, part in falls)
    return Estimate(area, share, math.sqrt(variance))
