"""The frameworks that are tested, one line each; the example is examples/frameworks/NAME_agent.py."""

from typing import NamedTuple


class Case(NamedTuple):
    title: str
    distribution: str
    streams: bool = True


CASES = {
    "langgraph": Case("LangChain and LangGraph", "langgraph"),
    "openai_agents": Case("OpenAI Agents SDK", "openai-agents"),
    "pydantic_ai": Case("Pydantic AI", "pydantic-ai-slim"),
    "openai": Case("OpenAI SDK", "openai"),
    "anthropic": Case("Anthropic SDK", "anthropic"),
    "llama_index": Case("LlamaIndex", "llama-index-core"),
    "autogen": Case("AutoGen AgentChat", "autogen-agentchat"),
    "adk": Case("Google ADK", "google-adk"),
    "crewai": Case("CrewAI", "crewai"),
    "strands": Case("Strands Agents", "strands-agents"),
    "agno": Case("Agno", "agno"),
    "semantic_kernel": Case("Semantic Kernel", "semantic-kernel"),
}
