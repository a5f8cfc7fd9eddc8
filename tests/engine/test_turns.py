"""Episodes: the turns of a response, with tokens between them that were not sampled."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import pytest

from lightrl.engine.base import EngineSpec
from lightrl.engine.emulated import EmulatedEngine
from lightrl.engine.process import build_engine
from lightrl.engine.stop_strings import StoppingEngine, StopStrings
from lightrl.history.gate import Gate
from lightrl.messages.responses import Sampling
from tests.engine.conftest import EngineClient, request_of
from tests.engine.test_stop_strings import text

FIRST = [2 + (3 * j) % 30 for j in range(140)]  # more than a block of vLLM's cache
INSERTED = [9, 8, 7, 6]
TURN = 20
SAMPLING = Sampling(1.0)


def play(engine: EngineClient, name: str, seed: int, is_fresh: bool = False) -> Any:
    """Tokens of the whole episode, logprobs of the sampled ones, and what was cached of each turn.
    `is_fresh`: each turn is a response that the engine does not know."""
    held, logprobs, cached = list(FIRST), [], []
    for turn in range(3):
        start = len(held)
        response = f"{name}.{turn}" if is_fresh else name
        request = request_of(
            response, [], TURN, seed, prefix=held, attempt=turn + 1, turn_start=start
        )
        [outcome] = engine.run(1, SAMPLING, request)
        assert (outcome.offset, len(outcome.tokens), outcome.finish) == (start, TURN, "length")
        held += [*outcome.tokens, *INSERTED]
        logprobs += outcome.logprobs
        cached.append(outcome.num_cached)
    return held, logprobs, cached


def test_turns_are_what_fresh_requests_with_the_whole_prefix_give(engine):
    held, logprobs, cached = play(engine, "e@0#0", 5)
    if engine.kind == "vllm":  # whole blocks, whoever computed them
        assert 128 <= cached[1] <= cached[2] < len(held)
    else:
        assert cached == [0, len(FIRST) + TURN - 1, len(FIRST) + 2 * TURN + len(INSERTED) - 1]
    fresh_held, fresh_logprobs, cached = play(engine, "f@0#0", 5, is_fresh=True)
    assert fresh_held == held
    assert fresh_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert engine.kind == "vllm" or cached == [0, 0, 0]
    if engine.kind != "emulated":
        start = len(FIRST) + TURN + len(INSERTED)
        expected = engine.tiny.reference(1, held[:start], 5, SAMPLING, TURN)
        assert expected[0] == held[start : start + TURN]
    # The second turn once more, resumed in its middle by an engine that has its row no longer.
    engine.load(1)
    start = len(FIRST) + TURN + len(INSERTED)
    middle = start + TURN // 2
    request = request_of("e@0#0", [], TURN // 2, 5, held[:middle], attempt=9, turn_start=start)
    [rest] = engine.run(1, SAMPLING, request)
    assert rest.tokens == held[middle : start + TURN]
    assert engine.kind == "vllm" or rest.num_cached == 0


def test_a_turn_that_does_not_lie_in_its_prefix_is_refused(engine):
    engine.failures.clear()
    engine.generate(1, SAMPLING, request_of("bad", [4], 5, prefix=[5, 6], turn_start=3))
    engine.until(lambda: engine.failures)
    assert engine.failures[0].reason == "bad: turn_start = 3: must be within the prefix"


# The torch engine's parked rows, in this process


class Open(Gate):
    """Drafts always pay."""

    def width(self, batch):
        return self.max_width


@pytest.fixture(scope="module")
def build(tiny) -> Iterator[Callable[..., Any]]:
    built = []

    def new(**fields: Any) -> Any:
        spec = EngineSpec("torch", str(tiny.dir), "float32", 512, **{"slots": 4, **fields})
        built.append(build_engine(spec))
        built[-1].load_weights(tiny.files[1])
        if spec.max_window:
            built[-1]._drafter.gate = Open(spec.max_window, is_padded=True)
        return built[-1]

    yield new
    for engine in built:
        engine.close()


@dataclass
class Episode:
    name: str
    held: list[int]
    # lengths of the turns that are left
    turns: list[int]
    attempt: int = 0
    turn_start: int = 0
    logprobs: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def ask(self) -> Any:
        self.attempt += 1
        new = self.turns[0] - (len(self.held) - self.turn_start)
        seed = crc32(self.name.encode())
        return request_of(
            self.name, [], new, seed, self.held, self.attempt, turn_start=self.turn_start
        )


def episodes(rng: random.Random) -> list[Episode]:
    """Some begin alike, as those of a group do."""
    return [
        Episode(
            f"p{i // 3}@0#{i}",
            [2 + (i // 3 + 3 * j) % 30 for j in range(rng.choice((3, 40)))],
            [rng.randint(1, 40) for _ in range(rng.randint(1, 4))],
        )
        for i in range(12)
    ]


def run_all(engine: Any, tiny: Any, seed: int, disturb: bool) -> list[Episode]:
    """All episodes at once; `disturb`: turns are aborted, resumed and begin in any order, and
    weights are loaded."""
    all_of_them = episodes(random.Random(seed))
    rng = random.Random(seed + 1)
    for e in all_of_them:
        e.turn_start = len(e.held)
    by_name = {e.name: e for e in all_of_them}
    idle, running = list(all_of_them), set()
    while idle or running:
        while idle and (not running or rng.random() < 0.5):
            e = idle.pop(rng.randrange(len(idle)) if disturb else 0)
            engine.add(e.ask(), SAMPLING)
            running.add(e.name)
        if disturb and rng.random() < 0.03:
            engine.load_weights(tiny.files[1])
        if disturb and running and rng.random() < 0.1:
            name = rng.choice(sorted(running))
            engine.abort(name)
            running.remove(name)
            idle.append(by_name[name])
        for d in engine.step():
            e = by_name[d.response]
            e.held += d.token_ids
            e.logprobs += d.logprobs
            if d.finish_reason:
                e.cached.append(d.num_cached)
                running.remove(e.name)
                e.turns.pop(0)
                if e.turns:
                    e.held += [(7 * len(e.held) + k) % 32 for k in range(len(e.turns))]
                    e.turn_start = len(e.held)
                    idle.append(e)
    return sorted(all_of_them, key=lambda e: e.name)


@pytest.mark.parametrize("window", [0, 8])
def test_parked_rows_change_no_token(build, tiny, window):
    plain, num_reused = build(is_deterministic=True), dict.fromkeys((1, 4, 24), 0)
    for seed in range(2):
        expected = run_all(plain, tiny, seed, disturb=False)
        assert not any(n for e in expected for n in e.cached)
        for slots in num_reused:
            engine = build(slots=slots, max_window=window)
            found = run_all(engine, tiny, seed, disturb=True)
            for e, f in zip(expected, found, strict=True):
                assert f.held == e.held
                assert f.logprobs == pytest.approx(e.logprobs, abs=1e-4)
            num_reused[slots] += sum(n > 0 for e in found for n in e.cached)
    assert num_reused[24] > 15
    assert num_reused[4] > 3


def one(engine: Any, request: Any) -> tuple[list[int], int | None]:
    engine.add(request, SAMPLING)
    tokens: list[int] = []
    num_cached = None
    while engine.num_unfinished():
        for d in engine.step():
            tokens += d.token_ids
            num_cached = d.num_cached
    return tokens, num_cached


def test_a_row_is_parked_for_a_turn_until_weights_are_loaded_or_its_slot_is_wanted(build, tiny):
    engine = build(slots=2, can_sleep=True)
    request = request_of("a", [], 10, prefix=FIRST)
    held = FIRST + one(engine, request)[0]

    def again(tokens: list[int] = held, first: list[int] = FIRST) -> int | None:
        one(engine, request_of("a", [], 10, prefix=first))
        ask = request_of("a", [], 5, prefix=tokens, turn_start=len(tokens))
        return one(engine, ask)[1]

    assert again() == len(held) - 1
    assert again([*held[:144], 3, 3]) == 144  # as far as they agree
    assert again(held[:20]) == 19  # a logit must be computed
    assert again([5, *held]) == 0
    one(engine, request)
    engine.load_weights(tiny.files[1])
    assert one(engine, request)[1] == 0
    assert one(engine, request)[1] == len(FIRST) - 1
    engine.sleep()
    engine.wake()
    engine.load_weights(tiny.files[1])
    assert one(engine, request)[1] == 0
    one(engine, replace(request, response="b"))
    assert one(engine, request)[1] == len(FIRST) - 1
    one(engine, replace(request, response="c"))  # in the place of b, which was parked before a
    assert one(engine, replace(request, response="b"))[1] == 0
    assert one(engine, replace(request, response="c"))[1] == len(FIRST) - 1


def both(engine: Any, *requests: Any) -> list[list[int]]:
    tokens: dict[str, list[int]] = {r.response: [] for r in requests}
    for r in requests:
        engine.add(r, SAMPLING)
    while engine.num_unfinished():
        for d in engine.step():
            tokens[d.response] += d.token_ids
    return list(tokens.values())


def test_a_parked_row_is_moved_where_it_is_in_the_way_and_copied_where_contexts_are_the_same(build):
    request = request_of("a", [], 10, prefix=FIRST)
    expected, _ = one(build(), request)
    engine = build(slots=3)
    noise = [(7 * j * j) % 31 for j in range(160)]
    one(engine, request_of("a", [], 10, prefix=noise))  # into the last row
    one(engine, replace(request, response="b"))
    both(engine, *(request_of(name, noise, 30) for name in "cd"))
    assert one(engine, replace(request, response="b")) == (expected, len(FIRST) - 1)
    found = both(engine, request, replace(request, response="b"))
    assert found == [expected, expected]
    assert one(engine, request) == (expected, len(FIRST) - 1)


def test_single_turns_are_not_parked(build):
    engine = build()
    request = request_of("a", FIRST, 10)
    tokens, num_cached = one(engine, request)
    assert num_cached == 0
    rest = request_of("a", FIRST, 10 - 4, prefix=tokens[:4])
    assert one(engine, rest) == (tokens[4:], 0)
    assert not engine._parked._rows


def test_a_turn_that_ended_with_a_stop_string_is_parked(build):
    inner = build()
    tokens, _ = one(inner, request_of("x", [], 30, prefix=FIRST))
    engine = StoppingEngine(inner, StopStrings((text(tokens[10:13]),), text))
    found, _ = one(engine, request_of("a", [], 30, prefix=FIRST))
    assert text(found).endswith(text(tokens[10:13]))
    held = [*FIRST, *found, 4, 5]
    ask = request_of("a", [], 5, prefix=held, turn_start=len(held))
    assert one(engine, ask)[1] == len(held) - 3


def test_an_emulated_engine_pays_for_what_is_not_parked(tiny):
    args = {"prefill_ms": 1e-6, "kv_tokens": 512.0}
    spec = EngineSpec("emulated", str(tiny.dir), "float32", 512, 2, engine_args=args)
    engine = EmulatedEngine(spec)
    engine.load_weights(tiny.files[1])
    request = request_of("a", [], 10, prefix=FIRST)
    held = [*FIRST, *one(engine, request)[0], 4, 5]
    ask = request_of("a", [], 5, prefix=held, turn_start=len(held))
    assert one(engine, ask)[1] == len(held) - 3
    one(engine, replace(request, response="b", prefix=3 * request.prefix))  # no room for both
    assert one(engine, ask)[1] == 0
