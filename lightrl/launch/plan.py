"""What a config means, in words and numbers: the batch arithmetic of `lightrl up --dry-run`.

Pure text; reads no more than how many rows the data has.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, inf

from lightrl.config.algorithm import CLIP
from lightrl.config.data import DataSet, TrainSet
from lightrl.config.reward import LONGEST_TEST_S
from lightrl.config.schema import LORA_ARGS, Config
from lightrl.config.sections import Optim, Train
from lightrl.data.sources import count_rows
from lightrl.devices.assign import Assignment
from lightrl.messages.nodes import Role

HIGH_LR = 1e-3
BIAS = {
    "off": "none: every round waits for its longest response",
    "continue": "none: responses that are put off are continued, not replaced",
    "restart": (
        "shorter: responses that are put off restart, and newer weights give others in place of "
        "long ones (round.deferred = 'restart'): see tail_run/length_bias"
    ),
    "both": (
        "the shorter responses of each prompt are trained: see tail/kept_length, "
        "tail/launched_length_km"
    ),
}


def describe(
    config: Config,
    devices: Sequence[str] = (),
    weights: Sequence[str] = (),
    roles: Sequence[Role] = (),
) -> list[str]:
    """Lines of the dry run. `devices`, `weights`: lines about the GPUs, and about moving a version
    (launch/weights_plan.py). `roles`: see `here`."""
    rollout, train = config.rollout, config.train
    responses = train.prompts_per_step * rollout.group_size
    slots = rollout.nodes * rollout.slots
    num_prompts = count_prompts(config.data.all_sets)
    place = f"{config.run.name}, in {config.run_dir}; the coordinator listens on {config.run.bind}"
    each_step = (
        f"{train.prompts_per_step:,} prompts x {rollout.group_size} responses = {responses:,} "
        f"responses, {_updates(config)}",
        f"at most {responses:,} x {rollout.max_response_length:,} = "
        f"{responses * rollout.max_response_length:,} generated tokens",
    )
    sections: dict[str, Iterable[str]] = {
        "run": [place],
        "model": [f"{config.model.path} ({config.model.dtype})"],
        "data": map(_set, config.data.all_sets),
        "each step": [*each_step, *_mini_batches(train)],
        "tail": _tail_batching(config),
        "staleness": [_staleness(config)],
        "whole run": [_whole_run(config, responses, num_prompts)],
        "rollout": [_rollout(config, slots)],
        "speculation": [_speculation(config)],
        "training": [_training(config, responses, roles), *_algorithm(config)],
        "devices": devices,
        "weights": weights,
        "evaluation": _evaluation(config),
        "checkpoints": [_checkpoints(config)],
    }
    lines = [line for label, some in sections.items() for line in labelled(label, some)]
    notes = _notes(config, num_prompts, slots)
    return [*lines, *(line for note in notes for line in labelled("note", [note]))]


def labelled(label: str, lines: Iterable[str]) -> list[str]:
    """Return lines indented by a column of labels, with the label before the first line."""
    return [f"{'' if i else label:12}{line}" for i, line in enumerate(lines)]


def here(config: Config, roles: Sequence[Role], slots: int) -> Config:
    """What is to be described where one daemon with these roles is started, and not the whole
    run: it is a rollout node, or there is none here. `slots`: 0 = as configured."""
    if not roles:
        return config
    update = {"nodes": int("rollout" in roles), "slots": slots or config.rollout.slots}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=update)})


def count_prompts(sets: Sequence[DataSet]) -> int | None:
    """Rows of all of them; None if one cannot be counted without being read."""
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


def _updates(config: Config) -> str:
    train = config.train
    if train.mini_batches == 1:
        return "one optimizer step"
    prompts = train.prompts_per_step // train.mini_batches
    return f"{train.mini_batches} optimizer steps of {prompts:,} prompts"


def _mini_batches(train: Train) -> Iterator[str]:
    """What their order costs."""
    num = train.mini_batches
    if num == 1:
        return
    if train.mini_batch_order == "random":
        yield (
            "mini-batches are of random groups (train.mini_batch_order): the first is complete "
            f"near the end of the round, until then about 1/{num} of the backward pass overlaps "
            "with generation"
        )
    else:
        yield (
            "mini-batches are in the order of arrival (train.mini_batch_order): all of the "
            "backward pass but the last groups overlaps with generation, and they are sorted by "
            "length: the longest responses are trained last, and clipped most"
        )


def _whole_run(config: Config, responses: int, num_prompts: int | None) -> str:
    steps = config.train.steps
    drawn = steps * config.train.prompts_per_step
    epochs = f" = {drawn / num_prompts:.4g} epochs of {num_prompts:,}" if num_prompts else ""
    return f"{steps:,} steps = {drawn:,} prompts{epochs}; {steps * responses:,} responses"


def _speculation(config: Config) -> str:
    if config.speculates:
        return (
            f"from what earlier epochs answered, at most {config.speculation.max_window} tokens "
            "at a time"
        )
    return "off, for run.deterministic" if config.speculation.enabled else "off"


def _tail_batching(config: Config) -> Iterator[str]:
    prompts, responses = config.train.prompts_per_step, config.rollout.group_size
    launched, launched_each = config.launched
    mode = config.round.tail_batching
    if mode == "off":
        yield f"no tail batching; length bias: {BIAS[mode]}"
        return
    yield (
        f"{mode}: a short round launches {launched:,} prompts x {launched_each} responses = "
        f"{launched * launched_each:,}, keeps the first {prompts:,} x {responses} by "
        f"{config.round.race}"
    )
    if put_off := launched - prompts:
        yield (
            f"{put_off:,} prompts are put off each time: about {prompts / put_off:.3g} short "
            f"rounds + 1 long ({prompts:,} x {responses}, waits for all); the rest at the end of "
            "an epoch and of the run"
        )
    yield f"length bias: {BIAS[mode if launched_each > responses else config.deferred]}"


def _staleness(config: Config) -> str:
    most = config.async_.max_staleness
    if not most and not config.continues:
        return "synchronous: every trained token is sampled by the newest version"
    weighted = f"{_weights(config, is_float32=True)} (algorithm.tis_bounds)"
    if config.algorithm.old_logprobs == "rollout":
        weighted = "their ratios are to what sampled them (algorithm.old_logprobs)"
    if not most:
        return (
            "synchronous, but for responses that are put off: the tokens that they have by then "
            f"are of older versions, {weighted}"
        )
    older = " (older ones in responses that are put off)" * config.continues
    return (
        f"asynchronous: up to {most} more rounds start before a step is trained; tokens are "
        f"at most that many versions old{older}, {weighted}"
    )


def _notes(config: Config, num_prompts: int | None, slots: int) -> Iterator[str]:
    launched, launched_each = config.launched
    if num_prompts and num_prompts < launched:
        is_short = launched > config.train.prompts_per_step
        what = "a short round launches" if is_short else "one step takes"
        where = "data.path holds" if config.data.path else "data.sets hold"
        yield f"{where} fewer prompts ({num_prompts:,}) than {what} ({launched:,})"
    if 0 < slots < launched_each:
        yield (
            f"the {slots:,} slots here are fewer than the {launched_each} responses of one prompt: "
            "no group runs at once; raise rollout.slots or rollout.nodes"
        )
    train = config.train
    if train.engine == "emulated" or config.run.deterministic:
        return
    tokens = train.prompts_per_step * config.rollout.group_size * config.max_trained_length
    if tokens < train.max_tokens_per_gpu * (train.world // train.replicas):
        yield (
            f"train.max_tokens_per_gpu = {train.max_tokens_per_gpu:,}: a step has at most "
            f"{tokens:,} tokens and fills no micro-batch on every rank, so that it is trained when "
            "its round is over; a smaller one lets both overlap"
        )


def _rollout(config: Config, slots: int) -> str:
    rollout = config.rollout
    prompts, each = config.launched
    responses = prompts * each
    if not slots:
        return "no daemon here: the run waits until nodes join"
    most = "step" if config.round.tail_batching == "off" else "short round"
    fit = (
        f"a {most}'s {responses:,} fit at once"
        if slots >= responses
        else f"a {most}'s {responses:,} take {ceil(responses / slots)} turns or more"
    )
    daemons = "daemon" if rollout.nodes == 1 else "daemons"
    cut = f", top_p {rollout.top_p:g}" * (rollout.top_p < 1)
    cut += f", top_k {rollout.top_k}" * (rollout.top_k > 0)
    return (
        f"{rollout.nodes} {daemons} ({rollout.engine}) x {rollout.slots} slots = {slots:,} at "
        f"once; {fit}; temperature {rollout.temperature:g}{cut}"
    )


def _training(config: Config, responses: int, roles: Sequence[Role]) -> str:
    train = config.train
    if train.engine == "emulated":
        return (
            "emulated: NOTHING IS LEARNT and no model comes out; weights are a digest of what "
            "was trained"
        )
    tokens = responses * config.max_trained_length
    micro = ceil(tokens / (train.max_tokens_per_gpu * train.world))
    ranks = "1 rank" if train.ranks == 1 else f"{train.ranks} ranks"
    if train.nodes > 1:
        ranks = f"{train.nodes} nodes x {ranks}, {_trainers_here(train.nodes, roles)}"
    if train.replicas > 1:
        each = train.world // train.replicas
        on = "1 rank" if each == 1 else f"{each} ranks"
        ranks += f", {train.replicas} replicas of {on}"
    return (
        f"{config.algorithm.name}, {_optimizer(train.optim)}, {ranks}; micro-batches of "
        f"{train.max_tokens_per_gpu:,} tokens: at most {micro:,} a step ({tokens:,} tokens "
        "with prompts)"
    )


def _trainers_here(nodes: int, roles: Sequence[Role]) -> str:
    if not roles:
        return f"trainer-0 to trainer-{nodes - 1} here"
    return "one of them here" if "trainer" in roles else "none of them here"


def _optimizer(optim: Optim) -> str:
    rate = f"lr {optim.lr:g}"
    if optim.warmup_steps:
        rate += f" after {optim.warmup_steps:,} steps of warm-up"
    if optim.schedule != "constant":
        rate += f", {optim.schedule} to {optim.min_lr_ratio * optim.lr:g}"
    return rate if optim.name == "adamw" else f"{rate}, {optim.name}"


def key_notes(config: Config) -> Iterator[str]:
    """Keys that have no effect, or hardly the one that was meant."""
    if config.run.deterministic:
        yield from (f"run.deterministic does not cover {what}" for what in _not_repeated(config))
    if config.train.deterministic is False and config.run.deterministic:
        yield "train.deterministic = false cannot act: run.deterministic includes it"
    if config.train.engine != "emulated" and config.train.optim.lr > HIGH_LR:
        yield (
            f"train.optim.lr = {config.train.optim.lr:g}: AdamW moves every weight by about as "
            "much in one update, which soon destroys a model; 1e-6 is usual, 1e-5 to 1e-4 for "
            "adapters"
        )
    if config.rollout.top_p < 1 or config.rollout.top_k:
        yield "rollout.top_p, top_k: tokens that they leave out are never sampled, nor explored"
    for key, why in without_effect(config):
        yield f"{key} cannot act: {why}"


def without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """Keys, with their values, that cannot act, and why."""
    train, rounds, given = config.train, config.round, config.key_value
    if train.engine != "emulated":
        yield from _of_training(config)
    if train.mini_batches == 1 and train.mini_batch_order != "random":
        yield given("train.mini_batch_order"), "a step is one update with train.mini_batches = 1"
    surplus = config.launched[0] - train.prompts_per_step
    steps_left = train.steps - 1 - config.async_.max_staleness
    if surplus > max(0, steps_left) * train.prompts_per_step:
        few = f"{given('train.steps')} are too few to train what it puts off"
        yield "round.tail_batching", f"after a short round {few}"
    for key in sorted(rounds.model_fields_set & {"eta", "race", "deferred"}):
        default = type(rounds).model_fields[key].default
        if rounds.tail_batching == "off" and getattr(rounds, key) != default:
            yield given(f"round.{key}"), "there are no short rounds without round.tail_batching"
    for key in sorted(LORA_ARGS.intersection(config.rollout.engine_args)):
        yield f"rollout.engine_args: {key}", "there are no adapters with model.lora.rank = 0"


def _of_training(config: Config) -> Iterator[tuple[str, str]]:
    train, algorithm, given = config.train, config.algorithm, config.key_value
    optim = train.optim
    keys = [k for k in ("clip_low", "clip_high") if getattr(algorithm, k) is not None]
    keys += ["clip_dual"] if algorithm.clip_dual else []
    what = f"algorithm.{' and '.join(keys)}" if keys else ""
    if not keys and algorithm.name in CLIP:  # by which it differs from others
        what = f"{given('algorithm.name')}: its clipping"
    if what and train.mini_batches == 1 and algorithm.old_logprobs == "trainer":
        yield (
            what,
            "a step is one update, and its ratios to the weights before it are all 1; raise "
            "train.mini_batches, or set algorithm.old_logprobs = 'rollout'",
        )
    if algorithm.clip_dual and algorithm.name == "cispo":
        yield "algorithm.clip_dual", "cispo clips the weight of a token, not its loss"
    if algorithm.kl_type != "k3" and not algorithm.kl_coef:
        yield given("algorithm.kl_type"), "there is no penalty with algorithm.kl_coef = 0"
    if optim.schedule == "constant" and optim.min_lr_ratio:
        yield "train.optim.min_lr_ratio", "train.optim.schedule = 'constant'"
    is_new = not config.checkpoint.initial_load_path
    if optim.schedule != "constant" and optim.warmup_steps >= train.steps and is_new:
        why = f"all of {given('train.steps')} are train.optim.warmup_steps"
        yield given("train.optim.schedule"), why
    if train.sync == "last" and train.world == 1:
        yield given("train.sync"), "there is one rank, and nothing to sum over ranks"
    elif train.sync != "auto" and train.world == train.replicas > 1:
        each = f"each of {given('train.replicas')} is one rank"
        yield given("train.sync"), f"{each}, and replicas meet once an update"


def _not_repeated(config: Config) -> Iterator[str]:
    """What a run that should repeat bit for bit does not repeat, and why."""
    if config.round.tail_batching != "off" and config.round.race == "clock":
        yield "round.race = 'clock': which responses are trained depends on timing"
    if config.continues:
        yield "round.deferred = 'continue': how far a response came depends on timing"
    if config.async_.max_staleness:
        ahead = config.key_value("async.max_staleness")
        yield f"{ahead}: what samples a token depends on timing"
    if "judge" in (functions := config.reward_functions):
        yield "the reward 'judge': its model may answer the same question differently"
    tests = f", nor tests of 'code' that take {LONGEST_TEST_S:g} s" if "code" in functions else ""
    limit = config.key_value("reward.timeout_s")
    yield f"time-outs of rewards ({limit}): a slow call has no score{tests}"


def device_notes(config: Config, gpus: Assignment, roles: Sequence[Role] = ()) -> Iterator[str]:
    """Keys that have no effect on the devices here. `gpus`: who gets which."""
    train = config.train
    is_on_cpu = not gpus.ranks and (not roles or "trainer" in roles)
    on_cpu = "cannot act: ranks here have no GPU, and"
    if train.offload != "none" and train.engine != "emulated" and is_on_cpu:
        yield f"{config.key_value('train.offload')} {on_cpu} all is in the memory of the host"
    if train.deterministic is True and (is_on_cpu or train.engine == "emulated"):
        yield f"train.deterministic = true {on_cpu} sums on a CPU have one order"


def _algorithm(config: Config) -> Iterator[str]:
    """The clipping and the weights, with the defaults of config/algorithm.py."""
    if config.train.engine == "emulated":
        return
    low, high = config.algorithm.clip
    span = f"above {1 + high:g}" if low == inf else f"to {max(0.0, 1 - low):g} ... {1 + high:g}"
    weights = _weights(config, is_float32=False)
    if _weights(config, is_float32=True) != weights:
        weights += ", none where trainer and engines compute in float32"
    to = "the weights before the step"
    if config.algorithm.old_logprobs == "rollout":
        to = "what engines sampled from"
    dual = config.algorithm.clip_dual
    limit = f", the loss of a negative advantage at {dual:g} times it" if dual else ""
    yield f"ratios to {to} are clipped {span}{limit}; {weights}"


def _weights(config: Config, is_float32: bool) -> str:
    if (bounds := config.tis_bounds(is_float32)) is None:
        return "no importance weights"
    low, high = bounds
    return f"importance weights of {f'{low:g} to' if low else 'at most'} {high:g}"


def _evaluation(config: Config) -> Iterator[str]:
    section, sets = config.eval, config.eval_sets
    if not sets:
        yield "none (eval.path is empty, and there are no [[eval.sets]])"
        return
    steps = config.train.steps
    times = len({0, steps, *(range(0, steps, section.interval) if section.interval else ())})
    for one in sets:
        yield f"{one.name}: {_place(one)} ({_count(one)}) {config.eval_sampling(one).words}"
    when = (
        f"every {section.interval} steps"
        if section.interval
        else "before the first and after the last step"
    )
    together = "all of them at once, " if len(sets) > 1 else ""
    yield f"{together}{when}: {times} times"


def _checkpoints(config: Config) -> str:
    section = config.checkpoint
    exported = {"last": "the last", "every": "every one", "never": "none"}[section.export]
    export = f"; {exported} is exported"
    if not section.interval:
        return f"after the last step{export}"
    good = f", those of each {section.keep_every} steps for good" if section.keep_every else ""
    return (
        f"every {section.interval} steps and after the last; the newest {section.keep_last} are "
        f"kept{good}{export}"
    )
