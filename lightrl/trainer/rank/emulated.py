"""The emulated training rank: no model, nothing is learnt; its weights are a digest of all it was
ever given.

For tests of everything around a trainer and for trying a fleet on one machine: it speaks,
publishes, saves and dies as a real rank does, and takes as long as `emulation.py` says. Two runs
have equal versions only if each trained the same samples, cut and ordered in the same way, each of
them once. Must not import torch.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import assert_never

from lightrl.config.schema import Config
from lightrl.emulation import arguments, logprobs
from lightrl.errors import ProtocolError, TrainerError
from lightrl.loss_mask import num_trained
from lightrl.messages.weights import Canary
from lightrl.system import files
from lightrl.trainer.batch import trainable
from lightrl.trainer.checkpoint.saved import (
    CHECKPOINTS,
    STEP_FILE,
    SavedStep,
    put_in_place,
    read_step,
    restored_at,
)
from lightrl.trainer.checkpoint.seal import sealed
from lightrl.trainer.protocol import (
    TAKES_DEVICE,
    Accumulate,
    Accumulated,
    Cleared,
    ClearStep,
    DeltaMade,
    EncodeDelta,
    Exported,
    FinishStep,
    GroupOpened,
    LeaveGroup,
    MicroBatch,
    OpenGroup,
    ParkRank,
    Published,
    RankCommand,
    RankEvent,
    RankParked,
    RankStarted,
    Save,
    Saved,
    SaveFailed,
    SendWeights,
    Staged,
    StartRank,
    TrainSample,
    Updated,
    UpdateWeights,
    WeightsSent,
)
from lightrl.trainer.rank.main import finished, require_step, serve
from lightrl.trainer.rank.meeting import Meeting
from lightrl.weights.broadcast.membership import IsUnwanted
from lightrl.weights.canary import arbitrary_text
from lightrl.weights.publish.buffers import Buffers
from lightrl.weights.version.manifest import VersionFile
from lightrl.weights.version.write import TensorBytes, flatten
from lightrl.wire import pack_f32, pack_i32, to_json

STATE = Path("state", "digest")  # in a checkpoint
TENSOR = "emulated.weight"  # no model has one of that name
DTYPE = "uint8"
MIN_BYTES = 4096  # of the tensor, of which the first ones are the digest
UNTRAINED = hashlib.blake2b(b"emulated", digest_size=16).digest()

NO_WEIGHTS = "emulated ranks send no weights"


def main(sock: socket.socket) -> None:
    """The child process: serves commands until the daemon closes the pipe."""
    with contextlib.suppress(EOFError):  # it holds nothing that must be saved
        serve(sock, lambda start, _: EmulatedRank(start))


class EmulatedRank:
    """Implements `rank_main.AnyRank`: one rank of a run, from its first published version on."""

    def __init__(self, start: StartRank) -> None:
        begun = time.monotonic()
        self.config = Config.model_validate_json(start.config_json)
        self.start = start
        self.step = start.start_step
        try:
            times = arguments(self.config.rollout.engine_args)
        except ValueError as e:
            raise TrainerError(f"rollout.{e}") from None
        self._token_s, self._step_s = times["train_token_ms"] / 1000, times["train_step_ms"] / 1000
        self._num_bytes = max(MIN_BYTES, int(times["version_mb"] * 1e6))
        self._park_s, self._fetch_s = times["park_ms"] / 1000, times["fetch_ms"] / 1000
        self._parked_bytes = int(times["parked_mb"] * 1e6)
        self._is_parked = False
        self._fetching_s = 0.0  # of the step
        self._meeting = Meeting(start.rank, start.world, Path(start.rendezvous))
        self._buffers = Buffers(Path(start.publish_dir))
        self._clear()
        saved, self._trained = None, UNTRAINED
        checkpoints = Path(start.run_dir) / CHECKPOINTS
        path = restored_at(checkpoints, start.start_step, self.config.checkpoint)
        if path is not None:
            saved, self._trained = _restore(Path(self.config.eval.checkpoint or path))
        self._steps_before = saved.steps_before if saved else 0
        self._publish(start.start_step)
        if saved and self.file:
            saved.require_digest(self.file.digest, DTYPE)
        published, parked = self._published(), self._parked()
        self.started = RankStarted("emulated", time.monotonic() - begun, published, parked=parked)

    def perform(
        self, command: RankCommand, is_unwanted: IsUnwanted | None = None
    ) -> Iterator[RankEvent]:
        require_step(self.step, command)
        if isinstance(command, TAKES_DEVICE):
            self._fetch()
        match command:
            case Accumulate(step, batches):
                self._accumulate(batches)
                yield Accumulated(step)
            case UpdateWeights(step):
                self._end_mini_batch(command)
                yield Updated(step)
            case ClearStep(step):
                self._clear()
                yield Cleared(step)
            case FinishStep(step):
                metrics = self._update(command)
                begun = time.monotonic()
                self._publish(command.policy_version)
                publish_s = time.monotonic() - begun
                if parked := self._parked():
                    metrics["timing_s/park"] = parked.seconds
                    yield parked
                if published := self._published():  # rollout nodes wait for it
                    yield published
                self.step += 1
                yield finished(step, metrics, publish_s)
            case ParkRank():
                if parked := self._parked(is_asked=True):
                    yield parked
            case EncodeDelta(step):
                yield DeltaMade()  # its weights are a digest: all of it is another one
            case Save(step, path, export):
                yield Staged(path)
                if self.start.rank == 0:
                    yield from self._save(Path(path), export)
            case OpenGroup():
                yield GroupOpened("", NO_WEIGHTS)
            case SendWeights():
                yield WeightsSent(NO_WEIGHTS)
            case LeaveGroup():
                pass
            case StartRank():
                raise TrainerError("StartRank, but the rank has started")
            case _:
                assert_never(command)

    def _clear(self) -> None:
        self._seen = hashlib.blake2b(digest_size=16)  # of the step
        self._ended: UpdateWeights | None = None  # mini-batch, after which nothing has come yet
        self._totals = (0, 0)  # responses and tokens of mini-batches that have ended
        self._lengths: list[float] = []  # mean of each
        self._num_tokens = 0
        self._num_batches = 0
        self._computing_s = 0.0

    def _accumulate(self, batches: Sequence[MicroBatch]) -> None:
        begun = time.monotonic()
        if self._ended is not None:
            totals = (self._ended.num_responses, self._ended.num_tokens)
            self._seen.update(b"mini-batch" + struct.pack("<QQ", *totals))
            self._ended = None
        for samples in batches:
            self._seen.update(struct.pack("<Q", len(samples)))
            for sample in samples:
                for part in _parts(sample):
                    self._seen.update(struct.pack("<Q", len(part)) + part)
            num_tokens = sum(
                num_trained(s.token_ids, s.loss_mask)
                for s in trainable(samples, self.config.algorithm)
            )
            self._num_tokens += num_tokens
            if self._token_s:
                time.sleep(self._token_s * num_tokens)
        self._num_batches += len(batches)
        self._computing_s += time.monotonic() - begun

    def _end_mini_batch(self, end: UpdateWeights) -> None:
        """What comes next is part of the weights in another way than if it had come before; if
        nothing comes, this was the step's last."""
        if self._step_s:
            time.sleep(self._step_s)
        self._ended = end
        self._totals = self._with(end)

    def _with(self, end: UpdateWeights | FinishStep) -> tuple[int, int]:
        num_responses, num_tokens = self._totals
        if end.num_responses:
            self._lengths.append(end.num_tokens / end.num_responses)
        return num_responses + end.num_responses, num_tokens + end.num_tokens

    def _update(self, finish: FinishStep) -> dict[str, float]:
        """What has been given to all ranks becomes part of the weights. Returns the metrics of the
        step."""
        begun = time.monotonic()
        if self._step_s:
            time.sleep(self._step_s)
        mine = json.dumps([self._seen.hexdigest(), self._num_tokens])
        all_R = self._meeting.exchange(mine)
        num_responses, num_tokens = self._with(finish)
        totals = [finish.step, num_responses, num_tokens]
        said = json.dumps([self._trained.hex(), totals, all_R])
        self._trained = hashlib.blake2b(said.encode(), digest_size=16).digest()
        metrics = {
            "num_tokens": float(num_tokens),
            "num_trained_tokens": float(sum(json.loads(theirs)[1] for theirs in all_R)),
            "perf/micro_batches": float(self._num_batches),
            "timing_s/forward_backward": self._computing_s,
            "timing_s/optimizer": time.monotonic() - begun,
        }
        if len(self._lengths) > 1:
            named = enumerate(self._lengths, 1)
            metrics |= {f"update/{k}/response_length": length for k, length in named}
        if self.config.rollout.placement == "shared":
            metrics["timing_s/fetch"] = self._fetching_s
            self._fetching_s = 0.0
        self._clear()
        return metrics

    def _parked(self, is_asked: bool = False) -> RankParked | None:
        """As long as configured, if its device is shared, and is not given back already."""
        if self.config.rollout.placement != "shared":
            return None
        seconds = 0.0 if self._is_parked else self._park_s
        if seconds:
            time.sleep(seconds)
        self._is_parked = True
        return RankParked(self._parked_bytes, seconds, is_asked)

    def _fetch(self) -> None:
        if self._is_parked:
            if self._fetch_s:
                time.sleep(self._fetch_s)
            self._is_parked = False
            self._fetching_s += self._fetch_s

    def _publish(self, policy_version: int) -> None:
        """Rank 0 writes the version to a file that has its name when it is complete."""
        self.policy_version = policy_version
        self.file: VersionFile | None = None
        if self.start.rank == 0:
            block = self._trained.ljust(MIN_BYTES, b"\0")  # again and again
            data = memoryview((block * -(-self._num_bytes // MIN_BYTES))[: self._num_bytes])
            flat, manifest = flatten([TensorBytes(TENSOR, DTYPE, (self._num_bytes,), data)])
            draft = self._buffers.take(len(flat))
            os.pwrite(draft.descriptor, flat, 0)
            self.file = self._buffers.finish(draft, policy_version, manifest)

    def _published(self) -> Published | None:
        """On rank 0 the version with what engines are held against. Every vocabulary has token
        0."""
        if self.file is None or self.config.weights.canary == 0:
            return Published(self.file) if self.file else None
        text = arbitrary_text(1, self.config.max_trained_length)
        scored = pack_f32(logprobs(self.file.digest, text))
        return Published(self.file, Canary(pack_i32(text), scored))

    def _save(self, path: Path, export: bool) -> Iterator[RankEvent]:
        """On rank 0. There is nothing to be exported."""
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
            (draft / STEP_FILE).write_bytes(to_json(sealed(saved, draft)))
            put_in_place(draft, path, keep.keep_last, keep.keep_every)
        except OSError as e:
            shutil.rmtree(draft, ignore_errors=True)
            yield SaveFailed(str(path), str(e).splitlines()[0])
            return
        yield Saved(str(path))
        if export:
            yield Exported(str(path))


def _parts(sample: TrainSample) -> Iterator[bytes]:
    yield sample.response.encode()
    yield sample.prompt
    yield sample.token_ids
    yield sample.rollout_logprobs
    yield struct.pack("<d", sample.advantage)
    yield sample.finish_reason.encode()
    yield sample.loss_mask


def _restore(path: Path) -> tuple[SavedStep, bytes]:
    try:
        return read_step(path), (path / STATE).read_bytes()
    except (OSError, ProtocolError) as e:
        raise TrainerError(f"{path}: no complete checkpoint: {e}") from None
