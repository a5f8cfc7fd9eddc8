"""The torch engine: any transformers decoder, batched continuously in one process. Needs no vLLM.

Owns the batch: which responses run, in which cache row, and when they leave; and that a drafted
token enters a response only if it is the one that is sampled there. The forward pass is
transformers' own; sampling is defined in `sampling.py`, drafts in `history/draft.py`.
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from lightrl.devices import memory
from lightrl.devices.cuda import has_cuda
from lightrl.engine.base import Delta, EngineSpec, ReceiveWeights, Scores
from lightrl.engine.model_dir import (
    attention_windows,
    build_model,
    kv_bytes_per_token,
    read_config,
    resolve_dtype,
)
from lightrl.engine.requests import Running, accept, check_text
from lightrl.engine.sampling import keys, sample
from lightrl.engine.torch.gpu_room import DRAFT_LOGITS, fitting
from lightrl.engine.torch.kv import RowCache, RowPlacement
from lightrl.engine.torch.live import LiveTensors
from lightrl.engine.torch.parked import ParkedRows
from lightrl.errors import EngineError
from lightrl.history.draft import Drafter
from lightrl.messages.load import Load
from lightrl.messages.responses import PromptHistory, ResponseRequest, Sampling
from lightrl.rope import settle
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.version.manifest import VersionFile

PREFILL_TOKENS = memory.ENGINE_STEP_TOKENS  # of one pass, padding included; bounds its activations
UNEVEN = (
    "run.deterministic: GPU kernels round differently for different batch sizes, so the torch "
    "engine may draw another token where two are almost equally likely; vLLM has batch-invariant "
    "kernels"
)


class TorchEngine:
    """Implements `base.Engine`. One step = one prefill of new responses + one decode of the
    others."""

    notes: tuple[str, ...] = ()
    num_workers = 1

    def __init__(self, spec: EngineSpec) -> None:
        self.device = "cuda" if has_cuda() else "cpu"
        if spec.is_deterministic and self.device == "cuda":
            self.notes = (UNEVEN,)
        config = read_config(Path(spec.model_dir))
        if note := settle(config, spec.max_model_length):
            self.notes += (note,)
        dtype = resolve_dtype(spec.dtype, config, self.device)
        self.dtype = str(dtype).removeprefix("torch.")
        self._model = build_model(config, dtype, self.device, spec.lora).requires_grad_(False)
        self._tensors = LiveTensors(self._model)
        text = config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        self._windows = attention_windows(text)
        self._max_length = spec.max_model_length
        self._slots, self._draft_logits = spec.slots, DRAFT_LOGITS
        cache_bytes = spec.slots * spec.max_model_length * kv_bytes_per_token(config, dtype)
        if spec.kv_cache_gib:
            fits = int(spec.kv_cache_gib * 2**30 / cache_bytes * spec.slots)
            if fits < 1:
                one = cache_bytes / spec.slots / 2**30
                raise EngineError(
                    f"kv_cache_gib = {spec.kv_cache_gib}: one sequence needs {one:.3f}"
                )
            self._slots = min(self._slots, fits)
        elif self.device == "cuda":
            self._slots, self._draft_logits = fitting(spec, config, cache_bytes // spec.slots)
        self._cache = RowCache(text.num_hidden_layers, self._slots, spec.max_model_length)
        self._parked = ParkedRows(self._slots)
        # whether a row is still there depends on time, and its last bits differ from those of a
        # prefill
        self._parks = not spec.is_deterministic
        self._waiting: deque[Running] = deque()
        # row i of the cache and of the arrays below belongs to response i
        self._rows: list[Running] = []
        self._length = np.zeros(self._slots, np.int64)  # tokens so far
        self._last = np.zeros(self._slots, np.int64)  # the latest token, not yet in the cache
        self._seed = np.zeros(self._slots, np.uint64)
        self._temperature = np.zeros(self._slots, np.float64)
        self._top_p = np.zeros(self._slots, np.float64)
        self._top_k = np.zeros(self._slots, np.int64)
        counted = (self._length, self._last, self._seed)
        self._row_arrays = (*counted, self._temperature, self._top_p, self._top_k)
        by_reward = spec.prefer == "reward"
        self._drafter = None
        if spec.max_window:
            self._drafter = Drafter(
                spec.max_window, by_reward, is_padded=True, vocabulary=self._vocabulary
            )

    def remember(self, histories: tuple[PromptHistory, ...]) -> None:
        if self._drafter:
            self._drafter.remember(histories)

    def add(self, request: ResponseRequest, sampling: Sampling) -> None:
        if any(r.response == request.response for r in (*self._waiting, *self._rows)):
            raise EngineError(f"{request.response}: already runs here")
        r = accept(request, sampling, self._vocabulary, self._max_length)
        self._waiting.append(r)
        if self._drafter:
            num_prompt = len(request.prompt) // 4
            self._drafter.start(r.response, r.tokens[:num_prompt], r.tokens[num_prompt:])

    def abort(self, response: str) -> None:
        self._waiting = deque(r for r in self._waiting if r.response != response)
        self._leave([i for i, r in enumerate(self._rows) if r.response == response])
        if self._drafter:
            self._drafter.end(response, is_finished=False)

    def step(self) -> list[Delta]:
        if self._drafter is None:
            return self._advance(())[0]
        started = time.perf_counter()
        num_decoding = len(self._rows)
        drafts = self._drafts(self._drafter)
        drafted = time.perf_counter()
        deltas, num_tokens = self._advance(drafts)
        advanced = time.perf_counter()
        for d in deltas:
            self._drafter.took(d.response, d.token_ids)
            if d.finish_reason:
                self._drafter.end(d.response, is_finished=True)
        ended = time.perf_counter()
        draft_s = drafted - started + ended - advanced
        is_pure = len(deltas) == num_decoding
        self._drafter.stepped(num_decoding, num_tokens, ended - started, draft_s, is_pure)
        return deltas

    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._rows)

    def load(self) -> Load:
        used = int(self._length[: len(self._rows)].sum())
        kv_usage = used / (self._slots * self._max_length)
        drafting = self._drafter.counts if self._drafter else None
        return Load(len(self._rows), len(self._waiting), kv_usage, drafting=drafting)

    @torch.inference_mode()
    def load_weights(self, file: VersionFile, base: VersionFile | None = None) -> None:
        tensors = self._tensors.check(file, base)
        self._requeue()
        self._tensors.load(file, tensors, base)
        if self.device == "cuda":  # the time is that of the load
            torch.cuda.synchronize()

    def leave_group(self, why: str) -> None:
        self._tensors.member.leave(why)

    @torch.inference_mode()
    def receive_weights(self, command: ReceiveWeights, is_unwanted: IsUnwanted) -> None:
        self._tensors.check(command.file, None)
        self._requeue()
        self._tensors.receive(command, self.device, is_unwanted)

    def sleep(self) -> int:
        self._parked.clear()
        return self._cache.give_back() + self._tensors.give_back()

    def wake(self) -> None:
        self._tensors.take_back()

    def _requeue(self) -> None:
        """Queue running responses for another prefill: their KV is of the old weights."""
        self._waiting.extendleft(reversed(self._rows))
        self._rows.clear()
        self._parked.clear()

    def logprobs_of(self, token_ids: list[int]) -> list[float]:
        return self.scores_of(token_ids).logprobs

    @torch.inference_mode()
    def scores_of(self, token_ids: list[int]) -> Scores:
        check_text(token_ids, self._vocabulary, self._max_length)
        ids = torch.tensor([token_ids], device=self.device)
        # Without the cache, all of which may belong to responses.
        logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits.float(), -1)
        best_logprobs, best = logprobs.max(-1)
        of_text = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        return Scores(of_text.tolist(), best.tolist(), best_logprobs.tolist())

    def close(self) -> None:
        self._waiting.clear()
        self._rows.clear()

    @torch.inference_mode()
    def _advance(self, drafts: Sequence[Sequence[int]]) -> tuple[list[Delta], int]:
        """Return the deltas of the step and the tokens of its decoding pass. `drafts`: one for each
        row, or none."""
        deltas: list[Delta] = []
        num_tokens = num_decoding = len(self._rows)
        joining = self._joining()
        if joining:
            self._prefill(joining, deltas)
        if any(drafts):
            num_tokens = self._verify(drafts, deltas)
        elif num_decoding:
            self._decode(num_decoding, deltas)
        self._leave(
            [i for i, d in enumerate(self._ordered(deltas, num_decoding)) if d.finish_reason]
        )
        return deltas, num_tokens

    def _drafts(self, drafter: Drafter) -> Sequence[Sequence[int]]:
        """Return a draft for each row, with room for the token that is sampled after it."""
        if not self._rows:
            return ()
        most = max(0, self._draft_logits // (len(self._rows) * self._vocabulary) - 1)
        return drafter.drafts(
            [(r.response, min(r.end - len(r.tokens) - 1, most)) for r in self._rows]
        )

    def _joining(self) -> list[Running]:
        """Return the responses that start now, in order, within the free rows and
        PREFILL_TOKENS."""
        joining: list[Running] = []
        longest = 0
        while self._waiting and len(self._rows) + len(joining) < self._slots:
            r = self._waiting[0]
            longest = max(longest, len(r.tokens) - self._parked.num_reusable(r))
            if joining and longest * (len(joining) + 1) > PREFILL_TOKENS:
                break
            joining.append(self._waiting.popleft())
        return joining

    def _prefill(self, joining: list[Running], deltas: list[Delta]) -> None:
        """Run whole contexts, or what is not parked, into new rows behind the running ones and
        sample a token for each."""
        first, num = len(self._rows), len(joining)
        for row, r in enumerate(joining, first):
            self._seed[row], self._length[row] = r.seed, len(r.tokens)
            self._temperature[row] = r.sampling.temperature
            self._top_p[row], self._top_k[row] = r.sampling.top_p, r.sampling.top_k
        self._rows.extend(joining)
        # A group's responses share their prompt: run it once and copy its keys and values.
        distinct: dict[tuple[int, ...], int] = {}
        source = np.array([distinct.setdefault(tuple(r.tokens), len(distinct)) for r in joining])
        reused, copies = self._parked.join(first, joining, source.tolist())
        self._copy_rows(copies)
        for r, i in zip(joining, source, strict=True):
            r.num_cached = reused[i] if r.num_cached is None else r.num_cached
        longest = max(len(context) - reused[i] for context, i in distinct.items())
        width = max(map(len, distinct))
        self._cache.reserve(width)
        # Padding is on the left, so that the last query column holds every context's last token.
        tokens = np.zeros((len(distinct), longest), np.int64)
        positions = np.zeros((len(distinct), longest), np.int64)
        columns = np.full((len(distinct), longest), self._cache.scratch, np.int64)
        for context, i in distinct.items():
            start = longest - len(context) + reused[i]
            tokens[i, start:] = context[reused[i] :]
            positions[i, start:] = columns[i, start:] = np.arange(reused[i], len(context))
        logits = self._forward(first, tokens, positions, columns, width)[:, -1]
        if len(distinct) < num:
            self._copy_rows([(first + i, first + k, width) for k, i in enumerate(source)])
            logits = logits[torch.from_numpy(source).to(self.device)]
        self._draw(logits, first, first + num, deltas)

    def _decode(self, num: int, deltas: list[Delta]) -> None:
        """Sample one token for each of the first `num` rows."""
        positions = self._length[:num, None] - 1
        width = int(positions.max()) + 1
        self._cache.reserve(width)
        logits = self._forward(0, self._last[:num, None], positions, positions, width)[:, -1]
        self._draw(logits, 0, num, deltas)

    def _verify(self, drafts: Sequence[Sequence[int]], deltas: list[Delta]) -> int:
        """Decode rows of which some have a draft: accept as many tokens of each draft as match the
        sampled ones, and the first that does not. Returns the tokens in the pass.

        The keys and values of rejected tokens stay in columns at or behind the new last token. They
        are never read: a query sees no column behind its own, and all up to it are written by then.
        """
        num = len(drafts)
        lengths = np.fromiter(map(len, drafts), np.int64, num)
        ahead = np.arange(1 + int(lengths.max()))
        is_real = ahead <= lengths[:, None]
        tokens = np.zeros(is_real.shape, np.int64)
        tokens[:, 0] = self._last[:num]
        tokens[:, 1:][is_real[:, 1:]] = np.fromiter(chain.from_iterable(drafts), np.int64)
        # Padding is on the right, is seen by none and has the position of the last token
        # before it.
        positions = self._length[:num, None] - 1 + np.minimum(ahead, lengths[:, None])
        width = int(positions.max()) + 1
        self._cache.reserve(width)
        columns = np.where(is_real, positions, self._cache.scratch)
        logits = self._forward(0, tokens, positions, columns, width, len(ahead))
        self._accept(tokens, is_real, logits, deltas)
        return tokens.size

    def _accept(
        self, tokens: np.ndarray, is_real: np.ndarray, logits: torch.Tensor, deltas: list[Delta]
    ) -> None:
        """Sample behind every token and append one delta for each row. [rows, 1 + longest draft]
        each."""
        num = len(tokens)
        rows, ahead = np.nonzero(is_real)
        if len(rows) < is_real.size:
            logits = logits[
                torch.from_numpy(rows).to(self.device), torch.from_numpy(ahead).to(self.device)
            ]
        noise = keys(self._seed[rows], self._length[rows] + ahead)
        flat_ids, flat_logprobs = sample(
            logits.reshape(len(rows), -1),
            noise,
            self._temperature[rows],
            self._top_p[rows],
            self._top_k[rows],
        )
        ids, logprobs = np.zeros(tokens.shape, np.int64), np.zeros(tokens.shape, np.float32)
        ids[is_real], logprobs[is_real] = flat_ids.cpu().numpy(), flat_logprobs.cpu().numpy()
        is_kept = (ids[:, :-1] == tokens[:, 1:]) & is_real[:, 1:]
        num_new = np.logical_and.accumulate(is_kept, axis=1).sum(axis=1) + 1
        for i, r in enumerate(self._rows[:num]):
            new, reason = ids[i, : num_new[i]].tolist(), None
            for k, token in enumerate(new, 1):
                if reason := r.grow(token):
                    del new[k:]
                    break
            new_logprobs = logprobs[i, : len(new)].tolist()
            deltas.append(Delta(r.response, new, new_logprobs, reason, r.num_cached))
            self._last[i] = new[-1]
            self._length[i] = len(r.tokens)

    def _forward(
        self,
        first: int,
        tokens: np.ndarray,
        positions: np.ndarray,
        columns: np.ndarray,
        width: int,
        num_logits: int = 1,
    ) -> torch.Tensor:
        """One pass over `tokens`, `positions` and `columns`, int64 [b, q] each, of the rows from
        `first` on. Returns the last logits, [b, num_logits, vocabulary]."""
        rows = torch.arange(first, first + len(tokens), device=self.device)
        position_ids = torch.from_numpy(positions).to(self.device)
        column_ids = (
            position_ids if columns is positions else torch.from_numpy(columns).to(self.device)
        )
        self._cache.place(RowPlacement(rows, column_ids, first, width))
        out = self._model(
            input_ids=torch.from_numpy(tokens).to(self.device),
            attention_mask=self._mask(position_ids, width),
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        return out.logits

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return what each query may see, bool [b, 1, q, width]; by kind if attention kinds are
        mixed."""
        columns = torch.arange(width, device=self.device)
        causal = (columns <= positions[..., None])[:, None]
        masks = {
            kind: causal
            if window is None
            else causal & (columns > positions[..., None] - window)[:, None]
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _draw(self, logits: torch.Tensor, start: int, end: int, deltas: list[Delta]) -> None:
        """Sample for rows start..end-1 and append one delta for each."""
        at = slice(start, end)
        noise = keys(self._seed[at], self._length[at])
        ids, logprobs = sample(
            logits, noise, self._temperature[at], self._top_p[at], self._top_k[at]
        )
        ids = ids.cpu().numpy()
        self._last[at] = ids
        self._length[at] += 1
        for r, token, logprob in zip(self._rows[at], ids.tolist(), logprobs.tolist(), strict=True):
            deltas.append(Delta(r.response, [token], [logprob], r.grow(token), r.num_cached))

    def _ordered(self, deltas: list[Delta], num_decoding: int) -> list[Delta]:
        """Return deltas in row order: `step` fills in the new rows, which lie behind, first."""
        num_new = len(deltas) - num_decoding
        return deltas[num_new:] + deltas[:num_new]

    @torch.inference_mode()
    def _leave(self, rows: list[int]) -> None:
        """Free rows by moving the last ones into the holes, and park those of episodes; only these
        are copied."""
        if not rows:
            return
        remaining = len(self._rows) - len(rows)
        leaving = set(rows)
        target = [i for i in rows if i < remaining]
        source = [i for i in range(remaining, len(self._rows)) if i not in leaving]
        ended = [i for i in rows if self._parks and self._rows[i].is_turn]
        parked = self._parked.park([self._rows[i] for i in ended], remaining)
        copied = [*zip(source, target, strict=True), *zip(ended, parked, strict=True)]
        self._copy_rows([(i, j, int(self._length[i])) for i, j in copied])
        if source:
            for array in self._row_arrays:
                array[target] = array[source]
            for i, j in zip(target, source, strict=True):
                self._rows[i] = self._rows[j]
        del self._rows[remaining:]

    def _copy_rows(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the keys and values of rows at the same time: (from row, to row, tokens)."""
        if copies:
            source, target, num_tokens = zip(*copies, strict=True)
            rows, to = (torch.tensor(x, device=self.device) for x in (source, target))
            self._cache.copy_rows(rows, to, max(num_tokens))
