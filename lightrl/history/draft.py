"""Drafts from history for the responses that run in one engine: what is tried, and how much of it.

Owns what an engine knows of earlier responses, where each running response stands in it, and the
windows. Whether a drafted token enters a response is decided by the engine alone: it must be the
token that the coupled sampler draws. So nothing here can change a response, only how soon it is
there. Reads no clock.

A window is the number of tokens drafted at once for a response. It doubles when all were kept and
halves when one was not (as in RhymeRL's release), below the width that the gate allows the whole
batch.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lightrl.history.gate import Gate
from lightrl.history.index import BYTES_PER_TOKEN, LONGEST, NOWHERE, Book, SuffixIndex
from lightrl.messages.load import Drafting
from lightrl.messages.responses import PromptHistory
from lightrl.wire import unpack_i32

FIRST_WINDOW = 4
MIN_WINDOW = 2
MIN_SHARE = 0.2  # a draft ends where its tokens together have less of the history's weight
MAX_BYTES = 512 << 20  # of what an engine knows; the prompts that came first go first
MAX_GROUPS = 10_000
# steps between two indexes of what was indexed before: it waits, to be sorted together
INDEX_EVERY = 8
MAX_SORTED = 1 << 20  # tokens in one index, but for a single prompt: making it holds a step up
LEAST_WEIGHT = 0.1  # of the worst response against the best one, where rewards count


@dataclass(slots=True)
class _Counts:
    """As in `Drafting`."""

    drafted: int = 0
    accepted: int = 0
    forwards: int = 0
    emitted: int = 0
    draft_s: float = 0.0
    engine_s: float = 0.0


@dataclass(slots=True)
class _Known:
    """The responses to one prompt."""

    responses: "list[array[int]]" = field(default_factory=lambda: [])
    weights: list[float] = field(default_factory=list[float])
    # with the context before each response
    num_tokens: int = 0
    # of them in `index`
    num_indexed: int = 0
    index: SuffixIndex | None = None
    # there
    book: int = 0
    # its last LONGEST tokens, once a response has begun to run
    prompt: Sequence[int] = ()
    num_running: int = 0
    # tokens of the responses that run, which draft from each other and from themselves
    num_live: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether what is known has doubled: so no token is sorted more than a few times."""
        known = self.num_tokens + self.num_live
        return known > 0 and known >= 2 * self.num_indexed


@dataclass(slots=True)
class _Cursor:
    """A running response."""

    known: _Known
    # the last LONGEST of the prompt, and the response so far
    tokens: list[int]
    index: SuffixIndex | None = None
    # where the index expects the next token
    at: int = NOWHERE
    window: int = FIRST_WINDOW
    # of the step that runs
    draft: list[int] = field(default_factory=list[int])
    # where the index expects what follows the draft
    after: int = NOWHERE


