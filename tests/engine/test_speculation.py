"""Speculation changes nothing but the number of forward passes: of every engine that has it.

The engines run in this process, so that a test can count and stop at single steps. The gate is held
open where a test is about drafts: what it decides depends on the clock.
"""

import itertools
import random

import numpy as np
import pytest
import torch

from lightrl.engine.base import EngineSpec
from lightrl.engine.process import build_engine
from lightrl.history.gate import Gate
from lightrl.messages.responses import PromptHistory, Sampling
from lightrl.wire import pack_i32
from tests.support.tiers import e2e

KINDS = ["torch"]
VOCABULARY = 32
MAX_WINDOW = 16

HALF = [Sampling(1.0), Sampling(0.0), Sampling(0.7, top_p=0.9)]
SAMPLINGS = {
    "T=1": HALF[:1],
    "greedy": HALF[1:2],
    "T=.7,top_p=.9": HALF[2:],
    "mixed in one batch": HALF,
}
PROMPTS = [[2 + (7 * i + 3 * j) % 30 for j in range(1 + 4 * i)] for i in range(4)]
# (group, index, prefix tokens, new tokens): three times as many as slots, so that rows are used
# again.
CASES = [(g, i, (0, 0, 9)[i], (45, 70, 20)[i] + 3 * g) for i in range(3) for g in range(4)]


class Open(Gate):
    """Drafts always pay."""

    def width(self, batch):
        return self.max_width


@pytest.fixture(scope="module")
def engines(tiny):
    """engines(kind, window, slots=4): one of each, with version 1 loaded; window 0 = no
    speculation."""
    built = {}

    def get(kind, window, slots=4):
        key = kind, window, slots
        if key not in built:
            built[key] = build_engine(
                EngineSpec(kind, str(tiny.dir), "float32", 512, slots, max_window=window)
            )
        engine = built[key]
        assert engine.num_unfinished() == 0
        engine.load_weights(tiny.files[1])
        if window:
            engine._drafter.gate = Open(window, is_padded=True)
        return engine

    yield get
    for engine in built.values():
        engine.close()


@pytest.fixture
def epoch(counter=itertools.count()):  # noqa: B008 - one for all tests: what an engine knows of a group stays
    return next(counter)


class Outcome:
    def __init__(self):
        self.tokens, self.logprobs, self.sizes, self.finish = [], [], [], None


def take(engine, outcomes):
    """One step."""
    for d in engine.step():
        o = outcomes.setdefault(d.response, Outcome())
        assert o.finish is None
        assert 0 < len(d.token_ids) == len(d.logprobs)
        o.tokens += d.token_ids
        o.logprobs += d.logprobs
        o.sizes.append(len(d.token_ids))
        o.finish = d.finish_reason


def run(engine, added, histories=()):
    """What comes of [(request, sampling), ...], in their order."""
    engine.remember(tuple(histories))
    for request, sampling in added:
        engine.add(request, sampling)
    outcomes = {}
    while engine.num_unfinished():
        take(engine, outcomes)
    return [outcomes[r.response] for r, _ in added]


def history(group, *responses):
    return PromptHistory(group, tuple(map(pack_i32, responses)), (None,) * len(responses))


def counted(engine):
    return engine.load().drafting


@pytest.fixture(scope="module")
def truth(engines, ask):
    """truth(kind, name of sampling): requests of CASES for any epoch, and what comes without
    speculation."""
    known = {}

    def requests(epoch, samplings, heads):
        return [
            (
                ask(f"p{g}@{epoch}#{i}", PROMPTS[g], num, seed=10 * g + i, prefix=head[:cut]),
                samplings[(g + i) % len(samplings)],
            )
            for (g, i, cut, num), head in zip(CASES, heads, strict=True)
        ]

    def get(kind, name):
        samplings = SAMPLINGS[name]
        if (kind, name) not in known:
            plain = engines(kind, 0)
            assert plain.load().drafting is None
            heads = [o.tokens for o in run(plain, requests("head", samplings, [[]] * len(CASES)))]
            known[kind, name] = heads, run(plain, requests("rest", samplings, heads))
        heads, outcomes = known[kind, name]
        return lambda epoch: requests(epoch, samplings, heads), heads, outcomes

    return get


def true(responses, _):
    return responses


def perturbed(responses, rng):
    return [[rng.randrange(VOCABULARY) if rng.random() < 0.1 else t for t in r] for r in responses]


