"""The eval section of a run's config: sets of held-out prompts, and how each is answered.

Must stay importable without torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from lightrl.config.data import Data, DataSet, resolved
from lightrl.config.sections import Count, NotNegative, Positive, Section

TopP = Annotated[float, Field(gt=0, le=1)]


class EvaluationSet(DataSet):
    split: str = ""
    """is required where there are several"""
    samples: Positive | None = None
    """responses for each prompt; default: eval.samples"""
    temperature: NotNegative | None = None
    """of sampling; 0 = greedy; default: eval.temperature"""
    top_p: TopP | None = None
    """nucleus sampling; 1 = off; default: eval.top_p"""
    max_response_length: Positive | None = None
    """tokens; default: eval.max_response_length"""


@dataclass(frozen=True, slots=True)
class EvalSampling:
    """The sampling of the responses to one set. `max_response_length`: tokens."""

    samples: int
    temperature: float
    top_p: float
    max_response_length: int

    @property
    def words(self) -> str:
        """For people. Example: "x 4, temperature 0.6, top_p 0.95, at most 8,192 tokens"."""
        how = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        nucleus = f", top_p {self.top_p:g}" if self.temperature and self.top_p < 1 else ""
        return f"x {self.samples}, {how}{nucleus}, at most {self.max_response_length:,} tokens"


class Eval(Section):
    path: str = ""
    """held-out prompts, as data.path and in its layout, "org/name:split" from the hub; short for
    one [[eval.sets]]; empty, and no sets = no evaluation"""
    sets: tuple[EvaluationSet, ...] = ()
    """several sets, each a table [[eval.sets]], in place of eval.path"""
    interval: Count = 0
    """steps between evaluations; 0 = only first and last"""
    samples: Positive = 1
    """responses for each prompt, of sets without their own"""
    temperature: NotNegative = 0.0
    """of sampling, of sets without their own; 0 = greedy"""
    top_p: TopP = 1.0
    """nucleus sampling, of sets without their own; 1 = off"""
    max_response_length: Positive | None = None
    """tokens, of sets without their own; default: rollout.max_response_length"""
    checkpoint: str = ""
    """set by `lightrl eval`: it is evaluated once, nothing is trained"""
    step: Count = 0
    """set by `lightrl eval`: steps done in it"""

    @model_validator(mode="after")
    def _differ(self) -> Self:
        for key, one in self._keyed():
            samples = self.samples if one.samples is None else one.samples
            temperature = self.temperature if one.temperature is None else one.temperature
            if samples > 1 and temperature == 0:
                where = f"eval{key}" if one.samples is not None else "eval"
                of = f" (set {one.name or one.path})" if key and one.samples is None else ""
                raise ValueError(
                    f"{where}.samples = {samples}: at temperature 0{of} all responses to a prompt "
                    "are the same; set a temperature (0.6 to 1 is usual), or leave samples at 1"
                )
        return self

    def last_step(self, steps: int) -> int:
        """Return the step at which a run of `steps` ends; an evaluation ends where it begins."""
        return self.step if self.checkpoint else steps

    def _keyed(self) -> Iterator[tuple[str, EvaluationSet]]:
        """Yield each set, with the text that follows "eval" in its keys."""
        if self.path:
            yield "", EvaluationSet(path=self.path)
        yield from ((f".sets[{k}]", one) for k, one in enumerate(self.sets))

    def all_sets(self, data: Data) -> tuple[EvaluationSet, ...]:
        """Return the sets, resolved."""
        return resolved([one for _, one in self._keyed()], data)

    def sampling(self, one: EvaluationSet, max_response_length: int) -> EvalSampling:
        """Return how one set is answered. `max_response_length`: of training, in tokens."""

        def first(*values: float | None) -> float:
            return next(v for v in values if v is not None)

        longest = first(one.max_response_length, self.max_response_length, max_response_length)
        return EvalSampling(
            samples=int(first(one.samples, self.samples)),
            temperature=first(one.temperature, self.temperature),
            top_p=first(one.top_p, self.top_p),
            max_response_length=int(longest),
        )

    def longest(self, max_response_length: int) -> tuple[str, int]:
        """Return the key that allows the longest responses, and their tokens; "" and 0 without any
        set. `max_response_length`: as in `sampling`."""
        found = ("", 0)
        for key, one in self._keyed():
            tokens = self.sampling(one, max_response_length).max_response_length
            own = key if one.max_response_length is not None else ""
            if tokens > found[1]:
                found = (f"eval{own}.max_response_length", tokens)
        return found
