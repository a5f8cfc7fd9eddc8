"""What adapters are beside: pulled once, whatever versions come meanwhile, and passed on."""

import asyncio
import filecmp
from dataclasses import replace
from pathlib import Path

from lightrl.messages.weights import PublishWeights, WeightsBase
from lightrl.weights.serve.server import WeightServer
from lightrl.weights.version.manifest import VersionFile
from tests.rollout.test_weights import BUCKETS_A_S, SIZE, Node, begun, node, until
from tests.support.daemons import published
from tests.support.versions import make_version, serving, source


def offer(one: Node, file: VersionFile, base: VersionFile, holder: WeightServer) -> PublishWeights:
    version = file.policy_version
    beside = WeightsBase(
        base.digest,
        base.num_bytes,
        base.manifest_bytes(),
        (source(holder, one.name, 0, name="holder"),),
    )
    message = published(file, (source(holder, one.name, version, name="holder"),))
    one.weights.offer(message := replace(message, base=beside))
    return message


def test_a_base_is_resumed_for_newer_adapters_then_held_and_relayed(tmp_path: Path):
    base = make_version(tmp_path / "base.bin", 0, *SIZE)
    files = [make_version(tmp_path / f"v{v}.bin", v, 1, 1000) for v in (1, 2, 3)]

    async def scenario() -> None:
        async with (
            serving(base, *files, max_bytes_per_s=BUCKETS_A_S) as trainer,
            node("a", tmp_path / "a") as a,
            node("b", tmp_path / "b") as b,
        ):
            offer(a, files[0], base, trainer)
            await until(lambda: begun(a))
            offer(a, files[1], base, trainer)
            fetched = await a.got(files[1])
            assert fetched.base_file is not None
            assert filecmp.cmp(fetched.base_file.path, base.path, shallow=False)
            a.weights.loaded()
            offer(a, files[2], base, trainer)
            again = await a.got(files[2])
            assert again.base is fetched.base  # held, not fetched again
            a.weights.loaded()
            offer(b, files[2], base, a.server)  # the other knows nobody else
            passed_on = await b.got(files[2])
            assert passed_on.base_file is not None
            assert filecmp.cmp(passed_on.base_file.path, base.path, shallow=False)
            b.weights.loaded()

    asyncio.run(scenario())


def test_adapters_wait_for_their_base(tmp_path: Path):
    base = make_version(tmp_path / "base.bin", 0, 1, 5000)
    file = make_version(tmp_path / "v1.bin", 1, 1, 1000)

    async def scenario() -> None:
        async with serving(file) as trainer, node("a", tmp_path / "a") as a:
            offer(a, file, base, trainer)
            await until(lambda: list(a.folder.glob(f"{base.digest}.pull")))
            assert a.weights._next is None
            trainer.serve(base)
            assert (await a.got(file)).base_file is not None
            a.weights.loaded()

    asyncio.run(scenario())


def spoil(path: Path) -> None:
    with path.open("r+b") as data:
        data.write(b"lie")


def test_a_base_that_may_be_wrong_is_proved_again_and_stays_open_until_then(tmp_path: Path):
    base = make_version(tmp_path / "base.bin", 0, 1, 5000)
    files = [make_version(tmp_path / f"v{v}.bin", v, 1, 1000) for v in (1, 2, 3)]

    async def scenario() -> None:
        async with serving(base, *files) as trainer, node("a", tmp_path / "a") as a:
            offer(a, files[0], base, trainer)
            first = await a.got(files[0])
            assert first.base is not None
            offer(a, files[1], base, trainer)
            await until(lambda: a.weights._next)
            spoil(Path(first.base.file.path))
            a.weights.reject(first)
            a.weights.loaded()
            second = await a.got(files[1])  # it was here before
            assert second.base is first.base
            assert first.base.descriptor >= 0
            a.weights.loaded()
            offer(a, files[2], base, trainer)
            third = await a.got(files[2])
            assert third.base is not None
            assert third.base is not first.base
            assert filecmp.cmp(third.base.file.path, base.path, shallow=False)
            await until(lambda: first.base is not None and first.base.descriptor < 0)
            assert third.base.descriptor >= 0
            a.weights.loaded()

    asyncio.run(scenario())
