"""The prompts of a run in its coordinator: read when they are needed, drawn in order.

Owns the data sets, the position in them, and the small files of the model. Decides nothing.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightrl.config.data import ANSWER_KEY, DataSet, SomeSet
from lightrl.config.reward import VERIFIERS
from lightrl.config.schema import Config
from lightrl.coordinator.settings import core_settings, require_context
from lightrl.core.commands import DrawPrompts
from lightrl.core.events import PromptsDrawn
from lightrl.core.settings import Settings
from lightrl.core.state import DrawnPrompt
from lightrl.data.check import check_large, check_small
from lightrl.data.draws import Draws
from lightrl.data.prompts import Prompt, PromptSet, load_prompts
from lightrl.errors import DataError
from lightrl.model_files import load_tokenizer, model_files, stop_token_ids, vocabulary_size
from lightrl.rewards.protocol import RewardSet
from lightrl.rewards.rubrics import Split, rows_file
from lightrl.rewards.trial import FirstRow, first_rows
from lightrl.system.temporary import temporary_folder
from lightrl.wire import pack_i32, to_json

Result = TypeVar("Result")
# What the parts of a digest are of.
IN_WHAT = (
    "the number of rows",
    "prompts, ids or their order",
    "what rows hold beside their ids or prompts",
)


class Prompts:
    def __init__(self, config: Config) -> None:
        """Check all prompts of small sets; `check` does it for large ones. Call `start`, then
        `serve`; `ask` at any time.

        Raises ConfigError or DataError, one line, for anything that is wrong with the run's input.
        """
        self._folders = contextlib.ExitStack()
        given = (*config.data.all_sets, *config.eval_sets)
        if any(one.path.startswith(VERIFIERS) for one in given):
            config = with_rows(config, self._folders.enter_context(temporary_folder("rows")))
        self.config = config
        self.model_files = model_files(config.model.path)
        require_context(self.model_files, config)
        tokenizer = load_tokenizer(config.model.path)
        self._vocabulary = vocabulary_size(config.model.path)

        def opened(sets: Sequence[DataSet]) -> tuple[PromptSet, ...]:
            how = config.data, tokenizer, self._vocabulary, config.environment
            return tuple(PromptSet(one, *how) for one in sets)

        self.train_sets, self.eval_sets = opened(config.data.all_sets), opened(config.eval_sets)
        self._unchecked = check_small(self.train_sets)
        evaluated = {one.name: load_prompts(one) for one in self.eval_sets}
        self._eval = {p.id: p for prompts in evaluated.values() for p in prompts}
        self.scored_alike = tuple(
            _reward_set(config, one) for one in (*self.train_sets, *self.eval_sets)
        )
        names = [(False, one.name) for one in self.train_sets]
        names += [(True, one.name) for one in self.eval_sets]
        self._scored_as = {name: index for index, name in enumerate(names)}
        sizes = [len(one) - one.num_dropped for one in self.train_sets]
        self._draws = Draws(
            self.train_sets,
            config.run.seed,
            shuffle=config.data.shuffle,
            batch=config.launched[0],
        )
        self._asked: asyncio.Queue[DrawPrompts] = asyncio.Queue()
        self.settings: Settings = core_settings(
            config,
            vocabulary=self._vocabulary,
            stop_ids=stop_token_ids(config.model.path, tokenizer),
            sizes=dict(zip((one.name for one in self.train_sets), sizes, strict=True)),
            eval_sizes={name: len(prompts) for name, prompts in evaluated.items()},
        )
        self.tokenizer = tokenizer

    @property
    def digests(self) -> dict[str, str]:
        """Return the digest of each set, as "train/NAME" or "eval/NAME". With other rows a resumed
        run would repeat or skip prompts, or score responses with rows of other prompts."""
        named = [(f"train/{one.name}", one.digest) for one in self.train_sets]
        return dict(named + [(f"eval/{one.name}", one.digest) for one in self.eval_sets])

    def require_same(self, digests: Mapping[str, str]) -> None:
        """Raise DataError, one line, if these are not the digests of the data."""
        sets = (*self.train_sets, *self.eval_sets)
        for one, (name, now) in zip(sets, self.digests.items(), strict=True):
            if (then := digests.get(name, "0 - -")) != now:
                pairs = zip(IN_WHAT, now.split(), then.split(), strict=True)
                what = next(what for what, a, b in pairs if a != b)
                raise DataError(
                    f"{one.settings.path}: the data differ from those the run started with, in "
                    f"{what}; put the old ones back, or begin a new run with lightrl up --from"
                )

    def take_waited_s(self) -> float:
        """Return for how long draws have waited for their prompts since the last call."""
        waited_s, self._draws.waited_s = self._draws.waited_s, 0.0
        return waited_s

    def known(self, prompt: str, is_eval: bool) -> Prompt | None:
        """Return a prompt in memory; None: `get` must read it."""
        return self._eval[prompt] if is_eval else self._draws.cached(prompt)

    async def get(self, prompt: str, is_eval: bool) -> Prompt:
        """Return any prompt that was drawn, with its row. Raises DataError."""
        return self._eval[prompt] if is_eval else await self._draws.get(prompt)

    def row_json(self, prompt: str, is_eval: bool) -> str | None:
        """Return the row of a prompt in memory, for an environment; None: `read_row` must."""
        known = self.known(prompt, is_eval)
        return None if known is None else to_json(known.row).decode()

    async def read_row(self, prompt: str, is_eval: bool) -> str:
        """Return the row of any prompt that was drawn, as JSON. Raises DataError."""
        return to_json((await self.get(prompt, is_eval)).row).decode()

    async def in_turn(self, act: Callable[[], Result]) -> Result:
        """Return what `act` returns, called in the one thread that uses rows and tokenizers."""
        return await self._draws.in_turn(act)

    async def first_rows(self) -> list[FirstRow]:
        """Return a row of each set, to try reward functions with; none where they score episodes.
        Raises DataError."""
        config, sets = self.config, (*self.train_sets, *self.eval_sets)
        if config.environment.enabled:
            return []
        sizes = [config.rollout.group_size] * len(self.train_sets)
        sizes += [config.eval_sampling(one).samples for one in config.eval_sets]
        given = zip(sets, self.scored_alike, sizes, strict=True)
        return await self.in_turn(lambda: list(first_rows(given, self.tokenizer)))

    def source_of(self, prompt: str) -> str:
        """Return `data_source` of an evaluation prompt, as in verl's rows; "" = there is none."""
        return str(self._eval[prompt].row.get("data_source") or "")

    def notes(self) -> list[str]:
        """Return the notes of all sets."""
        return [note for one in (*self.train_sets, *self.eval_sets) for note in one.notes()]

    def start(self) -> None:
        self._draws.start()

    async def check(self, logs: Path, report: Callable[[str], None]) -> None:
        """Check every row of every set, and report how many prompts are left out. Raises DataError,
        one line with file and row."""
        for one in (*self.train_sets, *self.eval_sets):
            if line := one.dropped_line():
                report(line)
        if names := [one.name for one in self._unchecked]:
            log = logs / "data.log"
            await check_large(self.config, names, self._vocabulary, log, report)
        for note in self.notes():
            report(f"note: {note}")

    def scored_as(self, prompt: str, is_eval: bool) -> int:
        """Return the index into `scored_alike` of the set of a prompt."""
        return self._scored_as[is_eval, prompt.partition("/")[0]]

    def ask(self, wanted: DrawPrompts) -> None:
        """Queue a request for `serve`; events that follow need not wait for it."""
        self._asked.put_nowait(wanted)

    async def serve(self, feed: Callable[[PromptsDrawn], None]) -> None:
        """Answer requests in order until cancelled. Raises DataError."""
        while True:
            wanted = await self._asked.get()
            feed(PromptsDrawn(await self.draw(wanted.source, wanted.count)))

    async def draw(self, source: str, count: int) -> tuple[DrawnPrompt, ...]:
        """Return the next prompts of the training data, or all evaluation prompts."""
        if source == "eval":
            return tuple(DrawnPrompt(p.id, 0, pack_i32(p.token_ids)) for p in self._eval.values())
        drawn = await self._draws.draw(count)
        return tuple(DrawnPrompt(p.id, epoch, pack_i32(p.token_ids)) for epoch, p in drawn)

    def go_on_from(self, num_drawn: int) -> None:
        """Continue after the prompts that an earlier process has drawn."""
        self._draws.skip(num_drawn)

    def close(self) -> None:
        self._draws.close()
        self._folders.close()


