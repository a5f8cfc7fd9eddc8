"""An agent with Anthropic's client and a tool, for five turns."""

import json
import os

import anthropic

TOOL = {
    "name": "count",
    "description": "Return the number after n.",
    "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}

client = anthropic.Anthropic()
asked = json.loads(os.environ["LIGHTRL_ROW"])["prompt"]
messages = [{"role": "user", "content": f"Count from {asked}."}]
for _ in range(5):
    message = client.messages.create(
        model=os.environ["LIGHTRL_MODEL"],
        max_tokens=100,
        system="Count with the tool.",
        messages=messages,
        tools=[TOOL],
    )
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["n"] + 1)}
        for block in message.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "assistant", "content": message.content})
    messages.append({"role": "user", "content": results or "Count on."})
