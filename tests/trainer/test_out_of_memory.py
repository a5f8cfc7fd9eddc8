"""Out of memory on a device ends the run, with what helps: ranks that start again have no more."""

import asyncio
import contextlib
import socket
import threading
from pathlib import Path

import pytest
import torch

from lightrl.config.run_file import parse_config
from lightrl.errors import TrainerError
from lightrl.messages.training import TrainGroup, TrainResponse
from lightrl.system.child import Pipe
from lightrl.trainer import rank_processes
from lightrl.trainer.learner import learner, optim
from lightrl.trainer.learner.out_of_memory import final
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    Accumulate,
    RankFailed,
    Update,
)
from lightrl.trainer.rank import main as rank_main
from lightrl.trainer.rank.rank import main
from tests.support.paths import python_path
from tests.support.starved_rank import STARVED_TARGET, starve
from tests.support.trainer_coordinator import Coordinator

DEADLINE_S = 110
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize(
    ("owner", "name", "where"),
    [
        (optim, "new_optimizer", "when it started"),
        (
            learner,
            "response_logprobs",
            "in a micro-batch of 45 tokens in 3 sequences, the longest of 19",
        ),
        (torch.optim.AdamW, "step", "in the optimizer step"),
        (learner.Learner, "_total", "in Update"),
    ],
)
def test_it_is_final_and_says_which_keys_help(start, samples, monkeypatch, owner, name, where):
    monkeypatch.setattr(owner, name, starve)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        daemon = Pipe(ours, RANK_EVENTS, RANK_COMMANDS)
        daemon.send(start())
        daemon.send(Accumulate(0, (tuple(samples[:3]),)))
        daemon.send(Update(0, 3, 20, 1))
        with pytest.raises(SystemExit):
            main(theirs)
        events = []
        while not events or not isinstance(events[-1], RankFailed):
            events += daemon.receive(DEADLINE_S)
    failed = events[-1]
    assert failed.is_final
    assert failed.reason.startswith(f"out of memory {where}: 2.00 GiB more were wanted; what helps")
    assert ("train.max_tokens_per_gpu (is 16384)" in failed.reason) == ("micro-batch" in where)
    assert "train.offload = 'optimizer' or 'all', train.optim.name = 'adamw8bit'" in failed.reason
    assert "'adamw8bit' in a new run" in failed.reason  # nothing else that is named needs one
    assert "\n" not in failed.reason


@pytest.mark.e2e
def test_no_rank_is_started_again(model_dir, samples, tmp_path, monkeypatch, caplog):
    """Though the other rank, which loses it, could be."""
    config = parse_config(
        {
            "model": {"path": str(model_dir)},
            "data": {"path": "unused"},
            "train": {"steps": 1, "ranks": 2},
        }
    )
    responses = tuple(
        TrainResponse(s.response, s.token_ids, s.rollout_logprobs, float(i), "stop")
        for i, s in enumerate(samples[:8])
    )
    groups = [TrainGroup("p0@0", samples[0].prompt, responses)] * 8
    monkeypatch.setattr(rank_processes, "RANK_TARGET", STARVED_TARGET)
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))

    async def run():
        line = r"^lightrl-rank-1: out of memory in a micro-batch of [\d,]+ tokens in \d+ sequences"
        with pytest.raises(TrainerError, match=line):
            await Coordinator(config, tmp_path / "run", groups).run_and_close()

    asyncio.run(run())
    assert "starting again" not in caplog.text


def test_the_reason_comes_before_the_loss(start, tmp_path, monkeypatch):
    """Other ranks, which could be started again, lose this one when its daemon knows why."""
    monkeypatch.setattr(rank_main, "LINGER_S", DEADLINE_S)
    ours, theirs = socket.socketpair()
    daemon = Pipe(ours, RANK_EVENTS, RANK_COMMANDS)

    def run():
        with theirs, contextlib.suppress(SystemExit):
            main(theirs)

    thread = threading.Thread(target=run)
    thread.start()
    daemon.send(start(tmp_path / "nowhere"))
    [failed] = daemon.receive(DEADLINE_S)
    assert isinstance(failed, RankFailed)
    thread.join(0.2)
    assert thread.is_alive()
    ours.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_what_is_something_else_passes(config):
    with pytest.raises(RuntimeError, match=r"^lost a peer$"), final(config(), "in a pass"):
        raise RuntimeError("lost a peer")


def test_libraries_have_their_own_words_for_it(config):
    words = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    with (
        pytest.raises(TrainerError, match=r"^out of memory in a pass: "),
        final(config(), "in a pass"),
    ):
        raise RuntimeError(words)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_real_one(config, samples):
    line = (
        r"^out of memory in a micro-batch of \d+ tokens in 24 sequences, the longest of \d+: "
        r"[\d.]+ \w+ more were wanted; the device has [\d.]+ GiB, [\d.]+ of them free"
    )
    with pytest.raises(TrainerError, match=line), final(config(), "", samples):
        torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