def noise(responses, rng):
    return [[rng.randrange(VOCABULARY) for _ in range(40 * len(r))] for r in responses]


def adversarial(responses, rng):
    """After each 7 tokens of the truth comes what is wrong."""
    return [
        [*r[p - 7 : p], (r[p] + 1) % VOCABULARY, *(rng.randrange(VOCABULARY) for _ in range(6))]
        for r in responses
        for p in range(7, len(r))
    ]


def foreign(responses, _):
    """The same of tokens that the model does not have."""
    return [[*r[p - 7 : p], 10**6, -3, 2**31 - 1] for r in responses for p in range(7, len(r))]


PASTS = [true, perturbed, noise, adversarial, foreign]
FEW = [*zip(PASTS, itertools.cycle(SAMPLINGS), strict=False)]


@pytest.mark.parametrize(
    ("past", "name"),
    [*FEW, *e2e(pair for pair in itertools.product(PASTS, SAMPLINGS) if pair not in FEW)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_responses_are_those_without_speculation(engines, truth, epoch, kind, past, name):
    requests, heads, expected = truth(kind, name)
    wholes = {
        (g, i): head[:cut] + o.tokens
        for (g, i, cut, _), head, o in zip(CASES, heads, expected, strict=True)
    }
    rng = random.Random(1)
    histories = [
        history(
            f"p{g}@{epoch}", *past([whole for (of, _), whole in wholes.items() if of == g], rng)
        )
        for g in range(4)
    ]
    engine = engines(kind, MAX_WINDOW)
    before = counted(engine)
    got = run(engine, requests(epoch), histories)
    for o, e in zip(got, expected, strict=True):
        assert o.tokens == e.tokens
        assert o.logprobs == pytest.approx(e.logprobs, abs=1e-4)
        assert o.finish == e.finish
    after = counted(engine)
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    emitted, forwards = after.emitted - before.emitted, after.forwards - before.forwards
    assert drafted > 20 or past is foreign  # which is never tried
    assert emitted == sum(len(o.tokens) for o in got)
    assert forwards == sum(len(o.sizes) for o in got)
    assert emitted == forwards + accepted
    if past is true:
        assert emitted > 2 * forwards
    elif past is perturbed:
        assert accepted > 0.3 * drafted


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_after_every_context_costs_no_step(engines, ask, epoch, kind):
    request = ask("free#0", PROMPTS[1], 200)
    (whole,) = run(engines(kind, 0), [(request, Sampling(1.0))])
    engine = engines(kind, MAX_WINDOW)
    before = counted(engine)
    known = history(f"p@{epoch}", *adversarial([whole.tokens], random.Random(1)))
    # From its eighth token on, where the adversary begins.
    rest = ask(f"p@{epoch}#0", PROMPTS[1], 193, prefix=whole.tokens[:7])
    (got,) = run(engine, [(rest, Sampling(1.0))], [known])
    assert got.tokens == whole.tokens[7:]
    after = counted(engine)
    assert after.drafted - before.drafted > 192
    assert after.accepted - before.accepted < 10  # contexts that occur twice and go on differently
    assert len(got.sizes) <= len(got.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_token_ends_a_response_in_the_middle_of_an_accepted_draft(engines, ask, epoch, kind):
    """Each token of the vocabulary once as the stop token: the responses end at all kinds of
    places."""
    (whole,) = run(engines(kind, 0), [(ask("free#0", PROMPTS[2], 150), Sampling(1.0))])
    stops = sorted(set(whole.tokens))
    added = [
        (ask(f"p@{epoch}#{s}", PROMPTS[2], 150), Sampling(1.0, stop_token_ids=(s, VOCABULARY + 7)))
        for s in stops
    ]
    engine = engines(kind, MAX_WINDOW)
    before = counted(engine)
    for stop, o in zip(
        stops, run(engine, added, [history(f"p@{epoch}", whole.tokens)]), strict=True
    ):
        assert o.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
        assert len(o.logprobs) == len(o.tokens)
        assert o.logprobs == pytest.approx(whole.logprobs[: len(o.tokens)], abs=1e-4)
        assert o.finish == "stop"
    after = counted(engine)
    # only stops cost tokens
    assert after.drafted - before.drafted > after.accepted - before.accepted + 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_is_never_longer_than_it_may_be(engines, ask, epoch, kind):
    (whole,) = run(engines(kind, 0), [(ask("free#0", PROMPTS[2], 60), Sampling(1.0))])
    limits = range(1, 40)
    added = [(ask(f"p@{epoch}#{n}", PROMPTS[2], n), Sampling(1.0)) for n in limits]
    got = run(engines(kind, MAX_WINDOW), added, [history(f"p@{epoch}", whole.tokens)])
    assert [o.tokens for o in got] == [whole.tokens[:n] for n in limits]
    assert {o.finish for o in got} == {"length"}
    assert MAX_WINDOW // 2 < max(max(o.sizes) for o in got) <= MAX_WINDOW + 1


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_end_with_the_longest_sequence_the_engine_allows(engines, ask, epoch, kind):
    num = 512 - len(PROMPTS[1])
    (whole,) = run(engines(kind, 0), [(ask("free#0", PROMPTS[1], num), Sampling(1.0))])
    engine = engines(kind, MAX_WINDOW)
    (got,) = run(
        engine,
        [(ask(f"p@{epoch}#0", PROMPTS[1], num), Sampling(1.0))],
        [history(f"p@{epoch}", whole.tokens + whole.tokens)],
    )
    assert got.tokens == whole.tokens


@pytest.mark.parametrize(
    "to", ["without histories", *e2e(["with histories", "without speculation"])]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_response_that_moves_while_it_is_drafted_stays_the_same(engines, ask, epoch, kind, to):
    num = 80
    sampling = Sampling(1.0)
    free = [(ask(f"free#{i}", p, num, seed=i), sampling) for i, p in enumerate(PROMPTS)]
    expected = run(engines(kind, 0), free)
    for steps in range(1, 6):
        groups = [f"p{i}@{epoch}-{steps}" for i in range(len(PROMPTS))]
        histories = tuple(history(g, o.tokens) for g, o in zip(groups, expected, strict=True))
        first = engines(kind, MAX_WINDOW)
        first.remember(histories)
        for i, g in enumerate(groups):
            first.add(ask(f"{g}#0", PROMPTS[i], num, seed=i), sampling)
        parts = {}
        for _ in range(steps):
            take(first, parts)
        for g in groups:
            first.abort(f"{g}#0")
        second = engines(kind, 0 if to == "without speculation" else MAX_WINDOW, slots=3)
        heads = [parts[f"{g}#0"].tokens for g in groups]
        rest = [
            (ask(f"{g}#0", PROMPTS[i], num - len(head), seed=i, prefix=head), sampling)
            for i, (g, head) in enumerate(zip(groups, heads, strict=True))
        ]
        got = run(second, rest, histories if to == "with histories" else ())
        assert all(steps == 1 or len(head) > 2 * steps for head in heads)
        assert [h + o.tokens for h, o in zip(heads, got, strict=True)] == [
            e.tokens for e in expected
        ]


@pytest.mark.parametrize(("loads", "least"), [((2, 1), 10), *e2e([((2,), 200)])])
@pytest.mark.parametrize("kind", KINDS)
def test_drafting_goes_on_after_new_weights(engines, ask, tiny, epoch, kind, loads, least):
    """The same response under the same loads, once with drafts and once without."""
    num, sampling = 120, Sampling(1.0)
    plain, engine = engines(kind, 0), engines(kind, MAX_WINDOW)
    free = run(plain, [(ask(f"free#{i}", p, num, seed=i), sampling) for i, p in enumerate(PROMPTS)])
    known = [[o.tokens] for o in free]
    for again in range(2):  # the second time with what the loads led to
        groups = [f"p{i}@{epoch}-{again}" for i in range(len(PROMPTS))]
        engine.load_weights(tiny.files[1])
        engine.remember(tuple(history(g, *k) for g, k in zip(groups, known, strict=True)))
        for i, g in enumerate(groups):
            engine.add(ask(f"{g}#0", PROMPTS[i], num, seed=i), sampling)
        outcomes, cuts = {}, []
        for version in loads:
            for _ in range(4):
                take(engine, outcomes)
            cuts.append([len(outcomes[f"{g}#0"].tokens) for g in groups])
            engine.load_weights(tiny.files[version])
            if version == loads[0]:
                accepted = counted(engine).accepted
        while engine.num_unfinished():
            take(engine, outcomes)
        if again:
            assert counted(engine).accepted > accepted + least
        for i, g in enumerate(groups):
            plain.load_weights(tiny.files[1])
            plain.add(ask("same#0", PROMPTS[i], num, seed=i), sampling)
            same = {}
            for version, cut in zip(loads, cuts, strict=True):
                while len(same.get("same#0", Outcome()).tokens) < cut[i]:
                    take(plain, same)
                plain.load_weights(tiny.files[version])
            while plain.num_unfinished():
                take(plain, same)
            assert outcomes[f"{g}#0"].tokens == same["same#0"].tokens
            assert outcomes[f"{g}#0"].logprobs == pytest.approx(same["same#0"].logprobs, abs=1e-4)
            known[i].append(same["same#0"].tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sibling_that_has_finished_is_history_too(engines, ask, epoch, kind):
    engine = engines(kind, MAX_WINDOW)
    before = counted(engine)
    (first,) = run(engine, [(ask(f"p@{epoch}#0", PROMPTS[1], 60), Sampling(1.0))])
    (second,) = run(engine, [(ask(f"p@{epoch}#1", PROMPTS[1], 60), Sampling(1.0))])
    assert second.tokens == first.tokens
    assert (
        len(second.sizes) < 20 < 59 < len(first.sizes) + counted(engine).accepted - before.accepted
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_that_is_closed_leaves_everything_as_it_is(engines, truth, epoch, kind):
    requests, _, expected = truth(kind, "T=1")
    engine = engines(kind, MAX_WINDOW)
    engine._drafter.gate = Closed(MAX_WINDOW)
    before = counted(engine)
    histories = [history(f"p{g}@{epoch}", *(o.tokens for o in expected)) for g in range(4)]
    got = run(engine, requests(epoch), histories)
    assert [o.tokens for o in got] == [o.tokens for o in expected]
    assert {size for o in got for size in o.sizes} == {1}
    after = counted(engine)
    assert after.drafted == before.drafted
    assert after.emitted - before.emitted == sum(len(o.tokens) for o in got)


class Closed(Gate):
    """Drafts never pay."""

    def width(self, batch):
        return 0


NUM_SEEDS = 3000


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_is_that_of_the_model(engines, tiny, ask, epoch, kind):
    """The likeliest tokens are drafted: whoever accepted more of them than are drawn would be seen
    here."""
    prompt, model = PROMPTS[2], tiny.models[1]
    p1 = softmax_after(model, [prompt])[0]
    p2 = softmax_after(model, [[*prompt, a] for a in range(VOCABULARY)])
    p3 = softmax_after(
        model, [[*prompt, a, b] for a in range(VOCABULARY) for b in range(VOCABULARY)]
    )
    likely2 = p2.argmax(1)
    likely3 = p3.argmax(1)[np.arange(VOCABULARY) * VOCABULARY + likely2]
    known = [[a, int(likely2[a]), int(likely3[a]), 0] for a in range(VOCABULARY)]
    engine = engines(kind, MAX_WINDOW, slots=100)
    before = counted(engine)
    added = [(ask(f"p@{epoch}#{s}", prompt, 4, seed=s), Sampling(1.0)) for s in range(NUM_SEEDS)]
    # They finish and become history, too: a thousand times the same, so that drafts stay the likely
    # ones.
    got = np.array([o.tokens for o in run(engine, added, [history(f"p@{epoch}", *known * 1000)])])
    after = counted(engine)
    # two for all whose second token is drawn as drafted
    assert after.drafted - before.drafted >= NUM_SEEDS
    assert after.accepted - before.accepted > 0.1 * NUM_SEEDS
    joint = p1[:, None] * p2
    triple = joint.reshape(-1)[:, None] * p3
    first, second, third = got[:, 0], got[:, 1], got[:, 2]
    assert_drawn_from(p1, first)
    assert_drawn_from(joint.sum(0), second)
    assert_drawn_from(joint.reshape(-1), first * VOCABULARY + second)
    assert_drawn_from(triple.sum(0), third)


@torch.inference_mode()
def softmax_after(model, contexts):
    return model(torch.tensor(contexts)).logits[:, -1].double().softmax(-1).numpy()


def assert_drawn_from(probabilities, drawn):
    """Pearson's chi-square at 1 in 1000 (Wilson and Hilferty's formula); rare values count as
    one."""
    expected = probabilities * len(drawn)
    seen = np.bincount(drawn, minlength=len(expected))
    is_rare = expected < 5
    expected = np.append(expected[~is_rare], expected[is_rare].sum() + 1e-9)
    seen = np.append(seen[~is_rare], seen[is_rare].sum())
    degrees = len(expected) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert ((seen - expected) ** 2 / np.maximum(expected, 1e-3)).sum() < limit
