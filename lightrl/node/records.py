"""What a run has to show: figures of rounds and steps, histories for the TUI, the summary at the end.

Reads the core's rounds when they close; decides nothing and does no I/O.
"""

import hashlib
import math
import os
import socket
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, replace

from lightrl.core.commands import CloseStep
from lightrl.core.coordinator import Coordinator
from lightrl.core.state import Group, GroupState, NodeState, Response, ResponseState, Round, RunState
from lightrl.messages import NodeRow, Sample, Snapshot

HISTORY_STEPS = 500
NUM_EVENTS = 200
NUM_SAMPLES = 64
HISTOGRAM_BINS = 12


class Records:
    def __init__(
        self, run: str, run_dir: str, head: str, eval_set: str, num_steps: int, max_response_tokens: int
    ) -> None:
        """`head` is the name of the coordinator's daemon, `eval_set` that of the evaluation set."""
        self._run = run
        self._head = head
        self._eval_set = eval_set
        self._run_dir = run_dir
        self._num_steps = num_steps
        self._max_response_tokens = max_response_tokens
        self._digest = hashlib.blake2b(digest_size=16)  # of all trained responses so far
        self._pending: dict[str, float] = {}  # of the round that is closed but not yet trained
        self._reward_figures: dict[str, list[float]] = {}  # of the round that is open
        self._rewards: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._lengths: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._seconds: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._histogram: tuple[tuple[int, int], ...] = ()
        self._metrics: dict[str, float] = {}
        self._events: deque[tuple[float, str]] = deque(maxlen=NUM_EVENTS)
        self._samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._rl_wall_s = 0.0
        self._rates: dict[str, _Rate] = {}
        self.evals: list[tuple[int, float]] = []
        self.bad_frames = 0

    # What happens

    def event(self, elapsed_s: float, text: str) -> None:
        self._events.append((elapsed_s, text))

    def sample(self, sample: Sample) -> None:
        self._samples.appendleft(sample)

    def reward_figures(self, figures: dict[str, float]) -> None:
        """What a reward function said about a response besides its reward."""
        for name, value in figures.items():
            self._reward_figures.setdefault(name, []).append(value)

    def close_eval(self, round: Round) -> dict[str, float]:
        """The record of an evaluation. A response without a score counts as 0.

        avg@k is the mean reward, pass@k the share of prompts with a response of reward 1 or more.
        """
        groups_GR = [[r.reward or 0.0 for r in g.responses] for g in round.groups.values()]
        score = statistics.fmean(reward for group in groups_GR for reward in group)
        passed = statistics.fmean(float(max(group) >= 1.0) for group in groups_GR)
        self.evals.append((round.step, score))
        k = round.group_size
        return {
            f"eval/{self._eval_set}/avg@{k}": score,
            f"eval/{self._eval_set}/pass@{k}": passed,
        }

    def close_round(self, round: Round) -> None:
        trained = [g for g in round.groups.values() if g.state is GroupState.SCORED]
        responses = [r for g in trained for r in g.responses]
        rewards = [r.reward or 0.0 for r in responses]
        lengths = [len(r.tokens) for r in responses]
        rollout_s = round.closed_at - round.opened_at
        self._digest.update(digest_responses(round.step, trained))
        self._histogram = histogram(lengths, self._max_response_tokens)
        self._pending = {
            "reward/mean": _mean(rewards),
            "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
            "reward/frac_zero_std": _mean([float(_all_equal(g)) for g in trained]),
            "response_length/mean": _mean(lengths),
            "response_length/max": float(max(lengths, default=0)),
            "response_length/clip_ratio": _mean([float(r.finish_reason == "length") for r in responses]),
            "round/groups_trained": float(len(trained)),
            "round/groups_dropped": float(len(round.groups) - len(trained)),
            "perf/rollout_tokens_per_s": sum(lengths) / rollout_s if rollout_s > 0 else 0.0,
            **{f"reward/{name}": _mean(values) for name, values in self._reward_figures.items()},
        }
        self._reward_figures.clear()

    def close_step(self, done: CloseStep) -> dict[str, float]:
        """The record of a finished step, for metrics.jsonl."""
        seconds = done.rollout_s + done.train_s + done.weights_s
        self._rl_wall_s += seconds
        record = {
            "step": float(done.step + 1),
            **self._pending,
            **done.metrics,
            "timing_s/step": seconds,
            "timing_s/rollout": done.rollout_s,
            "timing_s/train_after_rollout": done.train_s,
            "timing_s/weights": done.weights_s,
        }
        self._rewards.append(record["reward/mean"])
        self._lengths.append(record["response_length/mean"])
        self._seconds.append(seconds)
        self._metrics = record
        return record

    # What is shown

    def summary(self, core: Coordinator, reason: str, elapsed_s: float) -> dict[str, object]:
        """summary.json: equal digests mean equal final weights and equal trained responses."""
        c = core.ledger.counters
        return {
            "run": self._run,
            "state": _final(core.state),
            "reason": reason,
            "steps": core.step,
            "eval_start": self.evals[0][1] if self.evals else None,
            "eval_end": self.evals[-1][1] if self.evals else None,
            "evals": self.evals,
            "rl_wall_s": round(self._rl_wall_s, 3),
            "total_wall_s": round(elapsed_s, 3),
            "rollout_tokens": c.rollout_tokens,
            "eval_tokens": c.eval_tokens,
            "trained_responses": c.trained_responses,
            "aborted_tokens": c.aborted_tokens,
            "weights_digest": core.fleet.published.digest if core.fleet.published else None,
            "responses_digest": self._digest.hexdigest(),
            "counters": self._counters(core),
        }

    def snapshot(self, core: Coordinator, now: float, over: bool = False) -> Snapshot:
        """`over`: nothing will follow, in whatever state the core is."""
        elapsed = now - core.started_at
        round = core.ledger.round
        states = [r.state for r in core.ledger.responses.values()]
        rows = self._rows(core, now)
        return Snapshot(
            run=self._run,
            run_dir=self._run_dir,
            state=str(core.state) if not over else _final(core.state),
            step=core.step,
            num_steps=self._num_steps,
            policy_version=core.fleet.published.policy_version if core.fleet.published else None,
            elapsed_s=elapsed,
            nodes=rows,
            round_kind=round.kind if round is not None else "",
            round_accepted=round.num_settled if round is not None else 0,
            round_needed=round.needed if round is not None else 0,
            responses_running=states.count(ResponseState.RUNNING),
            responses_queued=states.count(ResponseState.QUEUED),
            responses_done=states.count(ResponseState.DONE),
            rollout_tokens=core.ledger.counters.rollout_tokens + core.ledger.counters.eval_tokens,
            tokens_per_s=sum(r.tokens_per_s for r in rows),
            rewards=tuple(self._rewards),
            lengths=tuple(self._lengths),
            step_seconds=tuple(self._seconds),
            evals=tuple(self.evals),
            length_histogram=self._histogram,
            metrics=self._metrics,
            counters=self._counters(core),
            events=tuple(self._events),
            samples=tuple(self._samples),
        )

    def _counters(self, core: Coordinator) -> dict[str, int]:
        return {
            **asdict(core.ledger.counters),
            "nodes_joined": core.fleet.num_joined,
            "weights_failed": core.fleet.num_weights_failed,
            "bad_frames": self.bad_frames,
        }

    def measure_rates(self, core: Coordinator, now: float) -> None:
        """Tokens per second of every node, smoothed; called every second or so."""
        for name, node in core.fleet.nodes.items():
            self._rates.setdefault(name, _Rate(now, node.num_tokens)).update(now, node.num_tokens)
        for name in self._rates.keys() - core.fleet.nodes.keys():
            del self._rates[name]

    def _rows(self, core: Coordinator, now: float) -> tuple[NodeRow, ...]:
        """The coordinator's daemon first, whether or not it has other roles too."""
        rows = {name: self._row(core, name, now) for name in sorted(core.fleet.nodes)}
        head = rows.pop(self._head, None) or NodeRow(
            self._head,
            (),
            str(NodeState.READY),
            socket.gethostname(),
            os.getpid(),
            "",
            None,
            0,
            0,
            0.0,
            0.0,
            0.0,
        )
        return (replace(head, roles=("coordinator", *head.roles)), *rows.values())

    def _row(self, core: Coordinator, name: str, now: float) -> NodeRow:
        node = core.fleet.nodes[name]
        is_rollout = "rollout" in node.roles
        rate = self._rates.get(name)
        version = node.policy_version
        if not is_rollout and core.fleet.published is not None and node.state is NodeState.READY:
            version = core.fleet.published.policy_version
        return NodeRow(
            name=name,
            roles=node.roles,
            state=str(node.state),
            host=node.host,
            pid=node.pid,
            device=node.device,
            policy_version=version,
            running=len(node.running),
            slots=node.slots if is_rollout else 0,
            tokens_per_s=rate.per_s if rate is not None else 0.0,
            kv_usage=node.load.kv_usage,
            heard_s_ago=now - node.heard_at,
            loop_lag_ms=node.loop_lag_ms,
        )


