"""The clients that programs use get what the backend answers, streamed or not."""

import asyncio
import json
import warnings

import pytest

from lightrl.endpoints.api import SamplingLimits
from tests.endpoints.scripted import KEY, ScriptedBackend, served, turn

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER}
CHAT_TOOLS = [{"type": "function", "function": TOOL}]
CALL = ("call_1", "weather", {"city": "Bern"})
SCRIPT = [turn("Let me see.", CALL, reasoning_content="hm"), turn("", CALL), turn("Sunny.")]
SHAPES = ["call and text", "call", "text"]


def openai_client(url: str, **settings):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, **settings)


def anthropic_client(url: str):
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def without_ids(value):
    """The same without ids and times, which differ from one request to the next."""
    if isinstance(value, dict):
        other = ("id", "created", "created_at", "item_id", "index", "parsed", "parsed_arguments")
        other += ("token_ids",)
        return {k: without_ids(v) for k, v in value.items() if k not in other and v is not None}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def test_five_turns_with_tools():
    backend = ScriptedBackend([turn("", CALL), turn("Sunny."), turn("Yes.", CALL), turn("", CALL)])
    with served(backend) as server, openai_client(server.url) as client:
        messages: list = [{"role": "developer", "content": "Be brief."}]
        messages.append({"role": "user", "content": [{"type": "text", "text": "Weather?"}]})
        for at in range(5):
            got = client.chat.completions.create(model="any", messages=messages, tools=CHAT_TOOLS)
            message = got.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                assert json.loads(call.function.arguments) == {"city": "Bern"}
                result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
                messages.append(result)
            assert got.choices[0].finish_reason == ("stop" if at == 1 else "tool_calls")
            assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (3, 2)
            assert got.weight_version == 4
    assert len(backend.asked) == 5
    last = backend.asked[-1]
    assert last.tools == ({"type": "function", "function": TOOL},)
    assert last.messages[:3] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        backend.script[0].message,
    ]
    assert last.messages[3] == {"role": "tool", "tool_call_id": "call_1", "content": "sun"}
    assert last.messages[5] == backend.script[2].message | {"content": "Yes."}


@pytest.mark.parametrize("answer", SCRIPT, ids=SHAPES)
def test_a_streamed_chat_is_the_chat(answer):
    extra = {"return_token_ids": True}
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}], "logprobs": True}
    with served(ScriptedBackend([answer])) as server, openai_client(server.url) as client:
        whole = client.chat.completions.create(**asked, extra_body=extra)
        options = {"include_usage": True}
        with client.chat.completions.stream(
            **asked, extra_body=extra, stream_options=options
        ) as stream:
            chunks = [event.chunk for event in stream if event.type == "chunk"]
            streamed = stream.get_final_completion()
    # the helper of the client joins no fields that it does not know
    assert chunks[0].prompt_token_ids == [1, 2, 3]
    assert [c.token_ids for chunk in chunks for c in chunk.choices if c.finish_reason] == [[7, 8]]
    expected, got = without_ids(whole.model_dump()), without_ids(streamed.model_dump())
    assert got["choices"] == expected["choices"]
    assert got["usage"] == expected["usage"]
    assert whole.prompt_token_ids == [1, 2, 3]
    choice = whole.choices[0]
    assert choice.token_ids == [7, 8]
    assert [each.token for each in choice.logprobs.content] == ["token_id:7", "token_id:8"]
    assert [each.logprob for each in choice.logprobs.content] == [-0.25, -9999.0]
    assert getattr(choice.message, "reasoning_content", None) == answer.message.get(
        "reasoning_content"
    )


@pytest.mark.parametrize("answer", SCRIPT, ids=SHAPES)
def test_a_streamed_response_is_the_response(answer):
    with served(ScriptedBackend([answer])) as server, openai_client(server.url) as client:
        whole = client.responses.create(model="m", input="?")
        with client.responses.stream(model="m", input="?") as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_response()
    assert without_ids(streamed.model_dump()) == without_ids(whole.model_dump())
    assert whole.output_text == answer.message["content"]
    assert whole.status == "completed"
    assert whole.usage.total_tokens == 5


def test_what_a_response_returned_is_the_same_turn_as_input():
    backend = ScriptedBackend(SCRIPT)
    tools = [{"type": "function", "strict": True, **TOOL}]
    given: list = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    with served(backend) as server, openai_client(server.url) as client:
        for _ in range(3):
            got = client.responses.create(
                model="m", instructions="Be brief.", input=given, tools=tools, store=False
            )
            given += [item.model_dump(exclude_none=True) for item in got.output]
            for item in got.output:
                if item.type == "function_call":
                    out = {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
                    given.append(out)
    assert backend.asked[-1].tools == ({"type": "function", "function": TOOL},)
    result = {"role": "tool", "content": "sun", "tool_call_id": "call_1"}
    assert backend.asked[-1].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        SCRIPT[0].message,
        result,
        SCRIPT[1].message,
        result,
    ]


