"""An agent of LangChain, which is a graph of LangGraph, with a tool."""

import json
import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError


@tool
def count(n: int) -> int:
    """Return the number after n."""
    return n + 1


model = ChatOpenAI(model=os.environ["LIGHTRL_MODEL"])
agent = create_agent(model, tools=[count], system_prompt="Count with the tool.")
asked = json.loads(os.environ["LIGHTRL_ROW"])["prompt"]
messages = [{"role": "user", "content": f"Count from {asked}."}]
try:
    state = agent.invoke({"messages": messages}, {"recursion_limit": 10})
    goes_on = [*state["messages"], {"role": "user", "content": "Count on."}]
    agent.invoke({"messages": goes_on}, {"recursion_limit": 10})
except GraphRecursionError as e:
    print(e)  # too many turns: the reward is that of what was said
