"""The recorder: turns requests to a model and their responses into ModelCalls in the ledger of the current episode.

    exchange = recorder.begin(method, path, body)     # None: not recorded, send the request unchanged
    ... send exchange.content ...                     # on an error: exchange.fail(reason)
    body = exchange.complete(status, headers, body)   # for a stream: exchange.feed(chunk) ..., exchange.end(headers)
    ... return `body` to the client ...

It does not depend on an HTTP library: `transport` hooks it into this process's HTTP clients, the gateway into a proxy.
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

_NON_SAMPLING_FIELDS = frozenset(("model", "messages", "prompt", "tools", "stream", "stream_options"))
_HINTS = {
    "token ids": "the server must support `return_token_ids` (vLLM 0.10.2 or later, or `insitu backend`)",
    "logprobs": "the server must support `logprobs: true` (vLLM: started without `--max-logprobs 0`)",
}


class Recorder:
    """Records chat and text completions of one model.

    `server` is its URL, `llm` its key under `llms`. `make_error` builds the error raised when a response lacks what
    training needs. `current_model` returns the model name to request, for servers that serve each policy version
    under its own model name. `forced_params` replace those of every request.
    """

    def __init__(
        self,
        server: str,
        llm: str | None = None,
        make_error: Callable[[str], CaptureError] = CaptureError,
        current_model: Callable[[], str] | None = None,
        forced_params: Mapping[str, Any] | None = None,
    ) -> None:
        self.server = server
        self.llm = llm
        self.make_error = make_error
        self.current_model = current_model
        self.forced_params = dict(forced_params or {})
        self._warned = False

    def report_late_call(self, ledger: CallLedger) -> None:
        """Counts and logs a request that outlived its episode: WARNING the first time, then INFO."""
        ledger.late_calls += 1
        level, self._warned = logging.INFO if self._warned else logging.WARNING, True
        message = "a model call was not recorded because %s had ended; is a background task still running?"
        logger.log(level, message, ledger.name)

    def begin(self, method: str, path: str, content: bytes, site: CallSite | None = None) -> "Exchange | None":
        """Starts recording a request made at `site` (default: the current call site); None if it is not recorded."""
        site = site or current_call_site.get()
        ledger = site.ledger
        if ledger is None or method != "POST" or not path.endswith("/completions"):
            return None
        if ledger.closed:
            self.report_late_call(ledger)
            return None
        if ledger.capture_error is not None:
            raise ledger.capture_error
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            return None  # invalid JSON: the server rejects it
        parsed = parse_completion_request(path, body)
        return None if parsed is None else Exchange(self, ledger, site, body, parsed)


class Exchange:
    """One recorded request and its response. Only the first of `complete`, `end` and `fail` takes effect."""

    def __init__(
        self, recorder: Recorder, ledger: CallLedger, site: CallSite, body: dict[str, Any], request: CompletionRequest
    ) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._site = site
        self._body = body
        self._request = request
        self._pending = True
        self.parse_error: str | None = None
        """Why the response could not be parsed as a completion."""
        self._is_trained = ledger.is_trained(recorder.llm)
        if self._is_trained and body.get("echo"):
            raise self._capture_error(
                "training does not support `echo` (the response would include the prompt): send requests without it"
            )
        self.streamed = bool(body.get("stream"))
        logprobs = body.get("logprobs")
        self._filter = ResponseFilter(
            token_ids=not body.get("return_token_ids"),
            # text completions may request `logprobs: 0`: those of the sampled tokens only
            logprobs=not logprobs and (request.route == CHAT or logprobs is None or logprobs is False),
        )
        self._call = ledger.begin_call(request.prompt_key, request.num_choices)
        if "max_tokens" in recorder.forced_params:
            body.pop("max_completion_tokens", None)  # the newer name of the same limit
        body.update(recorder.forced_params)
        if recorder.current_model is not None:
            body["model"] = recorder.current_model()
        if self._is_trained:
            if self._filter.logprobs:
                body["logprobs"] = request.logprobs_option
            body["return_token_ids"] = True
        if body.get("seed") is None:
            body["seed"] = ledger.sampling_seed(self._call)
        self._stream = StreamAssembler(self._filter) if self.streamed else None
        self._started_at = time.time()
        self.content = orjson.dumps(body)

    def complete(self, status: int, headers: Mapping[str, str], content: bytes) -> bytes:
        """Records a response that was not streamed; returns the body without the fields that only insitu requested."""
        if status >= 400:
            self.fail(f"http {status}")
            for missing, option in (("token ids", b"return_token_ids"), ("logprobs", b"logprobs")):
                if self._is_trained and status < 500 and option in content:
                    response_text = content[:300].decode(errors="replace")
                    raise self._missing_error(missing, f"rejected the request for them ({response_text})")
            return content
        try:
            response = orjson.loads(content)
            if not response.get("choices"):
                raise ValueError(error_message(response) or "the response has no choices")
            self._record(response, headers)
        except MALFORMED as error:
            self.fail("malformed response")
            self.parse_error = repr(error)
            return content
        return orjson.dumps(response) if self._filter.apply(response) else content

    def feed(self, chunk: bytes) -> bytes:
        """Takes a chunk of a streamed response; returns the bytes to forward."""
        assert self._stream is not None
        return self._stream.feed(chunk)

    def end(self, headers: Mapping[str, str], error: str | None = None) -> str | None:
        """Records a streamed response that has ended, was closed by the client, or was interrupted by `error`.

        Returns why the response is incomplete, if it is.
        """
        assert self._stream is not None
        if not self._pending:
            return error
        error = error or self._stream.error
        if error is None and not self.all_choices_finished:
            error = "the stream ended before all choices were finished"
        try:
            response = self._stream.response()
            if response["choices"] or self._ledger.closed:
                self._record(response, headers, error)
            else:
                self.fail("empty stream")
        except MALFORMED as malformed:
            self.fail("malformed response")
            error = f"the stream cannot be parsed: {malformed!r}"
        return error

    @property
    def all_choices_finished(self) -> bool:
        """Whether all choices of a streamed response have finished."""
        return self._stream is not None and self._stream.all_choices_finished(self._request.num_choices)

    @property
    def done_received(self) -> bool:
        """Whether the server has sent `[DONE]`.

        End the exchange before forwarding it: the client may finish its episode on receipt.
        """
        return self._stream is not None and self._stream.done_received

    def fail(self, reason: str) -> None:
        """Discards the exchange because no usable response arrived; a retry by the client counts as the same call."""
        if self._pending:
            self._pending = False
            self._ledger.abandon(self._call, reason)

    def _record(self, response: dict[str, Any], headers: Mapping[str, str], error: str | None = None) -> None:
        if self._ledger.closed:
            self._pending = False
            self._recorder.report_late_call(self._ledger)
            return
        calls = list(self._calls(response, headers, error))
        self._pending = False
        for call in calls:
            if self._is_trained and error is None:
                self._check(call)
            self._ledger.record(call, self._site)

    def _calls(self, response: dict[str, Any], headers: Mapping[str, str], error: str | None) -> Iterator[ModelCall]:
        version = str(response.get("policy_version", headers.get("x-policy-version")))  # "None" if absent
        sampling = {name: value for name, value in self._body.items() if name not in _NON_SAMPLING_FIELDS}
        for position, (index, choice) in enumerate(zip(self._call.indices, response["choices"], strict=False)):
            messages, choice_number = self._request.prompt_for_choice(choice.get("index", position))
            yield ModelCall(
                index=index,
                model=self._body.get("model", ""),
                messages=messages,
                llm=self._recorder.llm,
                tools=self._body.get("tools"),
                sampling=sampling,
                message=choice_message(choice),
                choice=choice_number,
                prompt_token_ids=choice.get("prompt_token_ids") or response.get("prompt_token_ids"),
                token_ids=choice_token_ids(choice),
                logprobs=choice_logprobs(choice),
                finish_reason=choice.get("finish_reason"),
                policy_version=int(version) if version.isdecimal() else None,
                functions=self._site.invocation.names,
                started=self._started_at,
                ended=time.time(),
                usage=response.get("usage"),
                error=error,
            )

    def _check(self, call: ModelCall) -> None:
        if call.logprobs is None:
            raise self._missing_error("logprobs", "did not return them")
        if call.token_ids is None or call.prompt_token_ids is None:
            if self._ledger.needs_token_ids:
                raise self._missing_error("token ids", "did not return them")
        elif len(call.logprobs) != len(call.token_ids):
            counts = f"returned {len(call.logprobs)} for {len(call.token_ids)} token ids"
            raise self._missing_error("logprobs", counts)

    def _missing_error(self, missing: str, problem: str) -> CaptureError:
        return self._capture_error(
            f"training needs the {missing} of every model call, but {self._recorder.server} (model "
            f"{self._body.get('model')!r}) {problem}: {_HINTS[missing]}"
        )

    def _capture_error(self, message: str) -> CaptureError:
        """Builds the error and stores it in the ledger, so the episode fails even if the workflow swallows it."""
        error = self._recorder.make_error(message)
        self._ledger.capture_error = error
        return error
