"""Keys without effect, and keys with a probably unintended one: notes of `lightrl check` and the
dry run."""

from collections.abc import Iterator, Sequence

from lightrl.config.algorithm import CLIP
from lightrl.config.reward import LONGEST_TEST_S
from lightrl.config.schema import LORA_ARGS, Config
from lightrl.devices.assign import Assignment
from lightrl.messages.nodes import Role

HIGH_LR = 1e-3


def key_notes(config: Config) -> Iterator[str]:
    """Yield the notes that follow from the config alone."""
    deterministic = config.run.deterministic
    if deterministic:
        yield from (f"run.deterministic does not cover {what}" for what in _not_repeated(config))
    if config.train.deterministic is False and deterministic:
        yield "train.deterministic = false cannot act: run.deterministic includes it"
    if config.train.engine != "emulated" and config.train.optim.lr > HIGH_LR:
        yield (
            f"train.optim.lr = {config.train.optim.lr:g}: AdamW moves every weight by about as "
            "much in one update; 1e-6 is usual, 1e-5 to 1e-4 for adapters"
        )
    if config.rollout.top_p < 1 or config.rollout.top_k:
        yield "rollout.top_p, top_k: tokens that they leave out are never sampled, nor explored"
    for key, why in without_effect(config):
        yield f"{key} cannot act: {why}"


def without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """Yield keys, with their values, that cannot act, and why."""
    train, rounds, given = config.train, config.round, config.key_value
    if train.engine != "emulated":
        yield from _of_training(config)
    if train.mini_batches == 1 and train.mini_batch_order != "random":
        yield given("train.mini_batch_order"), "a step is one update with train.mini_batches = 1"
    surplus = config.launched[0] - train.prompts_per_step
    steps_left = train.steps - 1 - config.async_.max_staleness
    if surplus > max(0, steps_left) * train.prompts_per_step:
        few = f"{given('train.steps')} are too few to train the prompts that it puts off"
        yield "round.tail_batching", f"after a short round {few}"
    for key in ("deferred", "eta", "race"):
        is_default = getattr(rounds, key) == type(rounds).model_fields[key].default
        if rounds.tail_batching == "off" and not is_default:
            yield given(f"round.{key}"), "there are no short rounds without round.tail_batching"
    for key in sorted(LORA_ARGS.intersection(config.rollout.engine_args)):
        yield f"rollout.engine_args: {key}", "there are no adapters with model.lora.rank = 0"


def _of_training(config: Config) -> Iterator[tuple[str, str]]:
    train, algorithm, given = config.train, config.algorithm, config.key_value
    optim = train.optim
    clips = [k for k in ("clip_low", "clip_high") if getattr(algorithm, k) is not None]
    clips += ["clip_dual"] if algorithm.clip_dual else []
    what = f"algorithm.{' and '.join(clips)}" if clips else ""
    if not clips and algorithm.name in CLIP:
        what = f"{given('algorithm.name')}: its clipping"
    if what and train.mini_batches == 1 and algorithm.old_logprobs == "trainer":
        yield (
            what,
            "a step is one update, whose ratios are all 1; raise train.mini_batches, or set "
            "algorithm.old_logprobs = 'rollout'",
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
        why = f"each of {given('train.replicas')} is one rank, and they sum once an update"
        yield given("train.sync"), why


def _not_repeated(config: Config) -> Iterator[str]:
    """Yield what a deterministic run does not repeat bit for bit, and why."""
    if config.round.tail_batching != "off" and config.round.race == "clock":
        yield "round.race = 'clock': which responses are trained depends on timing"
    if config.continues:
        yield "round.deferred = 'continue': how far a response came depends on timing"
    if config.async_.max_staleness:
        ahead = config.key_value("async.max_staleness")
        yield f"{ahead}: which version samples a token depends on timing"
    if "judge" in (functions := config.reward_functions):
        yield "the reward 'judge': its model may answer the same question differently"
    tests = f", nor tests of 'code' that take {LONGEST_TEST_S:g} s" if "code" in functions else ""
    limit = config.key_value("reward.timeout_s")
    yield f"time-outs of rewards ({limit}): a slow call has no score{tests}"


def device_notes(config: Config, gpus: Assignment, roles: Sequence[Role] = ()) -> Iterator[str]:
    """Yield the notes that follow from the devices of this machine, assigned as in `gpus`."""
    train = config.train
    is_on_cpu = not gpus.ranks and (not roles or "trainer" in roles)
    on_cpu = "cannot act: ranks here have no GPU, and"
    if train.offload != "none" and train.engine != "emulated" and is_on_cpu:
        yield f"{config.key_value('train.offload')} {on_cpu} all is in the memory of the host"
    if train.deterministic is True and (is_on_cpu or train.engine == "emulated"):
        yield f"train.deterministic = true {on_cpu} sums on a CPU have one order"
    engines = {token for part in gpus.engines for token in part.tokens}
    if config.weights.broadcast == "always" and engines:
        is_shared = not engines.isdisjoint(gpus.ranks)
        why = "has no two members on one GPU" if is_shared else "skips the trainer's machine"
        yield f"weights.broadcast = always: NCCL {why}: the engines here map the trainer's file"
