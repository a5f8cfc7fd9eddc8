"""The emulated engine: no model, tokens and lengths that are pure functions of (seed, position).

For tests of everything around an engine, and for trying a fleet on one machine: its times follow a
latency model. Needs neither torch nor vLLM. `engine_args`: see emulation.py.

Another version of the weights gives the same response or, with probability `restart_change`,
another one from the first token on. What follows depends on the seed and that token alone, so that
any version continues a response as the one that began it.
"""

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightrl.emulation import arguments, kv_capacity, logprobs, slowness, step_factor
from lightrl.engine.base import Delta, EngineSpec, ReceiveWeights, Scores
from lightrl.engine.requests import (
    Running,
    accept,
    check_text,
    num_reusable,
    vocabulary_size,
)
from lightrl.engine.sampling import uniform, uniforms
from lightrl.errors import EngineError, WeightsError
from lightrl.messages.load import Load
from lightrl.messages.responses import PromptHistory, ResponseRequest, Sampling
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.version.manifest import VersionFile, read_manifest

_RUNAWAY_SALT = 0x7A11
_LENGTH_SALT = 0x5EED  # a response's length is drawn from other noise than its tokens
_CHANGE_SALT = 0xC4A6
_BRANCH = 0x9E3779B97F4A7C15  # odd, so that each first token has noise of its own
_SEEDS = (1 << 63) - 1


@dataclass(slots=True)
class _Cache:
    """The KV cache: a response starts when its tokens fit, and when the running ones need more than
    there is, the youngest is preempted, as in vLLM."""

    # tokens; 0 = unlimited
    capacity: int
    # seconds of a token that is computed, but not sampled
    prefill_s: float
    # tokens of running responses and parked turns together
    room: int
    # since the engine started
    num_preemptions: int = 0
    # ended turns of episodes, until others need their place, the oldest first
    parked: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def schedule(self, running: list[Running], waiting: deque[Running], slots: int) -> float:
        """Preempt, or start what waits, for a step in which each running response gets a token;
        return the seconds of prefill."""
        if not self.capacity:
            started = [waiting.popleft() for _ in range(min(len(waiting), slots - len(running)))]
            running += started
            computed = sum(map(self._compute, started))
            self._evict(running)
            return self.prefill_s * computed
        held = sum(len(r.tokens) + 1 for r in running)
        preempts = False
        while held > self.capacity:
            last = running.pop()
            held -= len(last.tokens) + 1
            waiting.appendleft(last)
            self.num_preemptions += 1
            preempts = True
        computed = 0
        while waiting and not preempts and len(running) < slots:
            num = len(waiting[0].tokens)
            if held + num + 1 > self.capacity:
                break
            running.append(waiting.popleft())
            held += num + 1
            computed += self._compute(running[-1])
        self._evict(running)
        return self.prefill_s * computed

    def park(self, ended: Iterable[Running]) -> None:
        for r in ended:
            if r.is_turn:
                self.parked[r.response] = r.tokens

    def _compute(self, r: Running) -> int:
        """Return the tokens of a response that are not parked, and park it no longer."""
        num = num_reusable(self.parked.pop(r.response, r.tokens[:1]), r.tokens)
        if r.num_cached is None:
            r.num_cached = num
        return len(r.tokens) - num

    def _evict(self, running: list[Running]) -> None:
        if self.parked:
            held = sum(len(r.tokens) + 1 for r in running) + sum(map(len, self.parked.values()))
            while self.parked and held > self.room:
                held -= len(self.parked.pop(next(iter(self.parked))))


