"""Every message survives the wire, its bytes are pinned, and garbage is a ProtocolError, nothing
else."""

import dataclasses
import math
import random
from typing import Any, get_args

import pytest

from lightrl import wire
from lightrl.errors import ProtocolError
from lightrl.messages.broadcasts import (
    BroadcastGroup,
    BroadcastOrder,
    BroadcastStatus,
    VersionTaken,
)
from lightrl.messages.episodes import (
    BeginEpisode,
    EndEpisode,
    EpisodeEnded,
    Observed,
    RecordedTurn,
    StepEpisode,
)
from lightrl.messages.load import Load, StepCosts
from lightrl.messages.message import Message
from lightrl.messages.nodes import PROTOCOL, Bye, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.responses import (
    Abort,
    Generate,
    ResponseRequest,
    ResponseTokens,
    Sampling,
    TokenChunk,
)
from lightrl.messages.sharing import DevicesReleased, SetDevices
from lightrl.messages.snapshot import (
    CostRow,
    NodeRow,
    SampleText,
    Snapshot,
    StepForecast,
    TailRow,
    WaitRow,
    WarningRow,
    Watch,
)
from lightrl.messages.trainers import TrainerRelay, TrainerSet
from lightrl.messages.training import (
    Checkpointed,
    ShardsTaken,
    StepDone,
    TrainGroup,
    TrainResponse,
    TrainShard,
)
from lightrl.messages.weights import (
    Canary,
    DeltaOffer,
    PublishWeights,
    WeightsBase,
    WeightsEndpoint,
    WeightsFailed,
    WeightsProgress,
    WeightsReady,
    WeightsSource,
)

TRAINED = TrainResponse("p7@0#3", b"", b"", 1.0, "length", b"\x05")
EXAMPLES: list[Message] = [
    Hello(
        "rollout-0",
        17,
        ("rollout", "trainer"),
        PROTOCOL,
        pid=4242,
        host="a",
        slots=128,
        serves=(4, "9f3a"),
        running=(("p7@0#3", 1),),
        parallel=2,
    ),
    Welcome("quickstart", "{}", {"config.json": b"\x00{}"}, ""),
    Heartbeat(
        Load(3, 1, 0.5, 2, None, 9000, StepCosts(0.01, 1e-4, 1e-8, 1e-5)),
        0.4,
        "cpu",
        WeightsProgress(4, 8 << 20, 15 << 30, 3),
        2,
        True,
    ),
    Generate(
        4,
        Sampling(0.7, 0.9, 5, (1, 2)),
        (ResponseRequest("p7@0#3", 1, 2**63 - 1, wire.pack_i32([1, 2]), b"", 5),),
    ),
    Abort((("p7@0#3", 1),)),
    TokenChunk(
        4,
        "9f3a",
        (ResponseTokens("p7@0#3", 1, 16, wire.pack_i32([7]), wire.pack_f32([-0.25]), "stop"),),
    ),
    TrainShard(
        4,
        2,
        4,
        (TrainGroup("p7@0", b"", (TRAINED,)),),
        True,
        32,
        True,
        1,
    ),
    ShardsTaken(4, 2),
    StepDone(4, 5, {"loss/policy": 0.1}),
    Checkpointed(20, 10),
    WeightsEndpoint(("10.0.0.1:41873", "10.1.0.1:41873"), "c0ffee" * 6),
    PublishWeights(
        4,
        "9f3a",
        2112512,
        8190,
        deltas=(DeltaOffer("9f3a", "a01c", "77aa", 4210, 91022),),
        canary=Canary(wire.pack_i32([5, 6]), wire.pack_f32([-0.5])),
        portions=(3, 29),
        replicas=(0, 1),
        group=BroadcastGroup("7c1f", "10.0.0.1:41873", 2, 4, "gloo"),
        base=WeightsBase("4b7e", 2112512, 8190),
    ),
    WeightsReady(4, "9f3a", 2112512, 0.01, 0.03, 1000, 91022, 0.001),
    WeightsFailed(4, "bucket 7: digest differs", "rollout-3"),
    VersionTaken(4, wants_delta=False, broadcast=BroadcastOrder("7c1f", 4, "gloo")),
    BroadcastStatus(4, "7c1f", "10.0.0.1:41873", "rank 0: timed out"),
    TrainerSet("trainer-0", (("trainer-1", 2),)),
    TrainerRelay("trainer-1", b"frame"),
    SetDevices("trainer", 4, True, (0, 1)),
    DevicesReleased("trainer", 2, 22_000_000_000, 1.1),
    BeginEpisode(
        "p7@0#3",
        1,
        9,
        512,
        row='{"n": 5}',
        turns=(RecordedTurn(b"\x01\0\0\0", "5f0c", b"\x02\0\0\0", "stop", 0.5, b"s"),),
        repeats=True,
    ),
    StepEpisode("p7@0#3", 1, 0, b"\x02\0\0\0", "stop"),
    EndEpisode((("p7@0#3", 1),)),
    Observed("p7@0#3", 1, 0, 0, b"\x01\0\0\0", 64, "5f0c", "[]", 0.5, b"s", 0.25, 1),
    EpisodeEnded("p7@0#3", 1, 2, "failed", None, 0.5, "no n", "[]", {"won": 1.0}, 0.25, 1),
    Drain("rollout-0", "SIGTERM"),
    Bye("drained", True),
    Watch(0.5),
    Snapshot(
        run="a",
        run_dir="runs/a",
        state="running",
        step=3,
        num_steps=10,
        policy_version=3,
        elapsed_s=1.5,
        nodes=(
            NodeRow(
                "n", ("rollout",), "ready", "h", 1, "cpu", None, 1, 2, 3.0, 0.1, 0.2, state_s=0.5
            ),
        ),
        wait=WaitRow("scores", 12.5, 31, 1, 4, True, ("a",), 1, 9.5, 60.0, "add one"),
        tail=TailRow("both", 3, 8, 2, 20.5, 30.5, 0.5, 0.25),
        max_staleness=1,
        cost=CostRow(2, 3, 1.5, 0.5, 2.5, (StepForecast(3, 9.5, 0.25),), 5, 4),
        rewards=(0.5,),
        evals=((0, {"held": 0.25}),),
        length_histogram=((9, 3),),
        metrics={"lr": 1e-4},
        counters={"nodes_lost": 1},
        events=((0.5, "hello"),),
        warnings=(WarningRow("lost", 2, 1.0),),
        samples=(SampleText("r", "p", "t", None, 3, 1),),
    ),
]


