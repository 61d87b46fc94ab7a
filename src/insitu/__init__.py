"""insitu improves a language model from inside the agent workflow that uses it."""

__version__ = "0.1.0"
