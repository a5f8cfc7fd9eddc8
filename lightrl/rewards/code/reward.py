"""The reward "code": does the program in a response pass the tests of its row?

Owns how a program is found in a response, how long a test may take and what a row is worth. What it
runs, it runs in a sandbox of its own for each response. Must not look into the sandbox.
"""

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrl.config_reward import LONGEST_TEST_S
from lightrl.rewards.base import Sample
from lightrl.rewards.code import harness
from lightrl.rewards.code.cases import AssertCase, Case, InputCase, cases_of, check_cases
from lightrl.rewards.code.compare import same_text, same_value
from lightrl.rewards.code.sandbox import Limits, Outcome, Sandbox

# RollPacker, arXiv 2509.21009, section 4.3: min(max(2 s, 1.5 x the anchor), 30 s).
SHORTEST_S, LONGEST_S, FACTOR = 2.0, LONGEST_TEST_S, 1.5
MAX_ANCHORS = 100_000  # rows whose slowest right answer is remembered

_FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_HARNESS = Path(harness.__file__).read_bytes()
# Judges of programming contests import these for everybody, and answers rely on it.
_PRELUDE = (
    "import bisect, collections, copy, functools, heapq, itertools, json, math, operator, random, "
    "re, string, sys\n"
    "from bisect import *\nfrom collections import *\nfrom functools import *\n"
    "from heapq import *\nfrom itertools import *\nfrom math import *\nfrom typing import *\n"
    "from builtins import *\n"
)


class CodeReward:
    """1 if all tests of the row pass, else 0; `partial`: the share of them that do.

    `timeout_s`: of all tests of a response together. Figures: `timeouts` (0 or 1), and `passed`,
    the share, if `partial`.
    """

    def __init__(
        self,
        timeout_s: float,
        partial: bool = False,
        limits: Limits = Limits(),  # noqa: B008
        is_isolated: bool = True,
        packages: Sequence[str] = (),
    ) -> None:
        """Raises RewardError where no sandbox can be had."""
        self._timeout_s = timeout_s
        self._partial = partial
        self._limits = limits
        self._is_isolated = is_isolated
        self._packages = packages
        self._anchors: dict[int, float] = {}
        with self._sandbox():
            pass

    def __call__(self, sample: Sample) -> dict[str, float]:
        """Raises RewardError if the row has no tests."""
        cases = cases_of(sample.answer, sample.row)
        check_cases(cases)
        key = hash(sample.prompt)
        limit_s = time_limit(self._anchors.get(key))
        left_s, slowest_s = self._timeout_s, 0.0
        program, passed, timeouts = program_of(sample.response), 0, 0
        sandbox = self._sandbox()
        try:
            for case in cases:
                if not sandbox.is_alive:
                    sandbox = self._sandbox()
                outcome, is_right = run_case(sandbox, program, case, min(limit_s, left_s))
                left_s -= outcome.wall_s
                slowest_s = max(slowest_s, outcome.wall_s)
                timeouts += outcome.status == "timeout"
                passed += is_right
                if left_s <= 0 or not (is_right or self._partial):
                    break
        finally:
            sandbox.close()
        if passed == len(cases):
            self._remember(key, slowest_s)
        figures = {"reward": float(passed == len(cases)), "timeouts": float(timeouts > 0)}
        if self._partial:
            share = passed / len(cases)
            figures |= {"reward": share, "passed": share}
        return figures

    def _sandbox(self) -> Sandbox:
        return Sandbox(self._limits, self._is_isolated, self._packages)

    def _remember(self, key: int, seconds: float) -> None:
        if key in self._anchors or len(self._anchors) < MAX_ANCHORS:
            self._anchors[key] = max(seconds, self._anchors.get(key, 0.0))


def time_limit(anchor_s: float | None) -> float:
    """Seconds for one test, from those of the slowest right answer so far; the longest if there was
    none."""
    if anchor_s is None:
        return LONGEST_S
    return min(max(SHORTEST_S, FACTOR * anchor_s), LONGEST_S)


def program_of(response: str) -> str:
    """The last fenced block of Python, or the whole response if it has none."""
    blocks = _FENCED.findall(response)
    return blocks[-1] if blocks else response


def run_case(sandbox: Sandbox, program: str, case: Case, time_s: float) -> tuple[Outcome, bool]:
    """Returns how it ended and whether the test is passed."""
    files = {"main.py": (_PRELUDE + program).encode(errors="replace")}
    if isinstance(case, InputCase):
        outcome = sandbox.run("main.py", time_s, case.stdin.encode(), files)
        written = outcome.output.decode(errors="replace")
        return outcome, _has_finished(outcome) and same_text(written, case.expected)
    token = secrets.token_hex(8)
    request: dict[str, Any] = (
        {"code": case.code, "token": token}
        if isinstance(case, AssertCase)
        else {"function": case.function, "arguments": case.arguments}
    )
    files["harness.py"] = _HARNESS
    outcome = sandbox.run("harness.py", time_s, json.dumps(request).encode(), files)
    try:
        answer = json.loads(outcome.output)
    except ValueError:
        return outcome, False  # it ended before the answer
    if not _has_finished(outcome) or not isinstance(answer, dict):
        return outcome, False
    if isinstance(case, AssertCase):
        return outcome, answer.get("token") == token
    return outcome, "value" in answer and same_value(answer["value"], case.expected)


def _has_finished(outcome: Outcome) -> bool:
    return outcome.status == "exited" and outcome.code == 0
