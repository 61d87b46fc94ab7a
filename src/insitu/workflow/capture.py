"""The recorder: turns what crosses the wire to a model into the ModelCalls of the episode that is going on.

    exchange = recorder.begin(method, path, body)     None: not recorded, send as it is
    ... send exchange.content ...
    shown = exchange.answer(status, headers, body)    or, for a stream: exchange.feed(chunk) ..., exchange.end()
    ... give `shown` to the client ...                or exchange.fail(reason)

It knows nothing of HTTP libraries; `transport` and the gateway put it under them.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from insitu.errors import CaptureError
from insitu.http_format import MALFORMED, choice_logprobs, choice_token_ids, error_message
from insitu.schemas.episodes import ModelCall
from insitu.workflow.assembly import StreamAssembly
from insitu.workflow.context import EpisodeScope, current_scope
from insitu.workflow.spelling import CHAT, Asked, asked_by, message_of
from insitu.workflow.steps import Place, place

logger = logging.getLogger(__name__)

_NOT_SAMPLING = frozenset(("model", "messages", "prompt", "tools", "stream", "stream_options"))
_HINTS = {
    "token ids": "the server must understand `return_token_ids` (vLLM from 0.10.2 on, and `insitu backend`)",
    "logprobs": "the server must answer `logprobs: true` (vLLM: do not start it with --max-logprobs 0)",
}


class Recorder:
    """Records the completions of one model object, of chats and of texts.

    `server` is its address, `llm` its key under `llms`, `error_type` what is raised when training lacks something.
    `model_now` gives the name to ask for, where the server has another one for each version of the weights.
    """

    def __init__(
        self,
        server: str,
        llm: str | None = None,
        error_type: Callable[[str], CaptureError] = CaptureError,
        model_now: Callable[[], str] | None = None,
    ) -> None:
        self.server = server
        self.llm = llm
        self.error_type = error_type
        self.model_now = model_now
        self._warned = False

    def refuse_late_call(self, scope: EpisodeScope) -> None:
        """Count a request whose episode ended before its answer came; the first is a warning, for there may be many."""
        scope.late_calls += 1
        level, self._warned = logging.INFO if self._warned else logging.WARNING, True
        name = scope.key.text() if scope.key else "a run"
        logger.log(level, "a model call of %s came after its end and is not recorded: is a task left running?", name)

    def begin(
        self,
        method: str,
        path: str,
        content: bytes,
        scope: EpisodeScope | None = None,
        made_at: Place | None = None,
    ) -> "Exchange | None":
        """Start a call of the current episode, made here (or of `scope`, at `made_at`); None for what is no call."""
        scope = scope or current_scope()
        if scope is None or method != "POST" or not path.endswith("/completions"):
            return None
        if scope.closed:
            self.refuse_late_call(scope)
            return None
        if scope.capture_error is not None:
            raise scope.capture_error
        try:
            request = orjson.loads(content)
        except orjson.JSONDecodeError:
            return None  # the server will say what is wrong with it
        asked = asked_by(path, request)
        return None if asked is None else Exchange(self, scope, request, asked, made_at or place.get())


class Exchange:
    """One request and its answer. Of `answer`, `end` and `fail` exactly one has an effect, the first."""

    def __init__(
        self, recorder: Recorder, scope: EpisodeScope, request: dict[str, Any], asked: Asked, made_at: Place
    ) -> None:
        self._recorder = recorder
        self._scope = scope
        self._request = request
        self._asked = asked
        self._place = made_at
        self._open = True
        self.unreadable: str | None = None
        """Why the answer is no completion."""
        self._trains = scope.trains(recorder.llm)
        if self._trains and request.get("echo"):
            raise self._capture_error("tokens", "would repeat the prompt in the answer", "ask without `echo`")
        self.streamed = bool(request.get("stream"))
        given = request.get("logprobs")
        self.hide_logprobs = not given and (asked.route == CHAT or given is None or given is False)
        self.hide_token_ids = not request.get("return_token_ids")
        begun = scope.calls_begun + asked.choices
        self._indices = range(scope.calls_begun, begun)
        scope.calls_begun = begun
        self._prompt_digest = hashlib.blake2b(asked.identity, digest_size=16).digest()
        self._turn = scope.turns[self._prompt_digest].take()
        if recorder.model_now is not None:
            request["model"] = recorder.model_now()
        if self._trains:
            if self.hide_logprobs:
                request["logprobs"] = asked.logprobs
            request["return_token_ids"] = True
        if request.get("seed") is None:
            request["seed"] = self._seed()
        self._assembly = StreamAssembly(self) if self.streamed else None
        self._started = time.time()
        self.content = orjson.dumps(request)

    def _seed(self) -> int:
        """31 bits fixed by the episode, the prompt, and how often it has sent the very same one before.

        So what is sampled depends neither on other episodes nor on the order in which parallel calls are sent.
        """
        text = f"{self._scope.seed}|{self._turn}|".encode() + self._prompt_digest
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> bytes:
        """Record a whole answer; returns the body without what the client did not ask for."""
        if status >= 400:
            self._refused(status, body)
            return body
        try:
            reply = orjson.loads(body)
            if not reply.get("choices"):
                raise ValueError(error_message(reply) or "it has no choices")
            self._finish(reply, headers)
        except MALFORMED as error:
            self.fail("unreadable answer")
            self.unreadable = repr(error)
            return body
        found = self.hide_token_ids and reply.pop("prompt_token_ids", None) is not None
        for choice in reply["choices"]:
            found |= self.strip(choice)
        return orjson.dumps(reply) if found else body

    def strip(self, choice: dict[str, Any]) -> bool:
        """Take out of a choice what the client did not ask for; whether there was anything."""
        found = False
        for name in ("token_ids", "prompt_token_ids") if self.hide_token_ids else ():
            found |= choice.pop(name, None) is not None
        if self.hide_logprobs and choice.get("logprobs") is not None:
            choice["logprobs"] = None
            found = True
        return found

    def feed(self, chunk: bytes) -> bytes:
        """Take a piece of a streamed answer; returns what of it may be passed on."""
        assert self._assembly is not None
        return self._assembly.feed(chunk)

    def end(self, headers: Mapping[str, str], error: str | None = None) -> str | None:
        """A streamed answer has ended, or was closed by the client, or broke off for the reason `error`.

        Returns why there is no whole answer, if there is none.
        """
        assert self._assembly is not None
        if not self._open:
            return error
        error = error or self._assembly.error
        if error is None and not self.is_whole:
            error = "the stream was closed before its end"
        try:
            reply = self._assembly.reply()
            if reply["choices"] or self._scope.closed:
                self._finish(reply, headers, error)
            else:
                self.fail("empty stream")
        except MALFORMED as garbled:
            self.fail("unreadable answer")
            error = f"the stream cannot be understood: {garbled!r}"
        return error

    @property
    def is_whole(self) -> bool:
        """Whether all choices of a streamed answer have come to their end."""
        return self._assembly is not None and self._assembly.is_complete(self._asked.choices)

    @property
    def is_done(self) -> bool:
        """Whether the server of a streamed answer has nothing more to say.

        Whoever passes the answer on ends the exchange before the client can know it: its episode may be over then.
        """
        return self._assembly is not None and self._assembly.done

    def fail(self, reason: str) -> None:
        """This attempt brought no answer. The client may try again: that is the same call, with the same seed."""
        if self._open:
            self._open = False
            self._scope.failed_attempts[reason] += 1
            self._scope.turns[self._prompt_digest].give_back(self._turn)
            if self._scope.calls_begun == self._indices.stop:  # else a later number would be that of an earlier call
                self._scope.calls_begun = self._indices.start

    def _refused(self, status: int, body: bytes) -> None:
        self.fail(f"http {status}")
        for what, word in (("token ids", b"return_token_ids"), ("logprobs", b"logprobs")):
            if self._trains and status < 500 and word in body:
                raise self._lacks(what, f"refused a request for them ({body[:300].decode(errors='replace')})")

    def _finish(self, reply: dict[str, Any], headers: Mapping[str, str], error: str | None = None) -> None:
        if self._scope.closed:
            self._open = False
            self._recorder.refuse_late_call(self._scope)
            return
        calls = list(self._calls(reply, headers, error))
        self._open = False
        for call in calls:
            if self._trains and error is None:
                self._check(call)
            self._scope.record(call, self._place)

    def _calls(self, reply: dict[str, Any], headers: Mapping[str, str], error: str | None) -> Iterator[ModelCall]:
        version = str(reply.get("policy_version", headers.get("x-policy-version")))
        sampling = {name: value for name, value in self._request.items() if name not in _NOT_SAMPLING}
        for position, (index, choice) in enumerate(zip(self._indices, reply["choices"], strict=False)):
            messages, number = self._asked.prompt_of(choice.get("index", position))
            yield ModelCall(
                index=index,
                model=self._request.get("model", ""),
                messages=messages,
                llm=self._recorder.llm,
                tools=self._request.get("tools"),
                sampling=sampling,
                message=message_of(choice),
                choice=number,
                prompt_token_ids=choice.get("prompt_token_ids") or reply.get("prompt_token_ids"),
                token_ids=choice_token_ids(choice),
                logprobs=choice_logprobs(choice),
                finish_reason=choice.get("finish_reason"),
                policy_version=int(version) if version.isdecimal() else None,
                functions=self._place.invocation.names,
                started=self._started,
                ended=time.time(),
                usage=reply.get("usage"),
                error=error,
            )

    def _check(self, call: ModelCall) -> None:
        if call.logprobs is None:
            raise self._lacks("logprobs", "answered without them")
        if call.token_ids is None or call.prompt_token_ids is None:
            if not self._scope.needs_token_ids:
                return
            raise self._lacks("token ids", "answered without them")
        if len(call.logprobs) != len(call.token_ids):
            counts = f"answered with {len(call.logprobs)} for {len(call.token_ids)} token ids"
            raise self._lacks("logprobs", counts)

    def _lacks(self, what: str, did: str) -> CaptureError:
        return self._capture_error(what, did, _HINTS[what])

    def _capture_error(self, what: str, did: str, hint: str) -> CaptureError:
        """Also kept on the episode, which fails with it even if the workflow swallows the exception."""
        self._scope.capture_error = self._recorder.error_type(
            f"training needs the {what} of every model call, but {self._recorder.server} (model "
            f"{self._request.get('model')!r}) {did}: {hint}"
        )
        return self._scope.capture_error
