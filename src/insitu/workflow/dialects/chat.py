"""Chat completions (`POST /v1/chat/completions`): the dialect that is passed on as it is."""

from collections.abc import Iterator
from typing import Any

import orjson


def turn(request: dict[str, Any], memory: dict[str, Any]) -> "_Turn":
    return _Turn(request)


def error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class _Turn:
    verbatim = True

    def __init__(self, chat: dict[str, Any]) -> None:
        self.chat = chat

    def reply(self, completion: dict[str, Any]) -> dict[str, Any]:
        return completion

    def event(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        raise NotImplementedError("passed on as it is")

    def end(self, failure: str | None = None) -> Iterator[bytes]:
        if failure is not None:
            yield b"\n\ndata: " + orjson.dumps(error(502, failure, "upstream")) + b"\n\n"

    error = staticmethod(error)
