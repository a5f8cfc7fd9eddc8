"""The reward "judge": a language model behind an OpenAI-compatible endpoint grades a response.

Owns the request, the score in a reply, and the pauses after overload. Runs in the reward worker; a
reply without a score is no score.
"""

import asyncio
import contextlib
import random
import re
import socket
from ipaddress import ip_address, ip_network
from urllib.request import getproxies_environment, proxy_bypass

import httpx

from lightrl.config.reward import Judge
from lightrl.errors import RewardError
from lightrl.rewards.answers import answer_text
from lightrl.rewards.base import Sample

DEFAULT_PROMPT = (
    "Grade the answer of a student.\n\nQuestion:\n{prompt}\n\nAnswer:\n{response}\n\n"
    "Reference:\n{answer}\n\nReply with a single line, `Score: X`, where X is a number from 0 "
    "(wrong) to 1 (right)."
)
FIELDS = ("prompt", "response", "answer")
# Overload and trouble on the way: tried again. Every other status is an error.
PASSING = frozenset({408, 409, 429, 500, 502, 503, 504})
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0

_FIELD = re.compile(r"\{(\w+)\}")
_UNSIGNED = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
# Not the beginning of another number, nor of a range ("0-1").
_WHOLE = rf"({_UNSIGNED})(?!\d|[.,]\d|[eE][-+]?\d|\s*[-\u2013]\s*\d)"
_SCORE = re.compile(
    rf"score(?:\s*\([^()]*\))?\W{{0,10}}?(-?){_WHOLE}(?:\s*/\s*{_WHOLE})?", re.IGNORECASE
)
_NUMBER = re.compile(f"-?{_UNSIGNED}")


class JudgeReward:
    """An asynchronous reward function. `await check()` before the first call.

    A call is retried after overload, time-outs and broken connections, with pauses that double, or
    as long as the endpoint requires.
    """

    def __init__(
        self, judge: Judge, key: str = "", timeout_s: float = 60.0, workers: int = 1
    ) -> None:
        """`workers`: processes that share `judge.concurrency`. Raises RewardError for a prompt with
        unknown fields."""
        self._prompt = judge.prompt or DEFAULT_PROMPT
        if unknown := [f for f in _FIELD.findall(self._prompt) if f not in FIELDS]:
            raise RewardError(
                f"reward.judge.prompt: unknown field {{{unknown[0]}}}; the fields are {{prompt}}, "
                "{response} and {answer}"
            )
        self._judge = judge
        self._url = f"{judge.url.rstrip('/')}/chat/completions"
        self.turns = asyncio.Semaphore(judge.concurrency // workers)
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client: httpx.AsyncClient | None = None  # of the event loop of the calls

    async def check(self) -> None:
        """One call without a second try, in any event loop. Raises RewardError, one line."""
        try:
            async with self._new_client() as client:
                await self._ask(client, "Reply with a single line, `Score: 1`.")
        except (httpx.HTTPError, _Refused) as e:
            raise RewardError(f"judge: {self._url}: {_reason(e)}") from None

    def _new_client(self) -> httpx.AsyncClient:
        url = httpx.URL(self._url)
        # With a transport of its own the client does not look at the proxies at all.
        own = httpx.AsyncHTTPTransport() if is_direct(url.host, url.port) else None
        try:
            return httpx.AsyncClient(timeout=self._timeout_s, headers=self._headers, transport=own)
        except (ImportError, ValueError, httpx.InvalidURL) as e:
            raise RewardError(f"judge: {self._url}: proxy of the environment: {e}") from None

    async def __call__(self, sample: Sample) -> float | None:
        """The score, or None for a reply without one. Raises RewardError if there is no reply."""
        answer = answer_text(sample.answer)
        values = {"prompt": sample.prompt, "response": sample.response, "answer": answer}
        text = _FIELD.sub(lambda field: str(values[field[1]]), self._prompt)
        if self._client is None:
            self._client = self._new_client()
        for attempt in range(self._judge.retries + 1):
            try:
                return self._within(score_of(await self._ask(self._client, text)))
            except (httpx.TransportError, _Refused) as e:
                if attempt == self._judge.retries or (isinstance(e, _Refused) and not e.passes):
                    raise RewardError(f"judge: {_reason(e)}") from None
                asked_s = e.wait_s if isinstance(e, _Refused) else 0.0
            await asyncio.sleep(max(asked_s, pause_s(attempt, random.random())))
        return None

    def _within(self, score: float | None) -> float | None:
        """Return the score, or None if the default prompt forbids it: a response may ask for it."""
        is_usual = self._prompt == DEFAULT_PROMPT
        return None if is_usual and score is not None and not 0 <= score <= 1 else score

    async def _ask(self, client: httpx.AsyncClient, text: str) -> str:
        """The reply. Raises httpx.HTTPError and _Refused."""
        request = {
            "model": self._judge.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            **self._judge.options,
        }
        response = await client.post(self._url, json=request)
        if response.status_code != httpx.codes.OK:
            raise _Refused(response)
        try:
            return response.json()["choices"][0]["message"]["content"] or ""
        except (ValueError, LookupError, TypeError):
            raise _Refused(response) from None


def is_direct(host: str, port: int | None) -> bool:
    """Return whether to bypass the environment's proxy: for this machine and for no_proxy."""
    name = host.lower().rstrip(".")
    is_here = name in ("localhost", "0.0.0.0", "::", "::1", socket.gethostname().lower())
    is_here = is_here or name.startswith("127.") or name.endswith(".localhost")
    if is_here or proxy_bypass(f"{host}:{port}" if port else host):
        return True
    for network in getproxies_environment().get("no", "").split(","):
        with contextlib.suppress(ValueError):  # names
            if ip_address(host) in ip_network(network.strip(), strict=False):
                return True
    return False


def score_of(reply: str) -> float | None:
    """The number after the last "score", as a share if it is one ("7/10"), or a reply that is only
    a number. None if there is neither.

    Example: score_of("The student forgot to carry.\\nScore: 0.5") is 0.5.
    """
    if found := _SCORE.findall(reply):
        sign, value, whole = found[-1]
        if whole and float(whole) == 0:
            return None
        return float(sign + value) / (float(whole) if whole else 1.0)
    text = reply.strip()
    return float(text) if _NUMBER.fullmatch(text) else None


def pause_s(attempt: int, luck: float) -> float:
    """Seconds before try `attempt` + 2. `luck`, from 0 to 1, is the jitter."""
    return min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S) * (0.5 + luck / 2)


class _Refused(Exception):
    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"status {response.status_code}: {' '.join(response.text.split())[:200]}")
        self.passes = response.status_code in PASSING
        asked = response.headers.get("retry-after", "")
        self.wait_s = min(float(asked), LONGEST_WAIT_S) if _NUMBER.fullmatch(asked) else 0.0


def _reason(e: Exception) -> str:
    return str(e) or type(e).__name__
