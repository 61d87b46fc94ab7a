"""LangGraph: the models of LangChain (`langchain` is the same), whose callbacks tell of its nodes' tool runs too."""

from insitu.frameworks.langchain import make_llm

__all__ = ["make_llm"]
