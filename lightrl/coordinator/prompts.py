"""The prompts of a run as its coordinator holds them: read once, drawn in order.

Owns the data sets, the position in them, and the small files of the model. Decides nothing.
"""

import hashlib

from lightrl.config import Config
from lightrl.coordinator.settings import core_settings, vocabulary
from lightrl.core.settings import Settings
from lightrl.core.state import DrawnPrompt
from lightrl.data import Prompt, PromptCursor, load_prompts
from lightrl.model_files import load_tokenizer, model_files, stop_token_ids
from lightrl.wire import pack_i32


class Prompts:
    def __init__(self, config: Config) -> None:
        """Raises ConfigError or DataError, one line, for anything that is wrong with the run's
        input."""
        self.model_files = model_files(config.model.path)
        tokenizer = load_tokenizer(config.model.path)
        self._train = _by_id(load_prompts(config.data.path, config.data, tokenizer))
        self._eval = (
            _by_id(load_prompts(config.eval.path, config.data, tokenizer))
            if config.eval.path
            else {}
        )
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


def _by_id(prompts: list[Prompt]) -> dict[str, Prompt]:
    return {p.id: p for p in prompts}
