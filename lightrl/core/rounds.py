"""What a round holds, when it is closed, and what comes after it. Pure decisions; no messages, no nodes."""

from collections.abc import Sequence

from lightrl.core.state import (
    DrawnPrompt,
    Group,
    GroupState,
    Response,
    Round,
    RoundState,
    Settings,
    sample_seed,
)


def next_round(settings: Settings, step: int, evaluated: int | None, now: float) -> Round | None:
    """The round to open when `step` optimizer steps are done, or None when the run is complete.

    An evaluation of the policy goes before the training round that would replace it: before the
    first step, after the last one, and every `eval_interval` steps in between. `evaluated` is the
    version evaluated last.
    """
    done = step == settings.num_steps
    due = step == 0 or done or (settings.eval_interval > 0 and step % settings.eval_interval == 0)
    if settings.num_eval_prompts and due and evaluated != step:
        return Round(
            kind="eval",
            step=step,
            policy_version=step,
            sampling=settings.eval_sampling,
            needed=settings.num_eval_prompts,
            group_size=settings.eval_samples,
            opened_at=now,
        )
    if done:
        return None
    return Round(
        kind="short",
        step=step,
        policy_version=step,
        sampling=settings.sampling,
        needed=settings.prompts_per_step,
        group_size=settings.group_size,
        opened_at=now,
    )


def fill(round: Round, prompts: Sequence[DrawnPrompt], settings: Settings) -> list[Response]:
    """Makes the groups of a round and returns their responses in the order they should start.

    A response's name, and so its noise, depends on the prompt, the epoch (for an evaluation: the
    policy version) and its number in the group, never on time, placement or machine.
    """
    started: list[Response] = []
    for prompt in prompts:
        label = f"eval{round.policy_version}" if round.is_eval else str(prompt.epoch)
        name = f"{prompt.id}@{label}"
        names = [f"{name}#{k}" for k in range(round.group_size)]
        responses = [Response(n, name, sample_seed(settings.run_seed, n)) for n in names]
        round.groups[name] = Group(name, prompt, responses)
        started += responses
    round.move(RoundState.RUNNING)
    return started


def settle(round: Round, group: Group, to: GroupState) -> None:
    """A group is scored or dropped; counts it towards the closing of its round."""
    group.move(to)
    round.num_settled += 1
    round.num_scored += to is GroupState.SCORED


def is_complete(round: Round) -> bool:
    return round.state is RoundState.RUNNING and round.num_settled == len(round.groups)
