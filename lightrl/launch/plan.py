"""What a config means, in words and numbers: the batch arithmetic of `lightrl up --dry-run`.

Pure text; reads no more than the number of lines of a JSONL file.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path

from lightrl.config import Config

BIAS = {
    "off": "none: every round waits for its longest response",
    "prompts": (
        "none by selection, only in order: a prompt put off gives the same responses to newer "
        "weights"
    ),
    "both": (
        "the shorter responses of each prompt are trained: see tail/kept_length, "
        "tail/launched_length_km"
    ),
}


def describe(config: Config, devices: Sequence[str] = (), weights: Sequence[str] = ()) -> str:
    """Several lines, each with a label of twelve columns. `devices`, `weights`: what is to be said
    of the GPUs, and of moving a version (launch/weights_plan.py)."""
    rollout, train = config.rollout, config.train
    responses = train.prompts_per_step * rollout.group_size
    slots = rollout.nodes * rollout.slots
    num_prompts = count_prompts(config.data.path)
    lines = [
        (
            "run",
            f"{config.run.name}, in {config.run_dir}; the coordinator listens on {config.run.bind}",
        ),
        ("model", f"{config.model.path} ({config.model.dtype})"),
        (
            "data",
            f"{config.data.path} ({f'{num_prompts:,} prompts' if num_prompts else 'not counted'})",
        ),
        (
            "each step",
            f"{train.prompts_per_step:,} prompts x {rollout.group_size} responses = {responses:,} "
            "responses, one optimizer step",
        ),
        (
            "",
            f"at most {responses:,} x {rollout.max_response_length:,} = "
            f"{responses * rollout.max_response_length:,} generated tokens",
        ),
        *_tail_batching(config),
        ("staleness", _staleness(config)),
        ("whole run", _whole_run(config, responses, num_prompts)),
        ("rollout", _rollout(config, slots)),
        ("speculation", _speculation(config)),
        ("training", _training(config, responses)),
        *(("" if i else "devices", line) for i, line in enumerate(devices)),
        *(("" if i else "weights", line) for i, line in enumerate(weights)),
        ("evaluation", _evaluation(config)),
        ("checkpoints", _checkpoints(config)),
    ]
    lines += [("note", text) for text in _notes(config, num_prompts, slots)]
    return "\n".join(f"{label:12}{text}" for label, text in lines)


def count_prompts(path: str) -> int | None:
    """Non-empty lines of a local JSONL file; None for anything else."""
    file = Path(path)
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


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


def _tail_batching(config: Config) -> Iterator[tuple[str, str]]:
    prompts, responses = config.train.prompts_per_step, config.rollout.group_size
    launched, launched_each = config.launched
    mode = config.round.tail_batching
    if mode == "off":
        yield "tail", f"no tail batching; length bias: {BIAS[mode]}"
        return
    yield (
        "tail",
        f"{mode}: a short round launches {launched:,} prompts x {launched_each} responses = "
        f"{launched * launched_each:,}, keeps the first {prompts:,} x {responses} by "
        f"{config.round.race}",
    )
    put_off = launched - prompts
    if put_off:
        yield (
            "",
            f"{put_off:,} prompts are put off each time: about {prompts / put_off:.3g} short "
            f"rounds + 1 long ({prompts:,} x {responses}, waits for all); the rest at the end of "
            "an epoch",
        )
    yield "", f"length bias: {BIAS[mode if launched_each > responses else 'prompts']}"


def _staleness(config: Config) -> str:
    most = config.async_.max_staleness
    if not most:
        return "synchronous: every trained token is sampled by the newest version"
    return (
        f"asynchronous: up to {most} more rounds start before a step is trained; tokens are "
        f"at most that many versions old, weighted by at most {config.algorithm.tis_cap:g} "
        "(algorithm.tis_cap)"
    )


def _notes(config: Config, num_prompts: int | None, slots: int) -> Iterator[str]:
    launched, launched_each = config.launched
    if num_prompts and num_prompts < launched:
        what = (
            "a short round launches"
            if launched > config.train.prompts_per_step
            else "one step takes"
        )
        yield f"data.path holds fewer prompts ({num_prompts:,}) than {what} ({launched:,})"
    if 0 < slots < launched_each:
        yield (
            f"the {slots:,} slots here are fewer than the {launched_each} responses of one prompt: "
            "no group runs at once; raise rollout.slots or rollout.nodes"
        )
    if config.round.tail_batching == "off" and config.round.race == "clock":
        yield "round.race = clock has no effect without round.tail_batching"
    races_by_clock = config.round.tail_batching != "off" and config.round.race == "clock"
    if config.run.deterministic and (races_by_clock or config.async_.max_staleness):
        what = "round.race = clock" if races_by_clock else "async.max_staleness"
        yield (
            f"run.deterministic only fixes the order of sums: with {what} the samples depend "
            "on timing"
        )


def _rollout(config: Config, slots: int) -> str:
    rollout = config.rollout
    prompts, each = config.launched
    responses = prompts * each
    if not slots:
        return "no daemon here (rollout.nodes = 0): the run waits until nodes join"
    most = "step" if config.round.tail_batching == "off" else "short round"
    fit = (
        f"a {most}'s {responses:,} fit at once"
        if slots >= responses
        else f"a {most}'s {responses:,} take {ceil(responses / slots)} turns or more"
    )
    daemons = "daemon" if rollout.nodes == 1 else "daemons"
    return (
        f"{rollout.nodes} {daemons} ({rollout.engine}) x {rollout.slots} slots = {slots:,} at "
        f"once; {fit}; temperature {rollout.temperature:g}"
    )


def _training(config: Config, responses: int) -> str:
    train = config.train
    if train.engine == "emulated":
        return (
            "emulated: NOTHING IS LEARNT and no model comes out; weights are a digest of what "
            "was trained"
        )
    tokens = responses * config.max_model_length
    micro = ceil(tokens / (train.max_tokens_per_gpu * train.ranks))
    ranks = "1 rank" if train.ranks == 1 else f"{train.ranks} ranks"
    return (
        f"{config.algorithm.name}, lr {train.optim.lr:g}, {ranks}; micro-batches of "
        f"{train.max_tokens_per_gpu:,} tokens: at most {micro:,} a step ({tokens:,} tokens "
        "with prompts)"
    )


def _evaluation(config: Config) -> str:
    section = config.eval
    if not section.path:
        return "none (eval.path is empty)"
    steps = config.train.steps
    times = len({0, steps, *(range(0, steps, section.interval) if section.interval else ())})
    num_prompts = count_prompts(section.path)
    prompts = f"{num_prompts:,} prompts" if num_prompts else section.path
    how = "greedy" if section.temperature == 0 else f"temperature {section.temperature:g}"
    when = (
        f"every {section.interval} steps"
        if section.interval
        else "before the first and after the last step"
    )
    return f"{prompts} x {section.samples}, {how}, {when}: {times} times"


def _checkpoints(config: Config) -> str:
    if not config.checkpoint.interval:
        return "after the last step"
    return (
        f"every {config.checkpoint.interval} steps and after the last; the newest "
        f"{config.checkpoint.keep_last} are kept"
    )
