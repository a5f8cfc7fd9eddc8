"""The index of earlier responses against a slow search through them, where ambiguity is common."""

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from lightrl.history.index import NOWHERE, ORDERS, Book, SuffixIndex

LONG = ORDERS[0]
Place = tuple[int, int]  # response, index in it


def one_book(
    prompt: Sequence[int], responses: Sequence[Sequence[int]], weights: Sequence[float]
) -> SuffixIndex:
    return SuffixIndex([Book(prompt, responses, weights)])


def drafted(index: SuffixIndex, at: int, length: int, min_share: float) -> list[int]:
    return index.draft(at, length, min_share)[0]


class Oracle:
    """As `SuffixIndex`, by looking everywhere."""

    def __init__(
        self, prompt: Sequence[int], responses: Sequence[Sequence[int]], weights: Sequence[float]
    ) -> None:
        self.prompt, self.responses, self.weights = list(prompt), responses, weights

    def before(self, place: Place, order: int) -> tuple[int, ...]:
        """The `order` tokens before a place; -1 before the prompt."""
        response, i = place
        return tuple(([-1] * LONG + self.prompt + list(self.responses[response][:i]))[-order:])

    def places(self, context: Sequence[int]) -> list[Place]:
        everywhere = [(r, i) for r, tokens in enumerate(self.responses) for i in range(len(tokens))]
        return [place for place in everywhere if self.before(place, len(context)) == tuple(context)]

    def best(self, places: list[Place]) -> tuple[Place, float]:
        """Heaviest continuation, the newest where two weigh the same; and its share."""
        mass: dict[int, float] = defaultdict(float)
        newest: dict[int, Place] = {}
        for r, i in places:
            token = self.responses[r][i]
            mass[token] += self.weights[r]
            newest[token] = max(newest.get(token, (r, i)), (r, i))
        token = max(mass, key=lambda t: (round(mass[t], 6), newest[t]))
        return newest[token], mass[token] / sum(mass.values())

    def locate(self, tokens: Sequence[int]) -> Place | None:
        for order in ORDERS:
            context = ([-1] * LONG + list(tokens))[-order:]
            if (order == LONG or len(tokens) >= order) and (places := self.places(context)):
                return self.best(places)[0]
        return None

    def onward(self, place: Place) -> tuple[Place, float] | None:
        """From a place to what is expected after it."""
        r, i = place
        if i + 1 == len(self.responses[r]):
            return None
        return self.best(self.places(self.before((r, i + 1), LONG)))

    def draft(self, place: Place | None, length: int, min_share: float) -> list[int]:
        found: list[int] = []
        likely = 1.0
        while place is not None and len(found) < length and likely >= min_share:
            r, i = place
            found.append(self.responses[r][i])
            place, share = self.onward(place) or (None, 1.0)
            likely *= share
        return found


def history(seed: int) -> tuple[list[int], list[list[int]], list[float]]:
    """A prompt, responses that are variations of each other, weights of which many are equal."""
    rng = random.Random(seed)
    alphabet = rng.choice((2, 3, 5, 50))
    prompt = [rng.randrange(alphabet) for _ in range(rng.choice((0, 1, 4, 7, 12)))]
    responses: list[list[int]] = []
    for _ in range(rng.randrange(7)):
        if responses and rng.random() < 0.7:
            base = rng.choice(responses)
            changed = [rng.randrange(alphabet) if rng.random() < 0.1 else t for t in base]
            responses.append(
                changed[: rng.randrange(len(base) + 1)] if rng.random() < 0.3 else changed
            )
        else:
            responses.append([rng.randrange(alphabet) for _ in range(rng.randrange(40))])
    weights = [rng.choice((0.1, 0.5, 1.0, 1.0)) for _ in responses]
    return prompt, responses, weights


@pytest.mark.parametrize("seed", range(150))
def test_what_follows_is_what_a_search_through_all_responses_finds(seed: int) -> None:
    prompt, responses, weights = history(seed)
    index, oracle = one_book(prompt, responses, weights), Oracle(prompt, responses, weights)
    rng = random.Random(-seed)
    for _ in range(40):
        written = list(rng.choice(responses))[: rng.randrange(40)] if responses else []
        for i in range(len(written)):
            if rng.random() < 0.1:
                written[i] = rng.randrange(5)
        tokens = [*prompt, *written]
        at, place = index.locate(tokens[-LONG:]), oracle.locate(tokens)
        assert (at == NOWHERE) == (place is None)
        length, min_share = rng.randrange(1, 40), rng.choice((0.0, 0.2, 0.3, 0.6))
        assert drafted(index, at, length, min_share) == oracle.draft(place, length, min_share)


