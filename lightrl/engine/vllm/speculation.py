"""Speculation in vLLM: all that depends on how vLLM verifies drafted tokens is in this file.

Owns how drafts reach the scheduler, and which of the tokens that the sampler drew become part of a
response. vLLM is built without a `speculative_config`. Its scheduler takes drafts all the same, and
the model runner learns for each step whether there are any; so a step without is what it would be
without speculation, CUDA graphs included, which a window for the whole engine would cost several
percent. On CUDA it ran with 0.26; what it gains there was not measured.
"""

import inspect
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightrl.devices.memory import draftable_values
from lightrl.engine.base import Delta, EngineSpec
from lightrl.history.draft import Drafter

# Logits of one step with drafts: vLLM keeps those of every drafted position, in the dtype of the
# model.
MAX_LOGITS = 1 << 28


def refusal(core: Any) -> str | None:
    """Return why this engine core cannot speculate, or None."""
    config = core.vllm_config
    if core.async_scheduling or core.batch_queue is not None:
        return "the next step starts before the tokens of the last are known"
    if config.model_config.is_hybrid or config.model_config.is_attention_free:
        return "the model has state that drafts would change"
    return None


def let_verify(runner: Any) -> None:
    """Patch the class of model runners to keep the logits of drafted positions.

    Releases before 0.27 or so keep them in each step that has drafts; later ones only if the engine
    has a speculative_config, which the patch sets for such a step.
    """
    prepare = runner._prepare_inputs
    if "speculative_config" not in inspect.unwrap(prepare).__code__.co_names:
        return

    def prepared(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not scheduler_output.scheduled_spec_decode_tokens:
            return prepare(self, scheduler_output, *args, **kwargs)
        self.speculative_config = True  # all that is asked there is whether it is None
        try:
            return prepare(self, scheduler_output, *args, **kwargs)
        finally:
            self.speculative_config = None

    runner._prepare_inputs = prepared


class VllmSpeculation:
    """An engine's drafts: made after each step, for the responses that got tokens in it."""

    def __init__(
        self, spec: EngineSpec, core: Any, vocabulary: int, room: float | None = None
    ) -> None:
        """`room`: bytes of the GPU that are left for the logits of drafts; None: as much as is
        needed."""
        from vllm.v1.outputs import DraftTokenIds

        self.drafter = Drafter(spec.max_window, spec.prefer == "reward", vocabulary=vocabulary)
        self._scheduler = core.scheduler
        most = core.scheduler.max_num_scheduled_tokens
        self._max_step_tokens = min(most, max_drafted_rows(vocabulary, spec.slots, room))
        self._as_drafts = DraftTokenIds
        self._left: dict[str, int] = {}  # tokens that may still be added to each response
        # responses that decode in the next step, and how much was drafted
        self._ready: dict[str, int] = {}

    def start(
        self, response: str, prompt: Sequence[int], prefix: Sequence[int], max_new_tokens: int
    ) -> None:
        self.drafter.start(response, prompt, prefix)
        self._left[response] = max_new_tokens

    def end(self, response: str, is_finished: bool) -> None:
        self.drafter.end(response, is_finished)
        self._left.pop(response, None)
        self._ready.pop(response, None)

    def restart(self) -> None:
        """Drop all drafts: running responses were moved back to the queue, and vLLM has dropped its
        own."""
        self._ready.clear()
        self.drafter.drop()

    def after_step(self, deltas: Sequence[Delta], ids: dict[str, str], started: float) -> None:
        """Take in the results of a step that began at `started`, and draft for the next one.

        `ids` are vLLM's of the responses that continue.
        """
        drafting = time.perf_counter()
        ready, self._ready = self._ready, {}
        num_tokens = sum(1 + ready.get(d.response, 0) for d in deltas)
        going_on: list[str] = []
        for d in deltas:
            self.drafter.took(d.response, d.token_ids)
            if d.finish_reason is not None:
                self.end(d.response, is_finished=True)
            else:
                self._left[d.response] -= len(d.token_ids)
                going_on.append(d.response)
        if going_on:
            self._hand_over(going_on, ids)
        num_running, _ = self._scheduler.get_request_counts()
        is_pure = num_running == len(going_on) and all(d.response in ready for d in deltas)
        now = time.perf_counter()
        self.drafter.stepped(len(deltas), num_tokens, now - started, now - drafting, is_pure)

    def _hand_over(self, responses: list[str], ids: dict[str, str]) -> None:
        # The scheduler serves in order until its step is full: with longer drafts the last would
        # starve.
        share = max(0, self._max_step_tokens // len(responses) - 1)
        left = self._left
        drafts = self.drafter.drafts([(r, min(left[r] - 1, share)) for r in responses])
        self._ready = {r: len(draft) for r, draft in zip(responses, drafts, strict=True)}
        drafted = [
            (ids[r], list(draft)) for r, draft in zip(responses, drafts, strict=True) if draft
        ]
        if drafted:
            self._scheduler.update_draft_token_ids(
                self._as_drafts(*map(list, zip(*drafted, strict=True)))
            )


def max_drafted_rows(vocabulary: int, slots: int, room: float | None) -> int:
    """Return the rows of logits that a step may have: those of a step without drafts at least, for
    which vLLM has kept memory. It has kept none for drafts, which it does not expect."""
    values = MAX_LOGITS if room is None else draftable_values(room, MAX_LOGITS)
    return max(slots, values // vocabulary)


class DraftRows:
    """The rows of logits in a step in which drafts are verified.

    One for every drafted token of a request and one for what follows. Example: with [3, 0] drafted
    tokens 4 rows are of the first request and 1 is of the other.
    """

    def __init__(self, metadata: Any) -> None:
        counts = np.asarray(metadata.num_draft_tokens) + 1
        self.request: npt.NDArray[np.int64] = np.repeat(np.arange(len(counts)), counts)
        self.offset: npt.NDArray[np.int64] = np.arange(len(self.request)) - np.repeat(
            np.cumsum(counts) - counts, counts
        )  # after the request's newest token
        self._shape = len(counts), int(counts.max())
        self._drafted = metadata.draft_token_ids

    def accepted(
        self, tokens: torch.Tensor, logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the requests get of what was drawn, [requests, most rows of one], and
        logprobs.

        A drafted token was fed to the model whether it is right or not, so a row is valid if all
        drafts up to it were what had been drawn: those, and the first that was not. -1 after them,
        as vLLM has it.
        """
        device = tokens.device
        row = torch.from_numpy(self.request * self._shape[1] + self.offset).to(device)
        is_drafted = torch.from_numpy(self.offset > 0).to(device)
        drawn = tokens.new_full(self._shape, -1).flatten().scatter(0, row, tokens)
        chance = logprobs.new_zeros(self._shape).flatten().scatter(0, row, logprobs)
        # fed[i, j] = what was tried at the place for which drawn[i, j - 1] was drawn
        fed = torch.full_like(drawn, -2).scatter(0, row[is_drafted], self._drafted.to(tokens.dtype))
        drawn, fed = drawn.view(self._shape), fed.view(self._shape)
        is_right = torch.ones_like(drawn, dtype=torch.bool)
        is_right[:, 1:] = (fed[:, 1:] == drawn[:, :-1]).cumprod(1, dtype=torch.int32).bool()
        return drawn.masked_fill(~is_right, -1), chance
