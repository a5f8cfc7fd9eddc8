"""A tokenizer that its tokenizer.json describes completely: read with `tokenizers` alone.

To import transformers takes longer than to start a coordinator. Whether a directory is one of those
is decided here, rather too strictly: whatever is not known to change nothing is transformers' to
interpret. Must not import transformers.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

SPECIAL_TOKENS = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
# Of a tokenizer_config.json: they change no token of a prompt.
HARMLESS = {"backend", "clean_up_tokenization_spaces", "model_max_length", "tokenizer_class"}
# They may add tokens, or a chat template.
FURTHER_FILES = (
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)


class PlainTokenizer:
    """What `load_prompts` asks of a tokenizer of transformers, with the same answers."""

    chat_template = None  # or it were not plain

    def __init__(self, tokenizer: "Tokenizer", config: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = self._id_of(config.get("bos_token"))
        self.eos_token_id = self._id_of(config.get("eos_token"))

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": self._tokenizer.encode(text, None, False, add_special_tokens).ids}
        encoded = self._tokenizer.encode_batch(text, False, add_special_tokens)
        return {"input_ids": [e.ids for e in encoded]}

    def decode(self, token_ids: list[int]) -> str:
        """With special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def plain_tokenizer(folder: Path) -> PlainTokenizer | None:
    """None if it is not plain. Raises what the library raises for a broken tokenizer.json."""
    if any((folder / name).exists() for name in FURTHER_FILES):
        return None
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or not config.keys() <= HARMLESS.union(SPECIAL_TOKENS):
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = {t.content: t for t in tokenizer.get_added_tokens_decoder().values()}
    named = [token for key in SPECIAL_TOKENS if (token := config.get(key)) is not None]
    if tokenizer.truncation or tokenizer.padding:
        return None
    if not all(isinstance(t, str) and t in added and _is_as_named(added[t]) for t in named):
        return None
    return PlainTokenizer(tokenizer, config)


def _is_as_named(token: "AddedToken") -> bool:
    """As transformers adds a token by its name alone."""
    return token.special and not (
        token.lstrip or token.rstrip or token.single_word or token.normalized
    )
