"""OpenAI's own completions, of chats and of texts: the dialects that servers of models speak too."""

from collections.abc import Iterator
from typing import Any

import orjson

from insitu.http_format import error_body, format_event
from insitu.workflow.spelling import CHAT, TEXT


class Verbatim:
    """Requests and answers are passed on as they are."""

    error = staticmethod(error_body)

    def __init__(self, route: str) -> None:
        self._route = route

    def turn(self, request: dict[str, Any], memory: dict[str, Any]) -> "_Turn":
        return _Turn(self._route, request)


chat = Verbatim(CHAT)
text = Verbatim(TEXT)


class _Turn:
    verbatim = True
    error = staticmethod(error_body)

    def __init__(self, route: str, request: dict[str, Any]) -> None:
        self.route = route
        self.request = request

    def reply(self, completion: dict[str, Any]) -> dict[str, Any]:
        return completion

    def event(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        raise NotImplementedError("passed on as it is")

    def end(self, failure: str | None = None) -> Iterator[bytes]:
        if failure is not None:
            yield b"\n\n" + format_event(orjson.dumps(error_body(failure, 502, code="upstream")))
