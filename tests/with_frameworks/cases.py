"""The frameworks that are tested, one line each; the example is examples/frameworks/NAME_agent.py."""

from typing import NamedTuple


class Case(NamedTuple):
    """`goes_on`: an error of a tool is reported to the model; otherwise it ends the agent's run. `error_text` is what
    the step says about it.
    """

    title: str
    distribution: str
    streams: bool = True
    goes_on: bool = True
    error_text: str = "night"


CASES = {
    "langgraph": Case("LangChain and LangGraph", "langgraph", goes_on=False),
    "openai_agents": Case("OpenAI Agents SDK", "openai-agents", error_text="Error running tool"),
    "pydantic_ai": Case("Pydantic AI", "pydantic-ai-slim", goes_on=False),
    "openai": Case("OpenAI SDK", "openai", goes_on=False),
    "anthropic": Case("Anthropic SDK", "anthropic", goes_on=False),
    "llama_index": Case("LlamaIndex", "llama-index-core"),
    "autogen": Case("AutoGen AgentChat", "autogen-agentchat"),
    "adk": Case("Google ADK", "google-adk", goes_on=False),
    "crewai": Case("CrewAI", "crewai"),
    "strands": Case("Strands Agents", "strands-agents"),
    "agno": Case("Agno", "agno"),
    "smolagents": Case("smolagents", "smolagents"),
    "semantic_kernel": Case("Semantic Kernel", "semantic-kernel"),
}
