"""What comes from others is bounded before it costs anything: messages, welcomes, manifests. No
pickle."""

import ast
import asyncio
import contextlib
import dataclasses
import random
import socket
from pathlib import Path

import pytest

import lightrl
from lightrl.daemon.admission import MAX_FILES_BYTES, config_of, write_model_files
from lightrl.errors import ProtocolError, WeightsError
from lightrl.keys import Access, new_key
from lightrl.messages import fields
from lightrl.messages.broadcasts import BroadcastStatus
from lightrl.messages.episodes import EpisodeEnded, Observed
from lightrl.messages.load import Load
from lightrl.messages.message import Message
from lightrl.messages.nodes import PROTOCOL, Bye, Drain, Heartbeat, Hello, Welcome
from lightrl.messages.responses import ResponseTokens, TokenChunk
from lightrl.messages.snapshot import Watch
from lightrl.messages.training import Checkpointed, StepDone, TrainShard
from lightrl.messages.weights import (
    Canary,
    DeltaOffer,
    PublishWeights,
    WeightsEndpoint,
    WeightsFailed,
    WeightsProgress,
    WeightsReady,
    WeightsSource,
)
from lightrl.system.addresses import host_and_port, join_address
from lightrl.transport.link import Link
from lightrl.transport.router import Router
from lightrl.transport.validate import check_bounds, require_allowed
from lightrl.transport.zeromq import HANDSHAKE_MS
from lightrl.weights.pull.connection import Wanted, parse_address
from lightrl.weights.pull.transfer import Pull
from lightrl.weights.version.layout import TensorSpec
from lightrl.weights.version.manifest import DIGEST_BYTES, Manifest, decode, digest_version, encode
from lightrl.wire import MESSAGES
from tests.security import garbage
from tests.support.daemons import make_config
from tests.wire.test_messages import EXAMPLES

HELLO = Hello("n", 1, ("rollout",), PROTOCOL, 1, "h")
SECRET = "c0ffee" * 6
DELTA = DeltaOffer("a", "b", "c", 1, 1)
NO_ADDRESSES = (
    "",
    ":1",
    "h",
    "h:",
    "h:0",
    "*:1",
    "h:*",
    "h:65536",
    "h:99999999",
    "h:１",
    "a..b:1",
    f"{'x' * 64}:1",
    "a b:1",
    "h\0:1",
    "ä:1",
    "h:1/path",
    "user@h:1",
)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda e: type(e).__name__)
def test_honest_messages_pass(message: Message):
    check_bounds(message)


