"""The recorder: turns requests to a model and their responses into ModelCalls in the ledger of the current episode.

    exchange = recorder.begin(method, path, body)     # None: not recorded, send the request unchanged
    ... send exchange.content with exchange.headers   # on an error: exchange.fail(reason)
    body = exchange.complete(status, headers, body)   # for a stream: exchange.feed(chunk) ..., exchange.end(headers)
    ... return `body` to the client ...

It does not depend on an HTTP library: `transport` hooks it into this process's HTTP clients, the gateway into a proxy.

POST /chat/completions  messages    choice.message, choice.logprobs.content, prompt_token_ids of the response
POST /completions       prompt      choice.text, choice.logprobs.token_logprobs, prompt_token_ids of each choice

It asks for the compact form (`wire.http_format.COMPACT`) of logprobs that the agent does not get, and reads both forms.
"""

import asyncio
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from insitu.capture.ledger import CallLedger, CallSite, CompletionRequest, current_call_site
from insitu.capture.stream_assembler import StreamAssembler
from insitu.errors import CaptureError
from insitu.schemas.episodes import ModelCall, Needs
from insitu.wire.addresses import is_same_server
from insitu.wire.connection import choice_tokens, sent_logprobs
from insitu.wire.http_format import CHAT, COMPACT, JSON, MALFORMED, error_message, error_param, load_json, parse_count

logger = logging.getLogger(__name__)

_BRIDGE = "continues"
_NON_SAMPLING_FIELDS = frozenset((_BRIDGE, "model", "messages", "prompt", "tools", "stream", "stream_options"))
_SHAPING = ("logprobs_processed", "structured_outputs")
"""Says of a choice whether the request changed its logprobs, and by which grammar of forced calls."""
_NAMES_LOGPROBS = re.compile(rb"(?<!top_)logprobs")
_QUOTED_REQUEST = re.compile(rb"""['"]input\\*['"]: *\{""")
"""Where an error of validation begins to quote the whole request, and with it what only insitu requested."""
_NEEDED_FROM = {"token ids": Needs.TOKEN_IDS, "logprobs": Needs.LOGPROBS}
_OPTIONS = {"token ids": "return_token_ids", "logprobs": "logprobs"}
_REFUSALS = frozenset((400, 403, 422))
_ROUNDING = 1e-4
"""How far above 0 rounding may lift a logprob."""
_HINTS = {
    "token ids": "the server must support `return_token_ids` (vLLM 0.10.2 or later, or `insitu backend`)",
    "logprobs": "the server must support `logprobs: true` (vLLM: started without `--max-logprobs 0`)",
}


