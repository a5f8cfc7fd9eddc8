"""Episodes of agents: programs with a loop of their own, which talk to the endpoint of this node.

`Programs` is what the agent of the node calls (`Environments`) and what the endpoint calls
(`Backend`). Owns the processes, one for each episode, their time limit, and the keys of sessions;
sessions.py has the conversation. Agents that run elsewhere open a session instead of being started.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

from lightrl.config.environment import Environment, split_endpoint
from lightrl.config.schema import Config
from lightrl.config.values import VERIFIERS
from lightrl.endpoints.api import Answered, ApiError, Asked, EpisodeReport, SamplingLimits
from lightrl.endpoints.app import EndpointApp
from lightrl.endpoints.server import serving
from lightrl.environments.calls import (
    EnvironmentRaised,
    Environments,
    EnvironmentUnusable,
    Returned,
    StepTimedOut,
    TurnTokens,
    WorkerLost,
)
from lightrl.environments.pool import WorkerPool
from lightrl.environments.sessions import ENDED, Session, ended
from lightrl.errors import LightRLError
from lightrl.log import last_line
from lightrl.system.program import Program

HOLD_S = 600.0  # for a session that is to be begun again; clients wait as long
AGAIN_S = 10.0  # and for one that was given up here: a coordinator that is back begins it again
MAX_ENDED = 10_000  # keys of ended sessions, which need not be awaited
MAX_ROW = 1 << 16  # bytes of LIGHTRL_ROW; a system has a limit for all variables
PLACE = re.compile(r"\{(\w+)\}")
VERIFIERS_V1 = Path(__file__).parent / "adapters" / "verifiers_v1.py"


def is_program(settings: Environment) -> bool:
    """Return whether an episode is a program. Environments of verifiers are since release 0.4: asks
    the interpreter which one it has, which takes a moment."""
    if settings.has_agents or not settings.may_have_agents:
        return settings.has_agents
    code = "from importlib.metadata import version; print(version('verifiers'))"
    command = settings.command or (sys.executable,)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = [*command, "-c", code]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
        return tuple(map(int, re.findall(r"\d+", found.stdout)[:2])) >= (0, 4)
    return False  # the adapter reports what is missing


def words_of(settings: Environment) -> list[str]:
    """Return the command line of an episode's program; [] for agents elsewhere."""
    if settings.source:
        name = settings.source.removeprefix(VERIFIERS)
        return [*(settings.command or (sys.executable,)), "-P", str(VERIFIERS_V1), name]
    return shlex.split(settings.program)


@dataclass(slots=True, eq=False)
class _Playing:
    """An episode, with its program if it has one."""

    session: Session
    slot: int
    program: Program | None = None
    status: int | None = None  # of the program, when it has ended
    log_start: int = 0  # bytes of earlier programs
    opened: asyncio.Event = field(default_factory=asyncio.Event)  # for agents elsewhere


