"""What is appended to the ids of an episode, against the renderings of real chat templates."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl.environments.rendering import CannotAppend, Renderer
from lightrl.errors import ConfigError
from tests.support.chat_models import MARKER, make_model, trl_templates

TEMPLATES = trl_templates()
# What each template appends exactly; those that are not here: nothing.
BOTH = """lfm2_v2 llama3_1 llama3_2 muse_glimmer qwen2_5 qwen3_8 qwen3_instruct_2507 qwen3_vl"""
USER = """cohere cohere2 gemma gemma3 lfm2 llama3 phi3 phi3_5 qwen2_5_vl"""
TOOL = """diffusion_gemma gemma4 gemma4_v3 gemma4_v4 gemma4_v5 glm4moe gptoss lfm2_2_5 lfm2_2_5_v2
lfm2_2_5_vl qwen3 qwen3_5_think qwen3_6 nemotron_3_5_lightning nemotron_3_nano nemotron_3_super
nemotron_3_ultra"""
APPENDS = {
    **dict.fromkeys(BOTH.split(), ("user", "tool")),
    **dict.fromkeys(USER.split(), ("user",)),
    **dict.fromkeys(TOOL.split(), ("tool",)),
}
# With these arguments of the template, users' turns are appended, too.
KNOBS = {
    "qwen3_6": {"preserve_thinking": True},
    "lfm2_2_5": {"preserve_thinking": True},
    "nemotron_3_nano": {"truncate_history_thinking": False},
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "one"}},
            "required": ["a"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "What is ab?\n"}


@pytest.fixture(scope="module", autouse=True)
def without_renderers():
    """The package is not installed, wherever it may be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "renderers", None)
        yield


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    """Makes the renderer of one of the templates."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def make(name: str, **settings: Any) -> Renderer:
        if name not in made:
            made[name] = make_model(folder / name, TEMPLATES.get(name), name)
        return Renderer(made[name], **{"tool_format": "hermes", **settings})

    return make


@pytest.fixture(scope="module")
def qwen(renderer) -> Renderer:
    found = renderer("qwen2_5")
    found.prove([ADD])
    return found


def can(renderer: Renderer, role: str) -> bool:
    try:
        renderer.prove([ADD] if role == "tool" else [], user_turns=role == "user")
    except ConfigError as e:
        return "\n" in str(e)  # which no refusal has
    return True


def calls(*ids: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": 12}}
    tool_calls = [{"id": i, "type": "function", "function": function} for i in ids]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def result(id: str, content: str = "Its ab is 3.") -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": id, "content": content}


def one_by_one(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text with a token for each byte, as no tokenizer would encode it."""
    ids: list[int] = []
    for part in re.split(f"({MARKER.pattern})", text):
        pieces = [part] if MARKER.fullmatch(part) else list(part)
        for piece in pieces:
            ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
    return ids


def play(
    renderer: Renderer, start: list[Any], turns: list[Any], tools: list[Any], kwargs: Any = None
) -> None:
    """Play an episode whose turns are what the template would have the model say, and compare the
    tokens that are held with a rendering of all messages after each turn."""
    tokenizer = renderer._tokenizer
    stops = [tokenizer.decode([i]) for i in renderer.stops]
    history, held = list(start), renderer.first(start, tools)
    for answer, messages in turns:
        history += [answer, *messages]
        text = tokenizer.apply_chat_template(
            history, tools=tools or None, tokenize=False, add_generation_prompt=True, **kwargs or {}
        )
        before = tokenizer.decode(held)
        assert text.startswith(before)
        end = min(
            (m.end() for m in re.finditer("|".join(map(re.escape, stops)), text[len(before) :])),
        )
        sampled = one_by_one(tokenizer, text[len(before) :][:end])
        turn_start, held = len(held), held + sampled
        assert held[turn_start:] == sampled
        held += renderer.append(held, turn_start, messages, tools)
        assert tokenizer.decode(held) == text


