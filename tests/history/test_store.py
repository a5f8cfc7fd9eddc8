"""What is remembered of earlier responses: of the newest epoch, within the limit, whatever became
of them."""

import json
import random
import tracemalloc
from array import array

import pytest

from lightrl.core.state import DrawnPrompt, Group, Response, Round, RoundKind, RoundState
from lightrl.history.lengths import WorkloadLog
from lightrl.history.store import History, PastResponse, PromptAnswers, answers
from lightrl.messages.responses import Sampling


def past(num_tokens: int, epoch: int = 0, finished: bool = True) -> PastResponse:
    return PastResponse(epoch, array("i", [epoch] * num_tokens), finished)


def closed(epoch: int, *prompts: str, kind: RoundKind = "short") -> Round:
    """Two responses for each prompt: one finished with 3 tokens and a reward, one given up after
    2."""
    round = Round(kind, epoch, 1, len(prompts), 0.0, RoundState.CLOSED)
    for position, prompt in enumerate(prompts):
        drawn = DrawnPrompt(prompt, epoch, b"")
        group = Group(f"{prompt}@{epoch}", drawn, round, position, 1, Sampling(), 9)
        first, second = (
            Response(f"{group.id}#{k}", group, k, 0, tokens=array("i", [9] * (3 - k)))
            for k in (0, 1)
        )
        first.finish_reason, first.reward = "stop", 0.5
        group.responses = [first, second]
        round.groups[group.id] = group
    return round


def add(history: History, prompt: str, epoch: int, *responses: tuple[int, PastResponse]) -> None:
    history.add(PromptAnswers(prompt, epoch, responses))


def test_a_newer_epoch_replaces_an_older_one_and_late_news_of_an_older_one_is_ignored():
    history = History()
    add(history, "a", 0, (0, past(3)), (1, past(2)))
    add(history, "a", 1, (1, past(5, epoch=1)))
    assert history.of("a") == (past(5, epoch=1),)
    add(history, "a", 0, (0, past(9)))
    assert history.of("a") == (past(5, epoch=1),)
    assert (history.num_bytes, history.num_responses) == (20, 1)


def test_a_prompt_that_was_put_off_keeps_what_it_had_beside_what_it_got_in_the_end():
    history = History()
    add(history, "a", 0, (0, past(3)), (1, past(2, finished=False)), (2, past(4, finished=False)))
    add(history, "a", 0, (0, past(3)), (1, past(7)))
    assert history.of("a") == (past(3), past(7), past(4, finished=False))


def test_nothing_is_remembered_of_what_was_never_sampled():
    history = History()
    add(history, "a", 0, (0, past(2)))
    add(history, "a", 1, (0, past(0, epoch=1)))
    add(history, "b", 1, (0, past(0, epoch=1)))
    assert history.of("a") == (past(2),)
    assert history.of("b") == ()


def test_the_prompt_answered_last_is_forgotten_first_and_the_limit_holds():
    history = History(max_bytes=40)
    for prompt, num_tokens in (("a", 4), ("b", 4), ("a", 5), ("c", 3)):
        add(history, prompt, 0, (0, past(num_tokens)))
        assert history.num_bytes <= 40
    assert [history.of(p) for p in "abc"] == [(past(5),), (past(4),), ()]
    assert history.num_evicted == 1
    add(history, "d", 0, (0, past(10)))  # all there is room for
    assert [history.of(p) for p in "abcd"] == [(past(5),), (past(4),), (), ()]
    assert history.num_evicted == 2


@pytest.mark.parametrize("share", [0.9, 0.75, 0.5, 0.25])
@pytest.mark.parametrize("growth", [0.95, 1.0, 1.02])
def test_a_store_of_part_of_an_epoch_has_a_history_for_as_many_prompts(share, growth):
    """In any order of each epoch, and with other lengths in each."""
    num, mean, rng = 200, 50, random.Random(3)
    history = History(max_bytes=round(share * num * mean * 4))
    for epoch in range(5):
        prompts, hits = rng.sample(range(num), num), 0.0
        for start in range(0, num, 8):
            answered: list[PromptAnswers] = []
            for prompt in prompts[start : start + 8]:
                length = 1 + int(rng.expovariate(1 / (mean * growth**epoch)))
                answered.append(PromptAnswers(f"{prompt}", epoch, ((0, past(length, epoch)),)))
            hits += history.learn(answered)["history/hit_rate"] * len(answered)
        assert not epoch or hits / num > share - 0.05


def test_evaluations_make_room_by_what_was_trained_last():
    history = History(max_bytes=40)
    for prompt, num_tokens in (("\0e", 2), ("a", 4), ("b", 4), ("\0e", 6)):
        add(history, prompt, 0, (0, past(num_tokens)))
    assert [history.of(p) for p in ("\0e", "a", "b")] == [(past(6),), (past(4),), ()]
    add(history, "\0f", 0, (0, past(9)))  # training prompts give way before other evaluations do
    assert [a.prompt for a in history.all()] == ["\0e"]


def test_what_has_no_room_even_alone_costs_the_others_nothing():
    history = History(max_bytes=40)
    add(history, "a", 0, (0, past(4)))
    add(history, "b", 0, (0, past(6)), (1, past(5)))
    add(history, "a", 0, (1, past(7)))  # and what it is to stand beside stays
    assert [history.of(p) for p in "ab"] == [(past(4),), ()]
    assert (history.num_bytes, history.num_responses, history.num_evicted) == (16, 1, 0)


