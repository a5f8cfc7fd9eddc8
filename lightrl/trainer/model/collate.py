"""Samples of a micro-batch as tensors: tokens for the model, responses for the losses.

A model that packs reads all sequences back to back in one row; others read a row for each, padded
at the right, so that causal attention needs no mask. Losses have a row for each sample in both
cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightrl.errors import TrainerError
from lightrl.trainer.model.attention import Packing, packing
from lightrl.trainer.model.rows import moved
from lightrl.trainer.protocol import TrainSample
from lightrl.wire import fits_mask


@dataclass(frozen=True)
class Batch:
    """A micro-batch of `rows` samples with responses of at most `width` tokens, [rows, width] in
    the order of the samples. Column j of the last five is about the j-th token of a response."""

    # int64 [1, tokens] if packed, else [rows, length]
    ids: Tensor
    # int64 as `ids`, from 0 in each sequence; None: the columns
    positions: Tensor | None
    # None if not packed
    packing: Packing | None
    # int64 [trained tokens], in `ids` flattened: the tokens that predict them
    sources: Tensor
    # columns of `ids` from the first source on
    num_kept: int
    # int64 [trained tokens], where they are in [rows * width]
    cells: Tensor
    # int64 [rows, width]
    targets: Tensor
    # float32 [rows, width], 1 at response tokens that are trained
    mask: Tensor
    # float32 [rows, width], 1 at tokens that the newest version has sampled
    is_current: Tensor
    # float32 [rows, width], 0 where nothing is trained
    rollout_logprobs: Tensor
    # float32 [rows, 1]
    advantages: Tensor


def collate(
    samples: Sequence[TrainSample], device: torch.device, vocabulary: int, packed: bool = True
) -> Batch:
    """Make tensors of samples; of none, one token without any response.

    Raises TrainerError, one line that names the response, for a sample whose first token of all is
    trained, with other than one logprob per token, finite where it is trained, with a loss mask of
    other tokens, or with a token id outside the vocabulary.
    """
    prompts = np.array([len(s.prompt) // 4 for s in samples], np.int64)
    responses = np.array([len(s.token_ids) // 4 for s in samples], np.int64)
    tokens = np.frombuffer(b"".join(s.prompt + s.token_ids for s in samples), "<i4")
    logprobs = np.frombuffer(b"".join(s.rollout_logprobs for s in samples), "<f4")
    is_trained = np.concatenate(
        [np.empty(0, np.bool_), *(_require_sound(s, vocabulary) for s in samples)]
    )
    width = max(1, int(responses.max(initial=0)))
    rows, mask = max(1, len(samples)), np.zeros((max(1, len(samples)), width), np.float32)
    cells = _ranges(np.arange(len(samples)) * width, responses)[is_trained]
    mask.ravel()[cells] = 1
    stale = np.array([s.num_stale for s in samples] or [0], np.int64)[:, None]
    is_current = mask * (np.arange(width) >= stale)
    # of the j-th response token in all tokens, sample by sample
    starts = np.cumsum(prompts + responses) - responses
    at = _ranges(starts, responses)[is_trained]
    targets, rollout = np.zeros(rows * width, np.int64), np.zeros(rows * width, np.float32)
    targets[cells], rollout[cells] = tokens[at], logprobs[is_trained]
    advantages = np.array([s.advantage for s in samples] or [0.0], np.float32)[:, None]
    ids, positions, pack, sources = _layout(prompts, responses, tokens, device, packed)
    sources = sources[is_trained]
    if not len(cells):  # a gradient of zeros
        cells, sources = np.zeros(1, np.int64), np.zeros(1, np.int64)
    length = ids.shape[1]
    on = [ids, sources, cells, targets.reshape(rows, width), mask, is_current.astype(np.float32)]
    on += [rollout.reshape(rows, width), advantages]
    on_device = [moved(torch.from_numpy(a), device) for a in on]
    return Batch(
        on_device[0],
        None if positions is None else moved(torch.from_numpy(positions), device),
        pack,
        on_device[1],
        length - int((sources % length).min()),
        *on_device[2:],
    )


def num_tokens_read(sample: TrainSample) -> int:
    """Tokens that the model reads: the last one predicts nothing."""
    return max(1, (len(sample.prompt) + len(sample.token_ids)) // 4 - 1)


def _layout(
    prompts: np.ndarray,
    responses: np.ndarray,
    tokens: np.ndarray,
    device: torch.device,
    packed: bool,
) -> tuple[np.ndarray, np.ndarray | None, Packing | None, np.ndarray]:
    """`ids`, `positions`, `packing` and `sources` of a Batch, without the last tokens: see
    `num_tokens_read`."""
    if not len(prompts):
        prompts, responses, tokens = np.ones(1, np.int64), np.zeros(1, np.int64), np.zeros(2)
    lengths = np.maximum(1, prompts + responses - 1)
    begins = np.cumsum(prompts + responses) - prompts - responses
    if not packed:
        ids = np.zeros((len(lengths), lengths.max()), np.int64)
        ids[np.arange(ids.shape[1]) < lengths[:, None]] = tokens[_ranges(begins, lengths)]
        first = np.arange(len(lengths)) * ids.shape[1]
        return ids, None, None, _ranges(first + prompts - 1, responses)
    # neighbours of about the same length: on a processor attention goes by blocks
    order = np.argsort(-lengths, kind="stable")
    read = lengths[order]
    ids = tokens[_ranges(begins[order], read)].astype(np.int64)[None]
    first = np.empty_like(lengths)
    first[order] = np.cumsum(read) - read
    positions = _ranges(np.zeros_like(read), read)[None]
    sources = _ranges(first + prompts - 1, responses)
    return ids, positions, packing(read.tolist(), device), sources


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Join ranges of these starts and lengths. Example: [5, 9], [2, 1] -> [5, 6, 9]"""
    offsets = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - offsets, counts)


def _require_sound(sample: TrainSample, vocabulary: int) -> np.ndarray:
    """Return which response tokens are trained."""
    prompt, ids = (np.frombuffer(x, "<i4") for x in (sample.prompt, sample.token_ids))
    logprobs = np.frombuffer(sample.rollout_logprobs, "<f4")
    problem, is_trained = "", np.ones(len(ids), np.bool_)
    if len(ids) != len(logprobs):
        problem = (
            f"{len(prompt)} prompt tokens, {len(ids)} response tokens, {len(logprobs)} logprobs"
        )
    elif not fits_mask(sample.token_ids, sample.loss_mask):
        size = len(sample.loss_mask)
        problem = f"a loss mask of {size} bytes is not one of {len(ids)} tokens"
    else:
        if sample.loss_mask:
            bits = np.unpackbits(np.frombuffer(sample.loss_mask, np.uint8), bitorder="little")
            is_trained = bits[: len(ids)] > 0
        every, drawn = np.concatenate([prompt, ids]), logprobs[is_trained]
        is_headless = not len(prompt) and (not len(ids) or is_trained[0])
        wrong_ids = every[(every < 0) | (every >= vocabulary)]
        wrong_logprobs = drawn[~np.isfinite(drawn)]
        if is_headless:
            problem = "nothing comes before its first token, which is trained"
        elif len(wrong_ids):
            problem = f"token id {wrong_ids[0]} is outside the vocabulary of {vocabulary}"
        elif len(wrong_logprobs):
            problem = f"a rollout logprob is {wrong_logprobs[0]}"
    if problem:
        raise TrainerError(f"{sample.response}: {problem}")
    return is_trained