@pytest.mark.parametrize(
    "message",
    [
        dataclasses.replace(HELLO, node=""),
        dataclasses.replace(HELLO, node="x" * 300),
        dataclasses.replace(HELLO, node="\x1b[2J"),
        dataclasses.replace(HELLO, host="h" * 300),
        dataclasses.replace(HELLO, roles=("rollout",) * 4),
        dataclasses.replace(HELLO, slots=1 << 40),
        dataclasses.replace(HELLO, incarnation=1 << 63),
        dataclasses.replace(HELLO, serves=(-1, "d")),
        dataclasses.replace(HELLO, running=(("r", 1),) * (fields.MAX_RESPONSES + 1)),
        dataclasses.replace(HELLO, running=(("r" * 300, 1),)),
        dataclasses.replace(HELLO, running=(("r", 1 << 31),)),
        TokenChunk(1, "d", (ResponseTokens("r", 1 << 31, 0, b"", b""),)),
        Heartbeat(loop_lag_ms=float("nan")),
        Heartbeat(Load(kv_usage=float("inf"))),
        Heartbeat(Load(running=1 << 63)),
        Heartbeat(device="x" * 10_000),
        TokenChunk(-1, "d", ()),
        TokenChunk(1 << 60, "d", ()),
        TokenChunk(1, "d", (ResponseTokens("r", 1, -1, b"", b""),)),
        TokenChunk(1, "d", (ResponseTokens("r", 1, 1 << 40, b"", b""),)),
        Heartbeat(weights=WeightsProgress(1, 2, 1)),
        PublishWeights(-1, "d", 1, 1),
        PublishWeights(1, "d", -1, 1),
        PublishWeights(1, "d", 0, 1),
        PublishWeights(1, "d", 1, 0),
        PublishWeights(1, "d", 1 << 53, 1),
        PublishWeights(1, "d" * 1000, 1, 1),
        PublishWeights(1, "d\n", 1, 1),
        PublishWeights(1, "d", 1, 1, (WeightsSource("n", ("h:1",), "t"),)),
        PublishWeights(1, "d", 1, 1, deltas=(DELTA,) * (fields.MAX_DELTAS + 1)),
        PublishWeights(1, "d", 1, 1, deltas=(dataclasses.replace(DELTA, num_bytes=-1),)),
        PublishWeights(1, "d", 1, 1, deltas=(dataclasses.replace(DELTA, base="\0"),)),
        PublishWeights(1, "d", 1, 1, canary=Canary(bytes(8), bytes(8))),
        PublishWeights(1, "d", 1, 1, canary=Canary(bytes(7), bytes(4))),
        PublishWeights(1, "d", 1, 1, canary=Canary(b"", b"")),
        PublishWeights(1, "d", 1, 1, canary=Canary(bytes(1 << 20), bytes((1 << 20) - 4))),
        PublishWeights(1, "d", 1, 1, portions=(-1,)),
        PublishWeights(1, "d", 1, 1, replicas=(-1,)),
        PublishWeights(1, "d", 1, 1, replicas=(0,) * (fields.MAX_RESPONSES + 1)),
        TrainShard(1, 0, 1, (), alone=True, replica=-1),
        WeightsEndpoint((), SECRET),
        WeightsEndpoint(("h:1",) * (fields.MAX_ADDRESSES + 1), SECRET),
        WeightsEndpoint(("h:1",), ""),
        WeightsEndpoint(("h:1",), "s" * 15),
        WeightsEndpoint(("h:1",), "s" * 129),
        *(WeightsEndpoint(("h:1", address), SECRET) for address in NO_ADDRESSES),
        WeightsFailed(1, "r", "\x1b[2J"),
        WeightsFailed(-1, "r", "n"),
        WeightsFailed(1, "r" * 10_000, "n"),
        WeightsReady(1, "d", pull_s=float("nan")),
        WeightsReady(1, "d", load_s=float("inf")),
        WeightsReady(1, "d", canary_diff=float("nan")),
        WeightsReady(1, "d", num_bytes=1, peer_bytes=2),
        WeightsReady(1, "d", num_bytes=1, delta_bytes=2),
        WeightsReady(1, "d", num_bytes=-1),
        WeightsFailed(1, "x" * 10_000),
        WeightsReady(1, "d", broadcast_s=float("nan")),
        Heartbeat(num_workers=-1),
        Heartbeat(num_workers=1025),
        *(BroadcastStatus(1, "g", address) for address in NO_ADDRESSES),
        BroadcastStatus(1, "g\n", "h:1"),
        BroadcastStatus(1, "", "h:1"),
        BroadcastStatus(-1, "g", "h:1"),
        BroadcastStatus(1, "g", "h:1", "x" * 10_000),
        BroadcastStatus(1, "\x1b[2J", reason="r"),
        BroadcastStatus(1, "g" * 300, reason="r"),
        StepDone(1, 2, {f"m{k}": 0.0 for k in range(fields.MAX_METRICS + 1)}),
        Checkpointed(-1),
        Observed("r", 1, 0, 0, b"", 1, "d", "[]"),
        Observed("r", 1, 0, 0, bytes(5), 1, "d", "[]"),
        Observed("r", 1, 0, 0, bytes(4), 1, "\x1b[2J", "[]"),
        Observed("r", 1, 0, 0, bytes(4), 1, "d", "[]", float("nan")),
        Observed("r", 1, 0, 0, bytes(4), 1, "d", "[]", seconds=float("nan")),
        Observed("r", 1, -1, 0, bytes(4), 1, "d", "[]"),
        EpisodeEnded("r", 1, 1, "done", float("inf")),
        EpisodeEnded("r", 1, 1, "done", turn_reward=float("nan")),
        EpisodeEnded("r", 1, 1, "done", metrics={"a\nb": 1.0}),
        Drain("n", "x" * 10_000),
        Bye("x" * 10_000),
        Watch(float("inf")),
        Watch(float("nan")),
        Watch(-1.0),
    ],
    ids=lambda e: repr(e)[:50],
)
def test_what_no_honest_peer_says_is_refused(message: Message):
    with pytest.raises(ProtocolError):
        check_bounds(MESSAGES.decode(MESSAGES.encode(message)))


def allowed_with(access: Access) -> set[str]:
    allowed: set[str] = set()
    of_episodes = (Observed("r", 1, 0, 0, bytes(4), 1, "d", "[]"), EpisodeEnded("r", 1, 1, "done"))
    for message in (*EXAMPLES, *of_episodes):
        with contextlib.suppress(ProtocolError):
            require_allowed("n", message, access)
            allowed.add(type(message).__name__)
    return allowed


