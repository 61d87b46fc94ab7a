"""The dialects of agents, each to and from the completions that servers of models understand."""

from typing import Any

from insitu.workflow.dialects import anthropic, responses
from insitu.workflow.dialects.turns import Dialect, Turn, shown_of
from insitu.workflow.dialects.verbatim import chat, text
from insitu.workflow.spelling import CHAT, TEXT

__all__ = ["CHAT", "DIALECTS", "Dialect", "Turn", "anthropic", "chat", "request_of", "shown_of"]

DIALECTS: dict[str, Dialect] = {CHAT: chat, TEXT: text, "responses": responses, "messages": anthropic}
"""By the route below `/v1` that their clients ask."""


def request_of(turn: Turn, params: dict[str, Any], model: str) -> dict[str, Any]:
    """What the server is sent: the agent's request, and of the configured parameters those that it does not give."""
    params = dict(params)
    if turn.route == TEXT and params.pop("logprobs", False):  # there it is how many of the likeliest to tell
        params["logprobs"] = params.pop("top_logprobs", 0)
    if "max_completion_tokens" in turn.request and "max_tokens" not in turn.request:
        params.pop("max_tokens", None)  # the agent's own limit, by its newer name
    return {**params, **turn.request, "model": model}
