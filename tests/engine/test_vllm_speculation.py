"""Drafts in vLLM: whatever is tried, every response is the one that would have come without.

The engine under test runs in a child, where the functions below marked "in the child" drive it step
by step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightrl.engine.base import EngineSpec
from lightrl.engine.vllm.speculation import DraftRows
from lightrl.history.gate import Gate
from lightrl.messages.responses import PromptHistory, ResponseRequest, Sampling
from lightrl.wire import pack_i32
from tests.engine.conftest import Origins, vllm_child

SLOTS, WINDOW, MAX_LENGTH, VOCABULARY = 8, 6, 512, 32
KEYS = ("p0@0", "p1@0", "p2@0", "p3@0")
PROMPTS = ([5], [2, 9, 4, 11], [3] * 40, [7, 8, 9, 10, 11, 12, 13, 14, 15])  # of one token, too
SAMPLINGS = [
    pytest.param(Sampling(1.0), id="T=1"),
    pytest.param(Sampling(0.0), id="greedy"),
    pytest.param(Sampling(0.7, top_p=0.9), id="T=.7,top_p=.9"),
]

Histories = tuple[PromptHistory, ...]


class FixedGate(Gate):
    """Allows drafts of one width whether they pay or not; checks what it hears of passes without
    prefill."""

    def width(self, batch: int) -> int:
        return self.max_width

    def observe(self, batch: int, num_tokens: int, seconds: float) -> None:
        assert (batch, num_tokens) == Scheduled.last
        Scheduled.num_observed += 1


class Scheduled:
    """In the child: (responses, tokens) of the newest pass."""

    last = (0, 0)
    num_observed = 0

    @staticmethod
    def watch(scheduler: Any) -> None:
        schedule = scheduler.schedule

        def watched(*args: Any) -> Any:
            output = schedule(*args)
            Scheduled.last = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
            return output

        scheduler.schedule = watched


@dataclass
class Plan:
    """What the child is to do: requests, and what happens after which of its steps."""

    sampling: Sampling
    requests: list[ResponseRequest]
    histories: Histories = ()
    # 0 = no drafts
    width: int = WINDOW
    # steps; then all that runs is aborted
    stop_after: int | None = None
    # after how many steps which weights
    load_after: dict[int, Any] = field(default_factory=dict)


@dataclass
class Result:
    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]
    finish: dict[str, str | None]
    # how many loads each token had seen
    versions: dict[str, list[int]]
    num_steps: int = 0
    # of them without prefill
    num_observed: int = 0
    drafted: int = 0
    accepted: int = 0


def drive(engine: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """In the child; classes of this file do not travel, as it has another name there."""
    plan = Plan(**fields)
    drafter = engine._speculation.drafter
    drafter.gate = FixedGate(plan.width)
    drafter._known.clear()
    before = drafter.counts
    engine.remember(plan.histories)
    names = [r.response for r in plan.requests]
    tokens, logprobs, versions = ({n: [] for n in names} for _ in range(3))
    result = Result(tokens, logprobs, dict.fromkeys(names), versions)
    Scheduled.num_observed = 0
    for request in plan.requests:
        engine.add(request, plan.sampling)
    num_loads = 0
    while engine.num_unfinished():
        if result.num_steps in plan.load_after:
            engine.load_weights(plan.load_after[result.num_steps])
            num_loads += 1
        for d in engine.step():
            assert len(d.token_ids) == len(d.logprobs)
            result.tokens[d.response] += d.token_ids
            result.logprobs[d.response] += d.logprobs
            result.finish[d.response] = d.finish_reason
            result.versions[d.response] += [num_loads] * len(d.token_ids)
        result.num_steps += 1
        if result.num_steps == plan.stop_after:
            for name in names:
                engine.abort(name)
    assert not drafter._cursors
    result.num_observed = Scheduled.num_observed
    after = engine.load().drafting
    result.drafted, result.accepted = (
        after.drafted - before.drafted,
        after.accepted - before.accepted,
    )
    return vars(result)


def load(engine: Any, file: Any) -> None:
    """In the child."""
    engine.load_weights(file)


def serve(connection: Any, spec: EngineSpec) -> None:
    """The child: calls functions of this file by name until the connection closes."""
    from lightrl.engine.vllm.engine import VllmEngine

    engine = VllmEngine(spec)
    assert engine.notes == ()
    Scheduled.watch(engine._core.scheduler)
    while True:
        try:
            name, *args = connection.recv()
        except EOFError:
            return engine.close()
        connection.send(globals()[name](engine, *args))


class Remote:
    """The child's engine, with version 1 loaded."""

    def __init__(self, tiny: Any, connection: Any) -> None:
        self.tiny, self._connection = tiny, connection

    def call(self, name: str, *args: Any) -> Any:
        self._connection.send((name, *args))
        assert self._connection.poll(240)
        return self._connection.recv()

    def run(self, sampling: Sampling, requests: list[ResponseRequest], **fields: Any) -> Result:
        return Result(**self.call("drive", {"sampling": sampling, "requests": requests, **fields}))


