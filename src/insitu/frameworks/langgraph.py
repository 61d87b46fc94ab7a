"""LangGraph: its models are LangChain's, and LangChain's callbacks tell of its nodes' tool runs."""

from insitu.frameworks.langchain import make_llm

__all__ = ["make_llm"]
