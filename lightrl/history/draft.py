"""Draft tokens for the running responses of one engine from earlier responses.

Stores earlier responses, the position of each running response in them, and draft windows. The
engine accepts a drafted token only if it is the token that the coupled sampler draws, so drafts
change the speed of a response, never its tokens. Reads no clock.

The window of a response is the number of tokens drafted for one step. It doubles when all were
accepted and halves when one was not (as in RhymeRL's release), up to the width that the gate
allows.
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
MIN_SHARE = 0.2  # a draft ends where its tokens have less of the weight of all continuations
MAX_BYTES = 512 << 20  # of stored responses; the oldest prompts are evicted first
MAX_GROUPS = 10_000
# steps between two rebuilds of indexes, so that several groups are sorted together
INDEX_EVERY = 8
MAX_SORTED = 1 << 20  # tokens in one index of several prompts: building it delays a step
LEAST_WEIGHT = 0.1  # of the worst response relative to the best, where rewards count


@dataclass(slots=True)
class _Counts:
    """Counters of drafts, as in `Drafting`."""

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
    # of each, its name, if it ran here
    names: list[str] = field(default_factory=list[str])
    weights: list[float] = field(default_factory=list[float])
    # with the context before each response
    num_tokens: int = 0
    # of them in `index`
    num_indexed: int = 0
    index: SuffixIndex | None = None
    # number of this group in `index`
    book: int = 0
    # its last LONGEST tokens, once a response runs
    prompt: Sequence[int] = ()
    num_running: int = 0
    # tokens of the running responses, which draft from each other and from themselves
    num_live: int = 0

    @property
    def is_stale(self) -> bool:
        """Return whether the tokens have doubled since the last index: each is sorted few times."""
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
    # of the current step
    draft: list[int] = field(default_factory=list[int])
    # where the index expects what follows the draft
    after: int = NOWHERE


class Drafter:
    """Makes drafts for the responses of one engine.

    Example: remember([PromptHistory("p@0", ...)]), start("p@0#1", prompt, ()), drafts([("p@0#1",
    60)]) -> [[5, 6, 7, 8]], and took("p@0#1", [5, 6, 9]): two were accepted, 9 replaces 7.
    """

    def __init__(
        self,
        max_window: int,
        by_reward: bool = False,
        is_padded: bool = False,
        max_bytes: int = MAX_BYTES,
        vocabulary: int = 1 << 31,
    ) -> None:
        """`max_window`: tokens, at least 1. `by_reward`: weight continuations by reward instead of
        equally. `is_padded`: see `Gate`. Token ids >= `vocabulary` are never drafted.
        """
        self._vocabulary = vocabulary
        self.gate = Gate(max_window, is_padded)
        self._max_window = max_window
        self._by_reward = by_reward
        self._max_tokens = max_bytes // (4 + BYTES_PER_TOKEN)  # 4: the response itself
        self._num_tokens = 0
        self._counts = _Counts()
        self._steps_since_index = 0
        # a running group has responses but no index
        self._is_urgent = False
        self._stale: dict[int, _Known] = {}  # by identity, groups to index again
        self._known: dict[str, _Known] = {}  # by group; oldest first
        self._cursors: dict[str, _Cursor] = {}

    @property
    def counts(self) -> Drafting:
        c = self._counts
        return Drafting(c.drafted, c.accepted, c.forwards, c.emitted, c.draft_s, c.engine_s)

    def remember(self, histories: Iterable[PromptHistory]) -> None:
        """Store earlier responses, except duplicates and those with invalid tokens."""
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
                    self._add(known, "", tokens, weight)
        self._evict()

    def start(self, response: str, prompt: Sequence[int], prefix: Sequence[int]) -> None:
        """Add a response that starts, or continues after `prefix`, its earlier turns included."""
        known = self._group(group_of(response))
        if prefix and response in known.names:
            self._remove(known, known.names.index(response))
        known.prompt = list(prompt[-LONGEST:])
        known.num_running += 1
        known.num_live += len(prefix)
        self._is_urgent |= known.index is None and known.num_tokens > 0
        self._cursors[response] = _Cursor(known, [*known.prompt, *prefix])

    def drafts(self, batch: Sequence[tuple[str, int]]) -> list[list[int]]:
        """Return the drafted tokens of each (response, most tokens), possibly none."""
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
        """Add the tokens that a step has sampled for a response, with or without a draft."""
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
        """Discard the last drafts."""
        for c in self._cursors.values():
            c.draft = []

    def end(self, response: str, is_finished: bool) -> None:
        """Remove a response; a finished one is kept as a source of drafts for its group."""
        c = self._cursors.pop(response, None)
        if c is None:
            return
        known = c.known
        known.num_running -= 1
        known.num_live -= len(c.tokens) - len(known.prompt)
        if is_finished and self._known.get(group_of(response)) is known:
            weights = known.weights
            mean = sum(weights) / len(weights) if weights else 1.0
            self._add(known, response, array("i", c.tokens[len(known.prompt) :]), mean)
            self._evict()
        elif not known.num_running:
            self._stale.pop(id(known), None)

    def stepped(
        self, batch: int, num_tokens: int, engine_s: float, draft_s: float, is_pure: bool
    ) -> None:
        """Record a step for `batch` responses: tokens in its pass, padding included, its seconds,
        and the seconds spent on drafting. `is_pure`: it had no prefill, so its time shows the cost
        of tokens.
        """
        self._counts.engine_s += engine_s
        self._counts.draft_s += draft_s
        if is_pure and batch:
            # An index serves many steps: building it is not the cost of one draft.
            usual_s = engine_s - draft_s if self._steps_since_index == 0 else engine_s
            self.gate.observe(batch, num_tokens, usual_s)

    def _judge(self, c: _Cursor, draft: list[int], tokens: list[int]) -> None:
        """Compare a draft with the sampled `tokens`: the accepted ones and mostly one more."""
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
        """Build one index for all stale running groups: numpy's cost is per call."""
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

    def _add(self, known: _Known, name: str, tokens: "array[int]", weight: float) -> None:
        known.responses.append(tokens)
        known.names.append(name)
        known.weights.append(weight)
        known.num_tokens += LONGEST + len(tokens)
        self._num_tokens += LONGEST + len(tokens)
        if known.is_stale:
            self._stale[id(known)] = known
            self._is_urgent |= known.index is None and known.num_running > 0

    def _remove(self, known: _Known, i: int) -> None:
        known.num_tokens -= LONGEST + len(known.responses[i])
        self._num_tokens -= LONGEST + len(known.responses[i])
        del known.responses[i], known.names[i], known.weights[i]

    def _evict(self) -> None:
        """Evict the oldest groups. The data of running responses stay in memory until they end."""
        while self._known and (
            self._num_tokens > self._max_tokens or len(self._known) > MAX_GROUPS
        ):
            known = self._known.pop(next(iter(self._known)))
            self._num_tokens -= known.num_tokens
            if not known.num_running:
                self._stale.pop(id(known), None)


def _book(known: _Known, live: Sequence[Sequence[int]]) -> Book:
    """Build a Book; a running response has no reward yet and gets the mean weight."""
    mean = sum(known.weights) / len(known.weights) if known.weights else 1.0
    return Book(known.prompt, [*known.responses, *live], [*known.weights, *[mean] * len(live)])


def group_of(response: str) -> str:
    """Return the group of a response id: "p7@0" for "p7@0#3"."""
    return response.rpartition("#")[0]


def _weights(rewards: Sequence[float | None]) -> list[float]:
    """Scale rewards from LEAST_WEIGHT for the lowest to 1 for the highest; None is the middle."""
    known = [r for r in rewards if r is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if low == high:
        return [1.0] * len(rewards)
    middle = (LEAST_WEIGHT + 1) / 2
    span = (1 - LEAST_WEIGHT) / (high - low)
    return [middle if r is None else LEAST_WEIGHT + (r - low) * span for r in rewards]
