"""The recorder: turns requests to a model and their responses into ModelCalls in the ledger of the current episode.

    exchange = recorder.begin(method, path, body)             None: not recorded, send as it is
    ... send exchange.content ...
    body = exchange.complete(status, headers, body)           or, for a stream: exchange.feed(chunk) ..., exchange.end()
    ... return `body` to the client ...                       or exchange.fail(reason)

It is independent of HTTP libraries: `transport` puts it under those of this process, the gateway under a server.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from insitu.capture.completion_format import (
    CHAT,
    CompletionRequest,
    ResponseFilter,
    choice_message,
    parse_completion_request,
)
from insitu.capture.ledger import CallLedger, CallSite, current_call_site
from insitu.capture.stream_assembler import StreamAssembler
from insitu.errors import CaptureError
from insitu.http_format import MALFORMED, choice_logprobs, choice_token_ids, error_message
from insitu.schemas.episodes import ModelCall

logger = logging.getLogger(__name__)

_NOT_SAMPLING = frozenset(("model", "messages", "prompt", "tools", "stream", "stream_options"))
_HINTS = {
    "tokens": "ask without `echo`",
    "token ids": "the server must support `return_token_ids` (vLLM from 0.10.2 on, and `insitu backend`)",
    "logprobs": "the server must support `logprobs: true` (vLLM: do not start it with --max-logprobs 0)",
}


class Recorder:
    """Records the completions of one model, of chats and of texts.

    `server` is its URL, `llm` its key under `llms`. `error_type` is raised when a response lacks what training needs.
    `current_model` returns the model name to request, for servers that name each version of the weights.
    """

    def __init__(
        self,
        server: str,
        llm: str | None = None,
        error_type: Callable[[str], CaptureError] = CaptureError,
        current_model: Callable[[], str] | None = None,
    ) -> None:
        self.server = server
        self.llm = llm
        self.error_type = error_type
        self.current_model = current_model
        self._warned = False

    def count_late_call(self, ledger: CallLedger) -> None:
        """Counts a request that outlived its episode; only the first is a warning, for there may be many."""
        ledger.late_calls += 1
        level, self._warned = logging.INFO if self._warned else logging.WARNING, True
        logger.log(
            level, "a model call of %s came after its end and is not recorded: is a task left running?", ledger.name
        )

    def begin(self, method: str, path: str, content: bytes, site: CallSite | None = None) -> "Exchange | None":
        """Starts a call made at `site`, by default where the code runs; returns None for other requests."""
        site = site or current_call_site.get()
        ledger = site.ledger
        if ledger is None or method != "POST" or not path.endswith("/completions"):
            return None
        if ledger.closed:
            self.count_late_call(ledger)
            return None
        if ledger.capture_error is not None:
            raise ledger.capture_error
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            return None  # the server rejects it
        parsed = parse_completion_request(path, body)
        return None if parsed is None else Exchange(self, ledger, site, body, parsed)


class Exchange:
    """One request and its response. Of `complete`, `end` and `fail` only the first call has an effect."""

    def __init__(
        self, recorder: Recorder, ledger: CallLedger, site: CallSite, body: dict[str, Any], request: CompletionRequest
    ) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._site = site
        self._body = body
        self._request = request
        self._open = True
        self.malformed: str | None = None
        """Why the response is not a completion."""
        self._trains = ledger.trains(recorder.llm)
        if self._trains and body.get("echo"):
            raise self._capture_error("tokens", "would repeat the prompt in the answer")
        self.streamed = bool(body.get("stream"))
        logprobs = body.get("logprobs")
        self._filter = ResponseFilter(
            token_ids=not body.get("return_token_ids"),
            logprobs=not logprobs and (request.route == CHAT or logprobs is None or logprobs is False),
        )
        self._call = ledger.begin_call(request.identity, request.num_choices)
        if recorder.current_model is not None:
            body["model"] = recorder.current_model()
        if self._trains:
            if self._filter.logprobs:
                body["logprobs"] = request.logprobs_option
            body["return_token_ids"] = True
        if body.get("seed") is None:
            body["seed"] = ledger.sampling_seed(self._call)
        self._stream = StreamAssembler(self._filter) if self.streamed else None
        self._started = time.time()
        self.content = orjson.dumps(body)

    def complete(self, status: int, headers: Mapping[str, str], content: bytes) -> bytes:
        """Records a response that was not streamed; returns its body without what the client did not request."""
        if status >= 400:
            self.fail(f"http {status}")
            for what, option in (("token ids", b"return_token_ids"), ("logprobs", b"logprobs")):
                if self._trains and status < 500 and option in content:
                    refusal = content[:300].decode(errors="replace")
                    raise self._capture_error(what, f"refused a request for them ({refusal})")
            return content
        try:
            response = orjson.loads(content)
            if not response.get("choices"):
                raise ValueError(error_message(response) or "it has no choices")
            self._record(response, headers)
        except MALFORMED as error:
            self.fail("unreadable answer")
            self.malformed = repr(error)
            return content
        return orjson.dumps(response) if self._filter.apply(response) else content

    def feed(self, chunk: bytes) -> bytes:
        """Takes a chunk of a streamed response; returns the bytes to pass on."""
        assert self._stream is not None
        return self._stream.feed(chunk)

    def end(self, headers: Mapping[str, str], error: str | None = None) -> str | None:
        """Records a streamed response that has ended, was closed by the client, or broke off because of `error`.

        Returns why the response is incomplete, if it is.
        """
        assert self._stream is not None
        if not self._open:
            return error
        error = error or self._stream.error
        if error is None and not self.is_complete:
            error = "the stream was closed before its end"
        try:
            response = self._stream.response()
            if response["choices"] or self._ledger.closed:
                self._record(response, headers, error)
            else:
                self.fail("empty stream")
        except MALFORMED as malformed:
            self.fail("unreadable answer")
            error = f"the stream cannot be parsed: {malformed!r}"
        return error

    @property
    def is_complete(self) -> bool:
        """Whether all choices of a streamed response have finished."""
        return self._stream is not None and self._stream.is_complete(self._request.num_choices)

    @property
    def is_done(self) -> bool:
        """Whether the server has ended the stream.

        The exchange must be ended before the client sees that: its episode may end with it.
        """
        return self._stream is not None and self._stream.done

    def fail(self, reason: str) -> None:
        """The request had no response; a retry of the client counts as the same call."""
        if self._open:
            self._open = False
            self._ledger.abandon(self._call, reason)

    def _record(self, response: dict[str, Any], headers: Mapping[str, str], error: str | None = None) -> None:
        if self._ledger.closed:
            self._open = False
            self._recorder.count_late_call(self._ledger)
            return
        calls = list(self._calls(response, headers, error))
        self._open = False
        for call in calls:
            if self._trains and error is None:
                self._check(call)
            self._ledger.record(call, self._site)

    def _calls(self, response: dict[str, Any], headers: Mapping[str, str], error: str | None) -> Iterator[ModelCall]:
        version = str(response.get("policy_version", headers.get("x-policy-version")))
        sampling = {name: value for name, value in self._body.items() if name not in _NOT_SAMPLING}
        for position, (index, choice) in enumerate(zip(self._call.indices, response["choices"], strict=False)):
            messages, number = self._request.prompt_of(choice.get("index", position))
            yield ModelCall(
                index=index,
                model=self._body.get("model", ""),
                messages=messages,
                llm=self._recorder.llm,
                tools=self._body.get("tools"),
                sampling=sampling,
                message=choice_message(choice),
                choice=number,
                prompt_token_ids=choice.get("prompt_token_ids") or response.get("prompt_token_ids"),
                token_ids=choice_token_ids(choice),
                logprobs=choice_logprobs(choice),
                finish_reason=choice.get("finish_reason"),
                policy_version=int(version) if version.isdecimal() else None,
                functions=self._site.invocation.names,
                started=self._started,
                ended=time.time(),
                usage=response.get("usage"),
                error=error,
            )

    def _check(self, call: ModelCall) -> None:
        if call.logprobs is None:
            raise self._capture_error("logprobs", "answered without them")
        if call.token_ids is None or call.prompt_token_ids is None:
            if self._ledger.needs_token_ids:
                raise self._capture_error("token ids", "answered without them")
        elif len(call.logprobs) != len(call.token_ids):
            counts = f"answered with {len(call.logprobs)} for {len(call.token_ids)} token ids"
            raise self._capture_error("logprobs", counts)

    def _capture_error(self, what: str, did: str) -> CaptureError:
        """Also kept in the ledger: the episode fails with it even if the workflow swallows the exception."""
        error = self._recorder.error_type(
            f"training needs the {what} of every model call, but {self._recorder.server} (model "
            f"{self._body.get('model')!r}) {did}: {_HINTS[what]}"
        )
        self._ledger.capture_error = error
        return error
