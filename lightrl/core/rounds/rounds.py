"""Tail batching: the prompts of a round and the kind of the next. Pure; no messages, no nodes.

A synchronous step waits for its longest response. Short rounds launch more prompts than they need
and defer those that run long; a long round runs these together, when as many wait as a step
holds. With eta = 1.25 a quarter of a step is deferred each time, so one long round follows four
short ones. (RollPacker, arXiv 2509.21009, section 4.1; it omits the end of an epoch and fairness.)

    the queue of deferred prompts holds P0
        -> long:  the first P0 of it, R0 responses each, no surplus
    else: less than a short round is left of the epoch, or only deferred prompts; or the remaining
    steps of the run could not train what a short round would defer
        -> flush: the queue and the rest of the epoch, filled up to P0 with prompts of the
                  next one, no surplus
    else
        -> short: round(eta P0) new prompts, round(eta R0) responses

The queue is first in, first out, so a prompt waits for about one period of rounds, and at most
until the end of its epoch or of the run; no prompt is deferred twice in an epoch, since only short
rounds race. A run of `num_steps` steps ends with an empty queue, unless groups without scores were
deferred beyond the surplus of its last short rounds. A prompt in the queue is not drawn
again: if the next epoch contains it meanwhile, it is held back.

The responses of a deferred prompt continue from their tokens (`Tail.deferred`). Finished responses
are kept; of more than R0, the first R0 by index, so that deferral selects none. Their first tokens
are of older versions. With "restart" all responses are sampled again by the new weights, with the
same noise. Where the weights have changed enough to produce a different response, a long response
may be replaced by a shorter one, and the trained responses become shorter; with fresh noise, as in
the paper, this always happens (`fresh_noise`, for comparison).

With overlapping steps `admissible` limits the prompts that may start before their step.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightrl.core.arrays import decode, encode
from lightrl.core.responses.length_predictor import LengthPredictor
from lightrl.core.rounds.backlog import Backlog, Deferred
from lightrl.core.settings import Settings
from lightrl.core.state import (
    DrawnPrompt,
    Group,
    HeldResponse,
    Response,
    ResponseState,
    Round,
    RoundKind,
    RoundState,
    Turn,
)

MAX_REDRAWS = 8  # a round draws at most this many times its needed prompts (dynamic sampling)
# of the last cut: a prompt that took longer in the last epoch is deferred unseen
FORESEEN_MARGIN = 1.5


def next_kind(
    settings: Settings, backlog: Backlog, step: int, open_rounds: Iterable[Round]
) -> RoundKind:
    """Return the kind of the training round of this step."""
    if not settings.tail.races:
        return "plain"
    if len(backlog.deferred) >= settings.prompts_per_step:
        return "long"
    if backlog.epoch_left < settings.prompts_launched and (backlog.deferred or backlog.epoch_left):
        return "flush"
    # What this round would defer is known once the next `max_staleness` rounds have begun.
    rounds_left = max(0, settings.num_steps - step - 1 - settings.max_staleness)
    surplus = settings.prompts_launched - settings.prompts_per_step
    still_open = (r for r in open_rounds if r.state is not RoundState.CLOSED)
    surplus += sum(r.prompts_launched - r.needed for r in still_open)
    waiting = len(backlog.deferred) + surplus
    return "flush" if waiting > rounds_left * settings.prompts_per_step else "short"


def new_round(settings: Settings, kind: RoundKind, step: int, now: float) -> Round:
    """Return the training round of this step, or the evaluation before it, without prompts.

    An evaluation has the prompts of all sets, so that no set waits for the longest responses of
    another; without races or drops.
    """
    needed = settings.num_eval_prompts if kind == "eval" else settings.prompts_per_step
    launched = settings.prompts_launched if kind == "short" else needed
    return Round(kind, step, needed, launched, opened_at=now)


def is_eval_due(settings: Settings, step: int, evaluated: int | None) -> bool:
    """Return whether an evaluation is due: once before the first step, after the last, and every
    `eval_interval` steps."""
    done = step == settings.num_steps
    due = step == 0 or done or (settings.eval_interval > 0 and step % settings.eval_interval == 0)
    return settings.num_eval_prompts > 0 and due and evaluated != step


def num_missing(settings: Settings, round: Round) -> int:
    """Return the number of prompts that this round must still draw.

    A round that is being filled draws up to `prompts_launched`. Later a round draws only with
    dynamic sampling, when too few groups are left to fill the step. The number then depends only on
    the samples, not on time: a race has no cut before it has enough groups that may be trained.
    """
    if round.state is RoundState.FILLING:
        return round.prompts_launched - len(round.groups)
    if not settings.dynamic_sampling or round.is_eval or round.state is not RoundState.RUNNING:
        return 0
    left = round.num_open + len(round.finishers)
    most = MAX_REDRAWS * round.needed
    return max(0, min(round.needed - left, most - len(round.groups)))


def foreseen_losers(
    settings: Settings,
    round: Round,
    prompts: list[DrawnPrompt],
    predictor: LengthPredictor,
    last_cut: int,
) -> list[DrawnPrompt]:
    """Return the prompts of a short round that their last epoch predicts to lose its race.

    Saves the tokens until the cut. Returns at most half of the surplus, the longest: a prompt that
    runs long by chance is not foreseen, and needs the other half.
    """
    already = settings.prompts_launched - round.prompts_launched
    most = (settings.prompts_launched - round.needed) // 2 - already
    if not round.races or most <= 0 or not last_cut or not settings.foresight:
        return []
    foreseen = [(predictor.finished(p.id) or 0, i) for i, p in enumerate(prompts)]
    longest = sorted((-n, i) for n, i in foreseen if n > FORESEEN_MARGIN * last_cut)[:most]
    return [prompts[i] for i in sorted(i for _, i in longest)]


def add(
    settings: Settings, round: Round, prompts: Iterable[Deferred], predictor: LengthPredictor
) -> list[Response]:
    """Create groups of a round for these prompts; return their responses.

    A response's name, and so its noise, depends on the prompt, the epoch (for an evaluation: the
    policy version) and its number in the group, never on time, placement or machine.
    """
    started: list[Response] = []
    for held in prompts:
        group = _new_group(settings, round, held)
        names = [f"{group.id}#{k}" for k in range(num_launched(settings, group))]
        group.responses = [
            Response(name, group, k, sample_seed(settings.run_seed, name), attempt=held.attempts)
            for k, name in enumerate(names)
        ]
        if settings.tail.continues:
            for response, before in zip(group.responses, held.held, strict=False):
                _continue(response, before)
        group.num_open = len(names)
        group.foreseen_tokens = predictor.mean(group)
        group.longest_of_set = predictor.longest_of_set(group) if round.is_eval else 0
        round.groups[group.id] = group
        round.num_open += 1
        started += group.responses
    return started


def _continue(response: Response, before: HeldResponse) -> None:
    """Restore a new response from its state when its group was deferred.

    A finished response is done. Without a score it is scored under a new attempt: the result of an
    earlier request may still arrive.
    """
    response.tokens, response.logprobs = decode("i", before.tokens), decode("f", before.logprobs)
    response.starts = list(before.starts)
    response.version = before.starts[-1][0] if before.starts else -1
    response.turns, response.finishes = list(before.turns), list(before.finishes)
    response.num_inserted = sum(turn.num_inserted for turn in before.turns)
    response.outcome, response.was_stepped = before.outcome, True
    if before.turns and len(before.finishes) == len(before.turns) and before.outcome is None:
        response.state = ResponseState.WAITING  # its environment steps the last turn again
    is_full = not before.turns and response.num_sampled >= response.group.max_response_tokens
    response.finish_reason = before.finish_reason or ("length" if is_full else None)
    if response.finish_reason is not None:
        response.state = ResponseState.DONE
        response.reward, response.scored = before.reward, before.reward is not None
        response.attempt += not response.scored


def hold(settings: Settings, response: Response) -> HeldResponse:
    """Return what is kept of a response whose group is deferred: to continue it, or, where it
    restarts, to compare both."""
    turns = response.turns
    if not settings.tail.continues:
        turns = [Turn(turn.start, turn.num_inserted, 0) for turn in turns]
    return HeldResponse(
        encode(response.tokens),
        encode(response.logprobs) if settings.tail.continues else b"",
        tuple(response.starts),
        response.finish_reason,
        response.reward,
        tuple(turns),
        tuple(response.finishes) if settings.tail.continues else (),
        response.outcome,
    )


def num_launched(settings: Settings, group: Group) -> int:
    """Return the number of responses that are launched for a group."""
    return settings.responses_launched if group.round.races else group.size


def _new_group(settings: Settings, round: Round, held: Deferred) -> Group:
    """Return a group without responses. In an evaluation its prompt's set defines the sampling."""
    label = f"eval{round.step}" if round.is_eval else str(held.prompt.epoch)
    if settings.tail.fresh_noise and held.attempts:
        label += f"'{round.step}"
    group = Group(
        f"{held.prompt.id}@{label}",
        held.prompt,
        round,
        position=len(round.groups),
        size=settings.group_size,
        sampling=settings.sampling,
        max_response_tokens=settings.max_response_tokens,
        attempts=held.attempts,
        since=held.since,
        held=held.held,
    )
    if round.is_eval:
        of = settings.eval_set(held.prompt.id)
        group.size, group.sampling = of.samples, of.sampling
        group.max_response_tokens = of.max_response_tokens
    return group


