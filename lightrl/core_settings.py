"""The config as the core sees it: the one mapping, for the coordinator and the simulator alike. No
policy."""

from collections.abc import Mapping

from lightrl.config.schema import Config
from lightrl.core.nodes.cost_model import Prices
from lightrl.core.settings import EpisodeSettings, EvalSet, Settings, Tail
from lightrl.messages.responses import Sampling

# After node.grace_s a node kills an engine that keeps its devices. It counts as lost after so many
# of these, and what the kill may take, however short they are.
RELEASE_GRACES, KILL_S = 2.0, 5.0
MAX_UNSCORED_STEPS = 5  # in a row; one, if nothing was ever scored


def settings_of(
    config: Config,
    num_prompts: int,
    eval_sizes: Mapping[str, int] | None = None,
    vocabulary: int = 1,
    stop_ids: tuple[int, ...] = (),
) -> Settings:
    """Return the settings of the core. `eval_sizes`: prompts of each set to evaluate; None = no
    evaluation. `vocabulary`, `stop_ids`: of the model; default: none, for tokens of no model."""
    r = config.rollout
    eta_prompts, eta_responses = config.round.etas
    on_failure = config.reward.on_failure
    return Settings(
        run_seed=config.run.seed,
        num_steps=config.eval.last_step(config.train.steps),
        first_step=config.eval.step,
        prompts_per_step=config.train.prompts_per_step,
        group_size=r.group_size,
        max_response_tokens=r.max_response_length,
        sampling=Sampling(r.temperature, r.top_p, r.top_k, stop_ids),
        eval_interval=config.eval.interval,
        eval_sets=_eval_sets(config, eval_sizes or {}, stop_ids),
        slots=r.slots,
        num_rollouts=r.nodes,
        vocabulary=vocabulary,
        lease_s=config.node.lease_s,
        patience_s=config.node.patience_s,
        reward_on_failure=on_failure if isinstance(on_failure, float) else None,
        skips_unscored=on_failure == "skip",
        max_unscored_steps=MAX_UNSCORED_STEPS,
        chunk_tokens=r.chunk_tokens,
        num_prompts=num_prompts,
        tail=Tail(eta_prompts, eta_responses, config.round.race, config.deferred),
        max_staleness=config.async_.max_staleness,
        dynamic_sampling=config.algorithm.dynamic_sampling,
        deterministic=config.run.deterministic,
        mini_batches=config.train.mini_batches,
        mini_batch_order=config.train.mini_batch_order,
        deltas=config.has_deltas,
        broadcast=config.broadcast,
        num_ranks=config.train.ranks,
        weights_timeout_s=config.weights.timeout_s,
        prices=_prices(config),
        scale_max=config.scale.max,
        scale_drain=config.scale.drain,
        offload=config.offload.rule,
        device_parts=config.device_parts,
        parallel=r.parallel,
        release_s=RELEASE_GRACES * config.node.grace_s + KILL_S,
        episodes=_episodes(config),
    )


def _episodes(config: Config) -> EpisodeSettings | None:
    """None: single turns."""
    given = config.environment
    if not given.enabled:
        return None
    return EpisodeSettings(given.episodes, given.resume, given.slots, given.may_have_agents)


def _eval_sets(
    config: Config, sizes: Mapping[str, int], stop_ids: tuple[int, ...]
) -> tuple[EvalSet, ...]:
    return tuple(
        EvalSet(
            one.name,
            sizes[one.name],
            how.samples,
            Sampling(how.temperature, how.top_p, stop_token_ids=stop_ids),
            how.max_response_length,
        )
        for one in config.eval_sets
        if one.name in sizes and (how := config.eval_sampling(one))
    )


def _prices(config: Config) -> Prices | None:
    """None: not known."""
    reserved, preemptible = config.prices.reserved_per_hour, config.prices.preemptible_per_hour
    if reserved is None or preemptible is None:
        return None
    return Prices(reserved, preemptible)
