"""What is drafted for running responses: by whose history, how much at once, and what is counted
and kept."""

import random
from collections.abc import Sequence

import pytest

from lightrl.history import draft as module
from lightrl.history.draft import FIRST_WINDOW, MIN_WINDOW, Drafter, group_of
from lightrl.history.gate import FIRST_STEPS
from lightrl.history.index import LONGEST
from lightrl.messages.load import Drafting
from lightrl.messages.responses import PromptHistory
from lightrl.wire import pack_i32

PROMPT = [1, 2, 3]
OLD = list(range(100, 200))  # a response of which every context is its own


def history(
    group: str, *responses: Sequence[int], rewards: Sequence[float | None] = ()
) -> PromptHistory:
    return PromptHistory(
        group, tuple(map(pack_i32, responses)), tuple(rewards or [1.0] * len(responses))
    )


def opened(max_window: int = 16, batch: int = 1, **more: bool | int) -> Drafter:
    """A drafter whose gate has seen that tokens are verified for nothing."""
    d = Drafter(max_window, **more)
    for _ in range(FIRST_STEPS):
        d.stepped(batch, batch, 0.005, 0.0, is_pure=True)
    for tokens in (2, 4, 8, 16, 32):
        for _ in range(2):
            d.gate.verified(9, 0)
            d.stepped(batch, batch * tokens, 0.005, 0.0, is_pure=True)
    return d


def draft(d: Drafter, response: str = "p@0#0", room: int = 1000) -> list[int]:
    [found] = d.drafts([(response, room)])
    return list(found)


def knowing(*responses: Sequence[int], max_window: int = 16) -> Drafter:
    """With one response running, of a prompt that was answered so."""
    d = opened(max_window)
    d.remember([history("p@0", *responses)])
    d.start("p@0#0", PROMPT, ())
    return d


def test_nothing_is_drafted_before_the_gate_knows_what_a_step_costs() -> None:
    d = Drafter(16)
    d.remember([history("p@0", OLD)])
    d.start("p@0#0", PROMPT, ())
    assert draft(d) == []
    assert d.drafts([]) == []


def test_a_window_doubles_up_to_the_most_when_all_was_kept() -> None:
    d, written = knowing(OLD), 0
    for window in (FIRST_WINDOW, 8, 16, 16):
        found = draft(d)
        assert found == OLD[written : written + window]
        d.took("p@0#0", OLD[written : written + window + 1])  # one is drawn after the draft
        written += window + 1


def test_a_window_is_no_wider_than_it_may_be() -> None:
    d, written = knowing(OLD, max_window=6), 0
    sizes = []
    for _ in range(4):
        found = draft(d)
        sizes.append(len(found))
        d.took("p@0#0", OLD[written : written + len(found) + 1])
        written += len(found) + 1
    assert max(sizes) <= 6


def test_a_window_halves_when_one_was_not_kept_down_to_the_least() -> None:
    d = knowing(OLD)
    for written, window in ((0, FIRST_WINDOW), (20, 2), (40, MIN_WINDOW)):
        # back to where one knows
        d.took("p@0#0", OLD[written - LONGEST if written else 0 : written])
        assert draft(d) == OLD[written : written + window]
        d.took("p@0#0", [OLD[written], 7])


def test_a_draft_cut_short_by_the_room_neither_widens_nor_narrows() -> None:
    d = knowing(OLD)
    assert draft(d, room=0) == []
    assert draft(d, room=2) == OLD[:2]
    d.took("p@0#0", OLD[:3])
    assert draft(d) == OLD[3 : 3 + FIRST_WINDOW]


def test_the_cursor_finds_its_way_after_tokens_that_nobody_expected() -> None:
    d = knowing(OLD)
    assert draft(d) == OLD[:4]
    d.took("p@0#0", [*OLD[:2], 7])  # 7 instead of the third
    assert draft(d) == [], "no context with 7 in it is known"
    d.took("p@0#0", [8])
    d.took("p@0#0", OLD[50:52])
    assert draft(d) == []
    d.took("p@0#0", OLD[52:53])
    assert draft(d) == OLD[53:55], "three tokens are enough"


def test_a_closed_gate_does_not_lose_the_place() -> None:
    d = knowing(OLD)
    assert draft(d) == OLD[:4]
    d.took("p@0#0", OLD[:5])
    for token in OLD[5:30]:
        d.took("p@0#0", [token])
    assert draft(d) == OLD[30:38]
    d.took("p@0#0", [*OLD[30:32], 7])
    for token in OLD[60:90]:
        d.took("p@0#0", [token])
    assert draft(d) == OLD[90:94]


