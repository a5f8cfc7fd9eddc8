"""Which samples a step computes on, and how they are cut into micro-batches for the ranks.

Pure: no torch, no clock. Must not import torch: the daemon imports this file.

A packed micro-batch has its samples back to back, and only their sum counts. Families that cannot
be packed are padded to the longest sample; sorting by length keeps that small.
"""

import heapq
from collections.abc import Sequence

from lightrl.config.algorithm import AlgorithmSection
from lightrl.config.schema import Config
from lightrl.loss_mask import num_trained
from lightrl.trainer.protocol import MicroBatch, TrainSample

# A micro-batch is closed once its padding costs more than starting another one: the larger of a
# fixed price (tokens whose forward and backward pass takes as long as the Python around a pass) and
# a share of its real tokens.
BATCH_PRICE_TOKENS = 128
PADDING_SHARE = 0.125


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
    """As `plan`, of micro-batches whose tokens together are <= max_tokens, unless a single sample
    exceeds it alone.

    As few as will do, all of about the same size. Example: plan_packed([3, 9, 3, 3], ranks=2,
    max_tokens=12) == [[(0, 2, 3)], [(1,)]]
    """
    short = [length for length in lengths if length <= max_tokens]
    num = len(lengths) - len(short) - (-sum(short) // max_tokens)
    num += -num % ranks
    while (batches := _levelled(lengths, num, max_tokens)) is None:
        num += ranks
    batches.sort(key=lambda rows: (-sum(lengths[i] for i in rows), rows))
    plans: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for first in range(0, len(batches), ranks):  # there and back: no rank gets all the larger ones
        some = batches[first : first + ranks]
        for mine, rows in zip(plans, some if first // ranks % 2 == 0 else some[::-1], strict=True):
            mine.append(rows)
    return plans


def plan(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[tuple[int, ...]]]:
    """Micro-batches of each rank, as indices into `lengths` (tokens of prompt and response).

    Every index occurs once. rows x longest <= max_tokens, unless a single sample exceeds it alone.
    All ranks get the same number of micro-batches, if need be empty ones, and the i-th of each rank
    cost about the same, since collectives make the ranks wait for each other there. The ranks'
    padded totals differ by no more than the largest micro-batch. Example: plan([3, 9, 3, 3],
    ranks=2, max_tokens=9) == [[(1,)], [(3, 2, 0)]]
    """
    batches = _cut(lengths, max_tokens)
    while len(batches) % ranks and (largest := _splittable(batches, lengths)) is not None:
        rows = batches.pop(largest)
        batches += [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    batches += [()] * (-len(batches) % ranks)
    batches.sort(key=lambda rows: (-_cost(rows, lengths), rows))

    plans: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    # the costliest of a round goes to the least loaded rank
    for first in range(0, len(batches), ranks):
        order = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, rows in zip(order, batches[first : first + ranks], strict=True):
            plans[rank].append(rows)
            load[rank] += _cost(rows, lengths)
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
    """Micro-batches of neighbours in length, longest first."""
    batches: list[tuple[int, ...]] = []
    rows: list[int] = []
    real = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], -i)):
        padded = (len(rows) + 1) * lengths[rows[0]] if rows else 0
        padding = padded - real - lengths[i]
        if rows and (
            padded > max_tokens or padding > max(BATCH_PRICE_TOKENS, PADDING_SHARE * real)
        ):
            batches.append(tuple(rows))
            rows, real = [], 0
        rows.append(i)
        real += lengths[i]
    return [*batches, tuple(rows)] if rows else batches


def _levelled(lengths: Sequence[int], num: int, max_tokens: int) -> list[tuple[int, ...]] | None:
    """`num` micro-batches, each sample in that which has the fewest tokens so far, longest first;
    None if one would have too many."""
    batches: list[list[int]] = [[] for _ in range(num)]
    least = [(0, number) for number in range(num)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, number = least[0]
        if tokens and tokens + lengths[i] > max_tokens:
            return None
        batches[number].append(i)
        heapq.heapreplace(least, (tokens + lengths[i], number))
    return [tuple(rows) for rows in batches]


def _splittable(batches: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> int | None:
    """Index of the costliest micro-batch of more than one sample."""
    several = [i for i, rows in enumerate(batches) if len(rows) > 1]
    return max(several, key=lambda i: (_cost(batches[i], lengths), -i), default=None)


def _cost(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return len(rows) * max((lengths[i] for i in rows), default=0)
