"""What a synchronous run must train, whatever happens to its fleet. Written anew, in token space.

Shares no code with the core. Groups and responses are names; a length and a reward belong to a
name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from lightrl.core.settings import Settings

Prompt = tuple[str, int]  # (id, epoch)


@dataclass
class Step:
    kind: str
    # (group, responses kept), in the order of the prompts
    trained: list[tuple[str, list[str]]]
    # steps that a prompt of a long round was put off
    waited: dict[str, int] = field(default_factory=dict)


def oracle(
    s: Settings,
    prompt_at: Callable[[int], Prompt],
    length: Callable[[str], int],
    reward: Callable[[str], float | None],
) -> list[Step]:
    queue: list[tuple[Prompt, int, bool]] = []  # put off, since when, and whether it was tried
    spare: list[Prompt] = []
    # id -> tokens at which its group finished when it was last trained
    finished: dict[str, int] = {}
    steps: list[Step] = []
    num_drawn = cut = 0
    many = round(s.tail.eta_prompts * s.prompts_per_step)
    wide = round(s.tail.eta_responses * s.group_size)

    for step in range(s.num_steps):
        left_of_epoch = -num_drawn % s.num_prompts + len(spare)
        if s.tail.eta_prompts == s.tail.eta_responses == 1:
            kind = "plain"
        elif len(queue) >= s.prompts_per_step:
            kind = "long"
        else:
            is_end_of_epoch = left_of_epoch < many and (queue or left_of_epoch)
            put_off = len(queue) + many - s.prompts_per_step  # after a short round
            is_end_of_run = put_off > (s.num_steps - step - 1) * s.prompts_per_step
            kind = "flush" if is_end_of_epoch or is_end_of_run else "short"
        launch, width = (many, wide) if kind == "short" else (s.prompts_per_step, s.group_size)
        prompts: list[Prompt] = []
        again: set[Prompt] = set()  # tried before, and put off
        waited: dict[str, int] = {}

        def busy() -> set[str]:
            return {p[0] for p in prompts} | {p[0] for p, _, _ in queue}  # noqa: B023

        def draw(count: int) -> tuple[list[Prompt], list[Prompt]]:
            """Those held back that may come now, and what the data gives for the rest."""
            nonlocal num_drawn
            back: list[Prompt] = []
            new: list[Prompt] = []
            count = min(count, s.num_prompts - len(busy()))
            for prompt in list(spare):
                if len(back) < count and prompt[0] not in busy() | {p[0] for p in back}:
                    spare.remove(prompt)
                    back.append(prompt)
            for _ in range(count - len(back)):
                prompt = prompt_at(num_drawn)
                num_drawn += 1
                taken = busy() | {p[0] for p in back + new}
                (spare if prompt[0] in taken else new).append(prompt)
            return back, new

        def name(prompt: Prompt) -> str:
            fresh = s.tail.fresh_noise and prompt in again  # noqa: B023
            return f"{prompt[0]}@{prompt[1]}" + (f"'{step}" if fresh else "")  # noqa: B023

        def finish(prompt: Prompt) -> tuple[int, list[str], bool, int] | None:
            """(finishing time, responses kept, whether all rewards are the same, the longest kept);
            None = too few scores."""
            scored = []
            for k in range(width):  # noqa: B023
                response = f"{name(prompt)}#{k}"
                score = reward(response) if reward(response) is not None else s.reward_on_failure
                if score is not None or s.skips_unscored:
                    scored.append((length(response), k, response, score))
            first = sorted(scored)[: s.group_size]
            trained = sorted((x for x in first if x[3] is not None), key=lambda x: x[1])
            if len(first) < s.group_size or len(trained) < min(2, s.group_size):
                return None
            kept = [r for _, _, r, _ in trained]
            flat = len({x[3] for x in trained}) == 1
            return first[-1][0], kept, flat, max(x[0] for x in trained)

        def is_out(prompt: Prompt) -> bool:
            result = finish(prompt)
            return result is None or (s.dynamic_sampling and result[2])

        if kind in {"long", "flush"}:
            while queue and len(prompts) < s.prompts_per_step:
                prompt, since, tried = queue.pop(0)
                prompts.append(prompt)
                if tried:
                    again.add(prompt)
                waited[prompt[0]] = step - since
        num_unseen = 0
        while len(prompts) + num_unseen < launch and len(busy()) < s.num_prompts:
            back, new = draw(launch - num_unseen - len(prompts))
            if kind == "short" and s.foresight and cut:
                most = (many - s.prompts_per_step) // 2 - num_unseen
                longest = sorted((-finished.get(p[0], 0), i) for i, p in enumerate(new))[
                    : max(0, most)
                ]
                unseen = sorted(i for n, i in longest if -n > 1.5 * cut)
                queue += [(new[i], step, False) for i in unseen]
                new = [p for i, p in enumerate(new) if i not in unseen]
                num_unseen += len(unseen)
            prompts += back + new
        while s.dynamic_sampling and len(busy()) < s.num_prompts:
            missing = s.prompts_per_step - sum(not is_out(p) for p in prompts)
            missing = min(missing, 8 * s.prompts_per_step - len(prompts))
            if missing <= 0:
                break
            back, new = draw(missing)
            prompts += back + new

        order = sorted((finish(p)[0], i) for i, p in enumerate(prompts) if not is_out(p))  # type: ignore[index]
        won = {prompts[i] for _, i in order[: s.prompts_per_step]}
        last = order[s.prompts_per_step - 1][0] if len(order) >= s.prompts_per_step else None
        if kind == "short":
            for p in prompts:
                result = finish(p)
                flat = s.dynamic_sampling and result is not None and result[2]
                dropped = flat and (last is None or result[0] <= last)  # type: ignore[index]
                if p not in won and not dropped:
                    queue.append((p, step, True))
            cut = max((finish(p)[3] for p in won), default=0)  # type: ignore[index]
        trained = [(name(p), finish(p)[1]) for p in prompts if p in won]  # type: ignore[index]
        for p in won:
            finished[p[0]] = finish(p)[3]  # type: ignore[index]
        steps.append(Step(kind, trained, waited))
    return steps
