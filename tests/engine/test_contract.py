"""What every engine must do, asked of each through its process."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrl.emulation import logprobs
from lightrl.engine.base import EngineFailed, EngineLoaded
from lightrl.messages.responses import Sampling
from lightrl.messages.weights import Canary
from lightrl.weights.canary import arbitrary_text
from lightrl.wire import pack_f32, pack_i32
from tests.engine.conftest import MAX_LENGTH, VOCABULARY

KINDS_OF_SAMPLING = [
    pytest.param(Sampling(1.0), id="T=1"),
    pytest.param(Sampling(0.0), id="greedy"),
    pytest.param(Sampling(0.7, top_p=0.9), id="T=.7,top_p=.9"),
    pytest.param(Sampling(1.3, top_k=5), id="T=1.3,top_k=5"),
]
PROMPTS = [[2 + (3 * i + 5 * j) % 30 for j in range(4 + i)] for i in range(6)]


def test_streams_as_many_logprobs_as_tokens_up_to_the_length_limit(engine, ask):
    outcomes = engine.run(
        1, Sampling(1.0), *(ask(f"a{i}", p, 30 + i, seed=i) for i, p in enumerate(PROMPTS))
    )
    assert [len(o.tokens) for o in outcomes] == [30 + i for i in range(len(PROMPTS))]
    assert all(o.finish == "length" for o in outcomes)
    assert all(logprob <= 0 for o in outcomes for logprob in o.logprobs)
    assert {d for o in outcomes for d in o.digests} == {engine.tiny.files[1].digest}


def test_a_stop_token_ends_the_response_and_is_part_of_it(engine, ask):
    stop = (3, 4, 5, 6, 7, 8)
    sampling = Sampling(1.0, stop_token_ids=stop)
    if engine.kind == "emulated":
        pytest.skip("emulated lengths are drawn from mean_length; see test_emulated")
    outcomes = engine.run(
        1, sampling, *(ask(f"s{i}", p, 400, seed=i) for i, p in enumerate(PROMPTS))
    )
    for o in outcomes:
        assert o.finish == "stop"
        assert o.tokens[-1] in stop
        assert not set(o.tokens[:-1]) & set(stop)


def test_more_responses_than_slots_wait_their_turn(engine, ask):
    outcomes = engine.run(1, Sampling(1.0), *(ask(f"w{i}", [5, 6], 12, seed=i) for i in range(40)))
    assert [len(o.tokens) for o in outcomes] == [12] * 40


def test_an_aborted_response_keeps_what_was_sent_and_gets_no_more(engine, ask):
    for _ in range(10):  # it does not wait for us: all may be over before we abort it
        engine.generate(1, Sampling(1.0), ask("gone", [4, 5, 6], 200), ask("stays", [4, 5, 6], 60))
        engine.until(lambda: "gone" in engine.outcomes)
        engine.abort(("gone", 2))  # an attempt that does not run: ignored
        engine.abort(("gone", 1))
        # Whatever came for "gone" after its end would fail in EngineClient.receive.
        gone, stays = engine.finished("gone", "stays")
        if gone.finish == "abort":
            break
    assert gone.finish == "abort"
    assert 0 < len(gone.tokens) < 200
    assert len(stays.tokens) == 60
    (again,) = engine.run(1, Sampling(1.0), ask("gone", [4, 5, 6], 200, attempt=2))
    assert again.tokens[: len(gone.tokens)] == gone.tokens


@pytest.mark.parametrize("sampling", KINDS_OF_SAMPLING)
def test_resuming_from_a_prefix_gives_the_same_rest(engine, ask, sampling):
    num = 40
    whole = engine.run(
        1, sampling, *(ask(f"u{i}", p, num, seed=50 + i) for i, p in enumerate(PROMPTS))
    )
    cuts = [1 + 6 * i for i in range(len(PROMPTS))]
    rest = engine.run(
        1,
        sampling,
        *(
            ask(f"v{i}", p, num - cut, seed=50 + i, prefix=o.tokens[:cut])
            for i, (p, o, cut) in enumerate(zip(PROMPTS, whole, cuts, strict=True))
        ),
    )
    for w, r, cut in zip(whole, rest, cuts, strict=True):
        assert r.offset == cut
        assert r.tokens == w.tokens[cut:]
        assert r.logprobs == pytest.approx(w.logprobs[cut:], abs=1e-4)


def test_a_response_does_not_depend_on_its_company(engine, ask):
    (alone,) = engine.run(1, Sampling(1.0), ask("x", [9, 8, 7], 50))
    others = [ask(f"o{i}", PROMPTS[i % 6], 10 + 3 * i, seed=i) for i in range(12)]
    among = engine.run(1, Sampling(1.0), *others[:6], ask("x", [9, 8, 7], 50), *others[6:])[6]
    assert among.tokens == alone.tokens
    assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_seeds_tell_the_responses_of_a_group_apart(engine, ask):
    outcomes = engine.run(1, Sampling(1.0), *(ask(f"g{i}", [4, 5], 20, seed=i) for i in range(8)))
    assert len({tuple(o.tokens) for o in outcomes}) == 8


def test_new_weights_give_other_responses_and_their_digest(engine, ask):
    (old,) = engine.run(1, Sampling(1.0), ask("n", [4, 5, 6], 30))
    loaded = engine.load(2)
    assert (loaded.policy_version, loaded.digest) == (2, engine.tiny.files[2].digest)
    (new,) = engine.run(2, Sampling(1.0), ask("n", [4, 5, 6], 30))
    assert new.tokens != old.tokens
    assert set(new.versions) == {2}
    engine.load(1)
    (back,) = engine.run(1, Sampling(1.0), ask("n", [4, 5, 6], 30))
    assert back.tokens == old.tokens


def while_running(engine, request, load):
    """What `load` returns after some tokens of a response and before its end: again if it came too
    late.

    The engine does not wait for this process, which may be kept from running for as long as that
    takes.
    """
    for _ in range(10):
        engine.load(1)
        engine.generate(1, Sampling(1.0), request)
        engine.until(lambda: request.response in engine.outcomes)
        result = load()
        if engine.outcomes[request.response].finish is None:
            return result
    pytest.fail(f"{request.response} was always over before")


def test_a_running_response_goes_on_under_new_weights(engine, ask):
    while_running(engine, ask("long", [4, 5, 6], 200), lambda: engine.load(2))
    (outcome,) = engine.finished("long")
    assert len(outcome.tokens) == 200
    cut = outcome.versions.count(1)
    assert 0 < cut < 200
    assert outcome.versions == [1] * cut + [2] * (200 - cut)
    # What follows the load is what a fresh request with this prefix gives: no KV of old weights is
    # left.
    (fresh,) = engine.run(
        2, Sampling(1.0), ask("f", [4, 5, 6], 200 - cut, prefix=outcome.tokens[:cut])
    )
    assert fresh.tokens == outcome.tokens[cut:]
    assert fresh.logprobs == pytest.approx(outcome.logprobs[cut:], abs=1e-4)


def test_a_wrong_manifest_is_refused_and_nothing_is_served_until_a_good_version_is_loaded(
    engine, ask, tmp_path
):
    """The bytes of the file are proved by who orders the load (tests/rollout)."""
    file = engine.tiny.files[2]
    data = bytearray(Path(file.manifest_path).read_bytes())
    data[-1] ^= 1
    wrong = tmp_path / "wrong.manifest"
    wrong.write_bytes(data)
    failed = while_running(
        engine,
        ask("victim", [4, 5, 6], 400),
        lambda: engine.load_file(replace(file, manifest_path=str(wrong))),
    )
    assert isinstance(failed, EngineFailed)
    assert failed.policy_version == 2
    assert "another digest" in failed.reason
    for version in (1, 2):
        engine.failures.clear()
        engine.generate(version, Sampling(1.0), ask("refused", [4, 5, 6], 5))
        engine.until(lambda: engine.failures)
        assert "loaded is none" in engine.failures[0].reason
    assert "refused" not in engine.outcomes
    assert engine.outcomes["victim"].finish is None
    engine.load(1)
    (outcome,) = engine.run(1, Sampling(1.0), ask("ok", [4, 5, 6], 5))
    assert len(outcome.tokens) == 5


def test_a_missing_file_is_a_failure_not_a_crash(engine, ask, tmp_path):
    file = replace(engine.tiny.files[2], path=str(tmp_path / "nowhere.bin"))
    failed = engine.load_file(file)
    assert isinstance(failed, EngineFailed)
    engine.load(1)
    assert len(engine.run(1, Sampling(1.0), ask("ok", [4], 3))[0].tokens) == 3


@pytest.mark.parametrize(
    ("prompt", "num", "sampling", "complaint"),
    [
        ([], 5, Sampling(1.0), "prompt and prefix are empty"),
        ([2, 99], 5, Sampling(1.0), "token ids"),
        ([2], 512, Sampling(1.0), "exceed"),
        ([2], 0, Sampling(1.0), "max_new_tokens"),
        ([2], 5, Sampling(-1.0), "temperature"),
        ([2], 5, Sampling(1.0, top_p=0.0), "top_p"),
    ],
)
def test_a_request_that_cannot_run_is_refused_in_one_line(
    engine, ask, prompt, num, sampling, complaint
):
    engine.failures.clear()
    engine.generate(1, sampling, ask("bad", prompt, num))
    engine.until(lambda: engine.failures)
    assert complaint in engine.failures[0].reason
    assert "\n" not in engine.failures[0].reason
    assert engine.failures[0].policy_version is None


def test_a_repeated_generate_does_not_start_a_response_twice(engine, ask):
    request = ask("twice", [4, 5], 60)
    engine.generate(1, Sampling(1.0), request, request)
    (outcome,) = engine.finished("twice")
    assert len(outcome.tokens) == 60


def canary_of(engine, version):
    """What the trainer says of a version."""
    text = arbitrary_text(VOCABULARY, MAX_LENGTH)
    if engine.kind == "emulated":
        expected = logprobs(engine.tiny.files[version].digest, text)
    else:
        with torch.inference_mode():
            every = engine.tiny.models[version](torch.tensor([text[:-1]])).logits[0].log_softmax(-1)
        expected = every[range(len(text) - 1), text[1:]].tolist()
    return Canary(pack_i32(text), pack_f32(expected))


def test_what_is_served_is_held_against_what_the_trainer_says(engine, ask):
    loaded = engine.load_file(engine.tiny.files[2], canary_of(engine, 2))
    assert isinstance(loaded, EngineLoaded)
    assert loaded.canary_diff < engine.canary_limit / 2
    assert engine.load(2).canary_diff is None
    refused = while_running(
        engine,
        ask("victim", [4, 5, 6], 400),
        lambda: engine.load_file(engine.tiny.files[1], canary_of(engine, 2)),
    )
    assert isinstance(refused, EngineFailed)
    assert refused.policy_version == 1
    assert "\n" not in refused.reason
    by = re.search(r"differ by up to (\S+) from the trainer's, more than (\S+) ", refused.reason)
    assert float(by[1]) > 0.1 >= float(by[2]) == engine.canary_limit
    engine.failures.clear()
    engine.generate(1, Sampling(1.0), ask("refused", [4, 5, 6], 5))
    engine.until(lambda: engine.failures)
    assert "loaded is none" in engine.failures[0].reason
    engine.load_file(engine.tiny.files[1], canary_of(engine, 1))
    assert len(engine.run(1, Sampling(1.0), ask("ok", [4, 5, 6], 5))[0].tokens) == 5


def test_a_running_response_goes_on_although_a_canary_is_scored_between(engine, ask):
    canary = canary_of(engine, 2)
    while_running(
        engine,
        ask("long", [4, 5, 6], 200),
        lambda: engine.load_file(engine.tiny.files[2], canary),
    )
    (outcome,) = engine.finished("long")
    cut = outcome.versions.count(1)
    assert (len(outcome.tokens), outcome.versions) == (200, [1] * cut + [2] * (200 - cut))
    (fresh,) = engine.run(
        2, Sampling(1.0), ask("f", [4, 5, 6], 200 - cut, prefix=outcome.tokens[:cut])
    )
    assert fresh.tokens == outcome.tokens[cut:]


def test_a_canary_of_another_model_is_a_failure_not_a_crash(engine, ask):
    for text in ([3, 99], [3] * 513, [3]):
        canary = Canary(pack_i32(text), pack_f32([-1.0] * (len(text) - 1)))
        failed = engine.load_file(engine.tiny.files[1], canary)
        assert isinstance(failed, EngineFailed)
        assert "a text" in failed.reason
    engine.load(1)
    assert len(engine.run(1, Sampling(1.0), ask("ok", [4], 3))[0].tokens) == 3
