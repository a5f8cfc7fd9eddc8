"""What the keys of nodes, `join` and `environment`, are good for, and what not: whatever only the
full key allows is tried with them."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import zmq
from zmq.utils import z85

from lightrl.cli import main
from lightrl.errors import ConfigError, WrongKey
from lightrl.keys import (
    ENVIRONMENT,
    ENVIRONMENT_FILE,
    JOIN_FILE,
    KEY_FILE,
    Access,
    access_of,
    coordinator_public_key,
    coordinator_secret,
    environment_key,
    join_key,
    new_key,
    read_key,
    require_full,
    restore_keys,
    secret_of,
    write_key,
    write_keys,
)
from lightrl.messages.episodes import EpisodeEnded, Observed
from lightrl.messages.message import Message
from lightrl.messages.nodes import PROTOCOL, TAKEN, Bye, Drain, Heartbeat, Hello, Role, Welcome
from lightrl.messages.responses import Abort, Generate, TokenChunk
from lightrl.messages.snapshot import Snapshot, Watch
from lightrl.messages.training import Checkpointed, StepDone
from lightrl.messages.weights import PublishWeights, WeightsReady
from lightrl.transport.link import Link
from lightrl.transport.router import MAX_WELCOMES, Router
from lightrl.transport.zap import AUTHENTICATOR
from lightrl.wire import from_json
from tests.support.daemons import DEADLINE_S, Running, a_run

pytestmark = pytest.mark.usefixtures("warm_daemons")

M = TypeVar("M", bound=Message)
ANY = "tcp://127.0.0.1:*"
OBSERVED = Observed("p0@0#0", 1, 0, 0, bytes(4), 1, "d", "[]")

# The keys themselves


def test_all_keys_are_for_their_owner_alone_and_told_apart_by_their_form(tmp_path: Path):
    key = write_keys(tmp_path)
    join, environment = (read_key(tmp_path / name) for name in (JOIN_FILE, ENVIRONMENT_FILE))
    for name in (KEY_FILE, JOIN_FILE, ENVIRONMENT_FILE):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert (read_key(tmp_path / KEY_FILE), join_key(key)) == (key, join)
    assert environment_key(key) == environment
    assert [access_of(k) for k in (key, join, environment)] == list(Access)
    assert "\n" not in join + environment  # they fit into an environment variable
    assert require_full(key, "") == key
    with pytest.raises(ConfigError, match="RUN_DIR/key"):
        require_full(join, "status needs")
    with pytest.raises(ConfigError, match="lets an environment node join; status needs RUN_DIR/k"):
        require_full(environment, "status needs")


def test_join_holds_no_secret_but_that_of_a_node():
    key = new_key()
    join, environment = join_key(key), environment_key(key)
    for limited in (join, environment):
        assert coordinator_public_key(limited) == coordinator_public_key(key)
        with pytest.raises(ConfigError):
            coordinator_secret(limited)
    secrets = {bytes.fromhex(key), coordinator_secret(key)}
    assert len(secrets | {secret_of(k) for k in (key, join, environment)}) == 5
    public = z85.decode(zmq.curve_public(z85.encode(secret_of(join))))
    assert bytes.fromhex(join.removeprefix("join-")) == secret_of(join) + coordinator_public_key(
        key
    )
    assert public != coordinator_public_key(key)


def test_a_run_that_has_no_join_gets_the_one_that_belongs_to_its_key(tmp_path: Path):
    key = write_key(tmp_path / KEY_FILE)
    for spoil in (
        lambda p: p.unlink(missing_ok=True),
        lambda p: p.write_text(""),
        lambda p: p.chmod(0o644),
    ):
        spoil(tmp_path / JOIN_FILE)
        spoil(tmp_path / ENVIRONMENT_FILE)
        restore_keys(tmp_path)
        assert read_key(tmp_path / ENVIRONMENT_FILE) == environment_key(key)
        assert read_key(tmp_path / KEY_FILE) == key
        assert read_key(tmp_path / JOIN_FILE) == join_key(key)
    before = (tmp_path / JOIN_FILE).stat().st_ino
    restore_keys(tmp_path)
    assert (tmp_path / JOIN_FILE).stat().st_ino == before  # what fits is left alone
    (tmp_path / KEY_FILE).unlink()
    restore_keys(tmp_path)
    assert (
        read_key(tmp_path / JOIN_FILE) == join_key(read_key(tmp_path / KEY_FILE)) != join_key(key)
    )


# Connections


def test_each_message_says_what_its_connection_has_proved():
    """Also under one identity: the second connection takes the first one's place, but not its
    rights."""

    async def scenario() -> None:
        key = new_key()
        router = Router(ANY, key)
        async with asyncio.timeout(DEADLINE_S):
            for k, access in (
                (key, Access.FULL),
                (join_key(key), Access.JOIN),
                (environment_key(key), Access.ENVIRONMENT),
                (key, Access.FULL),
            ):
                link = Link(router.address, "trainer/1", k)
                link.send(Heartbeat())
                [(peer, message)] = await router.receive()
                assert (peer.identity, peer.name, peer.access) == ("trainer/1", "trainer", access)
                assert message == Heartbeat()
                link.close()
        router.close()

    asyncio.run(scenario())


def test_nobody_can_guess_under_which_identity_another_one_is_connected():
    async def scenario() -> None:
        key = new_key()
        router = Router(ANY, key)
        seen: set[str] = set()
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(3):
                link = await Link.connect(router.address, "n", key)
                link.send(Heartbeat())
                [(peer, _)] = await router.receive()
                seen.add(peer.identity.removeprefix("n/"))
                link.close()
        assert len(seen) == 3
        assert all(len(bytes.fromhex(s)) >= 16 for s in seen)
        router.close()

    asyncio.run(scenario())


def test_nobody_can_pose_as_the_coordinator_with_join():
    async def scenario() -> None:
        key = new_key()
        join = join_key(key)
        with pytest.raises(ConfigError, match="a coordinator needs"):
            Router(ANY, join)
        false = zmq.Context.instance().socket(zmq.ROUTER)  # with the only secret that `join` holds
        false.set(zmq.LINGER, 0)
        false.set(zmq.CURVE_SERVER, 1)
        false.set(zmq.CURVE_SECRETKEY, z85.encode(secret_of(join)))
        false.set_string(zmq.ZAP_DOMAIN, "false")
        AUTHENTICATOR.admit(
            "false", {z85.decode(zmq.curve_public(z85.encode(secret_of(join)))): "join"}
        )
        false.bind(ANY)
        try:
            link = await Link.connect(false.getsockopt_string(zmq.LAST_ENDPOINT), "n", join)
            link.send(Heartbeat())
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(WrongKey):
                    await link.receive()
            link.close()
        finally:
            AUTHENTICATOR.forget("false")
            false.close()

    asyncio.run(scenario())


# A run


async def welcome(link: Link, name: str, *roles: Role, incarnation: int = 7) -> Welcome:
    """The answer to a hello."""
    link.send(
        Hello(name, incarnation, roles or ("rollout",), PROTOCOL, pid=0, host="elsewhere", slots=1)
    )
    return await expect(link, Welcome)


async def expect(link: Link, kind: type[M], holds: Callable[[M], bool] = lambda _: True) -> M:
    while True:
        for message in await link.receive():
            if isinstance(message, kind) and holds(message):
                return message


@contextlib.asynccontextmanager
async def intruder(run: Running, name: str, file: str = JOIN_FILE) -> AsyncIterator[Link]:
    """A connection with the `join` key, or with that of another file."""
    link = await Link.connect(run.head.address, name, read_key(run.join_file.with_name(file)))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield link
    finally:
        link.close()


def test_with_join_nothing_can_be_said_that_is_no_business_of_a_rollout_node(tmp_path: Path):
    of_others: list[Message] = [
        Drain("*", "intruder"),
        Drain("a", "intruder"),
        Watch(0.0),
        PublishWeights(1, "d", 1, 1),
        StepDone(0, 1, {}),
        Checkpointed(0),
        OBSERVED,
        EpisodeEnded("p0@0#0", 1, 1, "done", 1.0),
    ]

    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            run.trainer.may_publish.clear()
            await run.add_rollout("a")
            before = await run.until(lambda s: s.rollout_tokens > 0)
            for message in of_others:  # as a stranger to the run, and as a node of it
                for joins in (False, True):
                    async with intruder(run, "b") as link:
                        if joins:
                            assert not (await welcome(link, "b")).refused
                        link.send(message)
                        link.send(Heartbeat())  # not a node, or not any more: it is told so
                        assert (await expect(link, Welcome)).refused == "rejoin"
            after = await run.until(lambda s: s.counters["bad_frames"] == 2 * len(of_others))
            assert (after.state, after.step, after.policy_version) == ("running", 0, 0)
            assert after.counters["nodes_lost"] == len(of_others)  # the intruder, each time
            pids = [{n.name: n.pid for n in s.nodes}["a"] for s in (before, after)]
            assert pids[0] == pids[1]
            run.trainer.may_publish.set()
            await run.until_finished()
            assert run.head.succeeded

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "roles",
    [
        ("trainer",),
        pytest.param(("coordinator",), marks=pytest.mark.e2e),
        pytest.param(("trainer", "rollout"), marks=pytest.mark.e2e),
        (),
    ],
)
def test_with_join_one_is_a_rollout_node_or_nothing(tmp_path: Path, roles: tuple[Role, ...]):
    async def scenario() -> None:
        async with a_run(tmp_path) as run, intruder(run, "b") as link:
            await run.until(lambda s: s.policy_version == 0)
            link.send(Hello("b", 7, roles, PROTOCOL, pid=0, host="elsewhere"))
            assert "one may be a rollout node" in (await expect(link, Welcome)).refused
            assert "coordinator's name" in (await _hello_as(run, "head")).refused

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("file", "roles", "why"),
    [
        (JOIN_FILE, ("environment",), "with the join key one may be a rollout node"),
        (ENVIRONMENT_FILE, ("rollout",), "with the environment key one may be an environment node"),
        (ENVIRONMENT_FILE, ("environment", "rollout"), "an environment node, not environment, r"),
    ],
)
def test_neither_key_of_a_node_makes_it_a_node_of_the_other_role(
    tmp_path: Path, file: str, roles: tuple[Role, ...], why: str
):
    async def scenario() -> None:
        async with a_run(tmp_path) as run, intruder(run, "b", file) as link:
            assert why in (await welcome(link, "b", *roles)).refused
            link.send(TokenChunk(0, "d", ()) if file == ENVIRONMENT_FILE else OBSERVED)
            after = await run.until(lambda s: s.counters["bad_frames"] == 1)
            assert "b" not in {n.name for n in after.nodes}

    asyncio.run(scenario())


async def _hello_as(run: Running, name: str) -> Welcome:
    async with intruder(run, name) as link:
        return await welcome(link, name)


def test_with_join_nobody_speaks_under_the_name_of_a_node_that_lives(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            run.trainer.may_publish.clear()
            process = await run.add_rollout("a")
            await run.until(lambda s: s.rollout_tokens > 0)
            for name in ("a", "trainer"):
                async with intruder(run, name) as link:
                    assert (await welcome(link, name)).refused == TAKEN
                    link.send(Bye("intruder"))
                    link.send(Heartbeat())
                    assert (await expect(link, Welcome)).refused == "rejoin"
            snapshot = await run.until(lambda s: True)
            assert snapshot.counters["nodes_lost"] == 0
            assert {n.name: n.state for n in snapshot.nodes if n.name in {"a", "trainer"}} == {
                "a": "ready",
                "trainer": "ready",
            }
            run.trainer.may_publish.set()
            await run.until_finished()
            assert run.head.succeeded
            assert process.returncode in {None, 0}

    asyncio.run(scenario())


def test_daemon_that_is_started_again_gets_its_name_when_the_one_before_is_lost(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            run.trainer.may_publish.clear()
            hung = await run.add_rollout("a")
            await run.until(lambda s: s.rollout_tokens > 0)
            hung.send_signal(signal.SIGSTOP)  # its connection stands, until its lease has run out
            again = await run.add_rollout("a")
            try:
                row = await run.until(lambda s: any(n.pid == again.pid for n in s.nodes))
                assert row.counters["nodes_lost"] == 1
            finally:
                hung.kill()
                await hung.communicate()
            again.kill()  # and at once if that connection is closed
            await again.communicate()
            third = await run.add_rollout("a")
            await run.until(lambda s: any(n.pid == third.pid for n in s.nodes))
            run.trainer.may_publish.set()
            await run.until_finished()
            assert run.head.succeeded

    asyncio.run(scenario())


def test_what_a_node_says_is_shown_as_the_terminal_would_show_it(tmp_path: Path):
    """Spelled like all else that is said, and on one line."""

    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            async with intruder(run, "b") as link:
                assert not (await welcome(link, "b")).refused
                link.send(Bye("\x1b[2J gone\nfor good \u202e"))
                said = "b left (\\u001b[2J gone for good \\u202e)"
                await run.until(lambda s: any(said in text for _, text in s.events))
            await run.add_rollout("a")
            await run.until_finished()
            assert run.head.succeeded

    asyncio.run(scenario())


def test_whoever_says_hello_in_a_loop_is_cut_off_and_the_run_goes_on(tmp_path: Path):
    async def scenario() -> None:
        async with a_run(tmp_path) as run:
            broke = asyncio.Event()
            key = read_key(run.join_file)
            link = await Link.connect(run.head.address, "b", key, on_break=broke.set)
            hello = Hello("b", 7, ("rollout",), PROTOCOL, pid=0, host="elsewhere", slots=1)
            for _ in range(5 * MAX_WELCOMES):  # and reads nothing
                link.send(hello)
            async with asyncio.timeout(DEADLINE_S):
                await broke.wait()
            link.close()
            await run.until(lambda s: all(n.name != "b" for n in s.nodes))
            await run.add_rollout("a")
            await run.until_finished()
            assert run.head.succeeded

    asyncio.run(scenario())


def test_attempt_that_was_never_given_out_makes_no_response_poison(tmp_path: Path):
    """A node claims one as high as can be said; whoever gets the response afterwards must be able
    to."""

    async def scenario() -> None:
        async with a_run(tmp_path) as run, intruder(run, "evil") as link:
            hello = Hello("evil", 7, ("rollout",), PROTOCOL, pid=0, host="elsewhere", slots=1)
            link.send(hello)
            offer = await expect(link, PublishWeights)
            version, digest = offer.policy_version, offer.digest
            link.send(WeightsReady(version, digest))
            work = await expect(link, Generate)
            link.send(Bye("back in a moment"))
            names = [r.response for r in work.requests]
            claims = tuple((name, (1 << 31) - 1) for name in names)
            link.send(
                replace(hello, incarnation=8, slots=4, serves=(version, digest), running=claims)
            )
            aborted = await expect(link, Abort)
            assert aborted.attempts == claims
            link.send(Bye("that was all"))
            await run.add_rollout("honest")
            await run.until_finished()
            assert run.head.succeeded
            last = from_json((run.config.run_dir / "snapshot.json").read_bytes(), Snapshot)
            assert last.counters["nodes_lost"] == 0

    asyncio.run(scenario())


# The command line


@pytest.mark.parametrize("by", ["file", "environment"])
@pytest.mark.parametrize(
    "command",
    [
        ("status", "tcp://127.0.0.1:1"),
        ("drain", "a", "tcp://127.0.0.1:1"),
        ("down", "tcp://127.0.0.1:1"),
        ("up", "--join", "tcp://127.0.0.1:1", "--role", "trainer"),
    ],
    ids=lambda c: c[0],
)
def test_who_has_join_alone_is_told_what_is_missing(
    tmp_path: Path,
    command: tuple[str, ...],
    by: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    write_keys(tmp_path)
    (tmp_path / KEY_FILE).unlink()
    monkeypatch.setenv(ENVIRONMENT, read_key(tmp_path / JOIN_FILE))
    options = ("--key", str(tmp_path / JOIN_FILE)) if by == "file" else ()
    with pytest.raises(SystemExit):
        main([*command, *options])
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("lightrl: this key only lets a rollout node join; ")
    assert line.endswith("RUN_DIR/key")


@pytest.mark.parametrize(
    ("file", "role", "line"),
    [
        (JOIN_FILE, "environment", "a rollout node join; --role environment needs RUN_DIR/env"),
        (ENVIRONMENT_FILE, "rollout", "an environment node join; --role rollout needs RUN_DIR/j"),
        (ENVIRONMENT_FILE, "trainer", "an environment node join; --role trainer needs RUN_DIR/k"),
        (ENVIRONMENT_FILE, "", "no answer (connection refused)"),  # follows from the key
        (KEY_FILE, "environment", "no answer (connection refused)"),
        (KEY_FILE, "environment,rollout", "an environment node is a daemon of its own"),
    ],
)
def test_role_needs_the_key_that_permits_it(
    tmp_path: Path, file: str, role: str, line: str, capsys: pytest.CaptureFixture[str]
):
    write_keys(tmp_path)
    options = ("--join", "tcp://127.0.0.1:1", "--key", str(tmp_path / file))
    with pytest.raises(SystemExit):
        main(["up", *options, *(("--role", role) if role else ())])
    [said] = capsys.readouterr().err.strip().splitlines()
    assert line in said


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_workers_are_those_of_an_environment_node(role: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["up", "--join", "tcp://127.0.0.1:1", "--role", role, "--workers", "2"])
    assert "--workers is for --role environment" in capsys.readouterr().err
