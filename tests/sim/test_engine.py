"""The formula of the engine against a loop that makes one engine step after the other."""

import random
from collections import deque

import pytest

from lightrl.messages.responses import ResponseTokens
from lightrl.sim.fleet.engine import Attempt, SimEngine
from lightrl.sim.inputs.hardware import EngineProfile, SimSpeculation


def attempt(k: int, final: int, held: int = 0, prompt: int = 10) -> Attempt:
    return Attempt(f"r{k}", 1, f"p{k}", prompt, held, final, truncated=False)


def count(delta: ResponseTokens) -> int:
    return len(delta.token_ids) // 4


def run(engine: SimEngine) -> tuple[dict[str, float], dict[str, int], float]:
    """When each response left the engine, tokens sent of each, and when nothing ran any more."""
    left: dict[str, float] = {}
    sent: dict[str, int] = {}
    now = engine.now
    present = set(engine.running) | {a.response for a in engine.waiting}
    while engine.next_at < float("inf"):
        now = engine.next_at
        for delta in engine.step(now):
            assert delta.offset == sent.get(delta.response, delta.offset)
            sent[delta.response] = delta.offset + count(delta)
        still = set(engine.running) | {a.response for a in engine.waiting}
        left |= dict.fromkeys(present - still, now)
        present = still
    return left, sent, now


def loop(
    profile: EngineProfile, slots: int, lengths: list[int], prompt: int = 10
) -> dict[str, float]:
    """The same, one step at a time."""
    held = dict.fromkeys(range(len(lengths)), 0)
    waiting, running = deque(held), list[int]()
    now, left = 0.0, dict[str, float]()
    context = lambda: sum(prompt + held[k] for k in running)  # noqa: E731
    while waiting or running:
        while (
            profile.kv_tokens and len(running) > 1 and context() + len(running) > profile.kv_tokens
        ):
            waiting.appendleft(running.pop())
        prefill = 0
        while waiting and len(running) < slots:
            size = prompt + held[waiting[0]]
            if (
                profile.kv_tokens
                and running
                and context() + size + len(running) + 1 > profile.kv_tokens
            ):
                break
            running.append(waiting.popleft())
            prefill += size
        now += prefill * profile.prefill_s
        now += (
            profile.step_s * (1 + len(running) / profile.half_batch) + profile.context_s * context()
        )
        for k in list(running):
            held[k] += 1
            if held[k] == lengths[k]:
                running.remove(k)
                left[f"r{k}"] = now
    return left


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kv_tokens", [0, 900])
def test_engine_finishes_what_a_loop_over_steps_finishes_at_the_same_times(
    seed: int, kv_tokens: int
):
    rng = random.Random(seed)
    profile = EngineProfile(0.01, 50, 2e-6, 1e-5, kv_tokens)
    lengths = [rng.randint(1, 300) for _ in range(rng.randint(1, 30))]
    slots = rng.choice([4, 40])
    engine = SimEngine(profile, slots, rng.choice([1, 16, 64]), 0.0)
    engine.add(0.0, [attempt(k, n) for k, n in enumerate(lengths)])
    left, sent, end = run(engine)
    expected = loop(profile, slots, lengths)
    assert left == pytest.approx(expected, rel=1e-9)
    assert sent == {f"r{k}": n for k, n in enumerate(lengths)}
    assert engine.num_tokens == sum(lengths)
    assert sum(engine.times.values()) == pytest.approx(end)
    assert engine.times["prefill"] == pytest.approx(engine.prefilled_tokens * profile.prefill_s)
    if kv_tokens and slots == 40 and len(lengths) > 10:
        assert engine.num_preemptions > 0


def test_a_lone_response_takes_what_the_profile_says():
    profile = EngineProfile(speculation=SimSpeculation())
    engine = SimEngine(profile, 8, 16, 0.0)
    engine.add(0.0, [attempt(0, 500)])
    _, _, end = run(engine)
    assert end == pytest.approx(profile.alone_s(10, 500) + 10 * profile.prefill_s)


def test_aborting_makes_room_and_loses_only_what_was_not_sent():
    engine = SimEngine(EngineProfile(), 1, 16, 0.0)
    engine.add(0.0, [attempt(0, 1000), attempt(1, 50)])
    engine.step(engine.next_at)
    engine.abort(1.0, "r0", 2)  # of another attempt
    assert list(engine.running) == ["r0"]
    engine.abort(1.0, "r0", 1)
    assert list(engine.running) == ["r1"]
    left, sent, _ = run(engine)
    assert sent == {"r1": 50}
    assert set(left) == {"r1"}


def test_giving_up_sends_everything_first():
    engine = SimEngine(EngineProfile(), 1, 16, 0.0)
    engine.add(0.0, [attempt(0, 1000), attempt(1, 50, held=7)])
    deltas = engine.abort_all(1.0)
    assert [(d.response, d.finish_reason) for d in deltas] == [
        ("r0", None),
        ("r0", "abort"),
        ("r1", "abort"),
    ]
    assert count(deltas[0]) == deltas[1].offset == engine.num_tokens
    assert deltas[2].offset == 7
    assert not engine.running
    assert engine.next_at == float("inf")


def test_speculation_stops_paying_with_large_batches_and_never_costs():
    plain, drafted = (
        EngineProfile(),
        EngineProfile(speculation=SimSpeculation(acceptance=0.7, verify_cost=0.8)),
    )
    gains = []
    for batch in (1, 8, 64, 512):
        (seconds, tokens), (alone, _) = drafted.forward(batch), plain.forward(batch)
        gains.append(tokens / seconds * alone)
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2
    assert gains[-1] >= 1
    assert SimSpeculation(acceptance=0.5).tokens_per_forward(1) == 1.5


def told(chunk_s: float, step_s: float, lengths: list[int]) -> list[tuple[float, list[int]]]:
    """When chunks came, and tokens of each that had ended."""
    profile = EngineProfile(step_s, 1e9, 0.0, 0.0)
    engine = SimEngine(profile, len(lengths), 16, now=0.0, prompt_batch=0, chunk_s=chunk_s)
    engine.add(0.0, [attempt(k, n) for k, n in enumerate(lengths)])
    chunks: list[tuple[float, list[int]]] = []
    while engine.next_at < float("inf"):
        now = engine.next_at
        if deltas := engine.step(now):
            ended = [d.offset + count(d) for d in deltas if d.finish_reason is not None]
            chunks.append((round(now, 6), ended))
    return chunks


def test_a_finish_is_sent_as_a_real_engine_does():
    """It waits for a fifth of `chunk_ms`, in whole steps of which its last one counts; the others'
    tokens come with their chunk, and nothing waits once nothing runs."""
    assert told(0.05, 0.020, [2, 7]) == [(0.04, [2]), (0.06, []), (0.12, []), (0.14, [7])]
    # 10 ms are ten steps of 1 ms, the last one of 5 counts; a chunk at 16 tokens
    assert told(0.05, 0.001, [5, 30])[:2] == [(0.014, [5]), (0.016, [])]
    assert told(0.05, 0.001, [5, 30])[-1] == (0.03, [30])
