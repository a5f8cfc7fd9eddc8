"""Choose the samples that a step computes on, and cut them into micro-batches for the ranks.

Pure: no torch, no clock. Must not import torch: the daemon imports this file.

A packed micro-batch has its samples back to back, and only their sum counts. Families that cannot
be packed are padded to the longest sample; sorting by length keeps that small.
"""

import heapq
from collections.abc import Callable, Sequence

from lightrl.config.algorithm import AlgorithmSection
from lightrl.config.schema import Config
from lightrl.trainer.protocol import MicroBatch, TrainSample
from lightrl.wire import num_trained


def trainable(samples: Sequence[TrainSample], algorithm: AlgorithmSection) -> list[TrainSample]:
    """The samples with a gradient. The others count in the denominators of `Update` as well."""
    return [
        s
        for s in samples
        if num_trained(s.token_ids, s.loss_mask) and (s.advantage != 0.0 or algorithm.trains_all)
    ]


def surprisal_of_rest(samples: Sequence[TrainSample], algorithm: AlgorithmSection) -> list[float]:
    """Of those that are not `trainable`: minus the sum of the logprobs [nats] with which their
    trained tokens were sampled, and the number of these. The mean is an unbiased estimate of the
    entropy at them; with top_k or top_p it leaves out the tokens that cannot be drawn."""
    import numpy as np  # not needed to start a daemon

    computed, total, number = set(map(id, trainable(samples, algorithm))), 0.0, 0
    for s in (s for s in samples if id(s) not in computed):
        logprobs = np.frombuffer(s.rollout_logprobs, "<f4")
        if s.loss_mask:
            bits = np.unpackbits(np.frombuffer(s.loss_mask, np.uint8), bitorder="little")
            logprobs = logprobs[bits[: len(logprobs)] > 0]
        total -= float(logprobs.sum(dtype=np.float64))
        number += len(logprobs)
    return [total, number]


def useful(groups: Sequence[list[TrainSample]], config: Config) -> list[list[TrainSample]]:
    """The samples to send to ranks; emulated ones get all of them."""
    if config.train.engine == "emulated":
        return list(groups)
    return [trainable(samples, config.algorithm) for samples in groups]


def num_tokens(sample: TrainSample) -> int:
    """Tokens of prompt and response."""
    return (len(sample.prompt) + len(sample.token_ids)) // 4


def plan_packed(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[tuple[int, ...]]]:
    """Plan micro-batches whose tokens together are <= max_tokens, unless a single sample exceeds it
    alone: as few as possible, of about the same size. Otherwise as `plan`.

    Example: plan_packed([3, 9, 3, 3], ranks=2, max_tokens=12) == [[(0, 2, 3)], [(1,)]]
    """
    short = [length for length in lengths if length <= max_tokens]
    num = len(lengths) - len(short) - (-sum(short) // max_tokens)
    num += -num % ranks
    while (batches := _levelled(lengths, num, max_tokens)) is None:
        num += ranks
    return _deal(batches, ranks, lambda rows: sum(lengths[i] for i in rows))


def plan(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[tuple[int, ...]]]:
    """Plan the micro-batches of each rank, as indices into `lengths` (tokens of prompt and
    response), for models that pad.

    Every index occurs once. rows x longest <= max_tokens, unless a single sample exceeds it alone.
    All ranks get equally many micro-batches, some perhaps empty, whose i-th cost about the same:
    collectives make the ranks wait for each other there. The ranks' totals differ by no more than
    the largest micro-batch. Example: plan([3, 9, 3, 3], 2, 9) == [[(1,)], [(3, 2, 0)]]
    """
    padded = len(lengths) * max(lengths, default=0)
    share = -(-padded // ranks)  # so that few samples go to all ranks
    return _deal(
        _cut(lengths, min(max_tokens, share)),
        ranks,
        lambda rows: len(rows) * max(lengths[i] for i in rows),
    )


def _deal(
    batches: list[tuple[int, ...]], ranks: int, cost: Callable[[tuple[int, ...]], int]
) -> list[list[tuple[int, ...]]]:
    """Deal micro-batches to the ranks, the costliest first, there and back."""
    batches = sorted(batches, key=lambda rows: (-cost(rows) if rows else 0, rows))
    batches += [()] * (-len(batches) % ranks)
    plans: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for first in range(0, len(batches), ranks):
        some = batches[first : first + ranks]
        for mine, rows in zip(plans, some if first // ranks % 2 == 0 else some[::-1], strict=True):
            mine.append(rows)
    return plans


def micro_batches(
    samples: Sequence[TrainSample], ranks: int, max_tokens: int, packed: bool = True
) -> list[tuple[MicroBatch, ...]]:
    """Plan the micro-batches of each rank, for its `Accumulate`."""
    planned = plan_packed if packed else plan
    plans = planned([num_tokens(s) for s in samples], ranks, max_tokens)
    return [tuple(tuple(samples[i] for i in rows) for rows in batches) for batches in plans]


def total_tokens(samples: Sequence[TrainSample]) -> int:
    """Tokens of prompts and responses."""
    return sum(map(num_tokens, samples))


def streamed(
    groups: Sequence[Sequence[TrainSample]],
    ranks: int,
    max_tokens: int,
    deterministic: bool,
    packed: bool = True,
) -> list[tuple[MicroBatch, ...]]:
    """Plan the micro-batches of each rank for the groups that wait.

    `deterministic`: each group by itself, so that the sums of a step follow from the order of its
    groups alone; micro-batches are smaller. Otherwise all groups together. Example, of two ranks:
    streamed([[a, b], [c]], 2, 99, True) == [((a,), (c,)), ((b,), ())]
    """
    parts = groups if deterministic else [[s for samples in groups for s in samples]]
    planned = [micro_batches(samples, ranks, max_tokens, packed) for samples in parts]
    return [tuple(batch for part in planned for batch in part[rank]) for rank in range(ranks)]


def _cut(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
    """Cut into micro-batches of neighbours in length, longest first."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], -i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return list(map(tuple, batches))


def _levelled(lengths: Sequence[int], num: int, max_tokens: int) -> list[tuple[int, ...]] | None:
    """Fill `num` micro-batches, longest sample first, each into that with the fewest tokens; None
    if one would have too many."""
    batches: list[list[int]] = [[] for _ in range(num)]
    least = [(0, number) for number in range(num)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, number = least[0]
        if tokens and tokens + lengths[i] > max_tokens:
            return None
        batches[number].append(i)
        heapq.heapreplace(least, (tokens + lengths[i], number))
    return [tuple(rows) for rows in batches]
