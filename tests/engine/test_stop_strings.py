"""Stop strings end a response at the same token in every engine, however its tokens come."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.engine.base import Delta, EngineSpec
from lightrl.engine.stop_strings import StoppingEngine, StopStrings, with_stop_strings
from lightrl.errors import EngineUnusable
from lightrl.messages.responses import Generate, PromptHistory, Sampling
from lightrl.wire import pack_i32
from tests.engine.conftest import VOCABULARY, EngineClient, TinyModel, request_of

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"
# so many that a response is a few dozen tokens long
STOP = tuple(a + LETTERS[(i + 11) % VOCABULARY] for i, a in enumerate(LETTERS))
NUM_SEEDS, MOST_TRIES = 24, 60
PROMPTS = [[2 + (3 * i + 5 * j) % 30 for j in range(4 + i)] for i in range(6)]


def text(tokens: list[int]) -> str:
    return "".join(LETTERS[t] for t in tokens)


def cut(tokens: list[int], stop: tuple[str, ...] = STOP) -> list[int]:
    """Up to the token that completes the first of the texts."""
    ends = (k for k in range(1, len(tokens) + 1) if any(s in text(tokens[:k]) for s in stop))
    return tokens[: next(ends, len(tokens))]


class Scripted:
    """An engine that says what it is told."""

    def __init__(self, *steps: list[Delta]) -> None:
        self.steps = list(steps)
        self.aborted: list[str] = []

    def add(self, request, sampling) -> None:
        """It has its script."""

    def abort(self, response: str) -> None:
        self.aborted.append(response)

    def step(self) -> list[Delta]:
        return self.steps.pop(0)


def stopping(
    *steps: list[Delta], stop: tuple[str, ...] = ("cab",)
) -> tuple[StoppingEngine, Scripted]:
    engine = Scripted(*steps)
    return StoppingEngine(engine, StopStrings(stop, text)), engine  # pyright: ignore


def test_a_response_ends_with_the_token_that_completes_the_text():
    engine, under = stopping([Delta("r", [2, 0, 1, 5], [-1.0, -2.0, -3.0, -4.0])])
    engine.add(request_of("r", [3], 9), Sampling())
    [delta] = engine.step()
    assert (delta.token_ids, delta.logprobs) == ([2, 0, 1], [-1.0, -2.0, -3.0])
    assert (delta.finish_reason, under.aborted) == ("stop", ["r"])


def test_a_text_may_begin_before_the_response_was_moved_but_not_in_the_prompt():
    for prompt, prefix, ends in (([3], [2, 0], True), ([2, 0], [], False)):
        engine, _ = stopping([Delta("r", [1], [-1.0])])
        engine.add(request_of("r", prompt, 9, prefix=prefix), Sampling())
        assert (engine.step()[0].finish_reason == "stop") is ends


def test_a_text_lies_within_one_turn_of_an_episode_wherever_that_is_resumed():
    """The prefix ends with "ca"; what of it is an observation does not count."""
    for turn_start, ends in ((1, True), (2, False), (3, False)):
        engine, _ = stopping([Delta("r", [1], [-1.0])])
        request = request_of("r", [], 9, prefix=[4, 2, 0], turn_start=turn_start)
        engine.add(request, Sampling())
        assert (engine.step()[0].finish_reason == "stop") is ends


def test_a_text_that_ends_where_the_engine_does_is_a_stop_and_nothing_is_left_to_abort():
    engine, under = stopping([Delta("r", [2, 0, 1], [-1.0] * 3, "length")])
    engine.add(request_of("r", [3], 3), Sampling())
    assert engine.step()[0].finish_reason == "stop"
    assert under.aborted == []


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_it_does_not_matter_how_many_tokens_come_at_once(size):
    tokens = [(7 * i * i + 3 * i) % 26 for i in range(200)] + [2, 0, 1, 4]
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    engine, _ = stopping(*([Delta("r", list(p), [0.0] * len(p))] for p in parts))
    engine.add(request_of("r", [3], 999), Sampling())
    got: list[int] = []
    while True:
        [delta] = engine.step()
        got += delta.token_ids
        if delta.finish_reason:
            break
    assert got == cut(tokens, ("cab",))


def test_characters_of_several_tokens_and_texts_that_end_with_a_space_are_found():
    pieces = {0: b"\xe2", 1: b"\x88", 2: b"\x9a", 3: b"x", 4: b" "}

    def decode(ids: list[int]) -> str:  # as byte-level tokenizers do; leading spaces are dropped
        return b"".join(pieces[i] for i in ids).decode(errors="replace").lstrip()

    assert StopStrings(("√",), decode).first([3, 0], [1, 2, 3]) == 1
    assert StopStrings(("x ",), decode).first([0, 1, 2], [3, 4]) == 1
    assert StopStrings(("√x",), decode).first([3, 0, 1, 2], [4, 3]) is None


# Real engines


@pytest.fixture(scope="session")
def lettered(tiny: TinyModel, tmp_path_factory) -> Path:
    """The tiny model with a tokenizer: a letter for each token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = shutil.copytree(tiny.dir, tmp_path_factory.mktemp("lettered") / "model")
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def stopped(start: Callable[..., EngineClient], lettered: Path) -> Callable[[str], EngineClient]:
    known: dict[str, EngineClient] = {}

    def of(kind: str) -> EngineClient:
        if kind not in known:
            more: dict[str, Any] = {"max_window": 8}
            if kind == "emulated":
                more = {"engine_args": {"restart_change": 1.0}}  # as the other one
            known[kind] = start(kind, model_dir=lettered, stop=STOP, **more)
            known[kind].load(1)
        return known[kind]

    return of