def _final(state: RunState) -> str:
    """A coordinator that ends in any other state has failed."""
    ends = {RunState.FINISHED, RunState.STOPPED, RunState.FAILED}
    return str(state if state in ends else RunState.FAILED)


class _Rate:
    """Exponentially smoothed rate of a counter; half of it forgotten in HALF_LIFE_S."""

    HALF_LIFE_S = 2.0

    def __init__(self, now: float, count: int) -> None:
        self.per_s = 0.0
        self._at = now
        self._count = count

    def update(self, now: float, count: int) -> None:
        seconds = now - self._at
        if seconds <= 0:
            return
        kept = 0.5 ** (seconds / self.HALF_LIFE_S)
        # A node that restarted counts from zero again.
        self.per_s = kept * self.per_s + (1 - kept) * max(0, count - self._count) / seconds
        self._at, self._count = now, count


def digest_responses(step: int, groups: Iterable[Group]) -> bytes:
    """Of all responses of a step in canonical order: the same whatever order they arrived in."""
    digest = hashlib.blake2b(str(step).encode(), digest_size=16)
    responses: list[Response] = [r for g in groups for r in g.responses]
    for r in sorted(responses, key=lambda r: r.id):
        digest.update(r.id.encode() + b"\0" + r.tokens.tobytes())
    return digest.digest()


def histogram(lengths: list[int], longest: int) -> tuple[tuple[int, int], ...]:
    """(upper bound in tokens, responses) of equal bins up to the longest possible response."""
    width = max(1, math.ceil(longest / HISTOGRAM_BINS))
    counts = [0] * math.ceil(longest / width)
    for n in lengths:
        counts[max(0, n - 1) // width] += 1
    return tuple((min((i + 1) * width, longest), count) for i, count in enumerate(counts))


def _all_equal(group: Group) -> bool:
    return len({r.reward for r in group.responses}) <= 1


def _mean(values: list[float] | list[int]) -> float:
    return statistics.fmean(values) if values else 0.0