@pytest.fixture(scope="module")
def remote(tiny: Any, origin_of_engines: Origins) -> Iterator[Remote]:
    spec = EngineSpec("vllm", str(tiny.dir), "float32", MAX_LENGTH, SLOTS, max_window=WINDOW)
    with vllm_child(__file__, spec, origin_of_engines) as here:
        yield Remote(tiny, here)


@pytest.fixture
def engine(remote: Remote) -> Remote:
    remote.call("load", remote.tiny.files[1])
    return remote


def requests_of(
    ask: Callable[..., ResponseRequest], num: int = 60, siblings: int = 3, seed: int = 0
):
    """More than there are slots, of different lengths; responses of one prompt have different
    seeds."""
    return [
        ask(f"{key}#{i}", list(PROMPTS[k]), num + 7 * k - 3 * i, seed=seed + 10 * k + i)
        for i in range(siblings)
        for k, key in enumerate(KEYS)
    ]


def histories_of(
    tokens: dict[str, list[int]], change: Callable[[list[int]], list[int]]
) -> Histories:
    by_key: dict[str, list[bytes]] = {}
    for name, t in tokens.items():
        by_key.setdefault(name.rpartition("#")[0], []).append(pack_i32(change(t)))
    return tuple(PromptHistory(k, tuple(v), (None,) * len(v)) for k, v in by_key.items())


def perturbed(tokens: list[int]) -> list[int]:
    return [(t + 1) % VOCABULARY if i % 9 == 8 else t for i, t in enumerate(tokens)]


def always_wrong(tokens: list[int]) -> list[int]:
    """Its context is found again every time, and what follows never is what is drawn."""
    return [x for t in tokens for x in (t, (t + 1) % VOCABULARY)]


def of_chance(tokens: list[int]) -> list[int]:
    return np.random.default_rng(len(tokens)).integers(0, VOCABULARY, len(tokens)).tolist()


@pytest.mark.e2e
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_responses_are_the_same_with_every_kind_of_history(engine, ask, sampling):
    requests = requests_of(ask)
    plain = engine.run(sampling, requests, width=0)
    assert plain.drafted == 0
    for name in ("p0@0#1", "p2@0#0"):
        request = next(r for r in requests if r.response == name)
        prompt = list(PROMPTS[KEYS.index(name[:4])])
        wanted = engine.tiny.reference(1, prompt, request.seed, sampling, request.max_new_tokens)
        assert (plain.tokens[name], pytest.approx(plain.logprobs[name], abs=1e-4)) == wanted
    steps = {}
    for change in (list, perturbed, of_chance, always_wrong):
        got = engine.run(sampling, requests, histories=histories_of(plain.tokens, change))
        assert got.tokens == plain.tokens, change
        assert got.finish == plain.finish
        for name, logprobs in plain.logprobs.items():
            assert got.logprobs[name] == pytest.approx(logprobs, abs=1e-4)
        assert got.drafted > 0
        steps[change] = got.num_steps
    assert steps[list] < plain.num_steps
    assert steps[list] <= steps[perturbed]


@pytest.mark.e2e
def test_a_draft_is_cut_off_by_the_end_of_an_attempt_and_goes_on_elsewhere(engine, ask):
    sampling = Sampling(1.0)
    requests = requests_of(ask)
    plain = engine.run(sampling, requests, width=0)
    histories = histories_of(plain.tokens, perturbed)
    first = engine.run(sampling, requests, histories=histories, stop_after=6)
    assert any(first.tokens.values())
    rest = [
        ask(r.response, list(PROMPTS[KEYS.index(r.response[:4])]), left, r.seed, tokens, attempt=2)
        for r in requests
        if (left := r.max_new_tokens - len(tokens := first.tokens[r.response])) > 0
    ]
    second = engine.run(sampling, rest, histories=histories)
    for name in plain.tokens:
        assert first.tokens[name] + second.tokens.get(name, []) == plain.tokens[name]
    assert first.accepted
    assert second.accepted


@pytest.mark.e2e
def test_weights_that_come_in_between_count_from_the_next_token_on(engine, ask):
    sampling = Sampling(1.0)
    requests = requests_of(ask)
    plain = engine.run(sampling, requests, width=0)
    histories = histories_of(plain.tokens, perturbed)
    got = engine.run(sampling, requests, histories=histories, load_after={6: engine.tiny.files[2]})
    num_mixed = 0
    for r in requests:
        tokens, versions = got.tokens[r.response], got.versions[r.response]
        old = versions.count(0)
        assert versions == sorted(versions)
        assert tokens[:old] == plain.tokens[r.response][:old]
        prefix = list(PROMPTS[KEYS.index(r.response[:4])]) + tokens[:old]
        num = min(len(tokens) - old, 12)  # the reference is slow
        wanted, logprobs = engine.tiny.reference(2, prefix, r.seed, sampling, num)
        assert tokens[old : old + num] == wanted
        assert got.logprobs[r.response][old : old + num] == pytest.approx(logprobs, abs=1e-4)
        num_mixed += 0 < old < len(tokens)
    assert num_mixed


