"""The seconds of a step are measured from the chunks of all running responses, whatever an engine
sends between them."""

import random

import pytest

from lightrl.metrics.chunk_window import ChunkWindow

STEP_S = 0.01


def sent(seed: int, batch: int = 16, every: int = 5, share: float = 0.1) -> list[tuple[float, int]]:
    """Return (seconds of a step, mean batch) of an engine that sends a response when it ends, and
    the others every few steps. Another response takes the place of each that ends."""
    rng = random.Random(seed)
    window, now, unsent, found = ChunkWindow(), 0.0, [0] * batch, []
    window.add(now, batch, batch, 0)
    for step in range(1, 500):
        now += STEP_S
        unsent = [tokens + 1 for tokens in unsent]
        ended = [i for i in range(batch) if rng.random() < share]
        whole = step % every == 0
        if chunk := list(range(batch)) if whole else ended:
            if measured := window.add(now, batch, len(chunk), sum(unsent[i] for i in chunk)):
                found.append((measured[1], measured[0]))
            for i in chunk:
                unsent[i] = 0
    return found


@pytest.mark.parametrize("seed", range(3))
def test_responses_that_end_between_the_chunks_of_all_do_not_blur_what_a_step_takes(seed: int):
    found = sent(seed)
    assert len(found) >= 90
    assert {batch for _, batch in found} == {16}
    assert all(seconds == pytest.approx(STEP_S, rel=1e-9) for seconds, _ in found)


def test_an_engine_that_only_sends_what_has_ended_tells_it_in_the_long_run():
    found = sent(0, every=10_000)
    assert len(found) >= 20
    mean = sum(seconds for seconds, _ in found) / len(found)
    assert mean == pytest.approx(STEP_S, rel=0.1)


def test_chunks_of_one_moment_are_one():
    window = ChunkWindow()
    assert window.add(0.0, 2, 2, 2) is None
    assert window.add(1.0, 2, 1, 10) is None
    assert window.add(1.0, 2, 1, 10) == (2, 0.1)
    assert window.add(2.0, 2, 2, 8) == (2, 0.25)


def test_neither_a_pause_nor_a_clock_that_is_set_back_counts_as_decoding():
    window = ChunkWindow()
    window.add(0.0, 1, 1, 1)
    window.pause()
    assert window.add(100.0, 1, 1, 1) is None
    assert window.add(90.0, 1, 1, 1) is None
    assert window.add(91.0, 1, 1, 4) == (1, 0.25)
