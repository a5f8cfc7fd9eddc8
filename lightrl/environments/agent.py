"""The environment role of a daemon: takes episodes from one observation to the next.

Owns the episodes of this node and the answers that the coordinator may lack. The environments run
in the processes of `pool.py`; `episode.py` has the bookkeeping. An environment that is lost with
its worker begins again here, by `environment.resume`.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from lightrl.config.schema import Config
from lightrl.environments.calls import (
    EnvironmentRaised,
    Environments,
    Returned,
    StepTimedOut,
    WorkerLost,
)
from lightrl.environments.episode import Answer, EpisodeLimits, HeldEpisode, Stopped, total
from lightrl.environments.rendering import Renderer
from lightrl.errors import LightRLError
from lightrl.messages.episodes import BeginEpisode, EndEpisode, EpisodeEnded, StepEpisode
from lightrl.messages.message import Message
from lightrl.system.threads import cancel

logger = logging.getLogger(__name__)

MAX_LOST = 2  # calls of one episode that are repeated because their worker died

P = ParamSpec("P")
T = TypeVar("T")


class EnvironmentAgent:
    """Holds the episodes of this node, and answers the coordinator's orders."""

    def __init__(
        self,
        config: Config,
        new_pool: Callable[[], Environments],
        new_renderer: Callable[[], Renderer],
        send: Callable[[Message], None],
    ) -> None:
        """`new_pool` may ask an interpreter, `new_renderer` loads the tokenizer. Messages given to
        `send` may be lost until `resend` is called."""
        settings = config.environment
        self._new_pool = new_pool
        self._new_renderer = new_renderer
        self._send = send
        self._resume = settings.resume
        self._name = settings.named
        self._limits = EpisodeLimits(
            settings.max_turns, config.max_trained_length, settings.max_turn_length
        )
        self._episodes: dict[str, HeldEpisode] = {}  # by response
        self._work: dict[HeldEpisode, asyncio.Task[None]] = {}
        self._handles = itertools.count()
        self._ready = asyncio.Event()  # workers and renderer have started
        self._failed = asyncio.get_running_loop().create_future()
        # Rendering has a thread of its own: long texts would delay the event loop.
        self._thread = ThreadPoolExecutor(1, "rendering")

    @property
    def held(self) -> tuple[tuple[str, int], ...]:
        """(response, incarnation) of all episodes that are here."""
        return tuple((name, e.begun.incarnation) for name, e in self._episodes.items())

    async def run(self) -> None:
        """Serve until cancelled. Raises LightRLError, one line, if the environment or the chat
        template cannot be used."""
        pool: Environments | None = None
        try:
            self._renderer = await self._in_thread(self._new_renderer)
            pool = self._pool = await self._in_thread(self._new_pool)
            await pool.start()
            await self._in_thread(self._renderer.prove, pool.tools, pool.has_user_turns)
            logger.info("environment %s is ready", self._name)
            self._ready.set()
            await self._failed
        finally:
            await cancel(*self._work.values())
            self._thread.shutdown(wait=False, cancel_futures=True)
            if pool is not None:
                await pool.stop()

    def handle(self, message: BeginEpisode | StepEpisode | EndEpisode) -> None:
        """Handle a message of the coordinator. Orders about older incarnations are ignored."""
        match message:
            case BeginEpisode():
                self._begin(message)
            case StepEpisode(response, incarnation):
                episode = self._episodes.get(response)
                if episode is not None and episode.begun.incarnation == incarnation:
                    self._step(episode, message)
            case EndEpisode(episodes):
                for response, incarnation in episodes:
                    episode = self._episodes.get(response)
                    if episode is not None and episode.begun.incarnation <= incarnation:
                        self._forget(episode)

    def resend(self) -> None:
        """The coordinator is back, and has got `held`: send all answers that it may lack."""
        for episode in self._episodes.values():
            if episode.last is not None:
                self._send(episode.last)

    def _begin(self, message: BeginEpisode) -> None:
        if (held := self._episodes.get(message.response)) is not None:
            if held.begun.incarnation >= message.incarnation:
                return
            self._forget(held)
        self._start(HeldEpisode.begin(message, self._limits))

    def _step(self, held: HeldEpisode, message: StepEpisode) -> None:
        if held.has_taken(message):
            if held.last is not None:
                self._send(held.last)
            return
        try:
            episode = held.take(message)
        except Stopped as over:
            self._answer(held, self._end(held, over))
            return
        if episode is not held:
            self._forget(held)
        self._start(episode)

    def _start(self, episode: HeldEpisode) -> None:
        """Start to work on the next answer of an episode."""
        self._episodes[episode.begun.response] = episode
        task = asyncio.create_task(self._advance(episode), name=episode.begun.response)
        self._work[episode] = task
        task.add_done_callback(lambda done: self._ended(episode, done))

    def _ended(self, episode: HeldEpisode, task: "asyncio.Task[None]") -> None:
        if self._work.get(episode) is task:
            del self._work[episode]
        if not task.cancelled() and (error := task.exception()) and not self._failed.done():
            self._failed.set_exception(error)

    def _forget(self, episode: HeldEpisode) -> None:
        del self._episodes[episode.begun.response]
        if (task := self._work.get(episode)) is not None:
            task.cancel()
        self._close(episode)

    def _close(self, episode: HeldEpisode, why: str = "") -> None:
        if episode.handle:  # else it has not been at the pool, which may not be there yet
            self._pool.close(episode.handle, why)

    def _answer(self, episode: HeldEpisode, answer: Answer) -> None:
        episode.last = answer
        self._send(answer)

    # One episode, in a task

    async def _advance(self, episode: HeldEpisode) -> None:
        """Take an episode to its next observation, or to its end."""
        await self._ready.wait()
        messages: list[dict[str, Any]] = []
        try:
            answer = await self._next(episode, messages)
        except Stopped as over:
            answer = self._end(episode, over, json.dumps(messages))
        self._answer(episode, answer)

    def _end(self, episode: HeldEpisode, over: Stopped, record: str = "") -> EpisodeEnded:
        """A failure is one line that names environment and row, as those of the pool do."""
        line = " ".join(over.failure.split())
        if line and not line.startswith(self._name):
            index = episode.row.get("index")
            which = episode.begun.response if index is None else f"row {index}"
            line = f"{self._name}: {which}: {line}"
        if line:
            logger.warning("%s", line)
            self._close(episode, line)
        return episode.end(over.stop, record, failure=line)

    async def _next(self, episode: HeldEpisode, messages: list[dict[str, Any]]) -> Answer:
        """Return the next answer. `messages` gets the model's, and those of the environment. Raises
        Stopped."""
        if episode.is_cut and self._pool.is_stateless:
            messages.append(await self._parse(episode, len(episode.turns) - 1))
            raise Stopped("length")
        returned = await self._returned(episode, messages)
        if returned.token_ids is not None:  # a record has messages
            text = await self._rendered(self._renderer.text, returned.token_ids[len(episode.ids) :])
            returned = replace(returned, messages=[{"role": "user", "content": text}])
        if episode.is_cut:
            episode.note(returned)
            return episode.end("length", json.dumps(messages), returned)
        messages += returned.messages
        episode.note(returned)
        if (stop := episode.stop_after(returned)) is None:
            ids = await self._render(episode, returned)
            if episode.fits(ids):
                return episode.observe(returned, ids, json.dumps(messages))
        if stop != "done" and returned.has_end:
            returned = await self._finally(episode, returned)
        return episode.end(stop or "context", json.dumps(messages), returned)

    async def _finally(self, episode: HeldEpisode, returned: Returned) -> Returned:
        """Return what was returned, with the reward that the environment gives since a limit ended
        the episode. Raises Stopped."""
        try:
            end = await self._pool.end(episode.handle, None, None)
        except (EnvironmentRaised, StepTimedOut, WorkerLost) as e:
            raise Stopped("failed", str(e)) from None
        episode.note(end)
        return replace(returned, reward=total([returned.reward, end.reward]))

    async def _returned(self, episode: HeldEpisode, messages: list[dict[str, Any]]) -> Returned:
        """Return what `reset` returned, or `step` of the model's message, which `messages` gets; of
        one that was cut, `end`. An environment that is lost with its worker begins again. Raises
        Stopped."""
        act = self._pool.end if episode.is_cut else self._pool.step
        while True:
            try:
                if not episode.turns:
                    return await self._reset(episode)
                if not episode.is_live:
                    await self._restore(episode)
                newest = len(episode.turns) - 1
                messages[:] = [await self._parse(episode, newest)]
                try:
                    return await act(episode.handle, messages[0], episode.tokens_of(newest))
                except StepTimedOut as late:
                    logger.warning("%s", late)
                    raise Stopped("timeout") from None
            except WorkerLost as lost:
                episode.is_live = False
                if lost.in_call:
                    episode.num_lost += lost.is_suspect
                    if self._resume == "once":
                        raise Stopped("failed", f"{lost}; environment.resume = once") from None
                    if episode.num_lost > MAX_LOST:
                        often = f"{episode.num_lost} times in this episode"
                        raise Stopped("failed", f"{lost}; {often}") from None
            except (EnvironmentRaised, StepTimedOut) as e:
                raise Stopped("failed", str(e)) from None

    async def _restore(self, episode: HeldEpisode) -> None:
        """Begin an environment again, up to the newest observation. Raises Stopped, and what
        the pool raises."""
        if self._pool.is_stateless:
            if self._resume == "once" and episode.begun.repeats:
                why = "its tool calls may have been made before; environment.resume = once"
                raise Stopped("failed", why)
            await self._reset(episode)
        elif self._resume == "once":
            raise Stopped("failed", "its environment was lost; environment.resume = once")
        elif self._resume == "snapshot":
            if not (state := episode.turns[-1].state):
                raise Stopped("failed", "its environment was lost, and has no saved state")
            self._rename(episode)
            await self._pool.load(episode.handle, episode.row, state)
        else:
            episode.require_digest(0, (await self._reset(episode)).digest)
            for k in range(1, len(episode.turns)):
                message = await self._parse(episode, k - 1)
                if self._pool.answers(message):
                    continue  # tools of the run are recorded; the class has not seen this turn
                tokens = episode.tokens_of(k - 1)
                expected = episode.turns[k].digest
                returned = await self._pool.step(episode.handle, message, tokens, expected)
                episode.require_digest(k, returned.digest)
        episode.is_live = True

    async def _reset(self, episode: HeldEpisode) -> Returned:
        self._rename(episode)
        expected = episode.turns[0].digest if episode.turns else ""
        seed = episode.begun.seed
        returned = await self._pool.reset(episode.handle, episode.row, seed, expected)
        episode.tools, episode.is_live = returned.tools, True
        return returned

    def _rename(self, episode: HeldEpisode) -> None:
        """Give an episode a new handle, for another environment."""
        self._close(episode)
        begun = episode.begun
        episode.handle = f"{begun.response}.{begun.incarnation}.{next(self._handles)}"

    async def _parse(self, episode: HeldEpisode, turn: int) -> dict[str, Any]:
        """Return what was sampled after an observation as a message."""
        return await self._rendered(
            self._renderer.parse, episode.sampled_ids(turn), self._tools(episode)
        )

    async def _render(self, episode: HeldEpisode, returned: Returned) -> Sequence[int]:
        """Return the tokens to append."""
        tools, messages = self._tools(episode), returned.messages
        if returned.token_ids is not None:
            return returned.token_ids[len(episode.ids) :]
        if not episode.turns:
            return await self._rendered(self._renderer.first, messages, tools)
        held, start = episode.ids, episode.turns[-1].end
        return await self._rendered(self._renderer.append, held, start, messages, tools)

    def _tools(self, episode: HeldEpisode) -> list[dict[str, Any]]:
        return [*self._pool.tools, *episode.tools]

    async def _rendered(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises Stopped for what the renderer refuses."""
        try:
            return await self._in_thread(act, *args, **kwargs)
        except LightRLError as e:
            raise Stopped("failed", str(e)) from None

    async def _in_thread(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._thread.submit(act, *args, **kwargs))
