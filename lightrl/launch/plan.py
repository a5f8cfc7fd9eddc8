"""What a config means, in words and numbers: the batch arithmetic of `lightrl up --dry-run`.

Pure text; reads no more than the number of lines of a JSONL file.
"""

from math import ceil
from pathlib import Path

from lightrl.config import Config


def describe(config: Config) -> str:
    """Several lines, each with a label of twelve columns."""
    rollout, train = config.rollout, config.train
    responses = train.prompts_per_step * rollout.group_size
    slots = rollout.nodes * rollout.slots
    num_prompts = count_prompts(config.data.path)
    lines = [
        ("run", f"{config.run.name}, in {config.run_dir}; the coordinator listens on {config.run.bind}"),
        ("model", f"{config.model.path} ({config.model.dtype})"),
        ("data", f"{config.data.path} ({f'{num_prompts:,} prompts' if num_prompts else 'not counted'})"),
        (
            "each step",
            f"{train.prompts_per_step:,} prompts x {rollout.group_size} responses = {responses:,} responses, "
            "one optimizer step",
        ),
        (
            "",
            f"at most {responses:,} x {rollout.max_response_length:,} = "
            f"{responses * rollout.max_response_length:,} generated tokens",
        ),
        ("whole run", _whole_run(config, responses, num_prompts)),
        ("rollout", _rollout(config, responses, slots)),
        ("training", _training(config, responses)),
        ("evaluation", _evaluation(config)),
        ("checkpoints", _checkpoints(config)),
    ]
    if num_prompts and num_prompts < train.prompts_per_step:
        lines.append(
            ("note", f"data.path holds fewer prompts than one step takes ({train.prompts_per_step})")
        )
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


def _rollout(config: Config, responses: int, slots: int) -> str:
    rollout = config.rollout
    if not slots:
        return "no daemon here (rollout.nodes = 0): the run waits until nodes join"
    fit = (
        f"a step's {responses:,} fit at once"
        if slots >= responses
        else f"a step's {responses:,} take {ceil(responses / slots)} turns or more"
    )
    daemons = "daemon" if rollout.nodes == 1 else "daemons"
    return (
        f"{rollout.nodes} {daemons} ({rollout.engine}) x {rollout.slots} slots = {slots:,} at once; {fit}; "
        f"temperature {rollout.temperature:g}"
    )


def _training(config: Config, responses: int) -> str:
    train = config.train
    tokens = responses * config.max_model_length
    micro = ceil(tokens / (train.max_tokens_per_gpu * train.ranks))
    ranks = "1 rank" if train.ranks == 1 else f"{train.ranks} ranks"
    return (
        f"{config.algorithm.name}, lr {train.optim.lr:g}, {ranks}; micro-batches of "
        f"{train.max_tokens_per_gpu:,} tokens: at most {micro:,} a step ({tokens:,} tokens with prompts)"
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
        f"every {section.interval} steps" if section.interval else "before the first and after the last step"
    )
    return f"{prompts} x {section.samples}, {how}, {when}: {times} times"


def _checkpoints(config: Config) -> str:
    if not config.checkpoint.interval:
        return "after the last step"
    return (
        f"every {config.checkpoint.interval} steps and after the last; the newest "
        f"{config.checkpoint.keep_last} are kept"
    )