@dataclass(eq=False, repr=False)
class Recorder:
    """Records chat and text completions of one model.

    `server` is its URL, `llm` its key under `llms`. `make_error` builds the error raised when a response lacks what
    training needs. `current_model` returns the model name to request, for servers that serve each policy version
    under its own model name. `forced_params` replace those of every request.
    """

    server: str
    llm: str | None = None
    make_error: Callable[[str], CaptureError] = CaptureError
    current_model: Callable[[], str] | None = None
    forced_params: Mapping[str, Any] = field(default_factory=dict)
    bridges_tokens: bool = False
    """Sends what was sampled of a conversation with its next request, as `token_bridge` of an llm says."""
    retried_statuses: Collection[int] | None = None
    """Of responses after which clients are to repeat a request; None: as they decide themselves."""
    stray_completions: int = 0
    """Completions requested outside every episode and evaluator: by threads that do not know their episode, say."""
    refused: frozenset[str] = frozenset()
    """What the server refuses to return, of `_OPTIONS`: it is not requested again where training does without."""
    _warned: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def report_late_call(self, ledger: CallLedger, what: str) -> None:
        """Counts and logs a request that outlived its episode: WARNING the first time, then INFO."""
        ledger.note_late_call()
        level, self._warned = logging.INFO if self._warned else logging.WARNING, True
        message = "a model call was %s because %s had ended; is a background task still running?"
        logger.log(level, message, what, ledger.name)

    def note_refusal(self, missing: str, response: bytes) -> None:
        """From now on, requests are sent without an option that the server refuses. Warns the first time."""
        with self._lock:
            is_known = missing in self.refused
            self.refused |= {missing}
        if not is_known:
            text, llm = response[:300].decode(errors="replace"), f"llms.{self.llm}: " if self.llm else ""
            logger.warning("%s%s gives no %s (%s); training goes on without them", llm, self.server, missing, text)

    def begin(self, method: str, path: str, content: bytes, site: CallSite | None = None) -> "Exchange | None":
        """Starts recording a request made at `site` (default: the current call site); None if it is not recorded.

        Raises CaptureError for a request of an episode that has ended.
        """
        site = site or current_call_site.get()
        ledger = site.ledger
        if method != "POST" or not path.endswith("/completions"):
            return None
        if ledger is not None and ledger.closed:
            self.report_late_call(ledger, "refused")
            raise self.make_error(
                f"a model call was refused because its episode {ledger.name} had ended: a task that serves several "
                "episodes must enter each of them with Context.activate()"
            )
        if ledger is not None and ledger.capture_error is not None:
            raise ledger.capture_error
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            return None  # invalid JSON: the server rejects it
        if (request := CompletionRequest.parse(path, body)) is None:
            return None
        if ledger is None:
            if not site.is_explicit:
                with self._lock:
                    self.stray_completions += len(request.prompts) * request.n
            return None
        return Exchange(self, ledger, site, body, request)


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
            raise recorder.make_error(  # the agent's own mistake: its other calls are trained
                "training does not support `echo` (the response would include the prompt): send requests without it"
            )
        self.streamed = bool(body.get("stream"))
        logprobs = body.get("logprobs")
        self._strips_token_ids = not body.get("return_token_ids")
        # text completions may request `logprobs: 0`: those of the sampled tokens only
        self._strips_logprobs = not logprobs and (request.route == CHAT or logprobs is None or logprobs is False)
        self._refusals: dict[str, bytes] = {}
        """What was refused, and how; not the request's other faults, if it is accepted now."""
        self._keeps_entries = ledger.needs is Needs.GIVEN
        is_compact = self._is_trained and self._strips_logprobs and not (self.streamed or self._keeps_entries)
        self.headers = {"Accept": f"{COMPACT}, {JSON}"} if is_compact else {}
        """Headers of the request instead of the agent's."""
        self._num_choices = len(request.prompts) * request.n
        self._call = ledger.begin_call(request.prompt_key, self._num_choices, recorder.server, recorder.llm)
        if "max_tokens" in recorder.forced_params:
            body.pop("max_completion_tokens", None)  # the newer name of the same limit
        body.update(recorder.forced_params)
        if ledger.temperature is not None:
            body["temperature"] = ledger.temperature
        if recorder.current_model is not None:
            body["model"] = recorder.current_model()
        elif ledger.sampled_from is not None:
            server, version = ledger.sampled_from
            if body.get("model") == version.rpartition("@")[0] and is_same_server(recorder.server, server):
                body["model"] = version
        if self._is_trained:
            if self._strips_logprobs:
                body["logprobs"] = True if request.route == CHAT else 0
            body["return_token_ids"] = True
            for missing in recorder.refused:
                if ledger.needs < _NEEDED_FROM[missing]:
                    self._leave_out(missing)
            bridges = recorder.bridges_tokens and request.route == CHAT
            if bridges and (earlier := ledger.continued(body["messages"], recorder.llm)) is not None:
                body[_BRIDGE] = {"token_ids": earlier.all_token_ids, "num_messages": len(earlier.messages) + 1}
        if body.get("seed") is None:
            body["seed"] = self._call.seed
        self._stream = StreamAssembler(self._strip) if self.streamed else None
        self._started_at = time.time()
        self.content = orjson.dumps(body)

    def must_resend(self, status: int, content: bytes) -> bool:
        """Whether the server refused what only insitu requested and training can do without.

        The request, now without it, must then be sent again; its response is the one to `complete`.
        """
        missing = self._rejected_option(content) if self._is_trained and status in _REFUSALS else None
        if missing is None or self._ledger.needs >= _NEEDED_FROM[missing]:
            return False
        self._refusals[missing] = content
        self._leave_out(missing)
        self.content = orjson.dumps(self._body)
        return True

    def _leave_out(self, missing: str) -> None:
        """Removes from the request what only insitu requests."""
        if self._strips_token_ids if missing == "token ids" else self._strips_logprobs:
            self._body.pop(_OPTIONS[missing], None)

    def complete(self, status: int, headers: Mapping[str, str], content: bytes) -> bytes:
        """Records a response that was not streamed; returns the body without the fields that only insitu requested."""
        if status >= 400:
            self.fail(f"http {status}", by_server=status == 429 or status >= 500)
            missing = self._rejected_option(content) if self._is_trained and status < 500 else None
            if missing is not None and self._ledger.needs >= _NEEDED_FROM[missing]:
                response_text = content[:300].decode(errors="replace")
                raise self._missing_error(missing, f"rejected the request for them ({response_text})")
            return content
        try:
            response = load_json(content)
            if not response.get("choices"):
                raise ValueError(error_message(response) or "the response has no choices")
            self._record(response, headers)
        except MALFORMED as error:
            self.fail("malformed response", by_server=True)
            self.parse_error = repr(error)
            return content
        return orjson.dumps(response) if self._strip(response) else content

    def _strip(self, body: dict[str, Any]) -> bool:
        """Removes what only insitu requested from a response, or an event of a stream; returns whether it changed."""
        changed = False
        for name in ("prompt_token_ids", "weights") if self._strips_token_ids else ():
            changed |= body.pop(name, None) is not None
        for choice in body.get("choices") or ():
            for name in ("token_ids", "prompt_token_ids") if self._strips_token_ids else ():
                changed |= choice.pop(name, None) is not None
            if self._strips_logprobs:
                for name in ("logprobs_temperature", *_SHAPING):
                    changed |= choice.pop(name, None) is not None
                if choice.get("logprobs") is not None:
                    choice["logprobs"] = None
                    changed = True
        return changed

    def _rejected_option(self, error: bytes) -> str | None:
        """What only insitu requested, if the error is about that; other bad requests are the agent's."""
        about = error_param(error)  # the text may quote what the agent has sent
        error = _QUOTED_REQUEST.split(error, maxsplit=1)[0]
        asks_ids = self._strips_token_ids and "return_token_ids" in self._body
        if asks_ids and (about == "return_token_ids" if about else b"return_token_ids" in error):
            return "token ids"
        ours = self._strips_logprobs and "logprobs" in self._body and not self._body.get("top_logprobs")
        return "logprobs" if ours and (about == "logprobs" if about else _NAMES_LOGPROBS.search(error)) else None

    def read_by(self, reader: asyncio.Task[Any] | None, leave: Callable[[], None]) -> None:
        """Who reads a streamed response, and what to call if it ends before the response does."""
        self._call.reader, self._call.leave = reader, leave

    def feed(self, chunk: bytes) -> bytes:
        """Takes a chunk of a streamed response; returns the bytes to forward."""
        assert self._stream is not None
        return self._stream.feed(chunk)

    def end(self, headers: Mapping[str, str], error: str | None = None, *, by_server: bool = True) -> str | None:
        """Records a streamed response that has ended, was closed by the client, or was interrupted by `error`.

        `by_server`: the server is at fault for the error. Returns why the response is incomplete, if it is.
        """
        assert self._stream is not None
        if not self._pending:
            return error
        told = self._stream.error or self._stream.malformed_event
        failure = (error if by_server else None) or told
        error = error or self._stream.error
        if error is None and not self.all_choices_finished:
            error = "the stream ended before all choices were finished"
        try:
            response = self._stream.response()
            if response["choices"] or self._ledger.closed:
                self._record(response, headers, error)
            else:
                self.parse_error = None if self._stream.event_error else told
                self.fail("empty stream", by_server=by_server or told is not None)
        except MALFORMED as malformed:
            self.fail("malformed response", by_server=True)
            error = f"the stream cannot be parsed: {malformed!r}"
        self._ledger.server_failure = failure or self._ledger.server_failure
        return error

    @property
    def all_choices_finished(self) -> bool:
        """Whether all choices of a streamed response have finished."""
        return self._stream is not None and self._stream.all_choices_finished(self._num_choices)

    @property
    def done_received(self) -> bool:
        """Whether the server has sent `[DONE]`.

        End the exchange before forwarding it: the client may finish its episode on receipt.
        """
        return self._stream is not None and self._stream.done_received

    def fail(self, reason: str, *, by_server: bool) -> None:
        """Discards the exchange because no usable response arrived; a retry by the client counts as the same call."""
        if self._pending:
            self._pending = False
            self._ledger.abandon(self._call, reason, by_server=by_server)

    def _record(self, response: dict[str, Any], headers: Mapping[str, str], error: str | None = None) -> None:
        calls = [] if self._ledger.closed else self._calls(response, headers, error)
        self._pending = False
        for missing, response_text in self._refusals.items():
            self._recorder.note_refusal(missing, response_text)
        for call in calls:
            if self._is_trained and error is None:
                self._check(call)
        if not self._ledger.record(calls, self._site, self._call):
            self._recorder.report_late_call(self._ledger, "not recorded")

    def _calls(self, response: dict[str, Any], headers: Mapping[str, str], error: str | None) -> list[ModelCall]:
        version = str(response.get("policy_version", headers.get("x-policy-version")))  # "None" if absent
        sampling = {name: value for name, value in self._body.items() if name not in _NON_SAMPLING_FIELDS}
        ended = self._started_at + time.monotonic() - self._call.started  # the clock may have been set meanwhile
        prompts, calls = self._request.prompts, []
        for position, (index, choice) in enumerate(zip(self._call.indices, response["choices"], strict=False)):
            number = choice.get("index", position)
            prompt, number = divmod(number, self._request.n) if len(prompts) > 1 else (0, number)
            message = choice.get("message")
            if isinstance(text := choice.get("text"), str):
                message = {"role": "assistant", "content": text}
            if not isinstance(message, dict | None):
                raise TypeError(f"the message is a JSON {type(message).__name__}")
            token_ids, logprobs = choice_tokens(choice)
            is_sent = self._is_trained and (self._keeps_entries or token_ids is None)
            shaping = {k: choice[k] for k in _SHAPING if choice.get(k)} if choice.get(_SHAPING[0]) is True else {}
            call = ModelCall(
                index=index,
                model=self._body.get("model", ""),
                messages=prompts[min(prompt, len(prompts) - 1)],
                llm=self._recorder.llm,
                tools=self._body.get("tools"),
                sampling=sampling | shaping,
                message=message,
                choice=number,
                prompt_token_ids=choice.get("prompt_token_ids") or response.get("prompt_token_ids"),
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=choice.get("finish_reason"),
                policy_version=parse_count(version),
                functions=self._site.invocation.names,
                started=self._started_at,
                ended=ended,
                usage=response.get("usage"),
                error=error,
                logprobs_temperature=choice.get("logprobs_temperature"),
                tool_call_malformed=choice.get("tool_call_malformed") is True,
                sent_logprobs=sent_logprobs(choice.get("logprobs")) if is_sent else None,
                weights=weights if isinstance(weights := response.get("weights"), str) else None,
            )
            calls.append(call)
        return calls

    def _check(self, call: ModelCall) -> None:
        logprobs: Any = call.logprobs
        for name in ("prompt_token_ids", "token_ids", "logprobs"):
            if not isinstance(values := getattr(call, name), list | None):
                problem = f"returned {name} as a JSON {type(values).__name__}; expected a list"
                raise self._capture_error(f"{self._source} {problem}")
        if logprobs is None:
            if self._ledger.needs is Needs.GIVEN:
                return
            raise self._missing_error("logprobs", "did not return them")
        if call.token_ids is None or call.prompt_token_ids is None:
            if self._ledger.needs is Needs.TOKEN_IDS:
                raise self._missing_error("token ids", "did not return them")
        elif len(logprobs) != len(call.token_ids):
            raise self._missing_error("logprobs", f"returned {len(logprobs)} for {len(call.token_ids)} token ids")
        for ids in (call.prompt_token_ids or [], call.token_ids or []):
            if not {int}.issuperset(map(type, ids)) or min(ids, default=0) < 0:
                bad_id = next(i for i in ids if type(i) is not int or i < 0)
                raise self._capture_error(f"{self._source} returned the token id {bad_id!r}")
        are_numbers = {int, float}.issuperset(map(type, logprobs))
        if not are_numbers or not math.isfinite(sum(logprobs)) or max(logprobs, default=0) > _ROUNDING:
            bad = next(p for p in logprobs if type(p) not in (int, float) or not -math.inf < p <= _ROUNDING)
            raise self._capture_error(f"{self._source} returned the logprob {bad!r}; allowed: finite, at most 0")
        divisor = call.logprobs_temperature
        if divisor is not None and not (type(divisor) in (int, float) and 0 < divisor < math.inf):
            problem = f"returned logprobs_temperature {divisor!r:.80}; allowed: finite numbers above 0"
            raise self._capture_error(f"{self._source} {problem}")

    @property
    def _source(self) -> str:
        return f"{self._recorder.server} (model {self._body.get('model')!r})"

    def _missing_error(self, missing: str, problem: str) -> CaptureError:
        return self._capture_error(
            f"training needs the {missing} of every model call, but {self._source} {problem}: {_HINTS[missing]}"
        )

    def _capture_error(self, message: str) -> CaptureError:
        """Builds the error and stores it in the ledger, so the episode fails even if the workflow swallows it."""
        error = self._recorder.make_error(message)
        self._ledger.fail_capture(self._call, error)
        return error