def test_engines_end_at_the_same_token_wherever_a_response_is_resumed(engine, stopped, ask):
    whole = engine.run(
        1, Sampling(1.0), *(ask(f"w{i}", p, 300, seed=i) for i, p in enumerate(PROMPTS))
    )
    expected = [cut(o.tokens) for o in whole]
    assert sum(2 < len(tokens) < 300 for tokens in expected) > 3
    client = stopped(engine.kind)
    got = client.run(
        1, Sampling(1.0), *(ask(f"s{i}", p, 300, seed=i) for i, p in enumerate(PROMPTS))
    )
    assert [o.tokens for o in got] == expected
    assert [o.finish for o in got] == [
        "stop" if len(tokens) < 300 else "length" for tokens in expected
    ]
    for o, w in zip(got, whole, strict=True):
        assert o.logprobs == pytest.approx(w.logprobs[: len(o.logprobs)], abs=1e-4)
    cuts = [max(0, len(tokens) - 1 - i % 2) for i, tokens in enumerate(expected)]
    rest = client.run(
        1,
        Sampling(1.0),
        *(
            ask(f"r{i}", p, 300 - n, seed=i, prefix=tokens[:n])
            for i, (p, tokens, n) in enumerate(zip(PROMPTS, expected, cuts, strict=True))
        ),
    )
    assert [o.tokens for o in rest] == [t[n:] for t, n in zip(expected, cuts, strict=True)]


def test_a_text_within_an_accepted_draft_ends_the_response(real, stopped, ask):
    """Whether drafts pay is measured, so that not every response has any."""
    wholes = real.run(
        1, Sampling(1.0), *(ask(f"w{i}", PROMPTS[1], 300, seed=i) for i in range(NUM_SEEDS))
    )
    # One that goes on for long enough to be drafted before its text comes.
    seed = max(range(NUM_SEEDS), key=lambda i: len(cut(wholes[i].tokens)) % 300)
    whole = wholes[seed]
    client = stopped(real.kind)
    history = PromptHistory("p@0", (pack_i32(whole.tokens),), (1.0,))

    def has_accepted() -> bool:
        return any(load.drafting and load.drafting.accepted for load in client.loads)

    for k in range(MOST_TRIES):
        name = f"p@0#{k}"
        request = ask(name, PROMPTS[1], 300, seed=seed)
        client.child.send(Generate(1, Sampling(1.0), (request,), (history,)))
        (got,) = client.finished(name)
        assert got.tokens == cut(whole.tokens)
        if has_accepted():
            break
    assert has_accepted()
    client.abort((name, 1))  # over already
    (again,) = client.run(1, Sampling(1.0), ask(name, PROMPTS[1], 300, seed=seed, attempt=2))
    assert again.tokens == got.tokens


def test_a_model_whose_tokens_are_no_text_is_refused(tiny):
    spec = EngineSpec("emulated", str(tiny.dir), "float32", 64, 4, stop=("x",))
    with pytest.raises(EngineUnusable, match=r"rollout\.stop: .*tokenizer"):
        with_stop_strings(Scripted(), spec)  # pyright: ignore
    broken = Path(tiny.dir).parent / "broken"
    shutil.copytree(tiny.dir, broken, dirs_exist_ok=True)
    (broken / "tokenizer.json").write_text(json.dumps({"version": 0}))
    spec = EngineSpec("emulated", str(broken), "float32", 64, 4, stop=("x",))
    with pytest.raises(EngineUnusable, match=r"rollout\.stop: .*tokenizer\.json cannot be loaded"):
        with_stop_strings(Scripted(), spec)  # pyright: ignore
