"""An emulated training rank, whose weights are a digest of all samples that it has accumulated.

For tests and for trying a fleet on one machine. It takes as long as the arguments of
`emulation.py`. Two runs have equal versions only if they trained the same samples in the same
micro-batches and order. Must not import torch.

    step_N/state/digest  all that a checkpoint holds besides SavedStep
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import assert_never

from lightrl.config.schema import Config
from lightrl.emulation import arguments, logprobs
from lightrl.errors import ProtocolError, TrainerError, first_line
from lightrl.messages.weights import Canary
from lightrl.system import files
from lightrl.trainer.batch import with_gradient
from lightrl.trainer.checkpoint.checksums import with_checksums
from lightrl.trainer.checkpoint.on_disk import (
    CHECKPOINTS,
    STEP_FILE,
    SavedStep,
    put_in_place,
    read_step,
    restored_at,
)
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    TAKES_DEVICE,
    Accumulate,
    Done,
    EncodeDelta,
    LeaveBroadcast,
    OpenGroup,
    Published,
    RankCommand,
    RankEvent,
    RankStarted,
    ResetStep,
    Save,
    Saved,
    SendWeights,
    StartRank,
    Suspend,
    Suspended,
    Update,
)
from lightrl.trainer.rank.main import finished, require_step, serve
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.canary import arbitrary_text
from lightrl.weights.publish.buffers import Buffers
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.write import TensorBytes, flatten
from lightrl.wire import num_trained, pack_f32, pack_i32, to_json

STATE = Path("state", "digest")  # in a checkpoint
TENSOR = "emulated.weight"  # no model has one of that name
DTYPE = "uint8"
MIN_BYTES = 4096  # of the tensor, which begins with the digest
UNTRAINED = hashlib.blake2b(b"emulated", digest_size=16).digest()

LOOK_S = 0.002  # for the texts of other ranks


def main(sock: socket.socket) -> None:
    """Serve commands until the daemon closes the pipe."""
    with contextlib.suppress(EOFError):  # it holds nothing that must be saved
        serve(sock, lambda start, _: EmulatedRank(start))


class EmulatedRank:
    """Implements `rank.main.AnyRank`."""

    def __init__(self, start: StartRank) -> None:
        began = time.monotonic()
        self.config = Config.model_validate_json(start.config_json)
        self.start = start
        self.step = start.start_step
        try:
            self._times = arguments(self.config.rollout.engine_args)
        except ValueError as e:
            raise TrainerError(f"rollout.{e}") from None
        self._is_suspended = False
        self._fetching_s = 0.0  # of the step
        self._num_exchanges = 0
        self._buffers = Buffers(Path(start.publish_dir))
        self._reset()
        saved, self._trained = None, UNTRAINED
        checkpoints = Path(start.run_dir) / CHECKPOINTS
        path = restored_at(checkpoints, start.start_step, self.config.checkpoint)
        if path is not None:
            saved, self._trained = _restore(Path(self.config.eval.checkpoint or path))
        self._steps_before = saved.steps_before if saved else 0
        self._write_version(start.start_step)
        if saved and self.file:
            saved.require_digest(self.file.digest, DTYPE)
        published, suspended = self._published(), self._suspend()
        took_s = time.monotonic() - began
        self.started = RankStarted("emulated", took_s, published, suspended=suspended)

    def perform(
        self, command: RankCommand, is_unwanted: IsUnwanted | None = None
    ) -> Iterator[RankEvent]:
        require_step(self.step, command)
        if isinstance(command, TAKES_DEVICE):
            self._fetch()
        match command:
            case Accumulate(step):
                self._accumulate(command)
                yield Done(step)
            case Update(step, policy_version=None):
                self._end_mini_batch(command)
                yield Done(step)
            case Update(step, policy_version=version):
                metrics = self._finish(command)
                began = time.monotonic()
                self._write_version(version or 0)
                publish_s = time.monotonic() - began
                self.step += 1
                yield finished(step, metrics, publish_s, self._published(), self._suspend())
            case ResetStep(step):
                self._reset()
                yield Done(step)
            case Suspend():
                yield Done(self.step, suspended=self._suspend())
            case EncodeDelta(step):
                yield Done(step)  # its weights are a digest: all of them differ
            case Save(step, path, export):
                yield Done(step)
                if self.start.rank == 0:
                    yield from self._save(Path(path), export)
            case OpenGroup() | SendWeights():
                yield Done(self.step, "emulated ranks send no weights")
            case LeaveBroadcast():
                pass
            case StartRank():
                raise TrainerError("StartRank, but the rank has started")
            case _:
                assert_never(command)

    def _reset(self) -> None:
        """Begin a step, or begin it again."""
        self._seen = hashlib.blake2b(digest_size=16)  # samples of the step
        self._ended: Update | None = None  # the mini-batch before, if nothing followed yet
        self._totals = (0, 0)  # responses and tokens of mini-batches that have ended
        self._lengths: list[float] = []  # mean of each
        self._num_tokens = 0
        self._num_batches = 0
        self._computing_s = 0.0

    def _accumulate(self, command: Accumulate) -> None:
        began = time.monotonic()
        if self._ended is not None:
            self._add(self._ended)
            self._ended = None
        for samples in command.batches:  # the digest is that of any division into commands
            self._add(Accumulate(0, (samples,)))
        num_tokens = sum(
            num_trained(s.token_ids, s.loss_mask)
            for samples in command.batches
            for s in with_gradient(samples, self.config.algorithm)
        )
        self._num_tokens += num_tokens
        self._sleep("train_token_ms", num_tokens)
        self._num_batches += len(command.batches)
        self._computing_s += time.monotonic() - began

    def _add(self, command: Accumulate | Update) -> None:
        frame = RANK_COMMANDS.encode(command)
        self._seen.update(struct.pack("<Q", len(frame)) + frame)

    def _end_mini_batch(self, update: Update) -> None:
        """What follows changes the weights in another way than if it had come before."""
        self._sleep("train_step_ms")
        self._ended = update
        self._totals = self._with(update)

    def _with(self, update: Update) -> tuple[int, int]:
        num_responses, num_tokens = self._totals
        if update.num_responses:
            self._lengths.append(update.num_tokens / update.num_responses)
        return num_responses + update.num_responses, num_tokens + update.num_tokens

    def _finish(self, update: Update) -> dict[str, float]:
        """Add the samples of all ranks to the weights. Return the metrics of the step."""
        began = time.monotonic()
        self._sleep("train_step_ms")
        mine = json.dumps([self._seen.hexdigest(), self._num_tokens])
        all_R = self._exchange(mine)
        num_responses, num_tokens = self._with(update)
        totals = [update.step, num_responses, num_tokens]
        text = json.dumps([self._trained.hex(), totals, all_R])
        self._trained = hashlib.blake2b(text.encode(), digest_size=16).digest()
        metrics = {
            "num_tokens": float(num_tokens),
            "num_trained_tokens": float(sum(json.loads(theirs)[1] for theirs in all_R)),
            "perf/micro_batches": float(self._num_batches),
            "timing_s/forward_backward": self._computing_s,
            "timing_s/optimizer": time.monotonic() - began,
        }
        if len(self._lengths) > 1:
            named = enumerate(self._lengths, 1)
            metrics |= {f"update/{k}/response_length": length for k, length in named}
        if self.config.rollout.placement == "shared":
            metrics["timing_s/fetch"] = self._fetching_s
            self._fetching_s = 0.0
        self._reset()
        return metrics

    def _exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks, in their order, by files beside the rendezvous. The daemon
        ends a rank that waits for a dead one."""
        if self.start.world == 1:
            return [text]
        last, self._num_exchanges = self._num_exchanges, self._num_exchanges + 1
        place = f"{self.start.rendezvous}.{self._num_exchanges}"
        files.write_whole(Path(f"{place}.{self.start.rank}"), text.encode())
        paths_R = [Path(f"{place}.{rank}") for rank in range(self.start.world)]
        while not all(path.exists() for path in paths_R):
            time.sleep(LOOK_S)
        texts_R = [path.read_text() for path in paths_R]
        # all have read the one before
        Path(f"{self.start.rendezvous}.{last}.{self.start.rank}").unlink(missing_ok=True)
        return texts_R

    def _suspend(self) -> Suspended | None:
        """Free the device, if it is shared, in `park_ms` unless it is free."""
        if self.config.rollout.placement != "shared":
            return None
        seconds = 0.0 if self._is_suspended else self._sleep("park_ms")
        self._is_suspended = True
        return Suspended(int(self._times["parked_mb"] * 1e6), seconds)

    def _fetch(self) -> None:
        if self._is_suspended:
            self._is_suspended = False
            self._fetching_s += self._sleep("fetch_ms")

    def _sleep(self, name: str, times: int = 1) -> float:
        """Take as long as configured. Return seconds."""
        if seconds := self._times[name] / 1000 * times:
            time.sleep(seconds)
        return seconds

    def _write_version(self, policy_version: int) -> None:
        self.policy_version = policy_version
        self.file: VersionFile | None = None
        if self.start.rank == 0:
            block = self._trained.ljust(MIN_BYTES, b"\0")  # repeated
            size = max(MIN_BYTES, int(self._times["version_mb"] * 1e6))
            data = memoryview((block * -(-size // MIN_BYTES))[:size])
            flat, manifest = flatten([TensorBytes(TENSOR, DTYPE, (size,), data)])
            draft = self._buffers.take(len(flat))
            os.pwrite(draft.descriptor, flat, 0)
            self.file = self._buffers.finish(draft, policy_version, manifest)

    def _published(self) -> Published | None:
        """The version with its canary, on rank 0. Every vocabulary has token 0."""
        if self.file is None or self.config.weights.canary == 0:
            return Published(self.file) if self.file else None
        text = arbitrary_text(1, self.config.max_trained_length)
        scored = pack_f32(logprobs(self.file.digest, text))
        return Published(self.file, Canary(pack_i32(text), scored))

    def _save(self, path: Path, export: bool) -> Iterator[RankEvent]:
        """On rank 0. The export is empty."""
        draft = path.with_name(f".{path.name}.draft")
        digest = self.file.digest if self.file else ""
        keep = self.config.checkpoint
        try:
            files.make_folder(path.parent)
            shutil.rmtree(draft, ignore_errors=True)
            (draft / STATE).parent.mkdir(parents=True)
            (draft / STATE).write_bytes(self._trained)
            saved = SavedStep(
                self.step, self.policy_version, digest, True, DTYPE, self._steps_before
            )
            (draft / STEP_FILE).write_bytes(to_json(with_checksums(saved, draft)))
            put_in_place(draft, path, keep.keep_last, keep.keep_every)
        except OSError as e:
            shutil.rmtree(draft, ignore_errors=True)
            yield Saved(str(path), first_line(e))
            return
        yield Saved(str(path))
        if export:
            yield Saved(str(path), is_export=True)


def _restore(path: Path) -> tuple[SavedStep, bytes]:
    try:
        return read_step(path), (path / STATE).read_bytes()
    except (OSError, ProtocolError) as e:
        raise TrainerError(f"{path}: no complete checkpoint: {e}") from None