def test_siblings_help_where_there_is_no_history() -> None:
    d = opened()
    d.start("p@0#0", PROMPT, ())
    d.start("p@0#1", PROMPT, ())
    d.start("q@0#0", PROMPT, ())
    assert draft(d, "p@0#1") == []
    d.took("p@0#0", OLD)
    d.end("p@0#0", is_finished=True)
    assert draft(d, "p@0#1") == OLD[:4]
    assert draft(d, "q@0#0") == [], "another group"


def test_what_was_aborted_helps_nobody() -> None:
    d = opened()
    d.start("p@0#0", PROMPT, ())
    d.took("p@0#0", OLD)
    d.end("p@0#0", is_finished=False)
    d.start("p@0#1", PROMPT, ())
    assert draft(d, "p@0#1") == []


@pytest.mark.parametrize("by_reward", [False, True])
def test_rewards_count_where_they_are_asked_for(by_reward: bool) -> None:
    d = opened(by_reward=by_reward)
    d.remember([history("p@0", [10, 11], [10, 11], [20, 21], rewards=(0.0, 0.0, 1.0))])
    d.start("p@0#0", PROMPT, ())
    assert draft(d) == ([20, 21] if by_reward else [10, 11])


def test_without_a_score_a_response_counts_as_one_in_the_middle() -> None:
    d = opened(by_reward=True)
    d.remember([history("p@0", [10], [20], [30], [20], rewards=(-1.0, None, 3.0, None))])
    d.remember([history("q@0", [10], [10], [30], rewards=(None, None, None))])
    d.start("p@0#0", PROMPT, ())
    d.start("q@0#0", PROMPT, ())
    assert draft(d, "p@0#0") == [20]  # 0.55 + 0.55 against 1
    assert draft(d, "q@0#0") == [10]


def test_a_response_goes_on_behind_its_prefix() -> None:
    """It has moved from another node, history and all."""
    d = opened()
    d.remember([history("p@0", OLD)])
    d.start("p@0#0", PROMPT, OLD[:30])
    assert draft(d) == OLD[30:34]
    d.took("p@0#0", OLD[30:35])
    d.took("p@0#0", OLD[35:40])
    d.end("p@0#0", is_finished=True)
    d.start("p@0#1", PROMPT, ())
    assert draft(d, "p@0#1") == OLD[:4]


def test_a_turn_replaces_the_turns_before_it_and_an_empty_prompt_is_none_too_short() -> None:
    d = opened()
    for turn in range(1, 5):  # 20 tokens each, of which the first 5 are inserted
        d.start("p@0#0", (), OLD[: 20 * turn - 15])
        d.took("p@0#0", OLD[20 * turn - 15 : 20 * turn])
        d.end("p@0#0", is_finished=True)
        assert d._num_tokens == LONGEST + 20 * turn
    d.start("p@0#1", (), OLD[:35])  # behind an observation
    assert draft(d, "p@0#1") == OLD[35 : 35 + FIRST_WINDOW]


def test_what_is_known_already_is_not_remembered_twice() -> None:
    d = opened()
    d.remember([history("p@0", [20, 21], [20, 21])])
    for _ in range(3):
        d.remember([history("p@0", [10, 11])])
    d.start("p@0#0", PROMPT, ())
    assert draft(d) == [20, 21], "twice against once"


def test_history_that_comes_after_a_response_started_helps_it_still() -> None:
    d = opened()
    d.start("p@0#0", PROMPT, ())
    d.remember([history("p@0", [], OLD)])
    assert draft(d) == OLD[:4]


def test_an_end_of_what_never_ran_is_ignored() -> None:
    d = opened()
    d.end("x@0#0", is_finished=True)
    d.start("x@0#1", PROMPT, ())
    assert draft(d, "x@0#1") == []


@pytest.mark.parametrize("rewarded", [False, True])
def test_the_oldest_prompts_are_forgotten_first_and_running_responses_survive_it(
    rewarded: bool,
) -> None:
    room = 3 * (len(OLD) + LONGEST) * 52
    d = opened(by_reward=rewarded, max_bytes=room)
    groups = [f"{name}@0" for name in "abcdef"]
    d.remember([history(groups[0], OLD)])
    d.start("a@0#0", PROMPT, ())
    d.start("a@0#1", PROMPT, ())
    d.remember([history(g, OLD) for g in groups[1:]])
    for g in groups[1:]:
        d.start(f"{g}#0", PROMPT, ())
    known = [g for g in groups[1:] if draft(d, f"{g}#0")]
    assert known == groups[3:]
    assert draft(d, "a@0#0") == OLD[:4], "it runs on with what it had"
    for _ in range(5):  # what has been forgotten takes no room away from the others
        d.took("a@0#0", OLD[:5])
        d.end("a@0#0", is_finished=True)
        d.start("a@0#0", PROMPT, ())
    assert [g for g in groups[3:] if draft(d, f"{g}#0")] == groups[3:]


