"""What the core must know of the configuration. Values only."""

from dataclasses import dataclass, field
from typing import Literal

from lightrl.core.nodes.cost_model import Prices
from lightrl.errors import InvariantViolation
from lightrl.messages.responses import Sampling


@dataclass(frozen=True, slots=True)
class Tail:
    """How rounds deal with their longest responses (RollPacker, arXiv 2509.21009, section 4.1).

    A short round launches round(eta_prompts * P0) prompts with round(eta_responses * R0) responses
    each and keeps the first P0 and R0 to finish. Both 1 = no racing: every round waits for all it
    launched. `race` says what "first" means: fewest tokens, or earliest by the clock.
    """

    eta_prompts: float = 1.0
    eta_responses: float = 1.0
    race: Literal["tokens", "clock"] = "tokens"
    # what a later round does with the responses of a group that was put off: it samples them again
    # from the first token, with the same noise, or continues them from the tokens that they have
    deferred: Literal["restart", "continue"] = "restart"
    # responses that restart get other noise; for comparison
    fresh_noise: bool = False

    @property
    def continues(self) -> bool:
        return self.deferred == "continue"

    @property
    def races(self) -> bool:
        return self.eta_prompts > 1 or self.eta_responses > 1


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One set to evaluate on, and how its prompts are answered. Their ids begin with its name and a
    slash. Example: EvalSet("math", 500, 4, Sampling(0.6, 0.95), 8192)"""

    name: str
    num_prompts: int
    # responses for each
    samples: int
    sampling: Sampling
    max_response_tokens: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What the core must know of the configuration. Lengths in tokens, times in seconds."""

    run_seed: int
    num_steps: int
    prompts_per_step: int
    group_size: int
    max_response_tokens: int
    sampling: Sampling
    # of a node that does not name its own
    slots: int
    # token ids are below it
    vocabulary: int
    lease_s: float
    # None = a response without a score cannot be kept
    reward_on_failure: float | None
    # of one epoch of the training data
    num_prompts: int
    # steps between evaluations; 0 = only before the first and after the last
    eval_interval: int = 0
    # that an evaluation has all of at once; () = no evaluation
    eval_sets: tuple[EvalSet, ...] = ()
    # without reward_on_failure: it holds its place in its group, which is trained without it
    skips_unscored: bool = False
    # steps in a row without any score after which a run ends; 0 = it goes on
    max_unscored_steps: int = 0
    # of a response that a node may hold before it sends them
    chunk_tokens: int = 16
    tail: Tail = Tail()
    # 0 = synchronous
    max_staleness: int = 0
    # groups without signal are replaced (DAPO, arXiv 2503.14476)
    dynamic_sampling: bool = False
    # how long a run that has lost its trainer waits for it
    patience_s: float = 600.0
    # groups reach the trainer in the order of their prompts
    deterministic: bool = False
    # updates of a step, and which of its groups each has
    mini_batches: int = 1
    mini_batch_order: Literal["random", "arrival"] = "random"
    # predicted lengths order the work; off only for comparison
    foresight: bool = True
    # by how much the canary's logprobs of a version that is trained again may differ from those
    # before, by the dtype in which they were computed; of another dtype: by any amount
    canary_tolerances: dict[str, float] = field(default_factory=dict[str, float])
    # nodes may get a version as the difference to one that they hold
    deltas: bool = True
    # who gets a version by broadcast
    broadcast: Literal["auto", "always", "off"] = "off"
    # rollout nodes that the run itself starts; 0 = all come from elsewhere
    num_rollouts: int = 0
    # nodes that train together
    num_trainers: int = 1
    # of the one that leads
    num_ranks: int = 1
    # without progress, after which a member of a broadcast group gives up
    weights_timeout_s: float = 60.0
    # running responses may move inside a step; off only for comparison
    migration: bool = True
    # None: not known
    prices: Prices | None = None
    # preemptible nodes that may be wanted; 0 = nobody asks
    scale_max: int = 0
    # those beyond that number leave
    scale_drain: bool = False
    # by which devices that sample and train change sides within a step; "off": between steps alone
    offload: Literal["off", "foreseen", "window"] = "foreseen"
    # parts of these that can train without the others, as many on each trainer node; 1 = they
    # change sides as a whole
    device_parts: int = 1
    # after which a node that has not given its devices back counts as lost, and patience_s more
    # while its engine may still start
    release_s: float = 40.0
    # devices of an engine, of each of the sizes that take turns; the first begins. () = one size
    parallel: tuple[int, ...] = ()
    # times the usual pause between two looks at all that runs; 1 but in long simulations, most of
    # whose time these looks would take
    look_pause: float = 1.0
    # where the trainer stands when the run begins; one that only evaluates ends there, too
    first_step: int = 0

    def slots_of(self, parallel: int) -> int:
        """Of a node that does not say how many it has: `slots` is what an engine of the first size
        has, and a larger one stands for several."""
        return self.slots * max(1, parallel // self.parallel[0]) if self.parallel else self.slots

    @property
    def num_eval_prompts(self) -> int:
        return sum(one.num_prompts for one in self.eval_sets)

    def eval_set(self, prompt: str) -> EvalSet:
        """That a prompt to evaluate on is of. Raises InvariantViolation if it is of none."""
        name = prompt.partition("/")[0]
        found = next((one for one in self.eval_sets if one.name == name), None)
        if found is None:
            raise InvariantViolation(f"{prompt}: is of no set to evaluate on")
        return found

    @property
    def prompts_launched(self) -> int:
        """Prompts of a short round."""
        return round(self.tail.eta_prompts * self.prompts_per_step)

    @property
    def responses_launched(self) -> int:
        """Responses of a group of a short round."""
        return round(self.tail.eta_responses * self.group_size)
