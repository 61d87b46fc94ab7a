"""OpenAI's own completions, of chats and of texts: the dialects that servers of models speak too."""

from collections.abc import Iterator
from typing import Any

import orjson

from insitu.workflow.dialects.turns import openai_error
from insitu.workflow.spelling import CHAT, TEXT


class Verbatim:
    """Requests and answers are passed on as they are."""

    error = staticmethod(openai_error)

    def __init__(self, route: str) -> None:
        self._route = route

    def turn(self, request: dict[str, Any], memory: dict[str, Any]) -> "_Turn":
        return _Turn(self._route, request)


chat = Verbatim(CHAT)
text = Verbatim(TEXT)


class _Turn:
    verbatim = True
    error = staticmethod(openai_error)

    def __init__(self, route: str, request: dict[str, Any]) -> None:
        self.route = route
        self.request = request

    def reply(self, completion: dict[str, Any]) -> dict[str, Any]:
        return completion

    def event(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        raise NotImplementedError("passed on as it is")

    def end(self, failure: str | None = None) -> Iterator[bytes]:
        if failure is not None:
            yield b"\n\ndata: " + orjson.dumps(openai_error(502, failure, "upstream")) + b"\n\n"
