"""The part of the configuration that the core uses. Values only."""

from dataclasses import dataclass, field
from typing import Literal

from lightrl.core.nodes.cost_model import Prices
from lightrl.errors import InvariantViolation
from lightrl.messages.responses import Sampling


@dataclass(frozen=True, slots=True)
class Tail:
    """Tail batching, the handling of long responses (RollPacker, arXiv 2509.21009, section 4.1).

    A short round launches round(eta_prompts * P0) prompts with round(eta_responses * R0) responses
    each and keeps the first P0 and R0 to finish. Both 1 = no race: every round waits for all its
    responses. `race` defines "first": fewest tokens, or earliest by the clock.
    """

    eta_prompts: float = 1.0
    eta_responses: float = 1.0
    race: Literal["tokens", "clock"] = "tokens"
    # how a later round handles the responses of a group that was deferred: sample again from the
    # first token, with the same noise, or continue from the tokens so far
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
    """An evaluation set and its sampling. Ids of its prompts begin with the name and a slash.
    Example: EvalSet("math", 500, 4, Sampling(0.6, 0.95), 8192)"""

    name: str
    num_prompts: int
    # responses for each
    samples: int
    sampling: Sampling
    max_response_tokens: int


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings of episodes, in `environment` of a config."""

    # open at the same time; 0 = computed from measured times
    max_open: int = 0
    resume: Literal["replay", "snapshot", "once"] = "replay"
    # of an environment node that does not report its own
    slots: int = 512
    # environments receive the logprobs of turns
    has_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of the core. Lengths in tokens, times in seconds."""

    run_seed: int
    num_steps: int
    prompts_per_step: int
    group_size: int
    max_response_tokens: int
    sampling: Sampling
    # of a node that does not report its own
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
    # of an evaluation, all in one round; () = no evaluation
    eval_sets: tuple[EvalSet, ...] = ()
    # without reward_on_failure: an unscored response keeps its place, and is not trained
    skips_unscored: bool = False
    # steps in a row without any score after which a run ends; 0 = never
    max_unscored_steps: int = 0
    # tokens of a response that a node may hold before it sends them
    chunk_tokens: int = 16
    tail: Tail = Tail()
    # 0 = synchronous
    max_staleness: int = 0
    # groups without signal are replaced (DAPO, arXiv 2503.14476)
    dynamic_sampling: bool = False
    # how long a run waits for a lost trainer
    patience_s: float = 600.0
    # groups reach the trainer in the order of their prompts
    deterministic: bool = False
    # updates of a step, and the assignment of groups to these
    mini_batches: int = 1
    mini_batch_order: Literal["random", "arrival"] = "random"
    # predicted lengths order the work; off only for comparison
    foresight: bool = True
    # permitted difference of the canary's logprobs of a version that is trained again, by the dtype
    # in which they were computed; unlimited for other dtypes
    canary_tolerances: dict[str, float] = field(default_factory=dict[str, float])
    # nodes may receive a version as the difference to one that they hold
    deltas: bool = True
    # which nodes receive a version by broadcast
    broadcast: Literal["auto", "always", "off"] = "off"
    # rollout nodes that the run itself starts; 0 = all are started externally
    num_rollouts: int = 0
    # nodes that train together
    num_trainers: int = 1
    # of the one that leads
    num_ranks: int = 1
    # without progress, after which a member of a broadcast group gives up
    weights_timeout_s: float = 60.0
    # running responses may move inside a step; off only for comparison
    migration: bool = True
    # None: unknown
    prices: Prices | None = None
    # most preemptible nodes that may be wanted; 0 = no scaling
    scale_max: int = 0
    # those beyond that number leave
    scale_drain: bool = False
    # rule by which shared devices change sides within a step; "off": only between steps
    offload: Literal["off", "foreseen", "window"] = "foreseen"
    # parts of these that can train without the others, equal on each trainer node; 1 = all devices
    # change sides together
    device_parts: int = 1
    # after which a node that has not released its devices counts as lost, plus patience_s while its
    # engine may still start
    release_s: float = 40.0
    # devices of an engine, of each of the sizes that take turns; the first begins. () = one size
    parallel: tuple[int, ...] = ()
    # factor of the pause between two calls of Balance.look; 1 except in long simulations, most of
    # whose time these calls would take
    look_pause: float = 1.0
    # step of the trainer when the run begins; a run that only evaluates also ends there
    first_step: int = 0
    # None: responses are single turns
    episodes: EpisodeSettings | None = None

    def slots_of(self, parallel: int) -> int:
        """Return the slots of a node that does not report its own: `slots` for an engine of the
        first size, a multiple for larger ones."""
        return self.slots * max(1, parallel // self.parallel[0]) if self.parallel else self.slots

    @property
    def num_eval_prompts(self) -> int:
        return sum(one.num_prompts for one in self.eval_sets)

    def eval_set(self, prompt: str) -> EvalSet:
        """Return the set of an evaluation prompt. Raises InvariantViolation if there is none."""
        name = prompt.partition("/")[0]
        found = next((one for one in self.eval_sets if one.name == name), None)
        if found is None:
            raise InvariantViolation(f"{prompt}: is of no set to evaluate on")
        return found

    @property
    def prompts_launched(self) -> int:
        """Number of prompts of a short round."""
        return round(self.tail.eta_prompts * self.prompts_per_step)

    @property
    def responses_launched(self) -> int:
        """Number of responses of a group of a short round."""
        return round(self.tail.eta_responses * self.group_size)
