"""Sessions: the episode of an agent, between its requests and the turns that answer them.

A request continues the conversation that is held: what is new in it is the next observation, and
the turn that is sampled after it is its answer. Owns the comparison with what is held, and which
requests are the same one, sent again. Must not start processes or listen.
"""

import asyncio
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from lightrl.endpoints.api import Answered, ApiError, Asked, EpisodeReport, Message
from lightrl.environments.calls import Returned, TurnTokens

CALL_ID = "t{:04}c{:03}"  # nine letters and digits, as some chat templates want it
APPEND_ONLY = "an episode can only append: send all earlier messages as they were"
FULL = "context_length_exceeded"  # the code that OpenAI's clients know
ENDED = "session_ended"
MAX_NEW = 1 << 20  # characters of an observation as JSON, or token ids: a record has a limit


@dataclass(slots=True, eq=False)
class _Request:
    digest: str
    asked: Asked
    answer: "asyncio.Future[Answered]"
    was_delivered: bool = False

    async def answered(self) -> Answered:
        answer = await asyncio.shield(self.answer)  # a client that is gone may ask again
        self.was_delivered = True
        return answer


@dataclass(slots=True, eq=False)
class Session:
    """One episode. The endpoint calls `ask` and `report`; the environment node waits for `changed`,
    then calls `take`, and `answer` with what was sampled."""

    key: str
    label: str  # environment and row, for errors
    row: dict[str, Any]
    seed: int
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reported: EpisodeReport = field(default_factory=EpisodeReport)
    # why no further turn is sampled, and the code of such an error
    _ended: tuple[str, str] = ("", "")
    # messages so far, with turns, each as `_canonical` returns it
    _held: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _ids: "array[int]" = field(default_factory=lambda: array("i"))  # tokens so far, with turns
    _tools: str = ""
    _num_turns: int = 0
    _open: _Request | None = None  # it waits for a turn
    _last: _Request | None = None  # it was answered
    _new: list[Message] = field(default_factory=list[Message])  # of `_open`, not yet taken

    @property
    def has_request(self) -> bool:
        """Return whether an observation can be taken."""
        return self._open is not None

    async def ask(self, asked: Asked) -> Answered:
        """Return the turn that follows. A request that is open, or whose answer may not have been
        received, gets the answer of the first. Raises ApiError."""
        ids = array("i", asked.token_ids or ()).tobytes().hex()  # quicker than as JSON
        digest = _digest([asked.messages, ids, list(asked.tools)])
        last = self._last
        is_again = last is not None and last.digest == digest
        if last is not None and is_again and (asked.is_retry or not last.was_delivered):
            return await last.answered()
        if self._ended[0]:
            raise ApiError(400, *self._ended)
        if (same := self._open) is not None:
            if same.digest == digest:
                return await same.answered()
            raise ApiError(400, "another request of this episode is open: send one at a time")
        self._new = self._continued(asked)
        answer = asyncio.get_running_loop().create_future()
        self._open = request = _Request(digest, asked, answer)
        self.changed.set()
        return await request.answered()

    def _continued(self, asked: Asked) -> list[Message]:
        """Return the messages of a request beyond those that are held. Raises ApiError if it does
        not continue them."""
        is_chat = asked.messages is not None
        if self._num_turns and is_chat is not bool(self._held):
            raise ApiError(400, "an episode is either a chat or token ids, from its first request")
        if asked.token_ids is not None:
            num = len(self._ids)
            if array("i", asked.token_ids[:num]) != self._ids or len(asked.token_ids) == num:
                why = "the token ids do not begin with those of this episode so far"
                raise ApiError(400, f"{why}, {num} of prompt and turns; {APPEND_ONLY}")
            _require_size(len(asked.token_ids) - num)
            return []
        messages = [_plain(message) for message in asked.messages or ()]
        num = 0  # messages that are held
        for held in self._held:
            if num < len(messages) and _canonical(messages[num]) == held:
                num += 1
            # clients leave out turns that have neither text nor calls
            elif held["role"] != "assistant" or held["content"] or held["calls"]:
                what = "is not the one that was sent or answered before"
                what = what if num < len(messages) else "of this episode is missing"
                raise ApiError(400, f"message {num} ({held['role']}) {what}; {APPEND_ONLY}")
        if len(messages) == num:
            raise ApiError(400, "there is no new message since the last answer")
        if self._num_turns and _digest(list(asked.tools)) != self._tools:
            raise ApiError(400, "the tools differ from those of the first request of this episode")
        new = messages[num:]
        if not any(message["role"] == "assistant" for message in new):
            _require_size(len(json.dumps(new)))
        return new

    def take(self, expected: str = "") -> Returned:
        """Return the observation of the open request. `expected`: the digest of the recorded one; a
        request that already has later turns of the record is taken in parts."""
        assert self._open is not None
        asked, new = self._open.asked, self._new
        for k, message in enumerate(new if expected else ()):
            if message["role"] == "assistant" and _digest(_canonical_all(new[:k])) == expected:
                new = new[:k]
                break
        self._new = self._new[len(new) :]
        ids, what = None, _canonical_all(new)
        self._held += what
        self._tools = _digest(list(asked.tools))
        if asked.token_ids is not None:
            ids = list(asked.token_ids)
            what = [ids[len(self._ids) :]]
        return Returned(
            new,
            tools=list(asked.tools),
            num_tool_calls=sum(message["role"] == "tool" for message in new),
            digest=_digest(what),
            token_ids=ids,
            max_tokens=asked.max_tokens or 0,
        )

    def answer(self, message: Message, tokens: TurnTokens) -> None:
        """Answer the open request with a turn. One that has this turn already stays open."""
        if self._open is None:
            return  # its program has ended
        if self._new:
            turn = _canonical(message)
            is_there = _canonical(self._new[0]) == turn
            if is_there or not (turn["content"] or turn["calls"]):  # clients leave empty ones out
                self._held.append(turn)
                self._new = self._new[is_there:]
                self._num_turns += 1  # calls of later turns get other ids
            return  # if it is another one, it is taken as the next observation, and diverges
        calls = [
            {**call, "id": CALL_ID.format(self._num_turns, k)}
            for k, call in enumerate(message.get("tool_calls", ()))
        ]
        message = {**message, "tool_calls": calls} if calls else message
        if self._open.asked.messages is not None:
            self._held.append(_canonical(message))
        self._ids = array("i", [*tokens.prompt_ids, *tokens.token_ids])
        self._num_turns += 1
        self._last, self._open = self._open, None
        self._last.answer.set_result(
            Answered(
                message,
                tokens.prompt_ids,
                tokens.token_ids,
                tokens.logprobs,
                "length" if tokens.finish_reason == "length" else "stop",
                tokens.version,
            )
        )

    def report(self, report: EpisodeReport) -> None:
        """Take what the agent reports of its episode; a later report replaces an earlier one."""
        self.reported = report
        self.changed.set()

    def end(self, why: str, code: str = FULL) -> None:
        """Sample no further turn: requests raise ApiError."""
        self._ended = why, code
        if self._open is not None:
            self._open.answer.set_exception(ApiError(400, why, code))
            self._open.answer.exception()  # the client may be gone
            self._open = None


def ended(report: EpisodeReport) -> Returned:
    """Return the end of an episode as `step` does."""
    return Returned([], report.reward, True, report.metrics, digest=_digest(["ended"]))


def _require_size(num: int) -> None:
    if num > MAX_NEW:
        why = f"what is new has {num:,} characters or tokens; at most {MAX_NEW:,} are possible"
        raise ApiError(400, why, FULL)


def _plain(message: Message) -> Message:
    role = "system" if message.get("role") == "developer" else message.get("role")
    return {**message, "role": role, "content": message.get("content") or ""}


def _canonical(message: Message) -> dict[str, Any]:
    """What two messages have in common if they are the same one: clients drop thoughts, and choose
    ids of calls."""
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    return {
        "role": message["role"],
        "content": (message.get("content") or "").strip(),
        "calls": [(call.get("name"), call.get("arguments")) for call in calls],
    }


def _canonical_all(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_canonical(message) for message in messages]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
