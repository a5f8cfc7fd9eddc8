"""What is remembered of earlier responses: of the newest epoch, within the limit, whatever became of them."""

import json
from array import array

from lightrl.core.state import DrawnPrompt, Group, Response, Round, RoundState
from lightrl.history.lengths import LengthsLog
from lightrl.history.store import History, Past
from lightrl.messages import Sampling
from lightrl.wire import pack_i32


def past(num_tokens: int, epoch: int = 0, finished: bool = True) -> Past:
    return Past(epoch, pack_i32([epoch] * num_tokens), finished)


def closed(epoch: int, *prompts: str) -> Round:
    """Two responses for each prompt: one finished with 3 tokens and a reward, one given up after 2."""
    round = Round("short", epoch, Sampling(), 1, 1, len(prompts), 2, 0.0, RoundState.CLOSED)
    for position, prompt in enumerate(prompts):
        group = Group(f"{prompt}@{epoch}", DrawnPrompt(prompt, epoch, b""), round, position)
        first, second = (
            Response(f"{group.id}#{k}", group, k, 0, tokens=array("i", [9] * (3 - k))) for k in (0, 1)
        )
        first.finish_reason, first.reward = "stop", 0.5
        group.responses = [first, second]
        round.groups[group.id] = group
    return round


def test_a_newer_epoch_replaces_an_older_one_and_late_news_of_an_older_one_is_ignored():
    history = History()
    history.add("a", 0, [(0, past(3)), (1, past(2))])
    history.add("a", 1, [(1, past(5, epoch=1))])
    assert history.of("a") == (past(5, epoch=1),)
    history.add("a", 0, [(0, past(9))])
    assert history.of("a") == (past(5, epoch=1),)
    assert (history.num_bytes, history.num_responses) == (20, 1)


def test_a_prompt_that_was_put_off_keeps_what_it_had_beside_what_it_got_in_the_end():
    history = History()
    history.add("a", 0, [(0, past(3)), (1, past(2, finished=False)), (2, past(4, finished=False))])
    history.add("a", 0, [(0, past(3)), (1, past(7))])
    assert history.of("a") == (past(3), past(7), past(4, finished=False))


def test_nothing_is_remembered_of_what_was_never_sampled():
    history = History()
    history.add("a", 0, [(0, past(2))])
    history.add("a", 1, [(0, past(0, epoch=1))])
    history.add("b", 1, [(0, past(0, epoch=1))])
    assert history.of("a") == (past(2),)
    assert history.of("b") == ()


def test_the_prompt_answered_longest_ago_is_forgotten_first_and_the_limit_holds():
    history = History(max_bytes=40)
    for prompt, num_tokens in (("a", 4), ("b", 4), ("a", 5), ("c", 3)):
        history.add(prompt, 0, [(0, past(num_tokens))])
        assert history.num_bytes <= 40
    assert [history.of(p) for p in "abc"] == [(past(5),), (), (past(3),)]
    history.add("d", 0, [(0, past(11))])  # more than the limit alone
    assert (history.num_bytes, history.num_responses) == (0, 0)
    assert all(history.of(p) == () for p in "abcd")


def test_a_round_brings_finished_and_given_up_responses_and_its_hits_are_counted():
    history = History()
    figures = history.learn(closed(0, "a", "b"))
    assert figures == {
        "history/bytes": 40.0,
        "history/responses": 4.0,
        "history/prompts": 2.0,
        "history/hit_rate": 0.0,
    }
    whole, part = history.of("a")
    assert whole == Past(0, pack_i32([9] * 3), finished=True, reward=0.5)
    assert part == Past(0, pack_i32([9] * 2), finished=False)
    assert history.learn(closed(1, "b", "c"))["history/hit_rate"] == 0.5
    assert history.of("b")[0].epoch == 1


def test_lengths_of_every_round_are_one_line(tmp_path):
    log = LengthsLog(tmp_path)
    log.write(closed(0, "a", "b"))
    log.write(closed(1, "b"))
    log.close()
    first, second = (json.loads(line) for line in (tmp_path / "lengths.jsonl").read_text().splitlines())
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


def test_lengths_on_a_disk_that_refuses_are_left_out_with_a_warning(tmp_path):
    log = LengthsLog(tmp_path)
    log.write(closed(0, "a"))
    log.write(closed(1, "b"))
    log.close()
    (tmp_path / "lengths.tmp").mkdir()  # in the way of a file without the rounds that come again
    told: list[str] = []
    log = LengthsLog(tmp_path, 1, told.append)
    log.write(closed(1, "b"))
    log.close()
    assert told == ["WARNING: lengths.jsonl: rounds from step 1 on will be there twice (Is a directory)"]
    lines = (tmp_path / "lengths.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 1]
