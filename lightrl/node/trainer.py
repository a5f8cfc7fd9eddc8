"""The trainer role of a daemon: its rank processes, the order of their work, and the versions they publish.

Which groups are trained is the coordinator's business, how they are packed is `trainer.batch`'s, what
they are worth `trainer.advantage`'s. Never touches a tensor.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lightrl.child import Child, ChildDied
from lightrl.config import Config
from lightrl.errors import TrainerError
from lightrl.messages import Manifest, Message, PublishWeights, StepDone, TrainGroup, TrainShard
from lightrl.trainer.advantage import advantages, overlong_penalty
from lightrl.trainer.batch import streamed, trainable
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    RANK_TARGET,
    Accumulate,
    Accumulated,
    FinishStep,
    Published,
    RankCommand,
    RankEvent,
    RankFailed,
    RankStarted,
    Save,
    Saved,
    StartRank,
    StepFinished,
    TrainSample,
)
from lightrl.weights.serve import WeightServer

Reply = TypeVar("Reply", bound=RankEvent)
STOP_S = 5.0  # a rank that is idle ends at once; one that hangs in a collective does not


class Trainer:
    def __init__(
        self,
        config: Config,
        run_dir: Path,
        scratch: Path,
        host: str,
        send: Callable[[Message], None],
    ) -> None:
        """`host` is the address under which other nodes pull weights; `send` reaches the coordinator."""
        self._config = config
        self._run_dir = run_dir
        self._scratch = scratch
        self._host = host
        self._send = send
        self._server = WeightServer()
        self._holder = ""
        self._ranks: list[Child[RankCommand, RankEvent]] = []
        self.device = ""
        self.all_steps_done = False  # the last version is published; a checkpoint may still be written
        self._stopping = asyncio.Event()
        self._shards: asyncio.Queue[TrainShard] = asyncio.Queue()
        self._replies: list[asyncio.Queue[RankEvent]] = []  # one for each rank

    def handle(self, message: TrainShard) -> None:
        self._shards.put_nowait(message)

    async def run(self) -> None:
        """Trains until the last step is saved, or `stop`. Raises TrainerError if a rank fails."""
        self._holder = await self._server.start(self._host)
        try:
            await self._start_ranks()
            async with asyncio.TaskGroup() as tasks:
                readers = [
                    tasks.create_task(self._receive(rank, replies))
                    for rank, replies in zip(self._ranks, self._replies, strict=True)
                ]
                await self._announce()
                await self._train_all()
                for reader in readers:
                    reader.cancel()
        finally:
            await asyncio.gather(*(rank.stop(STOP_S) for rank in self._ranks))

    def stop(self) -> None:
        """End after the step that is being trained, with a checkpoint of the steps done."""
        self._stopping.set()

    async def _train_all(self) -> None:
        done = saved = 0
        while done < self._config.train.steps and await self._train(done):
            done += 1
            self.all_steps_done = done == self._config.train.steps
            if self._is_due(done):
                await self._save(done)
                saved = done
        if done > saved:
            await self._save(done)

    async def close(self) -> None:
        """Stops serving weights; call it when no node will pull any more."""
        await self._server.close()

    async def _start_ranks(self) -> None:
        world = self._config.train.ranks
        rendezvous = f"127.0.0.1:{_free_port()}"
        for rank in range(world):
            child: Child[RankCommand, RankEvent] = await Child.start(
                RANK_TARGET,
                f"lightrl-rank-{rank}",
                RANK_COMMANDS,
                RANK_EVENTS,
                env={"OMP_NUM_THREADS": str(self._config.train.threads)},
                log=self._run_dir / "logs" / f"rank-{rank}.log",
            )
            self._ranks.append(child)
            self._replies.append(asyncio.Queue())
            child.send(
                StartRank(
                    config_json=self._config.model_dump_json(),
                    model_dir=self._config.model.path,
                    rank=rank,
                    world=world,
                    rendezvous=rendezvous,
                    publish_dir=str(self._scratch),
                    run_dir=str(self._run_dir),
                )
            )

    async def _receive(self, rank: Child[RankCommand, RankEvent], replies: asyncio.Queue[RankEvent]) -> None:
        while True:
            try:
                event = await rank.receive()
            except ChildDied as e:
                raise TrainerError(str(e)) from None
            if isinstance(event, RankFailed):
                raise TrainerError(f"{rank.name}: {event.reason}")
            replies.put_nowait(event)

    async def _announce(self) -> None:
        """Waits for all ranks and publishes the version they start from."""
        started, *_ = [await self._reply(rank, RankStarted) for rank in range(len(self._ranks))]
        if started.manifest is None:
            raise TrainerError("rank 0 started without publishing its weights")
        print(
            f"{len(self._ranks)} rank(s) started on {started.device} in {started.start_s:.1f} s", flush=True
        )
        self._publish(started.manifest, Path(started.path))

    async def _train(self, step: int) -> bool:
        """One optimizer step: whatever groups wait are accumulated at once, while others still generate.

        With `train.deterministic` one by one in the order in which the coordinator sent them, which is then
        that of their prompts in the round. False: stopped before all groups of the step had come; the
        weights are those of the last step. Raises TrainerError for any shard but the next of this step.
        """
        index, num_groups, last, num_responses, num_tokens = 0, 0, False, 0, 0
        while not last:
            shards = await self._waiting_shards()
            if not shards:
                return False
            groups: list[list[TrainSample]] = []
            for shard in shards:
                # The version is the one to be updated; the tokens may be of older ones.
                if (shard.step, shard.index, shard.policy_version) != (step, index, step):
                    raise TrainerError(
                        f"shard {shard.index} of step {shard.step} for version {shard.policy_version} came "
                        f"instead of shard {index} of step {step} for version {step}"
                    )
                index, last = index + 1, shard.last
                num_groups += len(shard.groups)
                if last and num_groups != shard.num_groups:
                    raise TrainerError(f"step {step}: {num_groups} of {shard.num_groups} groups came")
                groups += [train_samples(group, self._config) for group in shard.groups]
            num_responses += sum(map(len, groups))
            num_tokens += sum(len(s.token_ids) // 4 for samples in groups for s in samples)
            await self._accumulate(step, groups)
        version = step + 1
        self._tell(FinishStep(step, num_responses, num_tokens, version))
        published = await self._reply(0, Published)
        self._publish(published.manifest, Path(published.path))
        finished, *_ = [await self._reply(rank, StepFinished) for rank in range(len(self._ranks))]
        self._send(StepDone(step, version, finished.metrics))
        return True

    async def _waiting_shards(self) -> list[TrainShard]:
        """All shards of a step that have come, at least one; none if the trainer is to stop instead.

        What came after the last shard of a step stays where it is until that step is done.
        """
        stopping = asyncio.ensure_future(self._stopping.wait())
        coming = asyncio.ensure_future(self._shards.get())
        try:
            await asyncio.wait({stopping, coming}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return []
            shards = [coming.result()]
        finally:
            stopping.cancel()
            coming.cancel()
        while not shards[-1].last and not self._shards.empty():
            shards.append(self._shards.get_nowait())
        return shards

    async def _accumulate(self, step: int, groups: list[list[TrainSample]]) -> None:
        train = self._config.train
        useful = [trainable(samples, self._config.algorithm.kl_coef) for samples in groups]
        batches_R = streamed(useful, len(self._ranks), train.max_tokens_per_gpu, train.deterministic)
        if not batches_R[0]:  # as many for each rank
            return
        for rank, batches in zip(self._ranks, batches_R, strict=True):
            rank.send(Accumulate(step, batches))
        for rank in range(len(self._ranks)):
            await self._reply(rank, Accumulated)

    async def _save(self, step: int) -> None:
        path = self._run_dir / "checkpoints" / f"step_{step}"
        self._tell(Save(step, str(path), export=True))
        for rank in range(len(self._ranks)):
            await self._reply(rank, Saved)
        print(f"saved {path}", flush=True)

    def _is_due(self, step: int) -> bool:
        interval = self._config.checkpoint.interval
        return step == self._config.train.steps or (interval > 0 and step % interval == 0)

    def _publish(self, manifest: Manifest, path: Path) -> None:
        ticket = secrets.token_hex(16)
        self._server.publish(manifest, path, ticket)
        self._send(PublishWeights(manifest, (self._holder,), ticket))

    def _tell(self, command: RankCommand) -> None:
        for rank in self._ranks:
            rank.send(command)

    async def _reply(self, rank: int, kind: type[Reply]) -> Reply:
        """The next reply of a rank, which must be of this kind: a rank answers in the order it is told."""
        reply = await self._replies[rank].get()
        if not isinstance(reply, kind):
            raise TrainerError(f"rank {rank} answered {type(reply).__name__} instead of {kind.__name__}")
        return reply


def train_samples(group: TrainGroup, config: Config) -> list[TrainSample]:
    """The responses of a group with their advantages, in its order; any penalty for length is in them."""
    buffer, limit = config.algorithm.overlong_buffer, config.rollout.max_response_length
    rewards_G = [r.reward + overlong_penalty(len(r.token_ids) // 4, limit, buffer) for r in group.responses]
    values_G = advantages(config.algorithm.name, rewards_G)
    return [
        TrainSample(r.response, group.prompt, r.token_ids, r.rollout_logprobs, value, r.finish_reason)
        for r, value in zip(group.responses, values_G, strict=True)
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
