"""An agent of the OpenAI Agents SDK with a tool, in two conversations of one episode.

The argument is the API of its requests: "responses", which is the default of the SDK, or
"chat_completions".
"""

import json
import os
import sys

import agents
from agents import Agent, Runner, function_tool

agents.set_tracing_disabled(True)  # traces are sent to OpenAI
agents.set_default_openai_api(sys.argv[1])


@function_tool
def count(n: int) -> int:
    """Return the number after n.

    Args:
        n: A whole number.
    """
    return n + 1


# Not LIGHTRL_MODEL: the SDK reads what precedes a slash as the name of a provider.
agent = Agent(name="Counter", instructions="Count.", model="trained", tools=[count])
asked = json.loads(os.environ["LIGHTRL_ROW"])["prompt"]
try:
    result = Runner.run_sync(agent, f"Count from {asked}.", max_turns=5)
    goes_on = [*result.to_input_list(), {"role": "user", "content": "Count on."}]
    Runner.run_sync(agent, goes_on, max_turns=5)
except agents.AgentsException as e:
    print(e)  # too many turns, or one that was cut: the reward is that of what was said
