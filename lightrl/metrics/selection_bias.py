"""What is trained against what was launched for it: the length bias of racing, measured.

Racing keeps the shorter responses of a prompt, and the prompts whose responses are shorter. These
figures say by how much, for each round and over the whole run. Decides nothing, corrects nothing.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lightrl.core.backlog import Backlog
from lightrl.core.state import GroupState, Response, Round


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
    kept: int = 0
    kept_tokens: int = 0
    kept_at_limit: int = 0
    kept_reward: float = 0.0

    def add(self, fate: ResponseOutcome, count: int = 1) -> None:
        """`count` -1 takes back what was added."""
        lengths = self.finished if fate.finished else self.given_up
        lengths[fate.num_tokens] = lengths.get(fate.num_tokens, 0) + count
        self.at_limit += count * fate.at_limit
        if fate.reward is not None:
            self.scored += count
            self.scored_reward += count * fate.reward
        if fate.kept:
            self.kept += count
            self.kept_tokens += count * fate.num_tokens
            self.kept_at_limit += count * fate.at_limit
            self.kept_reward += count * (fate.reward or 0.0)

    def figures(self, limit: int) -> dict[str, float]:
        """`limit`: tokens at which a response is cut off.

        Those given up count with the tokens they had, so launched_length and launched_at_limit are
        lower bounds. Their estimates (_km) are upper bounds where none of the longest was allowed
        to finish: see `kaplan_meier`.
        """
        launched = sum(self.finished.values()) + sum(self.given_up.values())
        tokens = sum(
            n * count for counts in (self.finished, self.given_up) for n, count in counts.items()
        )
        length_km, at_limit_km = kaplan_meier(self.finished, self.given_up, limit)
        return {
            "kept_length": self.kept_tokens / max(1, self.kept),
            "launched_length": tokens / max(1, launched),
            "launched_length_km": length_km,
            "kept_at_limit": self.kept_at_limit / max(1, self.kept),
            "launched_at_limit": self.at_limit / max(1, launched),
            "launched_at_limit_km": at_limit_km,
            "kept_reward": self.kept_reward / max(1, self.kept),
            "scored_reward": self.scored_reward / max(1, self.scored),
        }


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


class Bias:
    """Over a run. A prompt that is put off starts again with the same noise: its responses count
    once, with what became of them in the end. Tokens count as often as they were sampled.
    """

    def __init__(self, max_response_tokens: int) -> None:
        self.num_rounds: Counter[str] = Counter()  # kind -> rounds
        self.max_wait_steps = 0
        self._limit = max_response_tokens
        self._tally = Tally()
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
        own = Tally()
        for group in round.groups.values():
            prompt = group.prompt.id, group.prompt.epoch
            fates = {r.index: _fate(r, r.id in kept) for r in group.responses}
            before = self._put_off.pop(prompt, {})
            for index, fate in fates.items():
                own.add(fate)
                self._tally.add(fate)
                if index in before:
                    self._tally.add(before[index], -1)
            if group.state is GroupState.PUT_OFF:
                self._put_off[prompt] = before | fates
        tokens = sum(len(r.tokens) for group in round.groups.values() for r in group.responses)
        self._tokens += tokens
        self._untrained_tokens += tokens - own.kept_tokens
        self.num_rounds[round.kind] += 1
        put_off = sum(p.since == round.step for p in backlog.put_off)
        waits = self._waits(round, backlog)
        self.max_wait_steps = max(self.max_wait_steps, waits)
        return {
            **own.figures(self._limit),
            "aborted_tokens": float(tokens - own.kept_tokens),
            "aborted_share": (tokens - own.kept_tokens) / max(1, tokens),
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
        )

    def recall(self, note: BiasNote) -> None:
        """Goes on from what another process knew."""
        self.num_rounds = Counter(note.num_rounds)
        self.max_wait_steps = note.max_wait_steps
        self._tally = note.tally
        self._put_off = {(prompt, epoch): fates for prompt, epoch, fates in note.put_off}
        self._since = {(prompt, epoch): step for prompt, epoch, step in note.since}
        self._tokens, self._untrained_tokens = note.tokens, note.untrained_tokens

    def figures(self) -> dict[str, float]:
        """Of the run so far."""
        return {
            **self._tally.figures(self._limit),
            "aborted_tokens": float(self._untrained_tokens),
            "aborted_share": self._untrained_tokens / max(1, self._tokens),
        }

    def _waits(self, round: Round, backlog: Backlog) -> int:
        """Steps for which a prompt of this round, or one in the queue, has been put off; the
        most."""
        self._since |= {(p.prompt.id, p.prompt.epoch): p.since for p in backlog.put_off}
        steps = [round.step - since for since in self._since.values()]
        for group in round.groups.values():
            if group.state is not GroupState.PUT_OFF:
                self._since.pop((group.prompt.id, group.prompt.epoch), None)
        return max([0, *steps])


def _fate(r: Response, kept: bool) -> ResponseOutcome:
    return ResponseOutcome(
        len(r.tokens), r.finish_reason is not None, r.finish_reason == "length", r.reward, kept
    )


def kaplan_meier(
    finished: Mapping[int, int], given_up: Mapping[int, int], limit: int
) -> tuple[float, float]:
    """(mean length up to `limit`, share that reaches it) of all responses, if those given up had
    gone on.

    `finished` and `given_up` count responses by their tokens; one given up after n tokens would
    have had more than n. S(t), the share longer than t, falls at each length that responses
    finished at by their share of all that had come so far (Kaplan and Meier 1958); the mean is the
    area below it. Beyond the longest that finished it stays level: where the longest were given up,
    both are upper bounds. Example: kaplan_meier({2: 1, 4: 1}, {3: 1}, 10) == (2 + 2/3 * 2, 0.0): S
    is 1, from 2 on 2/3, from 4 on 0.
    """
    at_risk = sum(finished.values()) + sum(given_up.values())
    share, area, before = 1.0 if at_risk else 0.0, 0.0, 0
    for length in sorted(n for n in finished.keys() | given_up.keys() if n < limit):
        area += share * (length - before)
        before = length
        if died := finished.get(length, 0):
            share *= 1 - died / at_risk
        at_risk -= died + given_up.get(length, 0)
    return area + share * (limit - before), share