def episodes(name: str, role: str) -> list[tuple[list[Any], list[Any]]]:
    """Beginnings and turns of episodes, some with thinking where the template has a place for
    it."""
    thinks = "think" in TEMPLATES[name] or "reasoning" in TEMPLATES[name]
    starts = [[ASKED]]
    if name not in ("gemma", "gptoss", "cohere", "phi3", "phi3_5"):
        starts.append([SYSTEM, ASKED])
    thoughts = [{"reasoning_content": "Let me see: ab."}] if thinks else [{}]
    replies = [{"role": "user", "content": "higher, 2 ab"}]
    found = []
    for thought in thoughts:
        said = {"role": "assistant", "content": "It is ab, a b.", **thought}
        one, two = {**calls("call00001"), **thought}, {**calls("call00002"), **thought}
        turns = [(said, replies)] * 3
        if role == "tool":
            turns = [(one, [result("call00001")]), (two, [result("call00002", "ab\nab")])]
        found += [(start, turns) for start in starts]
    return found


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_template_appends_what_a_full_rendering_has_or_is_refused(renderer, name, role):
    found = renderer(name)
    assert can(found, role) == (role in APPENDS.get(name, ()))
    if role in APPENDS.get(name, ()):
        for start, turns in episodes(name, role):
            play(found, start, turns, [ADD] if role == "tool" else [])


def test_every_template_of_trl_is_tried():
    assert len(TEMPLATES) >= 34
    assert set(APPENDS) <= set(TEMPLATES)


@pytest.mark.parametrize("name", KNOBS)
def test_argument_of_a_template_that_keeps_thinking_is_named_and_helps(renderer, name):
    [(key, value)] = KNOBS[name].items()
    with pytest.raises(ConfigError, match=f"set data.chat_template_kwargs = {{ {key} = "):
        renderer(name).prove([])
    found = renderer(name, template_kwargs={key: value})
    found.prove([ADD])
    for start, turns in episodes(name, "user"):
        play(found, start, turns, [], KNOBS[name])


def test_refusal_is_one_line_that_says_what_to_do(renderer):
    with pytest.raises(ConfigError) as e:
        renderer("qwen3").prove([])
    assert str(e.value) == (
        "an episode cannot be continued: the model's chat template drops earlier thinking when a "
        "user turn follows; pip install lightrl[renderers], which knows many models, or write "
        "another template into chat_template.jinja of the model's directory"
    )


def test_several_tool_results_follow_several_calls(qwen):
    results = [result("call00000"), result("call00001", "5")]
    play(qwen, [ASKED], [(calls("call00000", "call00001"), results)] * 2, [ADD])


def test_several_results_of_a_template_with_a_single_call_a_turn_are_appended(renderer):
    llama = renderer("llama3_2")
    llama.prove([ADD])
    held = llama.first([ASKED], [ADD])
    sampled = llama._ids("{}{}<|eot_id|>")
    added = llama.append([*held, *sampled], len(held), [result("a", "3"), result("b", "5")], [ADD])
    assert llama._tokenizer.decode(added) == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


NEXT = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("sampled", "added"),
    [
        ("It is 3.<|im_end|>", NEXT),
        # cut at its length, or by a stop string
        ("It is 3", "<|im_end|>" + NEXT),
        ("It is 3.\n", "<|im_end|>" + NEXT),
        ("", "<|im_end|>" + NEXT),
        # a stop token that ends no turn
        ("It is 3.<|endoftext|>", "<|im_end|>" + NEXT),
    ],
)
def test_turn_without_its_end_gets_it_first(qwen, sampled, added):
    held = qwen.first([SYSTEM, ASKED], [])
    ids = qwen._ids(sampled)
    found = qwen.append([*held, *ids], len(held), [{"role": "user", "content": "higher"}], [])
    assert qwen._tokenizer.decode(found) == added
    assert found == qwen._ids(added)


def test_cut_turn_gets_all_that_closes_it(renderer):
    cohere = renderer("cohere2")
    cohere.prove([])
    held = cohere.first([ASKED], [])
    found = cohere.append(
        [*held, *cohere._ids("no")], len(held), [{"role": "user", "content": "ab"}], []
    )
    assert cohere._tokenizer.decode(found).startswith("<|END_RESPONSE|><|END_OF_TURN_TOKEN|><|STA")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "has no messages"),
        ([{"role": "system", "content": "ab"}], "cannot append a message of 'system'"),
        ([{"role": "assistant", "content": "ab"}], "cannot append a message of 'assistant'"),
    ],
)
def test_other_messages_are_refused(qwen, messages, said):
    held = qwen.first([ASKED], [])
    with pytest.raises(CannotAppend, match=said):
        qwen.append(held, len(held), messages, [])


