"""Figures of the episodes of a round: turns, observations, times, endings. Pure functions."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from lightrl.core.responses.responses import ResponseTable
from lightrl.core.state import Response, Round


def episode_figures(round: Round, table: ResponseTable) -> dict[str, float]:
    """Return figures of all episodes of a closed round that have ended, trained or not; nothing, if
    it had none."""
    every = [r for group in round.groups.values() for r in group.responses]
    ended = [r for r in every if r.outcome is not None]
    if not any(r.turns for r in every):
        return {}
    stops = Counter(r.outcome.stop for r in ended if r.outcome is not None)
    return {
        "episodes/turns": _mean([len(r.finishes) for r in ended]),
        "episodes/tool_calls": _mean([num_tool_calls(r) for r in ended]),
        "episodes/observation_tokens": _mean([r.num_inserted for r in ended]),
        "episodes/environment_s": _mean([environment_s(r) for r in ended]),
        "episodes/waiting_s": _mean([r.waited_s for r in ended]),
        "episodes/ended_turns": float(stops["turns"]),
        "episodes/ended_context": float(stops["context"]),
        "episodes/ended_length": float(stops["length"]),
        "episodes/ended_timeout": float(stops["timeout"]),
        "episodes/diverged": float(stops["diverged"]),
        "episodes/unscored": float(sum(r.scored and r.reward is None for r in ended)),
        "episodes/open": float(len(table.open_episodes)),
    }


def environment_s(response: Response) -> float:
    """Return the seconds in the environment of an episode."""
    last = response.outcome.seconds if response.outcome is not None else 0.0
    return last + sum(turn.seconds for turn in response.turns)


def num_tool_calls(response: Response) -> int:
    last = response.outcome.num_tool_calls if response.outcome is not None else 0
    return last + sum(turn.num_tool_calls for turn in response.turns)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