@pytest.mark.e2e
def test_a_stop_token_in_a_draft_that_was_right_ends_the_response(engine, ask):
    requests = requests_of(ask)
    plain = engine.run(Sampling(1.0), requests, width=0)
    stop = 9
    ending = Sampling(1.0, stop_token_ids=(stop,))
    got = engine.run(ending, requests, histories=histories_of(plain.tokens, list))
    for name, tokens in plain.tokens.items():
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert got.tokens[name] == tokens[:end]
        assert got.logprobs[name] == pytest.approx(plain.logprobs[name][:end], abs=1e-4)
        assert got.finish[name] == ("stop" if stop in tokens else "length")
    assert got.accepted


@pytest.mark.e2e
def test_drafts_go_on_up_to_the_models_length(engine, ask):
    prompt = list(PROMPTS[2])
    request = ask("p2@0#0", prompt, MAX_LENGTH - len(prompt), seed=5)
    plain = engine.run(Sampling(1.0), [request], width=0)
    got = engine.run(Sampling(1.0), [request], histories=histories_of(plain.tokens, list))
    assert got.tokens == plain.tokens
    assert got.finish == {"p2@0#0": "length"}
    assert len(got.tokens["p2@0#0"]) == MAX_LENGTH - len(prompt)
    assert got.num_steps < len(got.tokens["p2@0#0"]) / (WINDOW + 1) + 8
    assert got.num_observed == got.num_steps - 1  # all but the prefill


@torch.inference_mode()
def exact(engine: Remote, tokens: list[int], temperature: float) -> Any:
    logits = engine.tiny.models[1](torch.tensor([tokens])).logits[0, -1].double()
    return torch.softmax(logits / temperature, -1).numpy()


def chi_square(counts: Any, probabilities: Any) -> float:
    """In standard deviations above its mean; rare tokens count as one."""
    expected = probabilities * counts.sum()
    is_rare = expected < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    return (((observed - wanted) ** 2 / wanted).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.e2e
def test_after_drafts_tokens_have_the_probabilities_of_the_model(engine, ask):
    """`x` and `y` are drafted for all; what is drawn instead of y, and after it, is compared."""
    temperature, prompt, num = 0.7, list(PROMPTS[1]), 1200
    w = int(exact(engine, prompt, 1.0).argmax())
    x = int(exact(engine, [*prompt, w], 1.0).argmax())
    y = int(exact(engine, [*prompt, w, x], 1.0).argmax())
    histories = (PromptHistory("p1@0", (pack_i32([w, x, y, 1, 2, 3]),), (None,)),)
    requests = [ask(f"p1@0#{i}", prompt, 4, seed=1000 + i, prefix=[w]) for i in range(num)]
    got = engine.run(Sampling(temperature), requests, histories=histories)
    assert got.drafted
    drawn = np.array(list(got.tokens.values()))
    for known in ([x], [x, y]):
        after = drawn[(drawn[:, : len(known)] == known).all(1)][:, len(known)]
        assert len(after) > 60
        counts = np.bincount(after, minlength=VOCABULARY)
        assert chi_square(counts, exact(engine, [*prompt, w, *known], temperature)) < 4


def test_rows_accept_what_a_loop_over_requests_accepts():
    random = np.random.default_rng(0)
    for _ in range(200):
        counts = random.integers(0, 5, random.integers(1, 7)).tolist()
        drafted = random.integers(0, 2, sum(counts))
        drawn = random.integers(0, 2, sum(counts) + len(counts))
        rows = DraftRows(
            SimpleNamespace(num_draft_tokens=counts, draft_token_ids=torch.from_numpy(drafted))
        )
        assert rows.request.tolist() == [i for i, n in enumerate(counts) for _ in range(n + 1)]
        assert rows.offset.tolist() == [j for n in counts for j in range(n + 1)]
        chances = torch.arange(len(drawn), dtype=torch.float32)
        tokens, logprobs = rows.accepted(torch.from_numpy(drawn), chances)
        row = draft = 0
        for i, n in enumerate(counts):
            kept = next((j for j in range(n) if drawn[row + j] != drafted[draft + j]), n) + 1
            assert tokens[i].tolist() == drawn[row : row + kept].tolist() + [-1] * (
                max(counts) + 1 - kept
            )
            assert (
                logprobs.view(tokens.shape)[i][:kept].tolist() == chances[row : row + kept].tolist()
            )
            row, draft = row + n + 1, draft + n


if __name__ == "lightrl_child":
    serve(CONNECTION, SPEC)  # noqa: F821  # pyright: ignore
