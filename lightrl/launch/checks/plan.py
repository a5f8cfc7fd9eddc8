"""The plan of a run, in words and numbers, for `lightrl up --dry-run`.

Reads the number of rows of the data, and nothing else.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, inf

from lightrl.config.data import DataSet, TrainSet
from lightrl.config.schema import Config
from lightrl.config.sections import Optim
from lightrl.data.sources import count_rows
from lightrl.messages.nodes import Role

LENGTH_BIAS = {
    "off": "none: every round waits for its longest response",
    "continue": "none: responses that are put off are continued, not replaced",
    "restart": "shorter: responses that are put off restart, on newer weights; see "
    "tail_run/length_bias",
    "both": "the shorter responses of each prompt are trained; see tail/kept_length",
}
EXPORTS = {"last": "the last", "every": "every one", "never": "none"}


def describe(
    config: Config,
    devices: Sequence[str] = (),
    weights: Sequence[str] = (),
    roles: Sequence[Role] = (),
) -> list[str]:
    """Return the lines of the plan. `devices`, `weights`: lines about GPUs and versions. `roles`:
    of the daemon that starts here; () = a whole run starts."""
    rollout, train = config.rollout, config.train
    num, slots = count_prompts(config.data.all_sets), rollout.nodes * rollout.slots
    bind = config.run.bind
    sections: dict[str, Iterable[str]] = {
        "run": [f"{config.run.name}, in {config.run_dir}; the coordinator listens on {bind}"],
        "model": [f"{config.model.path} ({config.model.dtype})"],
        "data": map(_set, config.data.all_sets),
        "each step": _step(config),
        "tail": _tail_batching(config),
        "staleness": [_staleness(config)],
        "whole run": [_whole_run(config, num)],
        "rollout": [_rollout(config, slots)],
        "speculation": [_speculation(config)],
        "training": _training(config, roles),
        "devices": devices,
        "weights": weights,
        "evaluation": _evaluation(config),
        "checkpoints": [_checkpoints(config)],
    }
    lines = [line for label, some in sections.items() for line in labelled(label, some)]
    is_trained = train.engine != "emulated" and not config.run.deterministic
    notes = [*_batch_notes(config, num, slots), *(_micro_batch_note(config) if is_trained else ())]
    notes += _environment_notes(config)
    return [*lines, *(line for note in notes for line in labelled("note", [note]))]


def labelled(label: str, lines: Iterable[str]) -> list[str]:
    """Return lines indented by a column of labels, with the label before the first line."""
    return [f"{'' if i else label:12}{line}" for i, line in enumerate(lines)]


def of_daemon(config: Config, roles: Sequence[Role], slots: int) -> Config:
    """Return the config with the rollout node of one daemon, or none, in place of all nodes of a
    run. `slots`: 0 = as configured."""
    if not roles:
        return config
    update = {"nodes": int("rollout" in roles), "slots": slots or config.rollout.slots}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=update)})


def count_prompts(sets: Sequence[DataSet]) -> int | None:
    """Return the rows of all sets; None if one cannot be counted without reading it."""
    counts = [count_rows(one) for one in sets]
    return None if None in counts else sum(n for n in counts if n)


def _set(one: TrainSet) -> str:
    weight = "" if one.weight is None else f", weight {one.weight:g}"
    return f"{_place(one)} ({_count(one)}{weight})"


def _place(one: DataSet) -> str:
    return ":".join(part for part in (one.path, one.subset, one.split) if part)


def _count(one: DataSet) -> str:
    count = count_rows(one)
    return "not counted" if count is None else f"{count:,} prompts"


def _responses(config: Config) -> int:
    return config.train.prompts_per_step * config.rollout.group_size


def _step(config: Config) -> Iterator[str]:
    train, longest = config.train, config.rollout.max_response_length
    num, responses = train.mini_batches, _responses(config)
    each = f"{train.prompts_per_step // num:,} prompts"
    updates = "one optimizer step" if num == 1 else f"{num} optimizer steps of {each}"
    prompts = f"{train.prompts_per_step:,} prompts x {config.rollout.group_size} responses"
    yield f"{prompts} = {responses:,} responses, {updates}"
    yield f"at most {responses:,} x {longest:,} = {responses * longest:,} generated tokens"
    if num > 1 and train.mini_batch_order == "random":
        yield f"mini-batches of random groups: about 1/{num} of the backward pass overlaps"
    elif num > 1:
        yield "mini-batches in the order of arrival: the longest responses are trained last"


def _tail_batching(config: Config) -> Iterator[str]:
    prompts, responses = config.train.prompts_per_step, config.rollout.group_size
    launched, launched_each = config.launched
    mode = config.round.tail_batching
    if mode == "off":
        yield f"no tail batching; length bias: {LENGTH_BIAS[mode]}"
        return
    yield (
        f"{mode}: a short round launches {launched:,} prompts x {launched_each} responses = "
        f"{launched * launched_each:,}, keeps the first {prompts:,} x {responses} by "
        f"{config.round.race}"
    )
    if put_off := launched - prompts:
        yield (
            f"{put_off:,} prompts are put off each time: about {prompts / put_off:.3g} short "
            f"rounds + 1 long ({prompts:,} x {responses}, waits for all)"
        )
    yield f"length bias: {LENGTH_BIAS[mode if launched_each > responses else config.deferred]}"


def _staleness(config: Config) -> str:
    most = config.async_.max_staleness
    if not most and not config.continues:
        return "synchronous: every trained token is sampled by the newest version"
    weighted = f"{_weights(config, is_float32=True)} (algorithm.tis_bounds)"
    if config.algorithm.old_logprobs == "rollout":
        weighted = "with ratios to the logprobs of the engines (algorithm.old_logprobs)"
    if not most:
        return f"synchronous, but responses that are put off have older tokens; {weighted}"
    older = " (older ones in responses that are put off)" * config.continues
    return (
        f"asynchronous: up to {most} more rounds start before a step is trained; tokens are "
        f"at most that many versions old{older}; {weighted}"
    )


def _whole_run(config: Config, num_prompts: int | None) -> str:
    steps = config.train.steps
    drawn = steps * config.train.prompts_per_step
    epochs = f" = {drawn / num_prompts:.4g} epochs of {num_prompts:,}" if num_prompts else ""
    return f"{steps:,} steps = {drawn:,} prompts{epochs}; {steps * _responses(config):,} responses"


def _rollout(config: Config, slots: int) -> str:
    rollout = config.rollout
    prompts, each = config.launched
    responses = prompts * each
    if not slots:
        return "no daemon here: the run waits until nodes join"
    most = "step" if config.round.tail_batching == "off" else "short round"
    turns = ceil(responses / slots)
    fit = "run concurrently" if turns == 1 else f"take {turns} turns or more"
    daemons = "daemon" if rollout.nodes == 1 else "daemons"
    cut = f", top_p {rollout.top_p:g}" * (rollout.top_p < 1)
    cut += f", top_k {rollout.top_k}" * (rollout.top_k > 0)
    return (
        f"{rollout.nodes} {daemons} ({rollout.engine}) x {rollout.slots} slots = {slots:,} "
        f"concurrent responses; a {most}'s {responses:,} {fit}; temperature "
        f"{rollout.temperature:g}{cut}"
    )


def _speculation(config: Config) -> str:
    if config.speculates:
        return f"from earlier epochs, at most {config.speculation.max_window} tokens at a time"
    return "off, for run.deterministic" if config.speculation.enabled else "off"


def _training(config: Config, roles: Sequence[Role]) -> Iterator[str]:
    train = config.train
    if train.engine == "emulated":
        yield "emulated: nothing is trained and no model is written; weights are a digest"
        return
    tokens = _responses(config) * config.max_trained_length
    micro = ceil(tokens / (train.max_tokens_per_gpu * train.world))
    ranks = _ranks(train.ranks)
    if train.nodes > 1:
        here = f"trainer-0 to trainer-{train.nodes - 1} here"
        if roles:
            here = "one of them here" if "trainer" in roles else "none of them here"
        ranks = f"{train.nodes} nodes x {ranks}, {here}"
    if train.replicas > 1:
        ranks += f", {train.replicas} replicas of {_ranks(train.world // train.replicas)}"
    yield (
        f"{config.algorithm.name}, {_optimizer(train.optim)}, {ranks}; micro-batches of "
        f"{train.max_tokens_per_gpu:,} tokens: at most {micro:,} a step"
    )
    low, high = config.algorithm.clip
    span = f"above {1 + high:g}" if low == inf else f"to {max(0.0, 1 - low):g} ... {1 + high:g}"
    weights, exact = (_weights(config, is_float32) for is_float32 in (False, True))
    if exact != weights:
        weights += ", none where trainer and engines compute in float32"
    is_old = config.algorithm.old_logprobs == "trainer"
    to = "the weights before the step" if is_old else "the logprobs of the engines"
    dual = config.algorithm.clip_dual
    limit = f", the loss of a negative advantage at {dual:g} times it" if dual else ""
    yield f"ratios to {to} are clipped {span}{limit}; {weights}"


def _ranks(num: int) -> str:
    return "1 rank" if num == 1 else f"{num} ranks"


def _optimizer(optim: Optim) -> str:
    rate = f"lr {optim.lr:g}"
    if optim.warmup_steps:
        rate += f" after {optim.warmup_steps:,} steps of warm-up"
    if optim.schedule != "constant":
        rate += f", {optim.schedule} to {optim.min_lr_ratio * optim.lr:g}"
    return rate if optim.name == "adamw" else f"{rate}, {optim.name}"


def _weights(config: Config, is_float32: bool) -> str:
    if (bounds := config.tis_bounds(is_float32)) is None:
        return "no importance weights"
    low, high = bounds
    return f"importance weights of {f'{low:g} to' if low else 'at most'} {high:g}"


def _evaluation(config: Config) -> Iterator[str]:
    interval, sets, steps = config.eval.interval, config.eval_sets, config.train.steps
    if not sets:
        yield "none (eval.path is empty, and there are no [[eval.sets]])"
        return
    for one in sets:
        yield f"{one.name}: {_place(one)} ({_count(one)}) {config.eval_sampling(one).words}"
    times = len({0, steps, *(range(0, steps, interval) if interval else ())})
    when = f"every {interval} steps" if interval else "before the first and after the last step"
    yield f"{'all sets concurrently, ' * (len(sets) > 1)}{when}: {times} times"


def _checkpoints(config: Config) -> str:
    section = config.checkpoint
    export = f"; {EXPORTS[section.export]} is exported"
    if not section.interval:
        return f"after the last step{export}"
    every = f", and one every {section.keep_every} steps" if section.keep_every else ""
    return (
        f"every {section.interval} steps and after the last; the newest {section.keep_last} are "
        f"kept{every}{export}"
    )


def _batch_notes(config: Config, num_prompts: int | None, slots: int) -> Iterator[str]:
    launched, launched_each = config.launched
    if num_prompts and num_prompts < launched:
        is_short = launched > config.train.prompts_per_step
        what = "a short round launches" if is_short else "one step takes"
        where = "data.path holds" if config.data.path else "data.sets hold"
        yield f"{where} fewer prompts ({num_prompts:,}) than {what} ({launched:,})"
    if 0 < slots < launched_each:
        yield (
            f"the {slots:,} slots here are fewer than the {launched_each} responses of one prompt: "
            "they do not run concurrently; raise rollout.slots or rollout.nodes"
        )


def _micro_batch_note(config: Config) -> Iterator[str]:
    train = config.train
    tokens = _responses(config) * config.max_trained_length
    if tokens < train.max_tokens_per_gpu * (train.world // train.replicas):
        yield (
            f"train.max_tokens_per_gpu = {train.max_tokens_per_gpu:,}: a step has at most "
            f"{tokens:,} tokens and fills no micro-batch on every rank: training and generation "
            "do not overlap"
        )


def _environment_notes(config: Config) -> Iterator[str]:
    if config.environment.enabled and not config.async_.max_staleness:
        yield (
            "async.max_staleness = 0: at the end of each step engines idle while the last episodes "
            "are in their environments; 1 keeps them busy, which pays if an episode spends more "
            "than a tenth of a step there (lightrl simulate --compare --environment-s ...)"
        )
