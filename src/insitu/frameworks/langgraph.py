"""LangGraph: LangChain's models (`langchain` is an alias), whose callbacks also report the tool runs of nodes."""

from insitu.frameworks.langchain import make_llm

__all__ = ["make_llm"]
