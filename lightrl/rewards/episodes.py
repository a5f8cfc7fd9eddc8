"""Episodes as reward functions see them: messages and turns, from what was recorded of them.

Must not render or tokenise: the texts of turns are decoded from their tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.wire import from_json

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """An episode that has ended. Example: EpisodeRecord(((9, 13),), ("[...]", "[...]"), (1.0,),
    1.0)"""

    # of each turn, indices of its first sampled token and of the one after its last
    spans: tuple[tuple[int, int], ...]
    # JSON lists: the first messages; then of each turn its message, and those that answered it. ""
    # = the environment did not see the last turn
    records: tuple[str, ...]
    # of each turn, by the environment; None = none was given
    rewards: tuple[float | None, ...]
    # of the episode
    reward: float | None


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn of the model, in `sample.turns`."""

    # of its tokens, special ones left out
    text: str
    # as the environment got it
    message: dict[str, Any]
    # by the environment; None = none was given
    reward: float | None = None
    # messages that answered it
    observation: Sequence[dict[str, Any]] = ()

    @property
    def tool_calls(self) -> Messages:
        return self.message.get("tool_calls") or []


def read_turns(
    record: EpisodeRecord, ids: Sequence[int], decode: Callable[[list[int]], str]
) -> tuple[Messages, list[SampledTurn]]:
    """Return the messages before the first turn, and all turns. `ids`: of the response."""
    first, *others = map(read_messages, record.records)
    turns: list[SampledTurn] = []
    for (start, end), reward, seen in zip(record.spans, record.rewards, others, strict=True):
        text = decode(list(ids[start:end]))
        message, *observation = seen or [{"role": "assistant", "content": text}]
        turns.append(SampledTurn(text, message, reward, observation))
    return first, turns


def read_messages(record: str) -> Messages:
    """Read a JSON list of messages; "" = none. Raises ProtocolError for anything else."""
    return from_json(record, Messages) if record else []


def chat_text(messages: Sequence[dict[str, Any]]) -> str:
    """For people. Example: "[user] 1+1?\\n[assistant] 2"."""
    parts = ((f"[{m.get('role')}]", m.get("content"), m.get("tool_calls")) for m in messages)
    return "\n".join(" ".join(str(part) for part in each if part) for each in parts)
