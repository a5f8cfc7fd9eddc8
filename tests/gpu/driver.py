"""Drives an engine step by step, here or in another process: what comes of requests, and of which
logits.

Nothing here is a test. Must not import vLLM, nor pydantic.
"""

import importlib
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lightrl.engine import sampling as definition
from lightrl.engine.base import EngineSpec
from lightrl.errors import EngineError, LightRLError
from lightrl.history.gate import Gate
from lightrl.messages.responses import PromptHistory, ResponseRequest, Sampling
from lightrl.wire import pack_i32

LIMIT_S = 240.0  # for one answer of an engine's process


@dataclass(frozen=True)
class Asked:
    """One response to be generated."""

    # "group#index"
    name: str
    prompt: tuple[int, ...]
    seed: int
    num_tokens: int
    prefix: tuple[int, ...] = ()

    def request(self) -> ResponseRequest:
        prompt, prefix = pack_i32(list(self.prompt)), pack_i32(list(self.prefix))
        return ResponseRequest(
            self.name, 1, self.seed, prompt, prefix, self.num_tokens - len(self.prefix)
        )

    def noise(self, index: int) -> int:
        """The key that decides token `index` of the response."""
        return int(definition.keys([self.seed], [len(self.prompt) + index])[0])


@dataclass
class Draw:
    """`logits` float32 [vocabulary]."""

    token: int
    logits: Any


@dataclass
class Outcome:
    """`tokens` and `logprobs` by response, `draws` by the key of their noise."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    draws: dict[int, Draw] = field(default_factory=dict)
    # drafted tokens
    accepted: int = 0
    seconds: float = 0.0


class Watch:
    """Stands in for `sample` where an engine has imported it: keeps the draws of the wanted
    keys."""

    def __init__(self) -> None:
        self.wanted: frozenset[int] | None = frozenset()  # None: all
        self.draws: dict[int, Draw] = {}

    @staticmethod
    def at(module: str) -> "Watch":
        """The one of that module, put there if it is the first."""
        owner = importlib.import_module(module)
        if not isinstance(owner.sample, Watch):
            owner.sample = Watch()
        return owner.sample

    def __call__(self, logits: Any, noise: Any, *controls: Any) -> Any:
        ids, logprobs = definition.sample(logits, noise, *controls)
        if self.wanted is None or self.wanted:
            for row, key in enumerate(noise.tolist()):
                if self.wanted is None or key in self.wanted:
                    self.draws[key] = Draw(int(ids[row]), logits[row].float().cpu().numpy())
        return ids, logprobs


class Open(Gate):
    """Drafts always pay: what the gate decides by the clock must not decide a test."""

    def width(self, batch: int) -> int:
        return self.max_width


class Closed(Gate):
    """Drafts never pay."""

    def width(self, batch: int) -> int:
        return 0


Drafts = Literal["none", "all", "gate"]


class Driven:
    """An engine of this process: build one vLLM in a process at most."""

    def __init__(self, spec: EngineSpec) -> None:
        self._window, self._is_padded = spec.max_window, spec.kind == "torch"
        if spec.kind == "torch":
            from lightrl.engine.torch.engine import TorchEngine

            self.engine: Any = TorchEngine(spec)
            self._drafter = self.engine._drafter
            self._watch = Watch.at("lightrl.engine.torch.engine")
        else:
            from lightrl.engine.vllm.engine import VllmEngine

            self.engine = VllmEngine(spec)
            self._drafter = self.engine._speculation.drafter if self.engine._speculation else None
            self._watch = Watch.at("lightrl.engine.vllm.worker")

    def load(self, file: Any) -> None:
        self.engine.load_weights(file)

    def run(
        self,
        asked: Sequence[Asked],
        sampling: Sampling | None = None,
        histories: tuple[PromptHistory, ...] = (),
        stop_after: int | None = None,
        wanted: frozenset[int] | None = frozenset(),
        at_once: int | None = None,
        drafts: Drafts = "none",
    ) -> Outcome:
        """Draws are kept for the `wanted` keys (None: for all).

        `at_once`: so many responses, then the next so many. `stop_after` steps what runs is
        aborted. `drafts`: none, whenever the history has one, or as the gate decides.
        """
        self._watch.wanted, self._watch.draws = wanted, {}
        self._prepare(drafts)
        before = self._num_accepted()
        outcome = Outcome({a.name: list(a.prefix) for a in asked}, {a.name: [] for a in asked})
        if histories:
            self.engine.remember(histories)
        size = at_once or len(asked)
        started = time.perf_counter()
        for first in range(0, len(asked), size):
            self._wave(asked[first : first + size], sampling or Sampling(1.0), stop_after, outcome)
        outcome.seconds = time.perf_counter() - started
        outcome.draws, outcome.accepted = self._watch.draws, self._num_accepted() - before
        return outcome

    def _wave(
        self, asked: Sequence[Asked], sampling: Sampling, stop_after: int | None, outcome: Outcome
    ) -> None:
        for a in asked:
            self.engine.add(a.request(), sampling)
        num_steps = 0
        while self.engine.num_unfinished() and num_steps != stop_after:
            for delta in self.engine.step():
                outcome.tokens[delta.response] += delta.token_ids
                outcome.logprobs[delta.response] += delta.logprobs
            num_steps += 1
        for a in asked:
            self.engine.abort(a.name)

    def _prepare(self, drafts: Drafts) -> None:
        if self._drafter is not None:
            kind = {"none": Closed, "all": Open, "gate": Gate}[drafts]
            self._drafter.gate = kind(self._window, is_padded=self._is_padded)
        core = getattr(self.engine, "_core", None)
        # prompts that are cached would make the second run another batch than the first
        if core is not None:
            core.reset_prefix_cache()

    def close(self) -> None:
        self.engine.close()

    def _num_accepted(self) -> int:
        drafting = self.engine.load().drafting
        return drafting.accepted if drafting is not None else 0

    def weights(self) -> dict[str, tuple[int, list[float]]]:
        """Of vLLM: where each parameter lies and its first values; tied ones under each of their
        names."""
        model = self.engine._core.model_executor.driver_worker.worker.model_runner.model
        named = model.named_parameters(remove_duplicate=False)
        return {n: (p.data_ptr(), p.flatten()[:4].float().tolist()) for n, p in named}

    def sleep(self) -> tuple[int, int]:
        """Bytes that it says it has set free, and those that the driver says are free then."""
        num_bytes = self.engine.sleep()
        return num_bytes, self.free()

    def wake(self, file: Any) -> None:
        """As an engine's process does: room for weights, the weights, room for the KV cache."""
        self.engine.wake()
        self.engine.load_weights(file)

    def free(self) -> int:
        import torch

        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def logprobs_of(self, token_ids: list[int]) -> list[float]:
        return self.engine.logprobs_of(token_ids)


