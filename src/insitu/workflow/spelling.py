"""What the recorder reads in requests for completions and in their answers, of chats and of texts alike.

POST /chat/completions  messages    choice.message, choice.logprobs.content, prompt_token_ids of the answer
POST /completions       prompt      choice.text, choice.logprobs.token_logprobs, prompt_token_ids of each choice
"""

from dataclasses import dataclass
from typing import Any

import orjson

CHAT = "chat/completions"
TEXT = "completions"

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    """What a request wants completed: its prompts, each as messages, and how many choices of each.

    A text is the message of a user; token ids are one too, written as JSON.
    """

    route: str
    prompts: list[Messages]
    n: int
    identity: bytes
    """The same for requests that have the same completed."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def logprobs(self) -> bool | int:
        """What asks for the logprobs of the sampled tokens and no others."""
        return True if self.route == CHAT else 0

    def prompt_of(self, index: int) -> tuple[Messages, int]:
        """The prompt of the choice that a server calls `index`, and which of that prompt's choices it is."""
        which, choice = divmod(index, self.n) if len(self.prompts) > 1 else (0, index)
        return self.prompts[min(which, len(self.prompts) - 1)], choice


def asked_by(path: str, request: Any) -> Asked | None:
    """None for what is no request for completions; a server says what is wrong with it."""
    if not isinstance(request, dict):
        return None
    route = next((route for route in (CHAT, TEXT) if path.endswith(f"/{route}")), None)
    given: Any = request.get("messages" if route == CHAT else "prompt")
    prompts = None
    if route == CHAT:
        prompts = [given] if isinstance(given, list) else None
    elif route == TEXT:
        prompts = [[{"role": "user", "content": _written(prompt)}] for prompt in _several(given)]
    if route is None or not prompts:
        return None
    n = request.get("n")
    return Asked(route, prompts, n if isinstance(n, int) and n > 0 else 1, orjson.dumps(given))


def _several(prompt: Any) -> list[Any]:
    """The prompts in a text completion's `prompt`: a text, token ids, or a list of either."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt] if isinstance(prompt, str | list) and prompt != [] else []


def _written(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else orjson.dumps(prompt).decode()


def message_of(choice: dict[str, Any]) -> dict[str, Any] | None:
    """What the model said."""
    text = choice.get("text")
    message = {"role": "assistant", "content": text} if isinstance(text, str) else choice.get("message")
    if not isinstance(message, dict | None):
        raise TypeError(f"the message is a JSON {type(message).__name__}")
    return message


def delta_of(piece: dict[str, Any]) -> dict[str, Any]:
    """What the message of a streamed choice grew by."""
    text = piece.get("text")
    return {"content": text} if isinstance(text, str) else piece.get("delta") or {}