def test_every_message_has_an_example_here():
    assert [type(e) for e in EXAMPLES] == list(get_args(Message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda e: type(e).__name__)
def test_round_trip(message: Message):
    assert wire.MESSAGES.decode(wire.MESSAGES.encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda e: type(e).__name__)
def test_every_field_without_a_default_is_required_and_checked(message: Message):
    """Leaving a field out, or giving it a type that no message field has, must not decode."""
    fields: dict[str, Any] = dataclasses.asdict(message)
    for f in dataclasses.fields(message):
        without = {k: v for k, v in fields.items() if k != f.name}
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required:
            with pytest.raises(ProtocolError, match=f.name):
                wire.MESSAGES.decode(frame(type(message).__name__, without))
        with pytest.raises(ProtocolError):
            wire.MESSAGES.decode(frame(type(message).__name__, {**fields, f.name: [[None]]}))


def test_bytes_of_protocol_20_are_pinned():
    """A change here means that daemons of two releases do not understand each other: raise
    PROTOCOL."""
    assert PROTOCOL == 20
    abort = wire.MESSAGES.encode(Abort((("p#0", 1),)))
    assert abort.hex() == "92a541626f727481a8617474656d7074739192a370233001"
    checkpointed = wire.MESSAGES.encode(Checkpointed(20, 10))
    assert checkpointed.hex() == "92ac436865636b706f696e74656482a47374657014a66f6c646573740a"
    taken = wire.MESSAGES.encode(ShardsTaken(4, 2))
    assert taken.hex() == "92ab53686172647354616b656e82a47374657004a5696e64657802"
    given = wire.MESSAGES.encode(SetDevices("trainer", 4, True, (0, 1)))
    assert given.hex() == (
        "92aa5365744465766963657384a4726f6c65a7747261696e6572a66e756d62657204a6616374697665c3"
        "a57061727473920001"
    )
    saving = wire.MESSAGES.encode(Heartbeat(is_saving=True))
    assert saving.hex().endswith("ab6e756d5f776f726b65727300a969735f736176696e67c3")
    chunk = TokenChunk(
        1, "d", (ResponseTokens("r", 2, 0, wire.pack_i32([3]), wire.pack_f32([-1.0])),)
    )
    assert wire.MESSAGES.encode(chunk).hex() == (
        "92aa546f6b656e4368756e6b83ae706f6c6963795f76657273696f6e01a6646967657374a164a9726573706f6e736573"
        "9187a8726573706f6e7365a172a7617474656d707402a66f666673657400a9746f6b656e5f696473c40403000000a86c"
        "6f6770726f6273c404000080bfad66696e6973685f726561736f6ec0aa6e756d5f636163686564c0"
    )
    masked = wire.MESSAGES.encode(TrainShard(1, 0, 1, (TrainGroup("g", b"", (TRAINED,)),)))
    assert masked.hex() == (
        "92aa547261696e536861726488a47374657001a5696e64657800ae706f6c6963795f76657273696f6e01a667726f75"
        "70739184a567726f7570a167a670726f6d7074c400a9726573706f6e7365739187a8726573706f6e7365a670374030"
        "2333a9746f6b656e5f696473c400b0726f6c6c6f75745f6c6f6770726f6273c400a6726577617264cb3ff000000000"
        "0000ad66696e6973685f726561736f6ea66c656e677468a96c6f73735f6d61736bc40105a96e756d5f7374616c6500"
        "aa6d696e695f626174636800"
        "a46c617374c2aa6e756d5f67726f75707300a5616c6f6e65c2a77265706c69636100"
    )


def test_bytes_of_what_says_where_weights_are_to_be_had_are_pinned():
    endpoint = wire.MESSAGES.encode(WeightsEndpoint(("h:1",), "s"))
    assert endpoint.hex() == (
        "92af57656967687473456e64706f696e7482a961646472657373657391a3683a31a6736563726574a173"
    )
    source = WeightsSource("n", ("h:1",), "t")
    delta = DeltaOffer("a", "b", "c", 1, 2)
    offer = PublishWeights(4, "b", 9, 8, (source,), (delta,), Canary(b"", b""), (3,), (0, 1))
    assert wire.MESSAGES.decode(wire.MESSAGES.encode(offer)) == offer
    base = WeightsBase("b", 9, 8, (source,))
    assert wire.to_bytes(base).hex() == (
        "84a6646967657374a162a96e756d5f627974657309ae6d616e69666573745f627974657308a7736f75726365"
        "739183a46e6f6465a16ea961646472657373657391a3683a31a67469636b6574a174"
    )
    assert wire.MESSAGES.encode(offer).hex() == (
        "92ae5075626c697368576569676874738bae706f6c6963795f76657273696f6e04a6646967657374a162a96e"
        "756d5f627974657309ae6d616e69666573745f627974657308a7736f75726365739183a46e6f6465a16ea961"
        "646472657373657391a3683a31a67469636b6574a174a664656c7461739185a462617365a161a67461726765"
        "74a162a6646967657374a163ae6d616e69666573745f627974657301a96e756d5f627974657302a663616e61"
        "727983a9746f6b656e5f696473c400a86c6f6770726f6273c400a56474797065a7666c6f61743332a8706f72"
        "74696f6e739103a87265706c69636173920001a567726f7570c0a462617365c0"
    )
    bad = wire.MESSAGES.encode(WeightsFailed(4, "r", "n"))
    assert bad.hex() == (
        "92ad576569676874734661696c656483ae706f6c6963795f76657273696f6e04a6726561736f6ea172a6736f75726365"
        "a16e"
    )


def test_bytes_of_broadcasts_are_pinned():
    taken = wire.MESSAGES.encode(VersionTaken(4, True, BroadcastOrder("g", 4, "gloo")))
    assert taken.hex() == (
        "92ac56657273696f6e54616b656e83ae706f6c6963795f76657273696f6e04ab77616e74735f64656c7461c3"
        "a962726f61646361737483a567726f7570a167a5776f726c6404a76261636b656e64a4676c6f6f"
    )
    status = wire.MESSAGES.encode(BroadcastStatus(4, "g", "h:1"))
    assert status.hex() == (
        "92af42726f61646361737453746174757384ae706f6c6963795f76657273696f6e04a567726f7570a167a761"
        "646472657373a3683a31a6726561736f6ea0"
    )


def test_unknown_field_is_skipped_so_that_newer_peers_may_add_some():
    assert wire.MESSAGES.decode(frame("Bye", {"reason": "x", "colour": [1]})) == Bye("x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x92",
        wire.MESSAGES.encode(Bye("x"))[:-1],
        b"\x93\xa3Bye\x81\xa6reason\xa1x\x00",
        b"\xff" * 100,
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xa3Bye\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x92\xa6Object\x80",
        b"\x92\x01\x80",
        b"\x92\xa3Bye\x81\xa6reason\xa2\xff\xfe",
    ],
)
def test_garbage_is_a_protocol_error(data: bytes):
    with pytest.raises(ProtocolError):
        wire.MESSAGES.decode(data)


