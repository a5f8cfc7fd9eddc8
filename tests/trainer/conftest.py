"""A tiny random model on disk, samples for it, and ranks that train it: in this process or in real
ones."""

import asyncio
import contextlib
import itertools
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lightrl.config.run_file import parse_config
from lightrl.config.schema import Config
from lightrl.messages.training import TrainGroup, TrainResponse
from lightrl.system.child import Child
from lightrl.trainer.protocol import (
    RANK_COMMANDS,
    RANK_EVENTS,
    RANK_TARGET,
    RankEvent,
    Save,
    StartRank,
    TrainSample,
)
from lightrl.trainer.rank.emulated import EmulatedRank
from lightrl.trainer.rank.rank import Rank
from lightrl.wire import pack_f32, pack_i32
from tests.support.warm import Origin, forking, origin

VOCABULARY = 24
DEADLINE_S = 110  # importing torch and transformers takes 5 s, on a busy machine far longer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Path]:
    def save(folder: Path, dtype: torch.dtype = torch.float32, tied: bool = True) -> Path:
        torch.manual_seed(7)
        shape = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        config = Qwen2Config(
            **shape,
            vocab_size=VOCABULARY,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            initializer_range=0.2,  # far from uniform, so that wrong positions show
        )
        Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
        words = {"<pad>": 0, "<eos>": 1} | {chr(ord("a") + i): i + 2 for i in range(VOCABULARY - 2)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ).save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def model_dir(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def samples() -> list[TrainSample]:
    """24 responses of 1 to 20 tokens to prompts of 2 to 5."""
    rng = random.Random(3)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(n)]

    made = []
    for i in range(24):
        response = tokens(rng.randint(1, 20))
        logprobs = [-3 * rng.random() for _ in response]
        made.append(
            TrainSample(
                f"p{i // 8}@0#{i % 8}",
                pack_i32(tokens(rng.randint(2, 5))),
                pack_i32(response),
                pack_f32(logprobs),
                rng.choice([-1.0, -0.5, 0.25, 1.5]),
            )
        )
    return made


@pytest.fixture(scope="module")
def groups(samples):
    """Eight groups of three responses, of which one has no signal."""
    made = []
    for i in range(8):
        rewards = [1.0, 1.0, 1.0] if i == 5 else [1.0, 0.0, 0.25]
        responses = tuple(
            TrainResponse(s.response, s.token_ids, s.rollout_logprobs, reward, "stop")
            for s, reward in zip(samples[3 * i : 3 * i + 3], rewards, strict=True)
        )
        made.append(TrainGroup(f"p{i}@0", samples[3 * i].prompt, responses))
    return made


@pytest.fixture(scope="session")
def config() -> Callable[..., Config]:
    def make(**sections: dict[str, Any]) -> Config:
        sections = {"train": {"optim": {"lr": 1e-3}}} | sections
        return parse_config({"model": {"path": "unused"}, "data": {"path": "unused"}, **sections})

    return make


@pytest.fixture
def start(
    tmp_path: Path, model_dir: Path, config: Callable[..., Config]
) -> Callable[..., StartRank]:
    numbers = itertools.count()  # each has a folder of versions of its own, as each daemon does

    def make(
        directory: Path = model_dir, start_step: int = 0, **sections: dict[str, Any]
    ) -> StartRank:
        return StartRank(
            config(**sections).model_dump_json(),
            str(directory),
            rank=0,
            world=1,
            rendezvous="",
            publish_dir=str(tmp_path / f"weights-{next(numbers)}"),
            run_dir=str(tmp_path / "run"),
            start_step=start_step,
        )

    return make


class LocalRank(Rank):
    """In this process."""

    def __init__(self, start: StartRank) -> None:
        self.events: list[RankEvent] = []  # from its other thread
        super().__init__(start, self.events.append)

    def save(self, command: Save) -> list[RankEvent]:
        """All events of a checkpoint."""
        self.events.clear()
        answers = list(self.perform(command))
        self.checkpoint_writer.wait()
        return [*answers, *self.events]


@pytest.fixture
def new_rank(start: Callable[..., StartRank]) -> Callable[..., LocalRank]:
    return lambda *args, **sections: LocalRank(start(*args, **sections))


@pytest.fixture
def new_emulated(start: Callable[..., StartRank]) -> Callable[..., EmulatedRank]:
    def make(
        start_step: int = 0, engine_args: dict[str, float] | None = None, **sections: dict[str, Any]
    ) -> EmulatedRank:
        sections["rollout"] = {"engine": "emulated", "engine_args": engine_args or {}}
        sections["train"] = {"engine": "emulated"}
        return EmulatedRank(start(start_step=start_step, **sections))

    return make


@pytest.fixture
def processes(
    tmp_path: Path,
) -> Callable[..., "contextlib.AbstractAsyncContextManager[list[Child]]"]:
    """`world` rank processes that were sent StartRank."""

    @contextlib.asynccontextmanager
    async def launch(
        start: StartRank, world: int, target: str = RANK_TARGET
    ) -> AsyncIterator[list[Child]]:
        rendezvous = str(tmp_path / f".ranks-{secrets.token_hex(8)}")
        environment = {"OMP_NUM_THREADS": "1"}
        names = [f"rank-{rank}" for rank in range(world)]
        ranks: list[Child] = []
        try:
            async with asyncio.timeout(DEADLINE_S):
                for rank, name in enumerate(names):
                    log = tmp_path / f"{name}.log"
                    child = await Child.start(
                        target, name, RANK_COMMANDS, RANK_EVENTS, env=environment, log=log
                    )
                    ranks.append(child)
                    child.send(
                        StartRank(
                            start.config_json,
                            start.model_dir,
                            rank,
                            world,
                            rendezvous,
                            start.publish_dir,
                            start.run_dir,
                            start.start_step,
                        )
                    )
                yield ranks
        finally:
            for child in ranks:
                await child.stop()

    return launch


@pytest.fixture
def warm_ranks(origin_of_runs: Origin | None) -> Iterator[None]:
    """Real ranks, each a process of its own that need not import torch (tests/support/warm.py)."""
    with forking(origin_of_runs):
        yield


@pytest.fixture(scope="session")
def origin_of_emulated() -> Iterator[Origin | None]:
    with origin("lightrl.trainer.rank.emulated") as process:
        yield process


@pytest.fixture
def warm_emulated(origin_of_emulated: Origin | None) -> Iterator[None]:
    """Emulated ranks, each a process of its own that need not import anything."""
    with forking(origin_of_emulated):
        yield
