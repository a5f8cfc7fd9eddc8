"""Names of classes of the core use the terms of the glossary in `lightrl/core/README.md`."""

import ast
import re
from pathlib import Path

CORE = Path(__file__).parents[1] / "lightrl" / "core"
TEXT = (CORE / "README.md").read_text(encoding="utf-8")
MOST = 100  # terms
WORD = re.compile(r"[A-Z][a-z]+|[A-Z]+(?![a-z])")


def terms() -> list[str]:
    section = TEXT.split("## Reference: glossary")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [term.strip() for row in rows for term in row.split("|")[1].split(",")]


def other_words() -> set[str]:
    sentence = TEXT.split("Other words in names of classes:")[1].split(".")[0]
    return {word.strip() for word in sentence.split(",")}


def names() -> list[str]:
    """Return the names of the public classes of the core."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(CORE.rglob("*.py"))]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [each.name for each in classes if not each.name.startswith("_")]


def words(name: str) -> list[str]:
    return [word.lower() for word in WORD.findall(name)]


def is_in(word: str, known: set[str]) -> bool:
    """Whether this word or its singular is one of them."""
    return bool({word, word.removesuffix("s"), f"{word}s"} & known)


def test_the_glossary_has_few_terms_each_once():
    found = terms()
    assert len(found) == len(set(found))
    assert len(found) <= MOST


def test_names_of_classes_use_terms_of_the_glossary():
    known = {*terms(), *other_words()}
    assert {name for name in names() if not all(is_in(w, known) for w in words(name))} == set()


def test_other_words_are_in_use():
    used = {word for name in names() for word in words(name)}
    assert other_words() <= used
