"""Requests for completions: their prompts, and when two of them have the same."""

from typing import Any, NamedTuple

import orjson

CHAT = "chat/completions"
TEXT = "completions"


class CompletionRequest(NamedTuple):
    """The prompts of a request, each as messages, and the number `n` of choices per prompt.

    A text prompt is one user message; a prompt of token ids is one with the ids as JSON. `prompt_key` is equal for
    requests with equal prompts, apart from the ids of tool calls, which servers choose at random.
    """

    route: str
    prompts: list[list[dict[str, Any]]]
    n: int
    prompt_key: bytes

    @classmethod
    def parse(cls, path: str, body: Any) -> "CompletionRequest | None":
        """None for other requests and for malformed ones, which the server rejects."""
        if not isinstance(body, dict):
            return None
        is_chat = path.endswith(f"/{CHAT}")
        prompt: Any = body.get("messages" if is_chat else "prompt")
        if not path.endswith(f"/{TEXT}") or not isinstance(prompt, list if is_chat else str | list):
            return None
        prompts: list[Any] = [prompt]
        if not is_chat:  # `prompt` is a text, token ids, or a list of either
            texts = prompt if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)) else [prompt]
            texts = [text if isinstance(text, str) else orjson.dumps(text).decode() for text in texts]
            prompts = [[{"role": "user", "content": text}] for text in texts]
        n = body.get("n")
        n = n if isinstance(n, int) and n > 0 else 1
        return cls(CHAT if is_chat else TEXT, prompts, n, _prompt_key(prompt)) if prompts else None


def _prompt_key(prompt: str | list[Any]) -> bytes:
    key = orjson.dumps(prompt)
    if b'"tool_call' in key and isinstance(prompt, list):
        key = orjson.dumps([_without_call_ids(part) if isinstance(part, dict) else part for part in prompt])
    return key


def _without_call_ids(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name != "tool_call_id"}
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [
            {k: v for k, v in call.items() if k != "id"} if isinstance(call, dict) else call for call in calls
        ]
    return kept