def test_with_the_environment_key_a_node_speaks_of_itself_and_of_episodes():
    assert allowed_with(Access.ENVIRONMENT) == {
        "Hello",
        "Heartbeat",
        "Observed",
        "EpisodeEnded",
        "Bye",
    }
    require_allowed("n", Drain("n"), Access.ENVIRONMENT)
    with pytest.raises(ProtocolError, match="Drain: not with the environment key"):
        require_allowed("n", Drain("m"), Access.ENVIRONMENT)


def test_with_the_join_key_a_node_speaks_of_itself_and_of_its_sources_and_publishes_nothing():
    of_itself = {"Hello", "Heartbeat", "TokenChunk", "Bye"}
    of_weights = {"WeightsEndpoint", "WeightsReady", "WeightsFailed"}
    of_groups = {"BroadcastStatus"}
    of_devices = {"DevicesReleased"}
    assert allowed_with(Access.JOIN) == of_itself | of_weights | of_groups | of_devices


def test_garbage_that_decodes_is_sane_or_a_protocol_error():
    rng, passed = random.Random(1), 0
    for _ in range(20_000):
        try:
            check_bounds(MESSAGES.decode(garbage.frame(rng)))
            passed += 1
        except ProtocolError:
            pass
    assert passed > 1000


def test_bad_frame_reaches_the_coordinator_as_an_error_with_its_sender():
    async def scenario() -> None:
        key = new_key()
        router = Router("tcp://127.0.0.1:*", key)
        node = await Link.connect(router.address, "n", key)
        node.send(Watch(float("inf")))
        node.send(Watch(1.0))
        received: list[tuple[str, Message | ProtocolError]] = []
        async with asyncio.timeout(90):
            while len(received) < 2:
                received += await router.receive()
        (sender, error), (other, message) = received
        assert isinstance(error, ProtocolError)
        assert (sender, message) == (other, Watch(1.0))
        node.close()
        router.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [1 << 26, 1 << 40, (1 << 63) - 1, 1 << 63])
def test_stranger_who_announces_a_huge_frame_is_cut_off(size: int):
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)

    async def scenario() -> None:
        router = Router("tcp://127.0.0.1:*", new_key())
        sock = socket.create_connection(host_and_port(router.address), 20)
        sock.settimeout(HANDSHAKE_MS / 2000)  # not only when its time is up

        def talk() -> None:
            sock.sendall(greeting)
            assert sock.recv(1, socket.MSG_WAITALL) == b"\xff"  # somebody speaks ZMTP there
            sock.sendall(b"\x06" + size.to_bytes(8, "big") + b"\x05HELLO")
            with contextlib.suppress(ConnectionError):
                while sock.recv(1000):
                    pass

        await asyncio.to_thread(talk)
        sock.close()
        router.close()

    asyncio.run(scenario())


# Welcomes


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".bashrc", "a\0b", "x" * 300, "\x1b[2J"],
)
def test_model_files_land_in_their_folder_or_nowhere(tmp_path: Path, name: str):
    with pytest.raises(ProtocolError, match="not a plain name"):
        write_model_files(tmp_path / "model", {"config.json": b"{}", name: b"x"})
    assert list(tmp_path.iterdir()) == []


def test_model_files_are_bounded(tmp_path: Path):
    for files in (
        {f"f{k}": b"" for k in range(fields.MAX_FILES + 1)},
        {f"f{k}": bytes(MAX_FILES_BYTES // 4) for k in range(5)},
    ):
        with pytest.raises(ProtocolError, match="model files of"):
            write_model_files(tmp_path / "model", files)
    files = {"config.json": b"{}", "tokenizer.model": b"\0", "chat_template.jinja": b"x"}
    write_model_files(tmp_path / "model", files)
    assert {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()} == files


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"run": 1}', '{"colour": 1}', "[" * 100_000]
)
def test_config_that_is_none_is_one_line(text: str):
    with pytest.raises(ProtocolError, match="the coordinator sent a config") as error:
        config_of(Welcome("run", text))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_config_arrives_whole(tmp_path: Path):
    config = make_config(tmp_path)
    assert config_of(Welcome("run", config.model_dump_json())) == config


# Weights

GOOD = TensorSpec("w", "float32", (2, 3), 0)


def manifest_of(
    *tensors: TensorSpec, num_bytes: int = 24, digests: bytes = bytes(DIGEST_BYTES)
) -> tuple[bytes, str]:
    """Its bytes, and the digest that belongs to them."""
    encoded = encode(Manifest(tensors, num_bytes, digests))
    return encoded, digest_version(encoded)


