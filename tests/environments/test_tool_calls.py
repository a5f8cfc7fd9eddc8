"""Formats of tool calls: which one a chat template tells, and vLLM's parsers."""

import pytest

from lightrl.environments.rendering import Renderer
from lightrl.environments.tool_calls import ToolCallParser, format_of, split_thinking
from lightrl.errors import ConfigError
from lightrl.model_files import load_tokenizer
from tests.environments.test_rendering import ADD
from tests.support.chat_models import make_model, trl_templates
from tests.support.tiers import e2e

TEMPLATES = trl_templates()
TOLD = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_6": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "glm4moe": "glm45",
    "gemma4": "gemma4",
    "gptoss": "openai",
    "lfm2_v2": "lfm2",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "muse_glimmer": "muse_glimmer",
    "deepseekv3": "deepseek_v3",
}


@pytest.mark.parametrize("name", TOLD)
def test_chat_template_tells_the_format(name):
    assert format_of(TEMPLATES[name]) == TOLD[name]


def test_template_that_tells_none_is_refused_when_there_are_tools(tmp_path):
    with pytest.raises(ConfigError, match=r"set environment\.tool_format to the name of one of"):
        format_of(TEMPLATES["llama3"])
    renderer = Renderer(make_model(tmp_path / "model", TEMPLATES["llama3"]))
    renderer.prove([])


@pytest.mark.parametrize(
    ("text", "begins_inside", "split"),
    [
        ("ab", False, (None, "ab")),
        ("ab", True, ("ab", "")),
        ("hm\n</think>\n\nab", True, ("hm", "ab")),
        ("hm</think>ab", False, ("hm", "ab")),
        ("\n<think>\nhm\n</think>ab", False, ("hm", "ab")),
        ("no <think>hm</think> ab", False, (None, "no <think>hm</think> ab")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
    ],
)
def test_split_thinking(text, begins_inside, split):
    assert split_thinking(text, begins_inside) == split


CALLS = {
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "pythonic": "[add(a=1)]",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(
        str(make_model(tmp_path_factory.mktemp("models") / "m", TEMPLATES["qwen3_6"]))
    )


@pytest.mark.filterwarnings("ignore")  # whatever vLLM and what it imports say
@pytest.mark.parametrize("name", e2e(CALLS))
def test_parsers_of_vllm(tokenizer, name):
    pytest.importorskip("vllm")
    parser = ToolCallParser(name, tokenizer)
    for _ in range(2):  # a parser keeps nothing
        content, found = parser.parse(CALLS[name], [ADD])
        assert (content, found) == ("", [("", "add", {"a": 1})])
    assert parser.parse("ab", [ADD]) == ("ab", [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "said"),
    e2e([("no_such", "has no such tool parser; it has .*hermes"), ("openai", "cannot be used")]),
)
def test_parser_that_is_not_there(tokenizer, name, said):
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match=said) as e:
        ToolCallParser(name, tokenizer)
    assert "\n" not in str(e.value)
