"""What a node can account for when it was not heard: every token once, in order, and nothing for
ever."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightrl.messages.responses import ResponseRequest, ResponseTokens, TokenChunk
from lightrl.rollout.resend_buffer import CHUNK_BYTES, ResendBuffer
from lightrl.wire import pack_f32, pack_i32, unpack_i32


def request(name: str, attempt: int = 1) -> ResponseRequest:
    return ResponseRequest(name, attempt, 0, b"", b"", 100)


def chunk(
    name: str, offset: int, ids: list[int], attempt: int = 1, end=None, version: int = 0
) -> TokenChunk:
    item = ResponseTokens(name, attempt, offset, pack_i32(ids), pack_f32([0.5] * len(ids)), end)
    return TokenChunk(version, f"d{version}", (item,))


def told(kept: ResendBuffer) -> list[tuple[int, str, int, list[int], str | None]]:
    """(version, response, offset, tokens, finish) of all that would be sent again, in order."""
    return [
        (c.policy_version, i.response, i.offset, unpack_i32(i.token_ids), i.finish_reason)
        for c in kept.chunks()
        for i in c.responses
    ]


def test_what_runs_is_kept_from_its_first_token():
    kept = ResendBuffer(0)
    kept.start([request("a")])
    for offset in (7, 9, 11):  # 7 tokens were held when it came
        kept.add(chunk("a", offset, [offset, offset + 1]))
    assert kept.unacked() == (("a", 1),)
    assert told(kept) == [(0, "a", 7, [7, 8, 9, 10, 11, 12], None)]


def test_what_has_finished_is_claimed_after_what_runs_and_told_with_its_end():
    kept = ResendBuffer(0)
    kept.start([request("a"), request("b")])
    kept.add(chunk("a", 0, [1], end="stop"))
    assert kept.unacked() == (("b", 1), ("a", 1))
    assert told(kept) == [(0, "a", 0, [1], "stop")]


def test_what_was_cached_is_told_with_the_last_tokens():
    kept = ResendBuffer(2)
    kept.start([request("a")])
    kept.add(chunk("a", 0, [1]))
    kept.loaded(1, True)
    [last] = chunk("a", 1, [2], end="stop", version=1).responses
    kept.add(TokenChunk(1, "d1", (replace(last, num_cached=5),)))
    assert [i.num_cached for c in kept.chunks() for i in c.responses] == [None, 5]


def test_loading_a_version_forgets_what_has_finished_unless_the_coordinator_was_out_of_touch():
    for in_touch, left in ((True, ()), (False, (("a", 1),))):
        kept = ResendBuffer(max_staleness=1)
        kept.start([request("a")])
        kept.add(chunk("a", 0, [1], end="stop"))
        kept.loaded(1, in_touch)
        assert kept.unacked() == left
        kept.loaded(2, in_touch)  # too old to be trained by now
        assert kept.unacked() == ()


def test_in_a_synchronous_run_nothing_finished_outlives_its_version():
    kept = ResendBuffer(max_staleness=0)
    kept.start([request("a")])
    kept.add(chunk("a", 0, [1], end="stop"))
    kept.loaded(1, is_connected=False)
    assert kept.unacked() == ()


def test_tokens_of_several_versions_are_told_oldest_version_first():
    kept = ResendBuffer(max_staleness=2)
    kept.loaded(4, True)
    kept.start([request("a"), request("b")])
    kept.add(chunk("b", 0, [1], version=4))
    kept.loaded(5, True)
    kept.add(chunk("a", 0, [2], version=5))
    kept.add(chunk("b", 1, [3], version=5, end="length"))
    assert told(kept) == [
        (4, "b", 0, [1], None),
        (5, "b", 1, [3], "length"),
        (5, "a", 0, [2], None),
    ]


def test_engine_that_died_ends_what_it_held_as_aborted():
    kept = ResendBuffer(0)
    kept.start([request("a"), request("b")])
    kept.add(chunk("a", 0, [1]))
    kept.end_all()
    assert kept.unacked() == (("a", 1),)  # of b there is nothing to tell
    assert told(kept) == [(0, "a", 0, [1], "abort")]


def test_what_is_not_wanted_is_forgotten_and_its_late_tokens_skipped():
    kept = ResendBuffer(0)
    kept.start([request("a"), request("b", 2)])
    kept.forget([("a", 1), ("b", 1), ("unknown", 1)])
    kept.add(chunk("a", 0, [1], end="abort"))
    assert kept.unacked() == (("b", 2),)


def test_newer_attempt_replaces_what_is_kept_of_an_older_one_and_an_order_twice_changes_nothing():
    kept = ResendBuffer(0)
    kept.start([request("a")])
    kept.add(chunk("a", 0, [1, 2]))
    kept.start([request("a")])
    assert told(kept) == [(0, "a", 0, [1, 2], None)]
    kept.start([request("a", 2)])
    kept.add(chunk("a", 0, [9], attempt=1))
    kept.add(chunk("a", 2, [3], attempt=2))
    assert told(kept) == [(0, "a", 2, [3], None)]


def test_finished_responses_are_bounded_by_bytes_the_first_go_first():
    kept = ResendBuffer(0, max_finished_bytes=3 * 8 * 10)
    names = [f"r{k}" for k in range(6)]
    kept.start([request(n) for n in names])
    for n in names[:5]:
        kept.add(chunk(n, 0, list(range(10)), end="stop"))
    assert kept.unacked() == (("r5", 1), ("r2", 1), ("r3", 1), ("r4", 1))


def test_much_is_told_in_portions():
    kept = ResendBuffer(0)
    size = CHUNK_BYTES // 8 // 4  # tokens; four such responses fill a portion
    kept.start([request(f"r{k}") for k in range(9)])
    for k in range(9):
        kept.add(chunk(f"r{k}", 0, [k] * size))
    assert [len(c.responses) for c in kept.chunks()] == [4, 4, 1]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.booleans()), max_size=40))
def test_whatever_comes_in_between_every_token_is_told_once_and_in_order(
    steps: list[tuple[str, int, bool]],
):
    """Chunks of two responses, loads in between: those told again make up exactly what was
    generated."""
    kept = ResendBuffer(max_staleness=1000)
    kept.start([request("a"), request("b")])
    made: dict[str, list[int]] = {"a": [], "b": []}
    version = 0
    for name, count, loads in steps:
        if loads:
            version += 1
            kept.loaded(version, is_connected=False)
        ids = list(range(len(made[name]), len(made[name]) + count))
        kept.add(chunk(name, len(made[name]), ids, version=version))
        made[name] += ids
    again: dict[str, list[int]] = {"a": [], "b": []}
    versions: list[int] = []
    for v, name, offset, ids, _ in told(kept):
        assert offset == len(again[name])
        again[name] += ids
        versions.append(v)
    assert again == made
    assert versions == sorted(versions)