class Programs:
    """Plays the episodes of `environment.program`, or of agents that open sessions."""

    def __init__(
        self,
        settings: Environment,
        limits: SamplingLimits,
        environment_key: str,
        model: str,
        log_dir: Path,
    ) -> None:
        """`environment_key`: the text of the key of environment nodes, with which agents elsewhere
        open sessions. `model`: directory with the tokenizer, or hub id."""
        self.tools: list[dict[str, Any]] = []
        self.is_stateless = self.has_user_turns = False
        self.limits = limits
        self.address = ""  # of the endpoint, while it runs: http://HOST:PORT
        self._settings = settings
        self._key = environment_key
        self._model = model
        self._log_dir = log_dir
        self._words = words_of(settings)
        python = (settings.command or (sys.executable,))[0]
        folder = Path(shutil.which(python) or python).absolute().parent
        self._path = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
        self._playing: dict[str, _Playing] = {}  # by name of the episode
        self._by_key: dict[str, _Playing] = {}
        self._ended: dict[str, str] = {}  # key -> failure, if it is one; the oldest first
        self._unopened: asyncio.Queue[_Playing] = asyncio.Queue()
        self._began = asyncio.Event()  # replaced whenever an episode begins
        self._stack = AsyncExitStack()
        self._watches: set[asyncio.Task[None]] = set()  # of programs that run

    # For the agent of the node

    async def start(self) -> None:
        """Raises EnvironmentUnusable, one line, if the program or the port cannot be used."""
        if self._words and shutil.which(self._words[0], path=self._path) is None:
            raise EnvironmentUnusable(f"environment.program: {self._words[0]}: no such program")
        place = split_endpoint(self._settings.endpoint)
        assert place is not None  # the config was checked
        try:
            served = serving(EndpointApp(self), *place)
            self.address = await self._stack.enter_async_context(served)
        except LightRLError as e:
            raise EnvironmentUnusable(f"environment.endpoint: {e}") from None

    async def stop(self) -> None:
        await self._stack.aclose()  # before sessions end: agents elsewhere are to ask again
        for episode in [*self._playing]:
            self.close(episode)
        await asyncio.gather(*self._watches)

    async def reset(
        self, episode: str, row: dict[str, Any], seed: int, expected: str = ""
    ) -> Returned:
        self.close(episode)
        which = f"row {row['index']}" if "index" in row else f"episode {episode}"
        response = episode.rsplit(".", 2)[0]
        key = self._new_key(response, token_hex(8) if self._words else "")
        session = Session(key, f"{self._settings.named}: {which}", row, seed)
        used = {playing.slot for playing in self._playing.values()}
        slot = next(k for k in range(len(used) + 1) if k not in used)
        playing = self._playing[episode] = self._by_key[key] = _Playing(session, slot)
        self._ended.pop(key, None)
        self._began.set()
        self._began = asyncio.Event()
        if self._words:
            await self._launch(playing)
        else:
            await self._opened(playing, is_known=bool(expected))
        return await self._next(playing, expected)

    async def _opened(self, playing: _Playing, *, is_known: bool) -> None:
        """Wait for an agent. One that has played the episode already continues with its key:
        others get it only if there is none."""
        if is_known:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.timeout_s):
                    await playing.opened.wait()
        if not playing.opened.is_set():
            self._unopened.put_nowait(playing)
            await playing.opened.wait()

    async def load(self, episode: str, row: dict[str, Any], state: bytes) -> None:
        raise EnvironmentUnusable("an agent cannot be loaded")

    async def step(
        self, episode: str, message: dict[str, Any], tokens: TurnTokens, expected: str = ""
    ) -> Returned:
        playing = self._found(episode)
        playing.session.answer(message, tokens)
        return await self._next(playing, expected)

    async def end(
        self, episode: str, cut: dict[str, Any] | None, tokens: TurnTokens | None
    ) -> Returned:
        """Give the program as long as a step to end, and to report a reward."""
        playing = self._found(episode)
        if cut is not None and tokens is not None:
            playing.session.answer(cut, tokens)
        playing.session.end("the limits of this episode are used up: end it")
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                while playing.status is None and not playing.session.reported.is_over:
                    await self._changed(playing.session)
        except TimeoutError:
            pass  # what was reported counts
        return self._ended_as_reported(playing)

    def answers(self, message: dict[str, Any]) -> bool:
        return False

    def close(self, episode: str, why: str = "") -> None:
        if (playing := self._playing.pop(episode, None)) is None:
            return
        session = playing.session
        session.end(why or "this episode has ended", ENDED)
        if self._by_key.get(session.key) is playing:
            del self._by_key[session.key]
            self._ended[session.key] = why
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
        if playing.program is not None:
            playing.program.kill()

    def _found(self, episode: str) -> _Playing:
        if (playing := self._playing.get(episode)) is None:
            raise WorkerLost(f"{self._settings.named}: episode {episode}: it was lost")
        return playing

    async def _next(self, playing: _Playing, expected: str) -> Returned:
        """Wait for the next request of an agent, or for its end."""
        session, began = playing.session, time.perf_counter()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                while not session.has_request:
                    if playing.status is not None or session.reported.is_over:
                        over = self._ended_as_reported(playing)
                        self._require_success(playing)
                        return over
                    await self._changed(session)
        except TimeoutError:
            limit = f"environment.timeout_s = {self._settings.timeout_s:g} s"
            raise StepTimedOut(f"{session.label}: no request within {limit}") from None
        return replace(session.take(expected), seconds=time.perf_counter() - began)

    async def _changed(self, session: Session) -> None:
        await session.changed.wait()
        session.changed.clear()

    def _ended_as_reported(self, playing: _Playing) -> Returned:
        """Raises EnvironmentRaised for a failure."""
        session = playing.session
        if failure := session.reported.failure:
            raise EnvironmentRaised(f"{session.label}: {failure}")
        return ended(session.reported)

    def _require_success(self, playing: _Playing) -> None:
        """Raises EnvironmentRaised or WorkerLost for the exit status of a program."""
        if not playing.session.reported.is_over and playing.status:
            last = last_line(self._log_of(playing), playing.log_start)
            tail = f": {last}" if last else ""
            if playing.status < 0:  # by a lack of memory, for instance: it is started again
                how = f"the program was killed by {signal.Signals(-playing.status).name}"
                raise WorkerLost(f"{playing.session.label}: {how}{tail}", True, True)
            how = f"the program ended with exit status {playing.status}"
            raise EnvironmentRaised(f"{playing.session.label}: {how}{tail}")

    async def _launch(self, playing: _Playing) -> None:
        session, log = playing.session, self._log_of(playing)
        words = [self._filled(word, session.row) for word in self._words]
        row = json.dumps(session.row, ensure_ascii=False)
        own = ["127.0.0.1,localhost", urlsplit(self.address).hostname]
        no_proxy = ("no_proxy", "NO_PROXY")  # some clients read the first alone, if it is set
        direct = ",".join(filter(None, [*map(os.environ.get, no_proxy), *own]))
        variables = {
            "PATH": self._path,
            **dict.fromkeys(no_proxy, direct),
            "OPENAI_BASE_URL": f"{self.address}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": self.address,
            "ANTHROPIC_API_KEY": session.key,
            "LIGHTRL_SEED": str(session.seed),
            "LIGHTRL_MODEL": self._model,
            "LIGHTRL_ARGS": json.dumps(self._settings.args),
        }
        # our keys, and one that clients would send instead of the session's
        kept = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTRL_")}
        kept.pop("ANTHROPIC_AUTH_TOKEN", None)
        try:
            if len(row.encode()) <= MAX_ROW:
                variables["LIGHTRL_ROW"] = row
            if any("\0" in word for word in words):
                raise ValueError("an argument has a character 0")
            playing.log_start = log.stat().st_size if log.exists() else 0
            playing.program = await Program.start(words, {**kept, **variables}, log)
        except (OSError, ValueError) as e:  # of a row that is no argument of a program, too
            why = e.strerror if isinstance(e, OSError) else e
            raise EnvironmentRaised(f"{session.label}: cannot be started: {why}") from None
        watch = asyncio.create_task(self._watch(playing), name=session.label)
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, playing: _Playing) -> None:
        assert playing.program is not None
        playing.status = await playing.program.wait()
        playing.session.changed.set()

    def _log_of(self, playing: _Playing) -> Path:
        return self._log_dir / f"program-{playing.slot}.log"

    def _filled(self, word: str, row: dict[str, Any]) -> str:
        """Return a word of the command line, with {column} as the row has it."""

        def value(found: "re.Match[str]") -> str:
            if found[1] not in row:
                return found[0]
            given = row[found[1]]
            return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

        return PLACE.sub(value, word)

    # For the endpoint

    def require(self, key: str) -> None:
        if compare_digest(key.encode(), self._key.encode()) or self._is_ours(key):
            return
        raise ApiError(401, "the API key is not one of an episode", "invalid_api_key")

    async def ask(self, key: str, asked: Asked) -> Answered:
        while True:
            session = await self._session(key)
            try:
                return await session.ask(asked)
            except ApiError as e:
                if self._words or e.code != ENDED:
                    raise  # else the episode may be begun again, and the request continues there

    async def episode(self, key: str) -> dict[str, Any]:
        session = await self._session(key)
        return {"row": session.row, "seed": session.seed, "max_length": self.limits.max_length}

    async def report(self, key: str, report: EpisodeReport) -> None:
        (await self._session(key)).report(report)

    async def open(self, key: str) -> dict[str, Any]:
        """Wait for an episode that no agent plays yet."""
        if not compare_digest(key.encode(), self._key.encode()):
            raise ApiError(401, "a session is opened with the environment key", "invalid_api_key")
        if self._words:
            raise ApiError(400, "environment.program plays the episodes of this run")
        while True:
            playing = await self._unopened.get()
            key = playing.session.key
            if self._by_key.get(key) is playing and not playing.opened.is_set():
                playing.opened.set()
                return {"api_key": key, **await self.episode(key)}

    async def _session(self, key: str) -> Session:
        """Return the session of a key. One that may be begun again, since its node or coordinator
        was lost, is awaited. Raises ApiError."""
        if (playing := self._by_key.get(key)) is None:
            if not self._is_ours(key):
                raise ApiError(401, "a request needs the key of an episode", "invalid_api_key")
            failure = self._ended.get(key)
            hold_s = HOLD_S if failure is None else AGAIN_S
            if self._words or failure:
                hold_s = 0
            try:
                async with asyncio.timeout(hold_s):
                    while (playing := self._by_key.get(key)) is None:
                        await self._began.wait()
            except TimeoutError:
                raise ApiError(404, failure or "this episode has ended", ENDED) from None
        playing.opened.set()
        return playing.session

    def _new_key(self, response: str, nonce: str) -> str:
        """Return the key of an episode; without a nonce the same one on every node of a run."""
        name = base64.urlsafe_b64encode(response.encode()).decode().rstrip("=")
        return f"{name}.{nonce}.{self._mac(f'{name}.{nonce}')}"

    def _is_ours(self, key: str) -> bool:
        name, _, mac = key.rpartition(".")
        return compare_digest(mac.encode(), self._mac(name).encode())

    def _mac(self, name: str) -> str:
        key = blake2b(self._key.encode(), digest_size=32).digest()
        return blake2b(name.encode(), key=key, digest_size=16).hexdigest()


def environments_of(
    config: Config,
    settings: Environment,
    key: str,
    model: str,
    log_dir: Path,
    report: Callable[[str], None],
) -> Environments:
    """Return what plays the episodes of a run. `settings`: those of this node; `key`, `model`: see
    `Programs`; `report`: see `WorkerPool`. May wait for an interpreter."""
    if not is_program(settings):
        return WorkerPool(settings, log_dir, report, config.data.prompt_key)
    how = config.rollout
    limits = SamplingLimits(
        config.model.path,
        config.max_trained_length,
        how.temperature,
        how.top_p,
        how.top_k,
        how.stop,
    )
    return Programs(settings, limits, key, model, log_dir)