@pytest.mark.parametrize(
    "manifest",
    [
        manifest_of(),
        manifest_of(GOOD, digests=b""),
        manifest_of(GOOD, digests=bytes(DIGEST_BYTES + 1)),
        manifest_of(GOOD, digests=bytes(2 * DIGEST_BYTES)),
        manifest_of(GOOD, digests=bytes(DIGEST_BYTES * (fields.MAX_BUCKETS + 1))),
        manifest_of(GOOD, num_bytes=0),
        manifest_of(GOOD, num_bytes=-24),
        manifest_of(GOOD, num_bytes=25),
        manifest_of(GOOD, num_bytes=1 << 60),
        manifest_of(GOOD, GOOD),
        manifest_of(dataclasses.replace(GOOD, offset=-64)),
        manifest_of(dataclasses.replace(GOOD, offset=128)),
        manifest_of(dataclasses.replace(GOOD, offset=1)),
        manifest_of(dataclasses.replace(GOOD, dtype="object")),
        manifest_of(dataclasses.replace(GOOD, shape=(-1, -1))),
        manifest_of(dataclasses.replace(GOOD, shape=(0,)), num_bytes=0, digests=b""),
        manifest_of(dataclasses.replace(GOOD, shape=(1 << 30, 1 << 30)), num_bytes=1 << 62),
        manifest_of(dataclasses.replace(GOOD, shape=(1,) * 100)),
        manifest_of(dataclasses.replace(GOOD, name="w" * 5000)),
        (manifest_of(GOOD)[0], "00"),
        (manifest_of(GOOD)[0][:-1], digest_version(manifest_of(GOOD)[0][:-1])),
        (b"", digest_version(b"")),
    ],
    ids=range(22),
)
def test_impossible_manifest_is_refused(manifest: tuple[bytes, str]):
    decode(*manifest_of(GOOD))
    with pytest.raises(WeightsError):
        decode(*manifest)


SOURCE = WeightsSource("n", ("127.0.0.1:1",), "ticket")
DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("wanted", "source", "reason"),
    [
        (Wanted(1, "d", 24, 100), SOURCE, "not a digest"),
        (Wanted(1, DIGEST, 1 << 60, 100), SOURCE, "bytes"),
        (Wanted(1, DIGEST, 0, 100), SOURCE, "bytes"),
        (Wanted(1, DIGEST, 24, 0), SOURCE, "bytes"),
        (Wanted(1, DIGEST, 24, 1 << 40), SOURCE, "bytes"),
        (Wanted(1, DIGEST, 24, 100), dataclasses.replace(SOURCE, addresses=()), "no address"),
        (Wanted(1, DIGEST, 24, 100), dataclasses.replace(SOURCE, ticket=""), "not a ticket"),
        (Wanted(1, DIGEST, 24, 100), dataclasses.replace(SOURCE, ticket="t" * 999), "not a ticket"),
        (Wanted(1, DIGEST, 24, 100), dataclasses.replace(SOURCE, addresses=("h",)), "host:port"),
    ],
    ids=range(9),
)
def test_impossible_version_is_refused_before_anything_is_transferred(
    tmp_path: Path, wanted: Wanted, source: WeightsSource, reason: str
):
    async def pull() -> None:
        one = Pull(wanted, "n", tmp_path / "w")
        one.add_sources([source])
        await one.run()

    with pytest.raises(WeightsError, match=reason):
        asyncio.run(pull())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_holder_that_is_none_is_refused(address: str):
    with pytest.raises(WeightsError, match="host:port"):
        parse_address(address)


def test_holders_are_read_as_they_are_written():
    for host, port in (
        ("10.0.0.1", 80),
        ("node-1.example.org", 65535),
        ("::1", 1),
        ("localhost", 41873),
    ):
        assert parse_address(join_address(host, port)) == (host, port)


# No pickle


# Inside a sandbox of the reward "code" (tests/rewards/test_sandbox.py); and a column of a data set,
# of which only strings, numbers and lists are taken (tests/rewards/test_code.py).
EXEMPT = {("inside.py", "exec"), ("cases.py", "pickle")}


def test_nothing_in_the_package_unpickles():
    """Not even by way of torch.load or numpy: what a peer can send is data, never code."""
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for file in Path(lightrl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.Import):
                names = [a.name.split(".")[0] for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call):
                text = ast.unparse(node.func)
                is_exempt = (file.name, text) in EXEMPT
                assert is_exempt or text not in {"eval", "exec"}, f"{file}:{line}: {text}"
                assert not text.endswith(("recv_pyobj", "send_pyobj")), f"{file}:{line}: {text}"
                options = {k.arg: ast.unparse(k.value) for k in node.keywords}
                if text == "torch.load":
                    assert options.get("weights_only") == "True", f"{file}:{line}: {text}"
                assert options.get("allow_pickle", "False") == "False", f"{file}:{line}: {text}"
            found = {n for n in unsafe & set(names) if (file.name, n) not in EXEMPT}
            assert not found, f"{file}:{line}: {names}"