def test_a_turn_that_was_cut_off_is_incomplete():
    backend = ScriptedBackend([turn("Let", cut=True)])
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    with served(backend) as server, openai_client(server.url) as client:
        assert client.chat.completions.create(**asked).choices[0].finish_reason == "length"
        assert client.responses.create(model="m", input="?").status == "incomplete"
        last = list(client.responses.create(model="m", input="?", stream=True))[-1]
        assert last.type == "response.incomplete"


@pytest.mark.parametrize("answer", SCRIPT, ids=SHAPES)
def test_a_streamed_message_of_anthropic_is_the_message(answer):
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
    with served(ScriptedBackend([answer])) as server, anthropic_client(server.url) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_message()
    expected, got = whole.model_dump(), streamed.model_dump()
    assert without_ids(got["content"]) == without_ids(expected["content"])
    assert got["stop_reason"] == expected["stop_reason"]
    assert got["usage"] == expected["usage"]
    assert whole.stop_reason == ("tool_use" if "tool_calls" in answer.message else "end_turn")


def test_what_anthropic_returned_is_the_same_turn_as_a_message():
    backend = ScriptedBackend(SCRIPT)
    tools = [{"name": "weather", "description": "Tells the weather.", "input_schema": WEATHER}]
    messages: list = [{"role": "user", "content": "Weather?"}]
    with served(backend) as server, anthropic_client(server.url) as client:
        for _ in range(3):
            got = client.messages.create(
                model="m", max_tokens=9, system="Be brief.", messages=messages, tools=tools
            )
            blocks = [block.model_dump(exclude_none=True) for block in got.content]
            messages.append({"role": "assistant", "content": blocks})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "sun"}
                for block in got.content
                if block.type == "tool_use"
            ]
            results.append({"type": "text", "text": "Well?"})
            messages.append({"role": "user", "content": results})
    assert backend.asked[-1].max_tokens == 9
    assert backend.asked[-1].tools == ({"type": "function", "function": TOOL},)
    result = {"role": "tool", "content": "sun", "tool_call_id": "call_1"}
    well = {"role": "user", "content": "Well?"}
    assert backend.asked[-1].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        SCRIPT[0].message,
        result,
        well,
        SCRIPT[1].message,
        result,
        well,
    ]


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
def test_an_agent_of_the_agents_sdk(api):
    pytest.importorskip("openai")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agents = pytest.importorskip("agents")
        from openai import AsyncOpenAI

    async def run(url: str) -> str:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        kinds = {
            "chat_completions": agents.OpenAIChatCompletionsModel,
            "responses": agents.OpenAIResponsesModel,
        }
        model = kinds[api](model="m", openai_client=client)
        agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(weather)])
        settings = agents.RunConfig(tracing_disabled=True)
        result = await agents.Runner.run(agent, "Weather?", run_config=settings)
        await client.close()
        return result.final_output

    def weather(city: str) -> str:
        """Tells the weather."""
        return f"sun in {city}"

    backend = ScriptedBackend([turn("", CALL), turn("Sunny.")])
    with served(backend) as server:
        assert asyncio.run(run(server.url)) == "Sunny."
    assert backend.asked[-1].messages[-1]["content"] == "sun in Bern"


def test_a_client_says_that_it_sends_a_request_again():
    openai = pytest.importorskip("openai")
    from lightrl.endpoints.api import ApiError

    backend = ScriptedBackend([ApiError(503, "no engine; try again"), turn("Hi.")])
    with served(backend) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=1)
        with client:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    assert [asked.is_retry for asked in backend.asked] == [False, True]


def test_an_evaluation_samples_as_its_clients_say():
    backend = ScriptedBackend(limits=SamplingLimits("tiny", 64, is_free=True))
    with served(backend) as server, openai_client(server.url) as client:
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "?"}],
            temperature=0.5,
            top_p=0.9,
            stop="\n",
            seed=3,
            extra_body={"top_k": -1},
        )
    asked = backend.asked[0]
    assert (asked.temperature, asked.top_p, asked.top_k, asked.stop, asked.seed) == (
        0.5,
        0.9,
        0,
        ("\n",),
        3,
    )
