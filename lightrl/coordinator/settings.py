"""The parts of the core's settings that come from data and model, and their checks. No policy."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightrl import rope
from lightrl.config.schema import Config
from lightrl.core.settings import Settings
from lightrl.core_settings import settings_of
from lightrl.errors import ConfigError, DataError
from lightrl.weights.canary import TOLERANCES, tolerance
from lightrl.wire import from_json


def core_settings(
    config: Config,
    vocabulary: int,
    stop_ids: tuple[int, ...],
    sizes: Mapping[str, int],
    eval_sizes: Mapping[str, int],
) -> Settings:
    """Return the settings of the core. `sizes`, `eval_sizes`: prompts of each set, to train and to
    evaluate on. Raises DataError if there are fewer to train on than a round launches."""
    if not config.eval.checkpoint:
        _require_enough(config, sizes)
    num_prompts = sum(sizes.values())
    settings = settings_of(config, num_prompts, eval_sizes, vocabulary, stop_ids)
    most = {dtype: tolerance(config.weights.canary, dtype) for dtype in TOLERANCES}
    return replace(settings, num_trainers=config.train.nodes, canary_tolerances=most)


def _require_enough(config: Config, sizes: Mapping[str, int]) -> None:
    needed, (launched, _) = config.train.prompts_per_step, config.launched
    short_round = f" x round.eta = {config.round.etas[0]:g}" if launched > needed else ""
    rounds_to = f": a short round launches {launched}" if launched > needed else ""
    sets, num_prompts = config.data.all_sets, sum(sizes.values())
    if num_prompts < launched:
        what = sets[0].path if len(sets) == 1 else "data.sets"
        raise DataError(
            f"{what}: {num_prompts} prompts are fewer than train.prompts_per_step = "
            f"{needed}{short_round}{rounds_to}"
        )
    total = sum(one.weight or 0.0 for one in sets)
    for one in sets:
        share = launched * (one.weight or 0.0) / total if total else 0.0
        if share > sizes[one.name]:
            raise DataError(
                f"{one.path}: {sizes[one.name]} prompts are fewer than its weight of "
                f"{one.weight:g} in {total:g} asks for in each round: {share:.1f} of {launched}"
            )


def require_context(files: Mapping[str, bytes], config: Config) -> None:
    """Raise ConfigError if a prompt with its response may be longer than the model's context.
    `files`: of the model, config.json at least."""
    text = _text_config(files)
    longest = rope.context(text)
    if longest is None or config.max_model_length <= longest:
        return
    if config.environment.enabled:
        default = "" if config.environment.max_length else " (the default)"
        raise ConfigError(
            f"environment.max_length = {config.max_model_length}{default}: the model's context is "
            f"{longest:,} tokens; lower it"
        )
    limit = config.data.max_prompt_length
    default = " (the default)" if "max_prompt_length" not in config.data.model_fields_set else ""
    key, tokens = "rollout.max_response_length", config.rollout.max_response_length
    if config.max_trained_length <= longest:
        key, tokens = config.eval.longest(tokens)
    source = "max_position_embeddings"
    if longest != text[source]:
        source += " and its scaling"
    raise ConfigError(
        f"data.max_prompt_length = {limit}{default} and {key} = {tokens} add up to "
        f"{limit + tokens:,} tokens, but the model's context ({source}) is "
        f"{longest:,}; lower one of them"
    )


def _text_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    tree = from_json(files["config.json"], dict)
    return tree.get("text_config") or tree  # of models that read more than text