def test_many_prompts_without_answers_are_forgotten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GROUPS", 10)
    d = opened()
    for i in range(30):
        d.start(f"p{i}@0#0", PROMPT, ())
        d.start(f"p{i}@0#1", PROMPT, ())
        d.took(f"p{i}@0#0", OLD)
        d.end(f"p{i}@0#0", is_finished=True)
    # they run, and keep what they stand in
    assert [i for i in range(30) if not draft(d, f"p{i}@0#1")] == []
    d.start("p0@0#2", PROMPT, ())
    assert draft(d, "p0@0#2") == []


def test_counts() -> None:
    d = opened()
    engine_s = d.counts.engine_s
    d.remember([history("p@0", OLD)])
    d.start("p@0#0", PROMPT, ())
    d.start("q@0#0", PROMPT, ())
    batch = [("p@0#0", 9), ("q@0#0", 9)]
    assert [len(found) for found in d.drafts(batch)] == [4, 0]
    d.took("p@0#0", [*OLD[:2], 7])
    d.took("q@0#0", [5])
    d.stepped(2, 6, 0.25, 0.125, is_pure=False)
    c = d.counts
    assert c == Drafting(4, 2, forwards=2, emitted=4, draft_s=0.125, engine_s=engine_s + 0.25)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_drafted_the_counts_add_up(seed: int) -> None:
    """Responses that follow the history and stray from it, in an engine that accepts what is
    right."""
    rng = random.Random(seed)
    d = opened(max_window=rng.choice((1, 3, 16)), batch=4)
    texts = {f"p@0#{k}": [rng.randrange(4) for _ in range(rng.randrange(1, 60))] for k in range(4)}
    d.remember([history("p@0", *(t[: rng.randrange(len(t) + 1)] for t in texts.values()))])
    done = dict.fromkeys(texts, 0)
    drafted = accepted = forwards = 0
    for response in texts:
        d.start(response, PROMPT, ())
    while done:
        batch = [(r, len(texts[r]) - n - 1) for r, n in done.items()]
        for (response, room), found in zip(batch, d.drafts(batch), strict=True):
            assert len(found) <= room
            right = texts[response][done[response] :]
            kept = next((i for i, t in enumerate(found) if t != right[i]), len(found))
            drafted, accepted, forwards = drafted + len(found), accepted + kept, forwards + 1
            d.took(response, right[: kept + 1])
            done[response] += kept + 1
            if done[response] == len(texts[response]):
                d.end(response, is_finished=rng.random() < 0.5)
                del done[response]
    c = d.counts
    assert (c.drafted, c.accepted, c.forwards) == (drafted, accepted, forwards)
    assert c.emitted == forwards + accepted == sum(map(len, texts.values()))


def test_the_group_of_a_response() -> None:
    assert group_of("p#7@0#3") == "p#7@0"


def test_what_runs_drafts_from_siblings_that_still_run() -> None:
    d = opened()
    for k in (0, 1):
        d.start(f"p@0#{k}", PROMPT, ())
    assert draft(d) == []
    d.took("p@0#0", OLD[:40])  # it is ahead
    d.took("p@0#1", OLD[:10])
    for _ in range(module.INDEX_EVERY + 1):
        found = draft(d, "p@0#1")
    assert found == OLD[10 : 10 + FIRST_WINDOW]
    d.start("q@0#0", PROMPT, ())  # another prompt's responses are none of its business
    assert draft(d, "q@0#0") == []


def test_what_runs_is_sorted_only_once_it_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    class Counted(module.SuffixIndex):
        def __init__(self, books: Sequence[module.Book]) -> None:
            made.append(sum(len(r) for book in books for r in book.responses))
            super().__init__(books)

    monkeypatch.setattr(module, "SuffixIndex", Counted)
    d = opened()
    d.start("p@0#0", PROMPT, ())
    rng = random.Random(1)
    for _ in range(1000):
        draft(d)
        d.took("p@0#0", [rng.randrange(1 << 20)])
    assert sum(made) <= 3 * 1000
    d.end("p@0#0", is_finished=False)
    d.start("p@0#1", PROMPT, ())  # of what was given up nothing is left
    d.took("p@0#1", OLD[:1])
    assert d.drafts([("p@0#1", 9)]) == [[]]