class EmulatedEngine:
    """Implements `base.Engine`. The digest of the weights determines which responses change."""

    device = "emulated"
    dtype = "float32"
    notes = ()
    num_workers = 0

    def __init__(self, spec: EngineSpec) -> None:
        try:
            args, slow = arguments(spec.engine_args), slowness()
        except ValueError as e:
            raise EngineError(str(e)) from None
        size = max(1, spec.parallel)
        factor = slow * step_factor(args, size) / 1000
        self._t0_s, self._half_batch = args["t0_ms"] * factor, args["half_batch"] or math.inf
        self._mean_length, self._runaway_share = args["mean_length"], args["runaway_share"]
        self._vocabulary = vocabulary_size(Path(spec.model_dir))
        self._max_length, self._slots = spec.max_model_length, spec.slots
        capacity, room = kv_capacity(args, size), self._slots * self._max_length
        self._cache = _Cache(capacity, args["prefill_ms"] * factor, capacity or room)
        if 0 < self._cache.capacity < self._max_length:
            raise EngineError(
                f"engine_args.kv_tokens: a cache of {self._cache.capacity} tokens does not hold "
                f"one sequence of {self._max_length}"
            )
        self._score_error, self._load_s = args["score_error"], args["load_ms"] / 1000
        self._sleep_s, self._wake_s = args["sleep_ms"] / 1000, args["wake_ms"] / 1000
        self._freed_bytes = round(args["sleep_mb"] * 1_000_000)
        self._change = args["restart_change"]
        self._digest, self._salt = "", 0
        time.sleep(args["start_ms"] / 1000)
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []

    def remember(self, histories: tuple[PromptHistory, ...]) -> None:
        """Do nothing: this engine does not speculate."""

    def add(self, request: ResponseRequest, sampling: Sampling) -> None:
        if any(r.response == request.response for r in (*self._waiting, *self._running)):
            raise EngineError(f"{request.response}: already runs here")
        self._waiting.append(accept(request, sampling, self._vocabulary, self._max_length))

    def abort(self, response: str) -> None:
        self._waiting = deque(r for r in self._waiting if r.response != response)
        self._cache.park(r for r in self._running if r.response == response)
        self._running = [r for r in self._running if r.response != response]

    def step(self) -> list[Delta]:
        prefill_s = self._cache.schedule(self._running, self._waiting, self._slots)
        if not self._running:
            return []
        if self._t0_s or prefill_s:
            step_s = self._t0_s * (1 + len(self._running) / self._half_batch)
            time.sleep(prefill_s + step_s)
        seeds = [self._seeds(r) for r in self._running]
        positions = np.array([len(r.tokens) for r in self._running], np.int64)
        noise = uniforms(np.array([s for s, _ in seeds], np.uint64), positions)
        deltas = []
        for r, (_, branch), u in zip(self._running, seeds, noise.tolist(), strict=True):
            stop = r.sampling.stop_token_ids
            token = stop[0] if stop and self._ends(r, branch) else self._token(u, r.stop)
            reason = r.grow(token)
            deltas.append(Delta(r.response, [token], [math.log1p(-u)], reason, r.num_cached))
        ended = zip(self._running, deltas, strict=True)
        self._cache.park(r for r, d in ended if d.finish_reason is not None)
        self._running = [
            r for r, d in zip(self._running, deltas, strict=True) if d.finish_reason is None
        ]
        return deltas

    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def load_weights(self, file: VersionFile, base: VersionFile | None = None) -> None:
        self._cache.parked.clear()
        manifest = read_manifest(file)
        size = Path(file.path).stat().st_size
        if size != manifest.num_bytes:
            raise WeightsError(f"{file.path}: {size} bytes, not {manifest.num_bytes}")
        if self._load_s:
            time.sleep(self._load_s)
        self._digest, self._salt = file.digest, int(file.digest[:15], 16)

    def leave_group(self, why: str) -> None:
        """Do nothing: this engine is never in a group."""

    def receive_weights(self, command: ReceiveWeights, is_unwanted: IsUnwanted) -> None:
        raise WeightsError("an emulated engine has no weights to receive")

    def sleep(self) -> int:
        time.sleep(self._sleep_s)
        self._cache.parked.clear()
        self._digest, self._salt = "", 0
        return self._freed_bytes

    def wake(self) -> None:
        time.sleep(self._wake_s)

    def logprobs_of(self, token_ids: list[int]) -> list[float]:
        check_text(token_ids, self._vocabulary, self._max_length)
        return [lp - self._score_error for lp in logprobs(self._digest, token_ids)]

    def scores_of(self, token_ids: list[int]) -> Scores:
        found = self.logprobs_of(token_ids)
        return Scores(found, token_ids[1:], found)

    def load(self) -> Load:
        used = sum(len(r.tokens) for r in self._running)
        cache = self._cache
        usage = used / (cache.capacity or self._slots * self._max_length)
        return Load(
            *(len(self._running), len(self._waiting), usage, cache.num_preemptions),
            kv_tokens=cache.capacity,
        )

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _token(self, u: float, stop: frozenset[int]) -> int:
        """Return a token that is no stop token, so that `_ends` alone determines the length."""
        token = int(u * self._vocabulary)
        for _ in range(self._vocabulary):
            if token not in stop:
                break
            token = (token + 1) % self._vocabulary
        return token

    def _seeds(self, r: Running) -> tuple[int, int]:
        """Return the seed of the next token, and of whether the response (of an episode, the turn)
        ends there."""
        at = len(r.tokens)
        if at > r.num_given:
            seed = _branch(r.seed, r.tokens[r.num_given])
            return seed, seed
        seed = r.seed ^ self._salt
        if uniform(seed ^ _CHANGE_SALT, 0) >= self._change:
            seed = r.seed
        return seed, _branch(r.seed, self._token(uniform(seed, at), r.stop))

    def _ends(self, r: Running, branch: int) -> bool:
        """Return whether the response ends here. The hazard is constant: lengths are geometric,
        wherever a response was resumed."""
        if not self._mean_length or uniform(branch ^ _RUNAWAY_SALT, 0) < self._runaway_share:
            return False
        return uniform(branch ^ _LENGTH_SALT, len(r.tokens)) < 1 / self._mean_length


def _branch(seed: int, first: int) -> int:
    """Return the seed of all tokens after the first one of a response."""
    return (seed ^ (first * _BRANCH)) & _SEEDS
