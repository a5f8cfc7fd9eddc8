"""What is said of the length bias, against runs of emulated engines whose every length is known."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lightrl.core.commands import CloseRound, DrawPrompts, ScoreResponse, Send
from lightrl.core.coordinator import Coordinator
from lightrl.core.events import (
    Event,
    MessageArrived,
    NodeJoined,
    PromptsDrawn,
    ResponseScored,
    ShardLeft,
)
from lightrl.core.settings import Settings, Tail
from lightrl.core.state import DrawnPrompt
from lightrl.engine.base import EngineSpec
from lightrl.engine.emulated import EmulatedEngine
from lightrl.messages.nodes import PROTOCOL, Hello, Role
from lightrl.messages.responses import (
    Abort,
    Generate,
    ResponseRequest,
    ResponseTokens,
    Sampling,
    TokenChunk,
)
from lightrl.messages.training import StepDone, TrainShard
from lightrl.messages.weights import WeightsReady
from lightrl.metrics.selection_bias import Bias
from lightrl.weights.version.layout import TensorSpec
from lightrl.weights.version.manifest import (
    Manifest,
    VersionFile,
    encode,
    finish_version,
    hash_buckets,
)
from lightrl.wire import pack_f32, pack_i32
from tests.core.conftest import endpoint_of, publication

LIMIT = 120
SAMPLING = Sampling(1.0, stop_token_ids=(1,))
LENGTHS = {"mean_length": 20.0, "runaway_share": 0.03}


def version_file(folder: Path, version: int) -> VersionFile:
    path, data = folder / f"v{version}.bin", version.to_bytes(16, "little")
    path.write_bytes(data)
    tensors = (TensorSpec("w", "float32", (4,), 0),)
    manifest = encode(Manifest(tensors, len(data), hash_buckets(memoryview(data))))
    return finish_version(path, version, len(data), manifest)


def new_engine(folder: Path, **args: float) -> EmulatedEngine:
    (folder / "config.json").write_text('{"vocab_size": 5000}')
    spec = EngineSpec("emulated", str(folder), "auto", 4096, 4096, engine_args={**LENGTHS, **args})
    return EmulatedEngine(spec)


def outcome(engine: EmulatedEngine, requests: tuple[ResponseRequest, ...]) -> dict[str, list[int]]:
    """The tokens of each, by the weights that are loaded, to the end."""
    for request in requests:
        engine.add(request, SAMPLING)
    tokens: dict[str, list[int]] = {r.response: [] for r in requests}
    while engine.num_unfinished():
        for delta in engine.step():
            tokens[delta.response] += delta.token_ids
    return tokens


@dataclass
class EmulatedRun:
    """A core, one engine in lock step with it, and one that completes each first attempt."""

    folder: Path
    settings: Settings
    args: dict[str, float]
    # length of each first attempt, had it not been given up
    first: dict[str, int] = field(default_factory=dict[str, int])
    kept: list[int] = field(default_factory=list[int])
    figures: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def __post_init__(self) -> None:
        self.core = Coordinator(self.settings, 0.0)
        self.bias = Bias(LIMIT)
        self.engine, self.shadow = (new_engine(self.folder, **self.args) for _ in range(2))
        self.version, self.drawn = 0, 0
        self.closed: int | None = None

    def run(self) -> "EmulatedRun":
        nodes: tuple[tuple[str, Role], ...] = (("t", "trainer"), ("a", "rollout"))
        for name, role in nodes:
            self.feed(NodeJoined(hello(name, role)))
            self.feed(MessageArrived(name, endpoint_of(name)))
        self.load(0)
        while self.core.step < self.settings.num_steps:
            while self.closed is None:
                self.decode()
            step, self.closed = self.closed, None
            self.load(step + 1)
        return self

    def load(self, version: int) -> None:
        file = version_file(self.folder, version)
        self.engine.close()
        for engine in (self.engine, self.shadow):
            engine.load_weights(file)
        self.version = version
        self.feed(MessageArrived("t", publication(version)))
        if version:
            self.feed(MessageArrived("t", StepDone(version - 1, version, {})))
        self.feed(MessageArrived("a", WeightsReady(version, f"digest-{version}")))

    def decode(self) -> None:
        running = self.core.fleet.nodes["a"].running
        items: list[ResponseTokens] = []
        for d in self.engine.step():
            r = running[d.response]
            ids, logprobs = pack_i32(d.token_ids), pack_f32(d.logprobs)
            items.append(
                ResponseTokens(r.id, r.attempt, len(r.tokens), ids, logprobs, d.finish_reason)
            )
        chunk = TokenChunk(self.version, f"digest-{self.version}", tuple(items))
        self.feed(MessageArrived("a", chunk))

    def feed(self, event: Event) -> None:
        todo = [event]
        while todo:
            for command in self.core.handle(todo.pop(0), 0.0):
                match command:
                    case Send("a", Generate(requests=requests)):
                        for request in requests:
                            self.engine.add(request, SAMPLING)
                        new = tuple(r for r in requests if r.response not in self.first)
                        for name, tokens in outcome(self.shadow, new).items():
                            self.first[name] = len(tokens)
                    case Send("a", Abort(attempts)):
                        for response, _ in attempts:
                            self.engine.abort(response)
                    case Send(_, TrainShard(step, index)):
                        todo.append(ShardLeft(step, index))
                    case DrawPrompts(_, count):
                        numbers = range(self.drawn, self.drawn + count)
                        self.drawn += count
                        todo.append(PromptsDrawn(tuple(map(self.prompt, numbers))))
                    case ScoreResponse(response):
                        todo.append(ResponseScored(response.id, response.attempt, 1.0))
                    case CloseRound(round):
                        self.closed = round.step
                        self.kept += [len(r.tokens) for g in round.accepted for r in g.kept]
                        self.figures.append(self.bias.add(round, self.core.backlog))
                    case _:
                        pass

    def prompt(self, number: int) -> DrawnPrompt:
        epoch, i = divmod(number, self.settings.num_prompts)
        return DrawnPrompt(f"p{i}", epoch, pack_i32([7]))

    def truth(self, up_to: float) -> float:
        kept = fmean(min(n, up_to) for n in self.kept)
        return kept / fmean(min(n, up_to) for n in self.first.values()) - 1


def hello(name: str, role: Role) -> Hello:
    return Hello(name, 1, (role,), PROTOCOL, pid=1, slots=4096, host="h")


def emulated_run(folder: Path, change: float, seed: int, **tail: Any) -> EmulatedRun:
    settings = Settings(
        run_seed=seed,
        num_steps=45,
        prompts_per_step=16,
        group_size=4,
        max_response_tokens=LIMIT,
        sampling=SAMPLING,
        slots=4096,
        vocabulary=5000,
        lease_s=1e9,
        reward_on_failure=0.0,
        num_prompts=100,
        tail=Tail(1.25, **tail),
        foresight=False,
    )
    return EmulatedRun(folder, settings, {"restart_change": change}).run()


@pytest.mark.parametrize(("change", "same"), [(0.0, 1.0), (1 - 0.5**0.5, 0.5), (1.0, 0.0)])
def test_the_bias_is_within_two_standard_errors_of_the_truth(tmp_path, change, same):
    """Whether restarts repeat what was put off always, half of the time or never."""
    ran = emulated_run(tmp_path, change, 1)
    said = ran.bias.figures()
    truth = ran.truth(said["length_bias_up_to"])
    assert abs(said["length_bias"] - truth) <= 2 * said["length_bias_se"]
    assert said["length_bias_se"] < 0.06
    assert said["restart_same_share"] == pytest.approx(same, abs=0.08)
    if same == 1.0:
        assert abs(truth) < 0.02  # but for prompts that still wait
        assert said["restart_shorter_share"] == 0.0
    if same == 0.0:
        assert truth < -0.04
        assert said["length_bias"] < -said["length_bias_se"]
        assert said["restart_common_tokens"] < 1.0
        assert said["restart_shorter_share"] > 0.5


def test_nothing_is_selected_where_responses_are_continued(tmp_path):
    ran = emulated_run(tmp_path, 1.0, 0, deferred="continue")
    said = ran.bias.figures()
    assert abs(ran.truth(LIMIT)) < 0.02
    assert abs(said["length_bias"]) < 0.02
    assert "restart_same_share" not in said
    assert {f["deferred_staleness_max"] > 0 for f in ran.figures} == {False, True}
    assert max(f["deferred_staleness"] for f in ran.figures) >= 1
    counters = ran.core.table.counters
    waiting = sum(len(h.tokens) // 4 for p in ran.core.backlog.deferred for h in p.held)
    assert counters.rollout_tokens == sum(ran.kept) + counters.aborted_tokens + waiting
    assert counters.aborted_tokens == 0
    assert said["aborted_tokens"] == 0