def test_mutated_frames_decode_or_are_protocol_errors():
    rng = random.Random(1)
    frames = [wire.MESSAGES.encode(e) for e in EXAMPLES]
    survived = 0
    for _ in range(20_000):
        data = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            wire.MESSAGES.decode(bytes(data[: rng.randint(1, len(data))]))
            survived += 1
        except ProtocolError:
            pass
    assert 0 < survived < 10_000


def test_frame_above_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ProtocolError, match="exceeds 10"):
        wire.MESSAGES.decode(wire.MESSAGES.encode(Bye("longer than that")))


def test_arrays_are_little_endian_and_checked():
    assert wire.pack_i32([1, -1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert wire.unpack_i32(wire.pack_i32([5, 6])) == [5, 6]
    assert wire.unpack_f32(wire.pack_f32([-0.5])) == [-0.5]
    with pytest.raises(ProtocolError, match="whole number"):
        wire.unpack_i32(b"123")
    with pytest.raises(OverflowError):
        wire.pack_i32([2**31])


def frame(name: str, fields: dict[str, Any]) -> bytes:
    import msgspec

    return msgspec.msgpack.encode((name, fields))


@dataclasses.dataclass
class Nested:
    name: str
    score: float
    missing: float | None = None
    pairs: tuple[tuple[int, dict[str, float]], ...] = ()
    rows: list["Nested"] | None = None


def test_figures_that_are_not_finite_come_back_from_json_as_nan():
    inner = Nested("in", math.nan, 1.0, ((3, {"a": math.inf, "b": 0.5}),))
    back = wire.from_json(wire.to_json(Nested("out", -math.inf, None, (), [inner])), Nested)
    assert back.missing is None  # what may be None is None
    assert math.isnan(back.score)
    assert back.rows is not None
    assert math.isnan(back.rows[0].score)
    assert back.rows[0].missing == 1.0
    (step, scores), *_ = back.rows[0].pairs
    assert step == 3
    assert math.isnan(scores["a"])
    assert scores["b"] == 0.5


@pytest.mark.parametrize(
    "data", ['{"name": null, "score": 1}', '{"name": "a"}', '{"name": "a", "score": "b"}', "[1", ""]
)
def test_json_of_another_type_is_refused_with_the_first_reason(data):
    with pytest.raises(ProtocolError, match="undecodable JSON"):
        wire.from_json(data, Nested)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_snapshot_with_figures_that_are_not_finite_can_be_read(bad):
    [whole] = [e for e in EXAMPLES if isinstance(e, Snapshot)]
    assert whole.tail is not None
    tail = dataclasses.replace(whole.tail, kept_length=bad)
    metrics, evals = {"grad_norm": bad}, ((0, {"held": bad}),)
    snapshot = dataclasses.replace(
        whole, rewards=(bad, 1.0), metrics=metrics, evals=evals, tail=tail, tokens_per_s=bad
    )
    back = wire.from_json(wire.to_json(snapshot), Snapshot)
    assert str(back) == str(snapshot).replace("-inf", "nan").replace("inf", "nan")