class Drafter:
    """Example: remember([PromptHistory("p@0", ...)]), start("p@0#1", prompt, ()), drafts([("p@0#1",
    60)]) -> [[5, 6, 7, 8]], and took("p@0#1", [5, 6, 9]): two were kept, 9 was drawn instead of 7.
    """

    def __init__(
        self,
        max_window: int,
        by_reward: bool = False,
        is_padded: bool = False,
        max_bytes: int = MAX_BYTES,
        vocabulary: int = 1 << 31,
    ) -> None:
        """`max_window` tokens, at least 1. `by_reward`: continuations that earned more weigh more;
        else each response counts once. `is_padded`: see `Gate`. Token ids from `vocabulary` on are
        never drafted.
        """
        self._vocabulary = vocabulary
        self.gate = Gate(max_window, is_padded)
        self._max_window = max_window
        self._by_reward = by_reward
        self._max_tokens = max_bytes // (4 + BYTES_PER_TOKEN)  # 4: the response itself
        self._num_tokens = 0
        self._counts = _Counts()
        self._steps_since_index = 0
        # something is known of a group that runs, and it has no index at all
        self._is_urgent = False
        self._stale: dict[int, _Known] = {}  # by identity, what has doubled since it was indexed
        self._known: dict[str, _Known] = {}  # by group; oldest first
        self._cursors: dict[str, _Cursor] = {}

    @property
    def counts(self) -> Drafting:
        c = self._counts
        return Drafting(c.drafted, c.accepted, c.forwards, c.emitted, c.draft_s, c.engine_s)

    def remember(self, histories: Iterable[PromptHistory]) -> None:
        """Takes in what was answered earlier, but what is known already and what cannot be."""
        for h in histories:
            known = self._group(h.group)
            before = list(known.responses)
            weights = _weights(h.rewards) if self._by_reward else [1.0] * len(h.responses)
            for data, weight in zip(h.responses, weights, strict=False):
                tokens = array("i", unpack_i32(data) if len(data) % 4 == 0 else ())
                if (
                    tokens
                    and min(tokens) >= 0
                    and max(tokens) < self._vocabulary
                    and tokens not in before
                ):
                    self._add(known, tokens, weight)
        self._evict()

    def start(self, response: str, prompt: Sequence[int], prefix: Sequence[int]) -> None:
        """A response begins to run, or goes on after `prefix`."""
        known = self._group(group_of(response))
        known.prompt = list(prompt[-LONGEST:])
        known.num_running += 1
        known.num_live += len(prefix)
        self._is_urgent |= known.index is None and known.num_tokens > 0
        self._cursors[response] = _Cursor(known, [*known.prompt, *prefix])

    def drafts(self, batch: Sequence[tuple[str, int]]) -> list[list[int]]:
        """For (response, tokens for which it has room) the tokens to try, maybe none."""
        self._steps_since_index += 1
        width = self.gate.width(len(batch)) if batch else 0
        if not width:
            return [[] for _ in batch]
        if self._stale and (self._is_urgent or self._steps_since_index > INDEX_EVERY):
            self._make_index()
        drafts: list[list[int]] = []
        for response, room in batch:
            c = self._cursors[response]
            length = min(c.window, width, room)
            if (index := c.known.index) is not None and length > 0:
                if index is not c.index:
                    c.index, c.at = index, NOWHERE
                if c.at == NOWHERE:
                    c.at = index.locate(c.tokens[-LONGEST:], c.known.book)
                if c.at != NOWHERE:
                    c.draft, c.after = index.draft(c.at, length, MIN_SHARE)
            drafts.append(c.draft)
        self.gate.drafted(len(batch), sum(map(bool, drafts)))
        self._counts.drafted += sum(map(len, drafts))
        return drafts

    def took(self, response: str, tokens: list[int]) -> None:
        """What the step brought for a response, in which a draft was verified or not."""
        c = self._cursors[response]
        c.tokens.extend(tokens)
        c.known.num_live += len(tokens)
        if c.known.is_stale:
            self._stale[id(c.known)] = c.known
        self._counts.forwards += 1
        self._counts.emitted += len(tokens)
        if draft := c.draft:
            c.draft = []
            self._judge(c, draft, tokens)
        elif c.index is not None:
            for token in tokens:
                c.at = c.index.advance(c.at, token)

    def drop(self) -> None:
        """The drafts that were made last will not be verified."""
        for c in self._cursors.values():
            c.draft = []

    def end(self, response: str, is_finished: bool) -> None:
        """It runs no more. What has finished helps its siblings."""
        c = self._cursors.pop(response, None)
        if c is None:
            return
        known = c.known
        known.num_running -= 1
        known.num_live -= len(c.tokens) - len(known.prompt)
        if is_finished and self._known.get(group_of(response)) is known:
            weights = known.weights
            mean = sum(weights) / len(weights) if weights else 1.0
            self._add(known, array("i", c.tokens[len(known.prompt) :]), mean)
            self._evict()
        elif not known.num_running:
            self._stale.pop(id(known), None)

    def stepped(
        self, batch: int, num_tokens: int, engine_s: float, draft_s: float, is_pure: bool
    ) -> None:
        """A step for `batch` responses is done: tokens in its pass, padding included; seconds of
        all of it, and of those on drafting. `is_pure`: nothing was prefilled in it, so that it
        tells what tokens cost.
        """
        self._counts.engine_s += engine_s
        self._counts.draft_s += draft_s
        if is_pure and batch:
            # An index is made once for many steps: it is not what a draft costs.
            usual_s = engine_s - draft_s if self._steps_since_index == 0 else engine_s
            self.gate.observe(batch, num_tokens, usual_s)

    def _judge(self, c: _Cursor, draft: list[int], tokens: list[int]) -> None:
        """`tokens` are those of the draft that were kept, and mostly one more."""
        most = min(len(draft), len(tokens))
        kept = most
        if draft != tokens[: len(draft)]:
            kept = next((i for i in range(most) if draft[i] != tokens[i]), most)
        self._counts.accepted += kept
        self.gate.verified(kept, int(kept < most))
        c.at = NOWHERE
        if kept < most:
            c.window = max(MIN_WINDOW, c.window // 2)
        else:
            if len(draft) >= c.window:
                c.window = min(2 * c.window, self._max_window)
            if len(tokens) == len(draft) + 1 and c.index is not None:
                c.at = c.index.advance(c.after, tokens[-1])

    def _make_index(self) -> None:
        """One for all groups that run and need it: the arrays are small, and numpy's price is by
        the call."""
        self._is_urgent = False
        stale = [known for known in self._stale.values() if known.num_running]
        if not stale:
            return
        total = accumulate(known.num_tokens + known.num_live for known in stale)
        stale = stale[: max(1, sum(n <= MAX_SORTED for n in total))]
        live: dict[int, list[list[int]]] = {id(known): [] for known in stale}
        for c in self._cursors.values():
            if id(c.known) in live:
                live[id(c.known)].append(c.tokens[len(c.known.prompt) :])
        index = SuffixIndex([_book(known, live[id(known)]) for known in stale])
        for i, known in enumerate(stale):
            known.index, known.book = index, i
            known.num_indexed = known.num_tokens + known.num_live
            del self._stale[id(known)]
        self._is_urgent = any(k.index is None and k.num_running for k in self._stale.values())
        self._steps_since_index = 0

    def _group(self, group: str) -> _Known:
        return self._known.setdefault(group, _Known())

    def _add(self, known: _Known, tokens: "array[int]", weight: float) -> None:
        known.responses.append(tokens)
        known.weights.append(weight)
        known.num_tokens += LONGEST + len(tokens)
        self._num_tokens += LONGEST + len(tokens)
        if known.is_stale:
            self._stale[id(known)] = known
            self._is_urgent |= known.index is None and known.num_running > 0

    def _evict(self) -> None:
        """What a running response stands in stays in memory until it has ended, but is counted no
        more."""
        while self._known and (
            self._num_tokens > self._max_tokens or len(self._known) > MAX_GROUPS
        ):
            known = self._known.pop(next(iter(self._known)))
            self._num_tokens -= known.num_tokens
            if not known.num_running:
                self._stale.pop(id(known), None)


def _book(known: _Known, live: Sequence[Sequence[int]]) -> Book:
    """What runs has no reward yet: it weighs as much as the mean of what has ended."""
    mean = sum(known.weights) / len(known.weights) if known.weights else 1.0
    return Book(known.prompt, [*known.responses, *live], [*known.weights, *[mean] * len(live)])


def group_of(response: str) -> str:
    """The group of a response id: that of "p7@0#3" is "p7@0"."""
    return response.rpartition("#")[0]


def _weights(rewards: Sequence[float | None]) -> list[float]:
    """From LEAST_WEIGHT for the lowest reward to 1 for the highest; without a score, in the
    middle."""
    known = [r for r in rewards if r is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if low == high:
        return [1.0] * len(rewards)
    middle = (LEAST_WEIGHT + 1) / 2
    span = (1 - LEAST_WEIGHT) / (high - low)
    return [middle if r is None else LEAST_WEIGHT + (r - low) * span for r in rewards]
