"""LangGraph: LangChain's models (`langchain` is an alias), whose callbacks also report the tool runs of nodes."""

from insitu.integrations.frameworks.langchain import ask_agent, make_llm, make_tool

__all__ = ["ask_agent", "make_llm", "make_tool"]
