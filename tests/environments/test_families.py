"""Models that the package `renderers` knows. Skipped without it: pip install renderers."""

import re

import pytest

from lightrl.environments.families import renderers
from lightrl.environments.rendering import Renderer
from tests.environments.test_rendering import ADD, ASKED, SYSTEM, calls, one_by_one, result
from tests.support.chat_models import make_model, trl_templates

pytestmark = pytest.mark.skipif(renderers() is None, reason="renderers is not installed")
TEMPLATES = trl_templates()
KNOWN = ("qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_ultra")
REPLY = {"role": "user", "content": "higher, 2 ab"}
NEXT = "\n<|im_start|>user\nhigher, 2 ab<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    def make(name: str, tools=(ADD,), **kwargs) -> Renderer:
        folder = tmp_path_factory.mktemp("models") / name
        found = Renderer(make_model(folder, TEMPLATES[name], name), template_kwargs=kwargs)
        found.prove(list(tools))
        return found

    return make


@pytest.mark.parametrize("name", KNOWN)
def test_earlier_thinking_stays_when_a_user_turn_follows(renderer, name):
    found = renderer(name)
    decode, begun = found._tokenizer.decode, found._begun
    held = found.first([SYSTEM, ASKED], [ADD])
    for _ in range(3):
        thought = "hm, ab\n</think>\n\nIts ab.<|im_end|>"
        sampled = one_by_one(found._tokenizer, thought if begun else "<think>\n" + thought)
        added = found.append([*held, *sampled], len(held), [REPLY], [ADD])
        assert decode(added) == NEXT + begun
        held += sampled + added
    assert decode(held).count("hm, ab") == 3


@pytest.mark.parametrize("name", KNOWN)
def test_results_of_tools_follow_their_calls(renderer, name):
    found = renderer(name)
    tokenizer = found._tokenizer
    ask = {**calls("call00000", "call00001"), "reasoning_content": "hm"}
    new = [result("call00000"), result("call00001", "5 ab")]
    held = found.first([ASKED], [ADD])
    text = tokenizer.apply_chat_template(
        [ASKED, ask, *new], tools=[ADD], tokenize=False, add_generation_prompt=True
    )
    sampled = text[len(tokenizer.decode(held)) :].partition("<|im_end|>")[0] + "<|im_end|>"
    ids = one_by_one(tokenizer, sampled)
    parsed = found.parse(ids, [ADD])
    assert parsed["tool_calls"] == ask["tool_calls"]
    assert parsed["reasoning_content"].strip() == "hm"
    held += ids
    held += found.append(held, len(held) - len(ids), new, [ADD])
    assert tokenizer.decode(held) == text


@pytest.mark.parametrize(
    ("sampled", "added"),
    [
        ("<think>\nhm", "\\s*</think>\\s*<\\|im_end\\|>"),  # cut within a thought
        ("<think>\nhm<|im_end|>", ""),  # ended within a thought
        ("no", "<\\|im_end\\|>"),
    ],
)
def test_turn_without_its_end_gets_it_first(renderer, sampled, added):
    qwen = renderer("qwen3")
    held = qwen.first([ASKED], [ADD])
    found = qwen.append([*held, *qwen._ids(sampled)], len(held), [REPLY], [ADD])
    assert re.fullmatch(added + re.escape(NEXT), qwen._tokenizer.decode(found))


def test_malformed_call_stays_in_the_content(renderer):
    qwen = renderer("qwen3")
    text = '<tool_call>\n{"name": "add", "arguments": {"a": one}}\n</tool_call>'
    parsed = qwen.parse(qwen._ids(f"<think>hm</think>{text}<|im_end|>"), [ADD])
    assert parsed == {"role": "assistant", "content": text, "reasoning_content": "hm"}


def test_model_without_thinking_is_known(renderer):
    qwen = renderer("qwen3", enable_thinking=False)
    held = qwen.first([ASKED], [ADD])
    added = qwen.append([*held, *qwen._ids("no<|im_end|>")], len(held), [REPLY], [ADD])
    assert qwen._tokenizer.decode(added) == NEXT + "<think>\n\n</think>\n\n"
