"""Tokens of tail-batched runs are normalised by a running mean of tokens per response."""

from typing import Any

import pytest

from lightrl.trainer.learner.token_mean import KEEP, TokenMean
from lightrl.trainer.protocol import Accumulate, Done, ResetStep, Save, Update
from lightrl.wire import unpack_i32

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# Continued responses would be weighted by what older versions gave their tokens, see `tis_bounds`.
TAIL: dict[str, Any] = {"round": {"tail_batching": "prompts", "deferred": "restart"}}


def totals(samples):
    return len(samples), sum(len(unpack_i32(s.token_ids)) for s in samples)


def train(rank, step, *updates):
    for i, samples in enumerate(updates):
        list(rank.perform(Accumulate(step, (tuple(samples),))))
        if i < len(updates) - 1:
            list(rank.perform(Update(step, *totals(samples))))
    [finished] = rank.perform(Update(step, *totals(updates[-1]), step + 1))
    return finished.published.file.digest, finished.metrics


@pytest.fixture(scope="module")
def short(samples):
    return sorted(samples, key=lambda s: len(s.token_ids))[:12]


@pytest.fixture(scope="module")
def long(samples):
    return sorted(samples, key=lambda s: len(s.token_ids))[12:]


def sections(name="dapo", **more):
    optim = {"lr": 1e-4, "grad_clip": 0.0}
    return {"algorithm": {"name": name}, "train": {"optim": optim, "mini_batches": 2}} | more


def test_the_mean_is_that_of_the_formula():
    mean, counts = TokenMean(), [(4, 40), (8, 160), (4, 400), (2, 3)]
    for s, (responses, tokens) in enumerate(counts):
        found = mean.add(responses, tokens)
        mean.end_step()
        weights = [KEEP ** (s - t) for t in range(s + 1)]
        of = [sum(w * c[k] for w, c in zip(weights, counts, strict=False)) for k in (0, 1)]
        assert found == pytest.approx(of[1] / of[0])
    assert TokenMean().add(0, 0) == 0.0


@pytest.mark.parametrize("name", ["dapo", "cispo", "reinforce++-baseline"])
def test_an_update_is_divided_by_responses_times_the_running_mean(new_rank, short, long, name):
    plain, tail = new_rank(**sections(name)), new_rank(**sections(name, **TAIL))
    own, mean = train(plain, 0, short)[1], train(tail, 0, short)[1]
    for key in ("loss/policy", "grad_norm"):  # there is nothing to compare with yet
        assert mean[key] == own[key]
    own, mean = train(plain, 1, long)[1], train(tail, 1, long)[1]
    (responses, tokens), (before, tokens_before) = totals(long), totals(short)
    per_response = (KEEP * tokens_before + tokens) / (KEEP * before + responses)
    assert mean["train/tokens_per_response"] == pytest.approx(per_response)
    factor = tokens / (responses * per_response)
    assert factor > 1.2  # each of its tokens weighs more than one over its own
    for key in ("loss/policy", "grad_norm"):
        assert mean[key] == pytest.approx(factor * own[key], rel=1e-4), key


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**TAIL, "algorithm": {"name": "grpo"}},
        {**TAIL, "algorithm": {"name": "dapo", "loss_norm": "constant"}},
    ],
    ids=["no tail batching", "by response", "by a constant"],
)
def test_elsewhere_nothing_changes(new_rank, short, long, changes):
    settings = sections() | changes
    rank, plain = new_rank(**settings), new_rank(**settings | {"round": {}})
    for step, samples in enumerate((short, long)):
        digest, metrics = train(rank, step, samples)
        assert digest == train(plain, step, samples)[0]
        assert "train/tokens_per_response" not in metrics


def test_a_step_that_begins_again_counts_nothing_twice(new_rank, short, long):
    digests = []
    for is_disturbed in (False, True):
        rank = new_rank(**sections(**TAIL))
        train(rank, 0, short)
        if is_disturbed:
            list(rank.perform(Accumulate(1, (tuple(long),))))
            list(rank.perform(Update(1, *totals(long))))
            list(rank.perform(Accumulate(1, (tuple(short),))))
            assert list(rank.perform(ResetStep(1))) == [Done(1)]
        digests.append([train(rank, step, long, short)[0] for step in (1, 2)])
    assert digests[0] == digests[1]


def test_a_checkpoint_has_the_mean(new_rank, short, long, tmp_path):
    rank = new_rank(**sections(**TAIL))
    train(rank, 0, short)
    rank.save(Save(1, str(tmp_path / "run" / "checkpoints" / "step_1")))
    again = new_rank(start_step=1, **sections(**TAIL))
    assert train(again, 1, long, short)[0] == train(rank, 1, long, short)[0]


def test_figures_of_each_update(new_rank, short, long):
    rank = new_rank(**sections())
    _, metrics = train(rank, 0, short, long)
    for k, samples in enumerate((short, long), 1):
        responses, tokens = totals(samples)
        assert metrics[f"update/{k}/response_length"] == pytest.approx(tokens / responses)
    norms = [metrics[f"update/{k}/grad_norm"] for k in (1, 2)]
    assert sum(norms) / 2 == pytest.approx(metrics["grad_norm"])
    counts = [totals(samples)[1] for samples in (short, long)]
    clipped = sum(metrics[f"update/{k}/clip_frac"] * n for k, n in enumerate(counts, 1))
    assert clipped / sum(counts) == pytest.approx(metrics["clip_frac"])
    assert not [name for name in train(rank, 1, short)[1] if name.startswith("update/")]


def test_figures_of_updates_count_responses_without_a_signal(new_rank, samples):
    """They are accumulated by nobody, and are in the totals all the same."""
    optim = {"lr": 0.1, "grad_clip": 0.0}  # the second update is clipped
    rank, halves = new_rank(train={"optim": optim, "mini_batches": 2}), (samples[:9], samples[9:])
    tokens = [4 * totals(half)[1] for half in halves]
    for half, num in zip(halves, tokens, strict=True):
        list(rank.perform(Accumulate(0, (tuple(half),))))
        if half is halves[0]:
            list(rank.perform(Update(0, 4 * len(half), num)))
    [finished] = rank.perform(Update(0, 4 * len(halves[1]), tokens[1], 1))
    metrics = finished.metrics
    clipped = sum(metrics[f"update/{k}/clip_frac"] * n for k, n in enumerate(tokens, 1))
    assert clipped > 0
    assert clipped / sum(tokens) == pytest.approx(metrics["clip_frac"])
