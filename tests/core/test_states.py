"""The state table in the README of the core is the code's."""

from pathlib import Path

from lightrl.core.state import EDGES

README = Path(__file__).parents[2] / "lightrl" / "core" / "README.md"


def state_table() -> str:
    """What belongs into the README, made from the edges."""
    lines = ["| | from | to |", "| --- | --- | --- |"]
    for entity, edges in EDGES.items():
        name = entity.__name__.removesuffix("State")
        for before, after in edges.items():
            if after:
                lines.append(
                    f"| {name} | {before} | {', '.join(s for s in type(before) if s in after)} |"
                )
                name = ""
    return "\n".join(lines)


def test_readme_shows_the_edges_of_the_code():
    assert state_table() in README.read_text(encoding="utf-8")
