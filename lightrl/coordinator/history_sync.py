"""Send earlier responses to nodes, which draft from them.

Tracks which node has which group's history. A history is sent with the first request of its group
to a node, so that a new node can draft immediately, and again after a Hello or the death of the
node's engine. Histories affect speed only: what does not fit into a message is left out.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lightrl.config.schema import Config
from lightrl.core.arrays import encode
from lightrl.core.state import Group, Response, Round
from lightrl.history.saved import SavedHistory
from lightrl.history.store import History, PastResponse, answers
from lightrl.messages.nodes import Hello
from lightrl.messages.responses import Generate, PromptHistory
from lightrl.messages.weights import WeightsFailed
from lightrl.system.threads import in_thread

MAX_RESPONSES = 16  # of one prompt
MAX_PROMPT_BYTES = 1 << 20  # of one prompt
MAX_MESSAGE_BYTES = 8 << 20  # of one message, so that the next one is not delayed long


class Histories:
    """Adds to a request the histories that its node lacks. Example: attach("a/0f", Generate(...),
    {"p7@1#0": r}).histories == (PromptHistory("p7@1", ...),)"""

    def __init__(self, history: History | None, saved: SavedHistory | None = None) -> None:
        """Without a history nothing is stored or sent."""
        self._history = history
        self._saved = saved
        self._sent: dict[str, set[str]] = {}  # identity of a node -> open groups

    def attach(
        self, identity: str, generate: Generate, responses: Mapping[str, Response]
    ) -> Generate:
        """Add the histories that this node lacks; `responses` are those of the open rounds."""
        if self._history is None:
            return generate
        known = (responses.get(request.response) for request in generate.requests)
        groups = {r.group.id: r.group for r in known if r is not None}
        sent = self._sent.setdefault(identity, set())
        histories: list[PromptHistory] = []
        left = MAX_MESSAGE_BYTES
        for group in groups.values():
            if group.id in sent:
                continue
            newest = _newest(self._history, group)
            size = sum(past.num_bytes for past in newest)
            if 0 < size <= left:
                left -= size
                sent.add(group.id)
                tokens = tuple(encode(past.tokens) for past in newest)
                rewards = tuple(past.reward for past in newest)
                histories.append(PromptHistory(group.id, tokens, rewards))
        return replace(generate, histories=tuple(histories))

    def received(self, identity: str, message: object) -> None:
        """Forget what was sent to a node if it or its engine has restarted."""
        has_failed = isinstance(message, WeightsFailed) and not message.source
        if has_failed or isinstance(message, Hello):
            self._sent.pop(identity, None)

    def learn(self, round: Round) -> dict[str, float]:
        """Add a closed round, and return the figures of the store."""
        if self._history is None:
            return {}
        for identity, sent in list(self._sent.items()):
            sent.difference_update(round.groups)
            if not sent:
                del self._sent[identity]
        brought = answers(round)
        figures = self._history.learn(brought)
        if self._saved is not None:
            self._saved.append(brought)
        return figures

    async def close(self) -> None:
        """Return when all is written, or has failed."""
        if self._saved is None:
            return
        try:
            await in_thread(self._saved.close)
        except OSError:  # no thread can be started
            self._saved.close()


def open_histories(
    config: Config, run_dir: Path, resume: bool, report: Callable[[str], None]
) -> Histories:
    """Create the histories, with `resume` those that were saved. `report` is called in the running
    loop."""
    if not config.speculates:
        return Histories(None)
    history = History(config.speculation.history_mb << 20)
    if not config.journal.enabled:
        return Histories(history)  # such a run cannot be resumed
    loop = asyncio.get_running_loop()

    def report_in_loop(text: str) -> None:
        loop.call_soon_threadsafe(report, text)

    saved = SavedHistory(run_dir, history, report_in_loop)
    if resume:
        saved.recall()
    else:
        saved.begin()
    return Histories(history, saved)


def _newest(history: History, group: Group) -> list[PastResponse]:
    """Return the newest responses within the limits; copies nothing."""
    kept: list[PastResponse] = []
    left = MAX_PROMPT_BYTES
    for past in reversed(_known(history, group)):
        if len(kept) < MAX_RESPONSES and 0 < past.num_bytes <= left:
            left -= past.num_bytes
            kept.insert(0, past)
    return kept


def _known(history: History, group: Group) -> list[PastResponse]:
    """Return earlier responses, aborted ones first, since they are the first to be left out."""
    earlier = sorted(history.of(group.key), key=lambda past: past.finished)
    finished = (r for r in group.responses if r.finish_reason is not None)
    return [
        *earlier,
        *(PastResponse(group.prompt.epoch, r.tokens, True, r.reward) for r in finished),
    ]
