"""The config as the core sees it, and what must be known of the model for that. No policy."""

from lightrl.config import Config
from lightrl.core.state import Settings, Tail
from lightrl.data import Prompt
from lightrl.errors import ConfigError, DataError
from lightrl.messages import Sampling
from lightrl.wire import from_json


def core_settings(
    config: Config, vocabulary: int, stop_ids: tuple[int, ...], num_prompts: int, num_eval_prompts: int
) -> Settings:
    """Raises DataError if the data holds fewer prompts than a round launches."""
    r = config.rollout
    _require_enough(config, num_prompts)
    eta_prompts, eta_responses = config.round.etas
    return Settings(
        run_seed=config.run.seed,
        num_steps=config.train.steps,
        prompts_per_step=config.train.prompts_per_step,
        group_size=r.group_size,
        max_response_tokens=r.max_response_length,
        sampling=Sampling(r.temperature, r.top_p, r.top_k, stop_ids),
        eval_interval=config.eval.interval,
        num_eval_prompts=num_eval_prompts,
        eval_samples=config.eval.samples,
        eval_sampling=Sampling(config.eval.temperature, stop_token_ids=stop_ids),
        slots=r.slots,
        vocabulary=vocabulary,
        lease_s=config.node.lease_s,
        reward_on_failure=None if config.reward.on_failure == "drop" else config.reward.on_failure,
        chunk_tokens=r.chunk_tokens,
        num_prompts=num_prompts,
        tail=Tail(eta_prompts, eta_responses, config.round.race),
        max_staleness=config.async_.max_staleness,
        dynamic_sampling=config.algorithm.dynamic_sampling,
        deterministic=config.train.deterministic,
    )


def _require_enough(config: Config, num_prompts: int) -> None:
    needed, (launched, _) = config.train.prompts_per_step, config.launched
    if num_prompts >= launched:
        return
    short_round = f" x round.eta = {config.round.etas[0]:g}" if launched > needed else ""
    rounds_to = f": a short round launches {launched}" if launched > needed else ""
    raise DataError(
        f"{config.data.path}: {num_prompts} prompts are fewer than "
        f"train.prompts_per_step = {needed}{short_round}{rounds_to}"
    )


def vocabulary(files: dict[str, bytes], prompts: dict[str, Prompt], config: Config) -> int:
    """The model's, from its config.json. Raises DataError for a prompt with tokens that it does not have."""
    tree = from_json(files["config.json"], dict)
    text = tree.get("text_config") or tree  # of models that read more than text
    size = text.get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"{config.model.path}: config.json has no vocab_size")
    longest = text.get("max_position_embeddings")
    if isinstance(longest, int) and config.max_model_length > longest:
        raise ConfigError(
            f"data.max_prompt_length + rollout.max_response_length = {config.max_model_length}: "
            f"the model's context (max_position_embeddings) is {longest} tokens"
        )
    for prompt in prompts.values():
        if max(prompt.token_ids, default=0) >= size:
            raise DataError(
                f"prompt {prompt.id}: the tokenizer's token {max(prompt.token_ids)} is outside the model's "
                f"vocabulary of {size}"
            )
    return size
