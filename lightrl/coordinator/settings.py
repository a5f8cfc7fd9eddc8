"""What the core's settings take from data and model, and whether these fit the config. No
policy."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightrl.config import Config
from lightrl.core.settings import Settings
from lightrl.core_settings import settings_of
from lightrl.data import Prompt
from lightrl.errors import ConfigError, DataError
from lightrl.wire import from_json


def core_settings(
    config: Config,
    vocabulary: int,
    stop_ids: tuple[int, ...],
    num_prompts: int,
    num_eval_prompts: int,
) -> Settings:
    """Raises DataError if the data holds fewer prompts than a round launches."""
    _require_enough(config, num_prompts)
    settings = settings_of(config, num_prompts, num_eval_prompts, vocabulary, stop_ids)
    return replace(settings, num_trainers=config.train.nodes)


def _require_enough(config: Config, num_prompts: int) -> None:
    needed, (launched, _) = config.train.prompts_per_step, config.launched
    if num_prompts >= launched:
        return
    short_round = f" x round.eta = {config.round.etas[0]:g}" if launched > needed else ""
    rounds_to = f": a short round launches {launched}" if launched > needed else ""
    raise DataError(
        f"{config.data.path}: {num_prompts} prompts are fewer than train.prompts_per_step = "
        f"{needed}{short_round}{rounds_to}"
    )


def vocabulary(files: dict[str, bytes], prompts: dict[str, Prompt], config: Config) -> int:
    """The model's, from its config.json. Raises DataError for a prompt with tokens that it does not
    have."""
    tree = from_json(files["config.json"], dict)
    text = tree.get("text_config") or tree  # of models that read more than text
    size = text.get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"{config.model.path}: config.json has no vocab_size")
    require_context(config, tree)
    for prompt in prompts.values():
        if max(prompt.token_ids, default=0) >= size:
            raise DataError(
                f"prompt {prompt.id}: the tokenizer's token {max(prompt.token_ids)} is outside the "
                f"model's vocabulary of {size}"
            )
    return size


def require_context(config: Config, tree: Mapping[str, Any]) -> None:
    """`tree`: the model's config.json. Raises ConfigError if a prompt with its response may be
    longer than what the model reads."""
    longest = (tree.get("text_config") or tree).get("max_position_embeddings")
    if not isinstance(longest, int) or config.max_model_length <= longest:
        return
    limit = config.data.max_prompt_length
    default = " (the default)" if "max_prompt_length" not in config.data.model_fields_set else ""
    raise ConfigError(
        f"data.max_prompt_length = {limit}{default} and rollout.max_response_length = "
        f"{config.rollout.max_response_length} are {config.max_model_length} tokens: the model's "
        f"context (max_position_embeddings) is {longest}; lower one of them"
    )
