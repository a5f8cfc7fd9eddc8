"""Functions as tools: what the model is told of them, and what a call answers."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from lightrl.environments.worker.base import UserError
from lightrl.environments.worker.tools import MAX_RESULT, ToolBox, ToolEpisode, load_tools

SOURCE = '''
import asyncio
import enum
import functools
import sys
from typing import Annotated, Any, Literal, Optional, Union


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


def search(query: str, limit: int = 5, lang: Optional[Literal["en", "de"]] = None) -> list:
    """Search the web.

    Returns the best pages: title and text.

    Args:
        query: What to search for,
            in plain words.
        limit (int, optional): At most so many pages.

    Returns:
        query: no, not this one.
    """
    return [query, limit, lang]


def full(
    a: str,
    b: int,
    c: list[float],
    d: dict[str, bool],
    e: Optional[int],
    f: Literal["x", "y"],
    g: Union[int, str],
    h: "list[Any]",
    i: "int | str | None" = None,
    j: bool = True,
    k: dict = {},
):
    """
    Take all.

    Args:
        a: A text.
        b: A number
        c: Numbers: some,
          more of them
        d: Flags
        e: Perhaps
        f: One
        g: Either
        h: Any
        i: Both (with words)
        j: Flag
        k: Anything
    """


def convert(value: float, to: Unit, among: "list[Unit] | None" = None):
    """
    Convert a length.

    Parameters
    ----------
    value : float
        Of the length: in metres.
    to
        The unit
        of the result.
    """
    return f"{value!r} {to} {among}"


def note(text: Annotated[str, "what to note"], tags: dict[str, list[int]], extra: Any = 1):
    """Note a text.

    :param tags: Some tags,
        by name.
    :param int extra: More.
    :returns: nothing
    """
    return {"text": text, "tags": tags}


def either(x: Union[int, str], y: "int | list[str]" = 3) -> str:
    return repr(x) + repr(y)


async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


meeting = []


async def meet(name: str) -> list:
    """Return when two are here."""
    meeting.append(name)
    async with asyncio.timeout(20):
        while len(meeting) % 2:
            await asyncio.sleep(0)
    return sorted(meeting[-2:])


@functools.wraps(wait)
def wrapped(*args, **kwargs):
    return wait(*args, **kwargs)


class Later:
    def __await__(self):
        yield


def fails(how: str) -> str:
    if how == "exit":
        sys.exit(3)
    if how == "stop":
        raise StopIteration
    if how == "late":
        return Later()
    raise KeyError(how)


def runs_a_loop() -> str:
    return asyncio.run(asyncio.sleep(0, "ran"))


def long(n: int) -> str:
    return "x" * n + chr(0xd800)


def bare(x): ...
def starred(*words: str): ...
def positional(x: int, /): ...
def unknown(x: "Missing"): ...
def odd(x: set[int]): ...
A_CONSTANT = 1
'''


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / f"{tmp_path.name}_tools.py"
    path.write_text(SOURCE)
    return path


def load(file: Path, *names: str, limit_s: float = 30.0) -> ToolBox:
    return asyncio.run(load_tools([f"{file}:{name}" for name in names], limit_s=limit_s))


def schema_of(file: Path, name: str) -> dict:
    [schema] = load(file, name).schemas
    assert schema["type"] == "function"
    assert schema["function"]["name"] == name
    return schema["function"]


def call(file: Path, name: str, limit_s: float = 30.0, **arguments) -> str:
    return asyncio.run(load(file, name, limit_s=limit_s).call(name, arguments))


def test_a_google_docstring_describes_the_parameters(file):
    assert schema_of(file, "search") == {
        "name": "search",
        "description": "Search the web.\n\nReturns the best pages: title and text.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {
                    "type": "string",
                    "description": "What to search for, in plain words.",
                },
                "limit": {
                    "type": "integer",
                    "description": "At most so many pages.",
                    "default": 5,
                },
                "lang": {
                    "type": "string",
                    "enum": ["en", "de"],
                    "nullable": True,
                    "default": None,
                },
            },
            "required": ["query"],
        },
    }


def test_numpy_and_sphinx_docstrings_do_too(file):
    convert, note = schema_of(file, "convert"), schema_of(file, "note")
    assert convert["description"] == "Convert a length."
    assert convert["parameters"]["properties"] == {
        "value": {"type": "number", "description": "Of the length: in metres."},
        "to": {"type": "string", "enum": ["m", "ft"], "description": "The unit of the result."},
        "among": {
            "type": "array",
            "items": {"type": "string", "enum": ["m", "ft"]},
            "nullable": True,
            "default": None,
        },
    }
    assert note["description"] == "Note a text."
    assert note["parameters"]["properties"] == {
        "text": {"type": "string", "description": "what to note"},
        "tags": {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "integer"}},
            "description": "Some tags, by name.",
        },
        "extra": {"description": "More.", "default": 1},
    }


@pytest.mark.e2e
def test_schemas_are_those_of_transformers(file):
    theirs = pytest.importorskip("transformers.utils.chat_template_utils").get_json_schema
    ours = schema_of(file, "full")
    for each in ours["parameters"]["properties"].values():
        each.pop("default", None)
    assert ours == theirs(sys.modules[file.stem].full)["function"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bare", "parameter 'x' has no type hint"),
        ("starred", "parameter 'words' cannot be given by name"),
        ("positional", "parameter 'x' cannot be given by name"),
        ("unknown", "its type hints cannot be read: name 'Missing' is not defined"),
        ("odd", "parameter 'x' is of type set, not str, int"),
        ("A_CONSTANT", "is no function"),
        ("not here", ""),
    ],
)
def test_what_cannot_be_a_tool_is_one_line(file, name, reason):
    with pytest.raises(UserError) as raised:
        load(file, "search", name)
    assert f"{file}:{name}: {reason}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_imported_and_repeated_names_are_one_line(file, tmp_path):
    (tmp_path / "broken_tools.py").write_text("import no_such_package")
    with pytest.raises(UserError, match=r"cannot be imported: .*no_such_package"):
        load(tmp_path / "broken_tools.py", "search")
    with pytest.raises(UserError, match=r"missing\.py: no such file"):
        load(tmp_path / "missing.py", "search")
    with pytest.raises(UserError, match="there is another tool 'search'"):
        load(file, "search", "search")


def test_arguments_become_what_the_function_takes(file):
    assert json.loads(call(file, "search", query="a", limit=2.0)) == ["a", 2, None]
    assert call(file, "convert", value=3, to="ft", among=["m"]) == (
        "3.0 Unit.FOOT [<Unit.METRE: 'm'>]"
    )
    assert call(file, "either", x="4", y=["a"]) == "'4'['a']"
    assert json.loads(call(file, "note", text="é", tags={"a": [1]})) == {
        "text": "é",
        "tags": {"a": [1]},
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "argument 'query' is missing"),
        ({"query": "a", "n": 1}, "no argument 'n'; there are: query, limit, lang"),
        ({"query": 1}, 'argument \'query\': 1 is not {"type": "string"}'),
        ({"query": "a", "limit": "2"}, "argument 'limit': '2' is not"),
        ({"query": "a", "limit": True}, "argument 'limit': True is not"),
        ({"query": "a", "lang": "fr"}, "argument 'lang': 'fr' is not"),
        ("query", "the arguments are no JSON object"),
    ],
)
def test_arguments_that_do_not_fit_are_told_to_the_model(file, arguments, reason):
    text = asyncio.run(load(file, "search").call("search", arguments))
    assert text.startswith(f"error: ArgumentError: {reason}")


def test_what_a_function_raises_is_told_to_the_model(file):
    assert call(file, "fails", how="key") == "error: KeyError: 'key'"
    assert call(file, "fails", how="exit") == "error: SystemExit: 3"
    assert call(file, "fails", how="stop").startswith("error: ")
    assert call(file, "fails", how="late").startswith("error: TypeError: fails returned an await")
    assert asyncio.run(load(file, "search").call("find", {})) == (
        "error: no tool 'find'; there are: search"
    )


def test_a_long_result_is_cut_and_half_a_pair_replaced(file):
    assert call(file, "long", n=2) == "xx?"
    text = call(file, "long", n=MAX_RESULT)
    assert len(text) < MAX_RESULT + 100
    assert text.endswith(f"[cut: the result has {MAX_RESULT + 1} characters]")


def test_an_asynchronous_function_ends_by_the_limit(file):
    assert call(file, "wait", seconds=0) == "waited"
    assert call(file, "wrapped", seconds=0) == "waited"
    assert call(file, "wait", 0.02, seconds=100) == "error: wait gave no result within 0.02 s"


def turn(*calls: tuple[str, dict]) -> dict:
    made = [
        {"id": f"c{k}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for k, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def test_an_episode_begins_with_the_rows_prompt(file):
    tools = load(file, "search")
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "2+2?"}
    assert ToolEpisode(tools).reset({"prompt": "2+2?"}, 1).messages == [user]
    assert ToolEpisode(tools, "q").reset({"q": [system, user]}, 1).messages == [system, user]
    for row in ({}, {"prompt": ""}, {"prompt": []}, {"prompt": 3}):
        with pytest.raises(UserError, match="column 'prompt' has neither text nor messages"):
            ToolEpisode(tools).reset(row, 1)


def test_plain_functions_need_no_event_loop_and_answer_in_order(file):
    episode = ToolEpisode(load(file, "runs_a_loop", "fails"))
    found = episode.step(turn(("runs_a_loop", {}), ("fails", {"how": "x"}), ("none", {})))
    assert [message["content"] for message in found.messages] == [
        "ran",
        "error: KeyError: 'x'",
        "error: no tool 'none'; there are: runs_a_loop, fails",
    ]
    assert found.messages[0] == {
        "role": "tool",
        "tool_call_id": "c0",
        "name": "runs_a_loop",
        "content": "ran",
    }
    assert (found.num_tool_calls, found.metrics, found.done) == (3, {"tool_errors": 2.0}, False)
    last = episode.step({"role": "assistant", "content": "4"})
    assert (last.messages, last.done, last.reward) == ([], True, None)


def test_asynchronous_functions_of_a_turn_overlap(file):
    async def run():
        episode = ToolEpisode(await load_tools([f"{file}:meet", f"{file}:search"]))
        calls = [("meet", {"name": "a"}), ("search", {"query": "q"}), ("meet", {"name": "b"})]
        return await episode.step(turn(*calls))

    texts = [message["content"] for message in asyncio.run(run()).messages]
    assert texts == ['["a", "b"]', '["q", 5, null]', '["a", "b"]']


def test_plain_functions_beside_asynchronous_ones_need_no_event_loop_either(file):
    tools = load(file, "runs_a_loop", "meet")
    calls = [("meet", {"name": "a"}), ("runs_a_loop", {}), ("meet", {"name": "b"})]
    work = ToolEpisode(tools).step(turn(*calls))

    async def awaited():
        return await work

    texts = [message["content"] for message in asyncio.run(awaited()).messages]
    assert texts == ['["a", "b"]', "ran", '["a", "b"]']