def test_tools_of_an_episode_are_refused_if_results_cannot_be_appended(renderer):
    gemma = renderer("gemma")
    gemma.prove([])
    with pytest.raises(CannotAppend, match="tool results"):
        gemma.first([ASKED], [ADD])


def test_contents_are_concatenated_without_a_chat_template():
    plain = Renderer(Path(__file__).parents[2] / "configs" / "quickstart" / "model")
    plain.prove([])
    held = plain.first([{"role": "user", "content": "12"}, {"role": "user", "content": "3="}], [])
    assert plain._tokenizer.decode(held) == "123="
    sampled = plain._ids("15<eos>")
    assert plain.parse(sampled, []) == {"role": "assistant", "content": "15"}
    added = plain.append([*held, *sampled], len(held), [{"role": "user", "content": "4="}], [])
    assert added == plain._ids("4=")
    with pytest.raises(ConfigError, match="tools need a chat template"):
        plain.prove([ADD])


def test_token_that_the_model_does_not_have_is_refused(tmp_path):
    folder = make_model(tmp_path / "model", TEMPLATES["llama3"])
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**table, "vocab_size": 40}))
    with pytest.raises(ConfigError, match="the model has no token '"):
        Renderer(folder).prove([])
    with pytest.raises(CannotAppend, match="the model has no token '"):
        Renderer(folder).text([1, 1 << 30])  # of an agent that asks with token ids


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARSED = {"id": "call00000", "type": "function"} | {
    "function": {"name": "add", "arguments": {"a": 1}}
}


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ("ab<|im_end|>", {"content": "ab"}),
        ("ab", {"content": "ab"}),
        ("<think>\nhm\n</think>\n\nab<|im_end|>", {"content": "ab", "reasoning_content": "hm"}),
        ("<think>\nhm", {"content": "", "reasoning_content": "hm"}),
        (
            f"<think>hm</think>I add.\n{CALL}<|im_end|>",
            {"content": "I add.", "reasoning_content": "hm", "tool_calls": [PARSED]},
        ),
        (
            f"{CALL}\n{CALL}",
            {"content": "", "tool_calls": [PARSED, {**PARSED, "id": "call00001"}]},
        ),
        (CALL[:-12], {"content": "", "tool_calls": [PARSED]}),
        # malformed
        (CALL[:-20] + "<|im_end|>", {"content": CALL[:-20]}),
        (CALL.replace("1", "one"), {"content": CALL.replace("1", "one")}),
        (CALL.replace("{", "["), {"content": CALL.replace("{", "[")}),
        (CALL.replace('{"a": 1}', "[1]"), {"content": CALL.replace('{"a": 1}', "[1]")}),
        (CALL.replace("name", "nam"), {"content": CALL.replace("name", "nam")}),
        (f"{CALL} <tool_call>ab", {"content": f"{CALL} <tool_call>ab"}),
    ],
)
def test_parse(qwen, sampled, message):
    assert qwen.parse(qwen._ids(sampled), [ADD]) == {"role": "assistant", **message}


def test_calls_are_text_without_tools(qwen):
    assert qwen.parse(qwen._ids(CALL), []) == {"role": "assistant", "content": CALL}


def test_thought_that_the_prompt_begins_ends_in_the_turn(renderer):
    qwen = renderer("qwen3_6")
    qwen.prove([ADD], user_turns=False)
    parsed = qwen.parse(qwen._ids("hm\n</think>\n\nab<|im_end|>"), [])
    assert parsed == {"role": "assistant", "content": "ab", "reasoning_content": "hm"}
    cut = qwen.parse(qwen._ids("hm"), [])
    assert cut == {"role": "assistant", "content": "", "reasoning_content": "hm"}
