"""The model of an agent that is not asynchronous."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

from insitu.agents.frameworks import sync_client
from insitu.workflow.llms import ModelClient, as_messages, text_of

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletion


class BlockingModel:
    """A `ModelClient` whose methods block, for functions that run in threads."""

    def __init__(self, model: ModelClient) -> None:
        self._model = model
        self.model = model.model
        self.params = model.params

    @cached_property
    def client(self) -> "OpenAI":
        """The official client."""
        return sync_client(self._model)

    def complete(self, messages: str | list[dict[str, Any]], **overrides: Any) -> "ChatCompletion":
        """One chat completion with the configured parameters; `overrides` take precedence. Text is a user's message."""
        request: dict[str, Any] = {"model": self.model, "messages": as_messages(messages), **self.params, **overrides}
        completion: ChatCompletion = self.client.chat.completions.create(**request)
        return completion

    def ask(self, messages: str | list[dict[str, Any]], **overrides: Any) -> str:
        """The text of one completion."""
        return text_of(self.complete(messages, **overrides))
