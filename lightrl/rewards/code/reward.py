"""The reward "code": whether the program in a response passes the tests of its row.

Owns the program in a response, the time limit of a test and the reward of a row. Programs and
assertions run in sandboxes only.
"""

import json
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from lightrl.config.reward import LONGEST_TEST_S
from lightrl.errors import RewardError
from lightrl.rewards.base import SLOWEST, Sample
from lightrl.rewards.code.cases import LAYOUTS, AssertCase, Case, InputCase, as_call, cases_of
from lightrl.rewards.code.compare import same_text, same_value
from lightrl.rewards.code.inside import packed, unpacked
from lightrl.rewards.code.sandbox import Ended, Limits, Sandbox

# RollPacker, arXiv 2509.21009, section 4.3: min(max(2 s, 1.5 x the anchor), 30 s).
SHORTEST_S, LONGEST_S, FACTOR = 2.0, LONGEST_TEST_S, 1.5
# Of the time for a response, reserved for the end of the last program: a call beyond its limit has
# no score, one with failed tests has.
MARGIN, MARGIN_S = 0.1, 2.0

_FENCED = re.compile(r"```[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = frozenset({"python", "python3", "py"})


class CodeReward:
    """1 if all tests of the row pass, else 0; `partial`: the share of them that do.

    `timeout_s`: of all tests of a response together. Figures: `timeouts` (0 or 1), of a right
    answer `slowest_s`, seconds of its slowest test, and `passed`, the share, if `partial`.

    Calls share no state, so that a score does not depend on the worker. The limit of a test follows
    from `sample.slowest_s`, which the coordinator keeps for the whole run.
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
        self._sandbox = Sandbox(limits, is_isolated, packages)

    def __call__(self, sample: Sample) -> dict[str, float]:
        """Raises RewardError if the row has no tests."""
        cases = cases_of(sample.answer, sample.row)
        if not cases:
            raise RewardError(f"code: the row has no tests: expected {LAYOUTS}")
        limit_s = time_limit(sample.slowest_s)
        ends_at = time.monotonic() + self._timeout_s - min(MARGIN_S, MARGIN * self._timeout_s)
        slowest_s, program, passed, timeouts = 0.0, program_of(sample.response), 0, 0
        for case in cases:
            if (left_s := ends_at - time.monotonic()) <= 0:
                break
            ended, is_right = run_case(self._sandbox, program, case, min(limit_s, left_s))
            slowest_s = max(slowest_s, ended.wall_s)
            timeouts += ended.status == "timeout"
            passed += is_right
            if not (is_right or self._partial):
                break
        figures = {"reward": float(passed == len(cases)), "timeouts": float(timeouts > 0)}
        if passed == len(cases):
            figures[SLOWEST] = slowest_s
        if self._partial:
            share = passed / len(cases)
            figures |= {"reward": share, "passed": share}
        return figures


def time_limit(anchor_s: float | None) -> float:
    """Seconds for one test, from those of the slowest right answer so far, if there was one."""
    if anchor_s is None:
        return LONGEST_S
    return min(max(SHORTEST_S, FACTOR * anchor_s), LONGEST_S)


def program_of(response: str) -> str:
    """The last fenced block marked as Python, else the last without a mark, else the whole
    response."""
    blocks = _FENCED.findall(response)
    for named in (_PYTHON, {""}):
        if found := [text for kind, text in blocks if kind.lower() in named]:
            return found[-1]
    return response


def run_case(sandbox: Sandbox, program: str, case: Case, time_s: float) -> tuple[Ended, bool]:
    """Return how the program ended, and whether it passes."""
    request: dict[str, Any] = {"program": program}
    if isinstance(case, InputCase):
        ended = sandbox.run(request | {"mode": "input"}, time_s, case.stdin.encode())
        written = ended.output.decode(errors="replace")
        return ended, ended.has_finished and same_text(written, case.expected)
    call = as_call(case) if isinstance(case, AssertCase) else case
    if isinstance(call, AssertCase):
        test = {"mode": "test", "test": call.code, "token": secrets.token_hex(8)}
        ended = sandbox.run(request | test, time_s)
        return ended, ended.has_finished and ended.output == test["token"].encode()
    called = {"mode": "call", "function": call.function, "exact": call.is_exact}
    ended = sandbox.run(request | called | {"arguments": packed(call.arguments)}, time_s)
    return ended, has_returned(ended, call.expected, call.is_exact)


def has_returned(ended: Ended, expected: Any, is_exact: bool) -> bool:
    """False too if the program ended before, or wrote something else."""
    try:
        value = json.loads(ended.output if ended.has_finished else b"")["value"]
        if not is_exact:
            return same_value(value, expected)
        # No program makes a larger set here than is expected.
        is_small = ended.output.count(b",") == json.dumps(packed(expected)).count(",")
        return is_small and bool(unpacked(value) == expected)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return False
