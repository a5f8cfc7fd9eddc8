"""The prompts of a run as its coordinator holds them: read once, drawn in order.

Owns the data sets, the position in them, and the small files of the model. Decides nothing.
"""

import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lightrl.config import Config
from lightrl.config_sections import Data
from lightrl.coordinator.settings import core_settings, vocabulary
from lightrl.core.settings import Settings
from lightrl.core.state import DrawnPrompt
from lightrl.data import Prompt, PromptCursor, answer_of, load_prompts
from lightrl.errors import DataError
from lightrl.model_files import load_tokenizer, model_files, stop_token_ids
from lightrl.rewards.rubrics import Split, rows_file
from lightrl.rewards.worker import RewardSet
from lightrl.wire import pack_i32


class Prompts:
    def __init__(self, config: Config) -> None:
        """Raises ConfigError or DataError, one line, for anything that is wrong with the run's
        input."""
        self.model_files = model_files(config.model.path)
        tokenizer = load_tokenizer(config.model.path)
        with tempfile.TemporaryDirectory(prefix="lightrl-rows-") as folder:

            def read(path: str, split: Split) -> dict[str, Prompt]:
                file = rows_file(path, split, config.reward, Path(folder))
                return _by_id(load_prompts(file, config.data, tokenizer))

            self._train = read(config.data.path, "train")
            self._eval = read(config.eval.path, "eval") if config.eval.path else {}
        # all prompts: by the same functions
        self.scored_alike = (_reward_set(config, [*self._train.values(), *self._eval.values()]),)
        self._order = list(self._train.values())  # what the cursor's indices mean
        self._cursor = PromptCursor(len(self._train), config.run.seed, config.data.shuffle)
        self.settings: Settings = core_settings(
            config,
            vocabulary=vocabulary(self.model_files, self._train | self._eval, config),
            stop_ids=stop_token_ids(config.model.path, tokenizer),
            num_prompts=len(self._train),
            num_eval_prompts=len(self._eval),
        )

    @property
    def digest(self) -> str:
        """Of the prompts in their order: a run that goes on with other data would repeat or skip
        some."""
        names = "\n".join(prompt.id for prompt in self._order)
        return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()

    def get(self, prompt: str, is_eval: bool) -> Prompt:
        return (self._eval if is_eval else self._train)[prompt]

    def scored_as(self, prompt: str, is_eval: bool) -> int:
        """Index into `scored_alike` of the set that a prompt is of."""
        return 0

    def draw(self, source: str, count: int) -> tuple[DrawnPrompt, ...]:
        """The next prompts of the training data, or the whole evaluation set."""
        if source == "eval":
            return tuple(DrawnPrompt(p.id, 0, pack_i32(p.token_ids)) for p in self._eval.values())
        drawn = [(epoch, self._order[index]) for epoch, index in self._cursor.draw(count)]
        return tuple(DrawnPrompt(p.id, epoch, pack_i32(p.token_ids)) for epoch, p in drawn)

    def go_on_from(self, num_drawn: int) -> None:
        """So many prompts were drawn by an earlier process."""
        epoch, position = divmod(num_drawn, len(self._order))
        self._cursor.restore({"epoch": epoch, "position": position})


def _reward_set(config: Config, prompts: Iterable[Prompt]) -> RewardSet:
    """What reward functions find in the rows of these prompts. Raises DataError for an answer_key
    that was given and that no row has."""
    reward, data = config.reward, config.data
    names: set[str] = set()
    have_answers = False
    for prompt in prompts:
        names.update(prompt.row)
        have_answers = have_answers or answer_of(prompt.row, data.answer_key) is not None
    columns = tuple(sorted(names))
    default = Data.model_fields["answer_key"].default
    if not have_answers and data.answer_key not in (default, *columns):
        raise DataError(
            f"data.answer_key = {data.answer_key!r}: no row has it; the columns are "
            f"{', '.join(columns)}"
        )
    weights = reward.weights or (1.0,) * len(reward.functions)
    return RewardSet(
        reward.functions, weights, data.prompt_key, data.answer_key, columns, have_answers
    )


def _by_id(prompts: list[Prompt]) -> dict[str, Prompt]:
    return {p.id: p for p in prompts}