def test_added_in_the_order_in_which_all_is_told_another_history_is_the_same():
    history, other = History(max_bytes=40), History(max_bytes=40)
    for prompt, epoch in (("a", 0), ("b", 0), ("a", 1)):
        add(history, prompt, epoch, (0, past(2, epoch)), (3, past(1, epoch)))
    for answered in history.all():
        other.add(answered)
    assert list(other.all()) == list(history.all())
    for each in (history, other):
        add(each, "c", 1, (0, past(4, 1)))
        assert [a.prompt for a in each.all()] == ["b", "a", "c"]
        add(each, "b", 1, (0, past(4, 1)))
        assert [a.prompt for a in each.all()] == ["a", "c"]
    assert (other.num_bytes, other.num_responses) == (history.num_bytes, history.num_responses)


def test_a_round_brings_finished_and_given_up_responses_and_its_hits_are_counted():
    history = History(max_bytes=60)
    assert history.learn(answers(closed(0, "a", "b"))) == {
        "history/bytes": 40.0,
        "history/responses": 4.0,
        "history/prompts": 2.0,
        "history/evicted": 0.0,
        "history/hit_rate": 0.0,
    }
    whole, part = history.of("a")
    assert whole == PastResponse(0, array("i", [9] * 3), finished=True, reward=0.5)
    assert part == PastResponse(0, array("i", [9] * 2), finished=False)
    assert history.learn(answers(closed(1, "b", "c")))["history/hit_rate"] == 0.5
    assert history.of("b")[0].epoch == 1
    assert history.learn(answers(closed(1, "d")))["history/evicted"] == 1.0
    assert [len(history.of(p)) for p in "abcd"] == [2, 2, 2, 0]


def test_a_round_is_learnt_without_a_copy_of_its_tokens():
    """Of 8,192 responses of 32k tokens that would hold up the event loop for more than a second."""
    history, round = History(), closed(0, "a", "b")
    history.learn(answers(round))
    for group in round.groups.values():
        for past, response in zip(history.of(group.prompt.id), group.responses, strict=True):
            assert past.tokens is response.tokens


def test_evaluations_are_kept_beside_the_training_data_and_a_later_one_replaces_an_earlier_one():
    history = History()
    history.learn(answers(closed(0, "a")))
    for step in (0, 10):
        history.learn(answers(closed(step, "a", kind="eval")))
    first, last = (
        group
        for round in (closed(0, "a"), closed(10, "a", kind="eval"))
        for group in round.groups.values()
    )
    assert first.key != last.key
    assert [p.epoch for p in history.of(first.key)] == [0, 0]
    assert [p.epoch for p in history.of(last.key)] == [10, 10]


def test_memory_beyond_the_tokens_is_as_said():
    """330 bytes for a response, so that 10,000 prompts with 8 responses of 2,000 tokens take 670
    MB."""
    tracemalloc.start()
    try:
        history = History()
        for prompt in range(500):
            responses = tuple(
                (k, PastResponse(prompt, array("i", [k] * 20), True, k / 3)) for k in range(8)
            )
            history.add(PromptAnswers(f"prompt {prompt}", prompt, responses))
        del responses
        beyond = tracemalloc.get_traced_memory()[0] - history.num_bytes
    finally:
        tracemalloc.stop()
    assert history.num_responses == 4000
    assert 150 < beyond / history.num_responses < 330


def test_lengths_of_every_round_are_one_line(tmp_path):
    log = WorkloadLog(tmp_path, 0, [].append)
    log.write(closed(0, "a", "b"))
    log.write(closed(1, "b"))
    log.close()
    first, second = (
        json.loads(line) for line in (tmp_path / "lengths.jsonl").read_text().splitlines()
    )
    assert first == {
        "step": 0,
        "kind": "short",
        "responses": [
            ["a", 0, 0, 3, True],
            ["a", 0, 1, 2, False],
            ["b", 0, 0, 3, True],
            ["b", 0, 1, 2, False],
        ],
    }
    assert (second["step"], len(second["responses"])) == (1, 2)


def steps_of(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_a_run_that_goes_on_leaves_out_the_rounds_that_come_again(tmp_path):
    log = WorkloadLog(tmp_path, 0, [].append)
    for step in range(4):
        log.write(closed(step, "a"))
    log.close()
    file = tmp_path / "lengths.jsonl"
    with file.open("ab") as torn:
        torn.write(b'{"step":4,"kind":"sh')
    log = WorkloadLog(tmp_path, 4, [].append)  # nothing but the torn line goes
    log.close()
    assert steps_of(file) == [0, 1, 2, 3]
    log = WorkloadLog(tmp_path, 2, [].append)
    log.write(closed(2, "b"))
    log.close()
    assert steps_of(file) == [0, 1, 2]
    WorkloadLog(tmp_path, 0, [].append).close()
    assert file.read_bytes() == b""


def test_lengths_on_a_disk_that_refuses_are_left_out_with_a_warning(tmp_path):
    (tmp_path / "lengths.jsonl").mkdir()  # in the way
    told: list[str] = []
    log = WorkloadLog(tmp_path, 1, told.append)
    log.write(closed(1, "b"))
    log.write(closed(2, "b"))
    log.close()
    assert told == [
        "WARNING: lengths.jsonl: rounds from step 1 on will appear twice (Is a directory)",
        "WARNING: lengths.jsonl: cannot write (Is a directory); skipping records until it can",
    ]