@pytest.mark.parametrize("seed", range(50))
def test_to_advance_along_a_draft_is_to_follow_it(seed: int) -> None:
    prompt, responses, weights = history(seed)
    index = one_book(prompt, responses, weights)
    for tokens in responses:
        for i in range(len(tokens)):
            at = index.locate([*prompt, *tokens[:i]][-LONG:])
            draft = drafted(index, at, 60, 0.0)
            assert draft, "every context of the history is known"
            assert index.advance(at, draft[0] + 1) == NOWHERE
            for k, token in enumerate(draft):
                assert drafted(index, at, 60 - k, 0.0) == draft[k:]
                at = index.advance(at, token)
            assert at == NOWHERE or len(draft) == 60


def test_the_longest_context_decides() -> None:
    index = one_book(
        (9,),
        [[1, 2, 3, 4, 5, 6, 7, 100], [0, 0, 3, 4, 5, 6, 7, 50], [0, 0, 0, 0, 5, 6, 7, 20]],
        [1.0] * 3,
    )

    def following(*tail: int) -> list[int]:
        return drafted(index, index.locate(tail), 1, 0.0)

    assert following(1, 2, 3, 4, 5, 6, 7) == [100]
    assert following(8, 8, 3, 4, 5, 6, 7) == [50]  # of two the newer
    assert following(8, 8, 8, 8, 5, 6, 7) == [20]
    assert following(8, 8, 8, 8, 8, 6, 7) == []


def test_the_heavier_continuation_wins_and_of_equals_the_newest() -> None:
    prompt = range(7)
    frequent = one_book(prompt, [[1], [1], [2]], [1.0] * 3)
    rewarded = one_book(prompt, [[1], [1], [2]], [0.1, 0.1, 1.0])
    newest = one_book(prompt, [[1], [2], [2], [1], [3]], [1.0] * 5)
    assert [drafted(i, i.locate(prompt), 1, 0.0) for i in (frequent, rewarded, newest)] == [
        [1],
        [2],
        [1],
    ]


def test_a_draft_ends_where_it_becomes_ambiguous() -> None:
    prompt = list(range(7))
    index = one_book(prompt, [[10, 11, k, 40] for k in range(20, 24)], [1.0] * 4)
    at = index.locate(prompt)
    assert drafted(index, at, 9, 0.26) == [10, 11]  # then four ways, each with a quarter
    assert drafted(index, at, 9, 0.25) == [10, 11, 23, 40]


def test_a_draft_never_crosses_the_end_of_a_response() -> None:
    prompt = list(range(7))
    index = one_book(prompt, [[10, 11, 12], [20, 21]], [2.0, 1.0])
    assert drafted(index, index.locate(prompt), 9, 0.0) == [10, 11, 12]
    assert index.locate([*prompt, 20, 21][-LONG:]) == NOWHERE
    at = index.locate([*prompt, 20][-LONG:])
    assert drafted(index, at, 9, 0.0) == [21]
    assert index.advance(at, 21) == NOWHERE


@pytest.mark.parametrize("responses", [[], [[]], [[], []]])
def test_nothing_follows_from_nothing(responses: list[list[int]]) -> None:
    index = one_book((1, 2), responses, [1.0] * len(responses))
    assert index.locate((1, 2)) == index.advance(NOWHERE, 1) == NOWHERE
    assert drafted(index, NOWHERE, 9, 0.0) == []


def test_empty_responses_are_passed_over() -> None:
    index = one_book((1, 2), [[], [5, 6], []], [3.0, 1.0, 3.0])
    assert drafted(index, index.locate((1, 2)), 9, 0.0) == [5, 6]


@pytest.mark.parametrize("prompt", [(), (1,), (1, 2)])
def test_a_short_prompt_is_a_context_of_its_own(prompt: tuple[int, ...]) -> None:
    index = one_book(prompt, [[5, 6, 7, 8]], [1.0])
    assert drafted(index, index.locate(prompt), 9, 0.0) == [5, 6, 7, 8]
    assert drafted(index, index.locate((*prompt, 5)), 9, 0.0) == [6, 7, 8]
    assert index.locate((3,)) == NOWHERE


def test_token_ids_of_31_bits_cost_no_more_than_a_wrong_draft() -> None:
    high = 2**31 - 1
    index = one_book((high, 0), [[high, high - 1, 2**20, 0, 5]], [1.0])
    assert drafted(index, index.locate((high, 0)), 9, 0.0) == [high, high - 1, 2**20, 0, 5]
    alike = one_book((1,), [[2**20 + 3, 8], [3, 9]], [1.0, 1.0])  # told apart by 20 bits
    assert drafted(alike, alike.locate((1,)), 9, 0.0) in ([2**20 + 3, 8], [3, 9])