class Remote:
    """A `Driven` in a process of its own, with the same methods."""

    def __init__(self, spec: EngineSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec))
        self._process.start()
        theirs.close()
        self._receive()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._connection.send((name, args, kwargs))
            return self._receive()

        return call

    def close(self) -> None:
        self._connection.close()
        self._process.join(30)
        if self._process.exitcode is None:
            self._process.kill()

    def _receive(self) -> Any:
        assert self._connection.poll(LIMIT_S), f"no answer within {LIMIT_S:.0f} s"
        try:
            result = self._connection.recv()
        except EOFError:
            self._process.join(30)
            raise AssertionError(
                f"the engine's process ended with {self._process.exitcode}"
            ) from None
        if isinstance(result, Exception):
            raise result
        return result


def _serve(connection: Any, spec: EngineSpec) -> None:
    try:
        driven = Driven(spec)
    except EngineError as e:
        connection.send(e)
        return None
    connection.send(None)
    while True:
        try:
            name, args, kwargs = connection.recv()
        except EOFError:
            return driven.close()
        try:
            result = getattr(driven, name)(*args, **kwargs)
        except (AssertionError, LightRLError, RuntimeError, TypeError, AttributeError) as e:
            result = AssertionError(f"{type(e).__name__}: {e}")
        connection.send(result)


def nearly(
    outcome: Outcome, epoch: str, asked: Sequence[Asked], vocabulary: int
) -> tuple[list[Asked], tuple[PromptHistory, ...]]:
    """The same requests under new names, and what came of them as history: every ninth token is
    wrong."""
    renamed, by_group = [], {}
    for a in asked:
        group, _, index = a.name.rpartition("#")
        renamed.append(Asked(f"{group}@{epoch}#{index}", a.prompt, a.seed, a.num_tokens, a.prefix))
        tokens = np.array(outcome.tokens[a.name])
        tokens[8::9] = (tokens[8::9] + 1) % vocabulary
        by_group.setdefault(f"{group}@{epoch}", []).append(pack_i32(tokens.tolist()))
    histories = tuple(
        PromptHistory(g, tuple(past), (None,) * len(past)) for g, past in by_group.items()
    )
    return renamed, histories
