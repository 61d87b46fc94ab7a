"""Requests for completions and their choices, of chats and of texts.

POST /chat/completions  messages    choice.message, choice.logprobs.content, prompt_token_ids of the response
POST /completions       prompt      choice.text, choice.logprobs.token_logprobs, prompt_token_ids of each choice
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

CHAT = "chat/completions"
TEXT = "completions"

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class CompletionRequest:
    """The prompts of a request, each as messages, and the number `n` of choices per prompt.

    A text prompt is one user message; a prompt of token ids is one with the ids as JSON.
    """

    route: str
    prompts: list[Messages]
    n: int
    prompt_key: bytes
    """Equal for requests with equal prompts, apart from the ids of tool calls, which servers choose at random."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def logprobs_option(self) -> bool | int:
        """The value of `logprobs` that requests those of the sampled tokens only."""
        return True if self.route == CHAT else 0

    def prompt_for_choice(self, index: int) -> tuple[Messages, int]:
        """The prompt of the choice with this `index`, and which of that prompt's choices it is."""
        prompt, choice = divmod(index, self.n) if len(self.prompts) > 1 else (0, index)
        return self.prompts[min(prompt, len(self.prompts) - 1)], choice


def parse_completion_request(path: str, request: Any) -> CompletionRequest | None:
    """Returns None for other requests and for malformed ones, which the server rejects."""
    if not isinstance(request, dict):
        return None
    route = CHAT if path.endswith(f"/{CHAT}") else TEXT
    prompt: Any = request.get("messages" if route == CHAT else "prompt")
    if not path.endswith(f"/{TEXT}") or not isinstance(prompt, list if route == CHAT else str | list):
        return None
    prompts: list[Any] = [prompt]
    if route == TEXT:  # `prompt` is a text, token ids, or a list of either
        texts = prompt if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)) else [prompt]
        texts = [text if isinstance(text, str) else orjson.dumps(text).decode() for text in texts]
        prompts = [[{"role": "user", "content": text}] for text in texts]
    n = request.get("n")
    n = n if isinstance(n, int) and n > 0 else 1
    return CompletionRequest(route, prompts, n, _prompt_key(prompt)) if prompts else None


def _prompt_key(prompt: str | list[Any]) -> bytes:
    if isinstance(prompt, list):
        prompt = [
            _without_call_ids(part)
            if isinstance(part, dict) and ("tool_call_id" in part or part.get("tool_calls"))
            else part
            for part in prompt
        ]
    return orjson.dumps(prompt)


def _without_call_ids(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name != "tool_call_id"}
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [
            {k: v for k, v in call.items() if k != "id"} if isinstance(call, dict) else call for call in calls
        ]
    return kept


def choice_message(choice: dict[str, Any]) -> dict[str, Any] | None:
    text = choice.get("text")
    message = {"role": "assistant", "content": text} if isinstance(text, str) else choice.get("message")
    if not isinstance(message, dict | None):
        raise TypeError(f"the message is a JSON {type(message).__name__}")
    return message


def choice_delta(choice: dict[str, Any]) -> dict[str, Any]:
    """What a streamed choice adds to its message."""
    text = choice.get("text")
    return {"content": text} if isinstance(text, str) else choice.get("delta") or {}


class ResponseFilter(NamedTuple):
    """Removes from responses what the recorder requested and the client did not."""

    token_ids: bool
    logprobs: bool

    def apply(self, body: dict[str, Any]) -> bool:
        """Filters a response, or an event of a stream, in place; returns whether it changed."""
        changed = self.token_ids and body.pop("prompt_token_ids", None) is not None
        for choice in body.get("choices") or ():
            for name in ("token_ids", "prompt_token_ids") if self.token_ids else ():
                changed |= choice.pop(name, None) is not None
            if self.logprobs and choice.get("logprobs") is not None:
                choice["logprobs"] = None
                changed = True
        return changed