def with_rows(config: Config, folder: Path) -> Config:
    """Convert sets that are environments of `verifiers` to files in `folder`. Raises DataError."""

    def in_files(sets: Sequence[SomeSet], split: Split) -> tuple[SomeSet, ...]:
        paths = [rows_file(one.path, split, config.reward, folder) for one in sets]
        return tuple(
            one.model_copy(update={"path": path}) for one, path in zip(sets, paths, strict=True)
        )

    train, evaluated = config.data.all_sets, config.eval_sets
    data: dict[str, Any] = {"path": "", "subset": "", "split": "", "sets": in_files(train, "train")}
    evaluation: dict[str, Any] = {"path": "", "sets": in_files(evaluated, "eval")}
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "eval": config.eval.model_copy(update=evaluation),
        }
    )


def _reward_set(config: Config, prompts: PromptSet) -> RewardSet:
    """Return what reward functions find in the rows of a set. Raises DataError for an answer_key
    that was given and that no row has."""
    reward, settings = config.reward, prompts.settings
    columns = tuple(sorted(prompts.portable))
    if not prompts.have_answers and settings.answer_key not in (ANSWER_KEY, *columns):
        raise DataError(
            f"data.answer_key = {settings.answer_key!r}: no row of {settings.path} has it; the "
            f"columns are {', '.join(columns)}"
        )
    functions = settings.reward or reward.functions
    weights = (1.0,) * len(functions)
    if not settings.reward and reward.weights:
        weights = reward.weights
    return RewardSet(
        functions,
        weights,
        settings.prompt_key,
        settings.answer_key,
        columns,
        prompts.have_answers,
        config.data.as_chat,
        config.data.system_prompt,
    )