def sample_seed(run_seed: int, response: str) -> int:
    """Return the seed of a response's noise, 0 <= seed < 2**63. Seed and position determine every
    sampled token."""
    digest = hashlib.blake2b(f"{run_seed} {response}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Staleness(NamedTuple):
    """Staleness of one response when it is trained; synchronous training has (1, 0, 0)."""

    # versions that sampled its tokens
    span: int
    # trainer's version minus the newest of them
    newest_gap: int
    # trainer's version minus the oldest, at most max_staleness
    oldest_gap: int


def staleness(spans: Sequence[tuple[int, int]], version: int) -> Staleness:
    """Return the staleness of a response when `version` is updated.

    `spans` are (policy version, tokens) in order; without tokens the result is (0, 0, 0).
    """
    versions = [v for v, num_tokens in spans if num_tokens]
    if not versions:
        return Staleness(0, 0, 0)
    return Staleness(len(set(versions)), version - max(versions), version - min(versions))


def admissible(max_staleness: int, version: int, batch: int, admitted: int) -> int:
    """Return how many more prompts may start while `version` is the newest.

    (max_staleness + version + 1) * batch - (accepted + running), as in AReaL (arXiv 2505.24298,
    section 5.1). Steps train prompts in the order of their admission, so a prompt that starts under
    version v is trained at version v + max_staleness at the latest: no slow prompt is ever dropped.
    """
    return (max_staleness + version + 1) * batch - admitted
