"""The prompts of a run as its coordinator holds them: read when they are due, drawn in order.

Owns the data sets, the position in them, and the small files of the model. Decides nothing.
"""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from lightrl.config import Config
from lightrl.config_data import Data, DataSet
from lightrl.config_reward import VERIFIERS
from lightrl.coordinator.settings import core_settings, require_context, vocabulary
from lightrl.core.settings import Settings
from lightrl.core.state import DrawnPrompt
from lightrl.data.check import check_large, check_small
from lightrl.data.draws import Draws
from lightrl.data.prompts import Prompt, PromptSet, load_prompts
from lightrl.errors import DataError
from lightrl.model_files import load_tokenizer, model_files, stop_token_ids
from lightrl.rewards.rubrics import rows_file
from lightrl.rewards.worker import RewardSet
from lightrl.wire import pack_i32


class Prompts:
    def __init__(self, config: Config) -> None:
        """Looks at all prompts of small sets; `check` does at those of large ones. `start`
        before the first `draw`.

        Raises ConfigError or DataError, one line, for anything that is wrong with the run's input.
        """
        self._rows: tempfile.TemporaryDirectory[str] | None = None  # of environments
        paths = (config.eval.path, *(one.path for one in config.data.all_sets))
        if any(path.startswith(VERIFIERS) for path in paths):
            self._rows = tempfile.TemporaryDirectory(prefix="lightrl-rows-")
            config = with_rows(config, Path(self._rows.name))
        self._config = config
        self.model_files = model_files(config.model.path)
        require_context(self.model_files, config)
        tokenizer = load_tokenizer(config.model.path)
        self._vocabulary = vocabulary(self.model_files, config)

        def opened(sets: tuple[DataSet, ...]) -> tuple[PromptSet, ...]:
            return tuple(PromptSet(one, config.data, tokenizer, self._vocabulary) for one in sets)

        self.train_sets, self.eval_sets = opened(config.data.all_sets), opened(config.eval_sets)
        self._unchecked = check_small(self.train_sets)
        self._eval = {p.id: p for one in self.eval_sets for p in load_prompts(one)}
        self.scored_alike = tuple(
            _reward_set(config, one) for one in (*self.train_sets, *self.eval_sets)
        )
        sizes = [len(one) - one.num_dropped for one in self.train_sets]
        self._draws = Draws(
            self.train_sets,
            config.run.seed,
            shuffle=config.data.shuffle,
            at_once=config.launched[0],
        )
        self.settings: Settings = core_settings(
            config,
            vocabulary=self._vocabulary,
            stop_ids=stop_token_ids(config.model.path, tokenizer),
            sizes=dict(zip((one.name for one in self.train_sets), sizes, strict=True)),
            num_eval_prompts=len(self._eval),
        )

    @property
    def digest(self) -> str:
        """Of the prompts in their order: a run that goes on with other data would repeat or skip
        some."""
        names = "\n".join(f"{one.name} {one.digest}" for one in self.train_sets)
        return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()

    def require_same(self, digest: str) -> None:
        """Raises DataError if the data are not those of this digest."""
        if digest != self.digest:
            where = ", ".join(f"{one.settings.path}" for one in self.train_sets)
            raise DataError(f"{where}: the prompts differ from those the run started with")

    def take_waited_s(self) -> float:
        """For how long draws have waited for their prompts since it was asked last."""
        waited_s, self._draws.waited_s = self._draws.waited_s, 0.0
        return waited_s

    def get(self, prompt: str, is_eval: bool) -> Prompt:
        return self._eval[prompt] if is_eval else self._draws.get(prompt)

    def set_of(self, prompt: str, is_eval: bool) -> PromptSet:
        """The set that a prompt is of."""
        sets, name = self.eval_sets if is_eval else self.train_sets, prompt.partition("/")[0]
        return next(one for one in sets if one.name == name)

    def start(self) -> None:
        self._draws.start()

    async def check(self, logs: Path, report: Callable[[str], None]) -> None:
        """Says how many prompts are left out; returns when every row of every set has been looked
        at. Raises DataError, one line with file and row."""
        for one in (*self.train_sets, *self.eval_sets):
            if line := one.dropped_line():
                report(line)
        if names := [one.name for one in self._unchecked]:
            log = logs / "data.log"
            await check_large(self._config, names, self._vocabulary, log, report)

    def scored_as(self, prompt: str, is_eval: bool) -> int:
        """Index into `scored_alike` of the set that a prompt is of."""
        sets = (*self.train_sets, *self.eval_sets)
        return sets.index(self.set_of(prompt, is_eval))

    def draw(self, source: str, count: int) -> tuple[DrawnPrompt, ...]:
        """The next prompts of the training data, or all evaluation prompts."""
        if source == "eval":
            return tuple(DrawnPrompt(p.id, 0, pack_i32(p.token_ids)) for p in self._eval.values())
        drawn = self._draws.draw(count)
        return tuple(DrawnPrompt(p.id, epoch, pack_i32(p.token_ids)) for epoch, p in drawn)

    def go_on_from(self, num_drawn: int) -> None:
        """So many prompts were drawn by an earlier process."""
        self._draws.go_on_from(num_drawn)

    def close(self) -> None:
        self._draws.close()
        if self._rows is not None:
            self._rows.cleanup()


def with_rows(config: Config, folder: Path) -> Config:
    """Sets that are environments of `verifiers` become files in `folder`. Raises DataError."""
    sets = config.data.all_sets
    paths = [rows_file(one.path, "train", config.reward, folder) for one in sets]
    evaluated = rows_file(config.eval.path, "eval", config.reward, folder)
    given = tuple(
        one.model_copy(update={"path": path}) for one, path in zip(sets, paths, strict=True)
    )
    data = config.data.model_copy(update={"path": "", "subset": "", "split": "", "sets": given})
    evaluation = config.eval.model_copy(update={"path": evaluated})
    return config.model_copy(update={"data": data, "eval": evaluation})


def _reward_set(config: Config, prompts: PromptSet) -> RewardSet:
    """What reward functions find in the rows of a set. Raises DataError for an answer_key that was
    given and that no row has."""
    reward, settings = config.reward, prompts.settings
    columns = tuple(sorted(prompts.portable))
    default = Data.model_fields["answer_key"].default
    if not prompts.have_answers and settings.answer_key not in (default, *columns):
        raise DataError(
            f"data.answer_key = {settings.answer_key!r}: no row has it; the columns are "
            f"{', '.join(columns)}"
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
    )
