"""The requests and model calls of one episode, and where in the workflow each of them is made."""

import asyncio
import hashlib
import heapq
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from insitu.errors import CaptureError
from insitu.schemas.episodes import ModelCall, Needs
from insitu.schemas.steps import ROOT_INVOCATION, IntermediateStepCategory, InvocationNode
from insitu.wire.http_format import CHAT, TEXT


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


@dataclass(slots=True)
class Invocation:
    """One run of a function: its node, the names from the outermost function to it, and its latest model call."""

    node: InvocationNode
    names: tuple[str, ...] = ()
    caller: "Invocation | None" = None
    latest_call: int | None = None


class OpenStep(NamedTuple):
    """An intermediate step that has started and not ended, and the step around it."""

    uuid: str
    category: IntermediateStepCategory
    outer: "OpenStep | None"


class CallSite(NamedTuple):
    """The function, step and episode that the running code belongs to.

    `is_explicit`: the code entered the site itself, instead of inheriting it from the code that started its task.
    """

    invocation: Invocation
    step: OpenStep | None = None
    ledger: "CallLedger | None" = None
    is_explicit: bool = False


OUTSIDE = CallSite(Invocation(ROOT_INVOCATION))
current_call_site: ContextVar[CallSite] = ContextVar("insitu_call_site", default=OUTSIDE)
"""Concurrent tasks each have their own; a task started inside a function belongs to that function."""
calls_in_flight: ContextVar["Activity | None"] = ContextVar("insitu_calls_in_flight", default=None)
"""Measures when model calls of a run's episodes are in flight, or attempts at episodes in other processes."""
SCORING = CallSite(Invocation(ROOT_INVOCATION), is_explicit=True)
"""The site of evaluators: their model calls belong to no episode, and are no mistake."""

OnCall = Callable[[ModelCall, CallSite], None]


class InheritingThreads:
    """Part of an event loop: its threads inherit the call site, as with `asyncio.to_thread`."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        if executor is None or isinstance(executor, ThreadPoolExecutor):
            func, args = copy_context().run, (func, *args)
        return super().run_in_executor(executor, func, *args)  # type: ignore[misc]


@dataclass(eq=False, slots=True)
class PendingCall:
    """A request in flight: the indices of its choices, and how often its prompt had been sent before.

    `seed` has 31 bits, determined by the episode's seed, the prompt and the repetition: sampling depends neither on
    other episodes nor on the order in which parallel calls are sent.
    """

    indices: range
    prompt_digest: bytes
    repetition: int
    seed: int
    server: str
    llm: str | None
    started: float
    """By `time.monotonic()`."""
    reader: asyncio.Task[Any] | None = None
    """The task that reads the response, if it is streamed."""
    leave: Callable[[], None] | None = None
    """Ends the request as its client does by closing the stream."""

    @property
    def is_left(self) -> bool:
        """Whether nobody reads the rest of the stream, which may be closed as late as by the garbage collection."""
        return self.reader is not None and self.reader.done()


class Activity:
    """Measures for how long at least one of some overlapping activities was in progress; several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._since = self._busy = 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far in which at least one was in progress."""
        with self._lock:
            return self._busy + (time.monotonic() - self._since if self._count else 0.0)

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._since = time.monotonic()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._busy += time.monotonic() - self._since

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()


@dataclass(eq=False, repr=False, kw_only=True)
class CallLedger:
    """The model calls of one episode, or of a plain run; agents may call from several threads.

    `name` identifies the episode in log messages. `training` selects the trained calls: all, none, or those to some
    keys of `llms`; each must have what training `needs`. `on_call` is called with each recorded call.
    `sampled_from` is the URL of the policy's server, and the version there that gets the requests to the policy.
    `in_flight` measures when calls are. `temperature` replaces that of all requests.
    """

    name: str = "the current run"
    seed: int = 0
    training: bool | Collection[str] = False
    needs: Needs = Needs.TOKEN_IDS
    on_call: OnCall | None = None
    sampled_from: tuple[str, str] | None = None
    in_flight: Activity | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        self.calls: list[ModelCall] = []
        """In order of completion; after `close` in order of their start."""
        self.failed_attempts: Counter[str] = Counter()
        """Requests that failed, by reason; a client that retries still makes one call."""
        self.late_calls = 0
        """Requests that were refused or not recorded because the episode had ended."""
        self.requested: Counter[str] = Counter()
        """Completions requested, by URL of the server; those of failed requests too."""
        self.server_failure: str | None = None
        """Why the latest request failed, if its server was at fault."""
        self.capture_error: CaptureError | None = None
        """What a response lacked for training, kept here in case the workflow swallows the exception."""
        self.closed = False
        self._next_index = 0
        self._repetitions: Counter[bytes] = Counter()  # by prompt digest
        self._abandoned: defaultdict[bytes, list[int]] = defaultdict(list)  # heaps of repetitions, by prompt digest
        self._pending: dict[PendingCall, None] = {}  # in the order of their start
        self._callers: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()

    def is_trained(self, llm: str | None) -> bool:
        """Whether calls to this key of `llms` are trained on their tokens."""
        return self.needs is not Needs.TEXT and self.is_credited(llm)

    def is_credited(self, llm: str | None) -> bool:
        """Whether calls to this key of `llms` earn step rewards in training; a judge's calls do not."""
        return self.training if isinstance(self.training, bool) else llm in self.training

    def begin_call(self, prompt_key: bytes, choices: int, server: str, llm: str | None = None) -> PendingCall:
        """Reserves an index for each choice of a request; `prompt_key` is equal for equal prompts."""
        digest = hashlib.blake2b(prompt_key, digest_size=16).digest()
        with self._lock:
            self.requested[server] += choices
            indices = range(self._next_index, self._next_index + choices)
            self._next_index = indices.stop
            if self._abandoned[digest]:
                repetition = heapq.heappop(self._abandoned[digest])
            else:
                repetition = self._repetitions[digest]
                self._repetitions[digest] += 1
            seed = hashlib.blake2b(f"{self.seed}|{repetition}|".encode() + digest, digest_size=4).digest()
            sampling_seed = int.from_bytes(seed, "big") >> 1
            pending = PendingCall(indices, digest, repetition, sampling_seed, server, llm, time.monotonic())
            if not self.closed:
                self._pending[pending] = None
                if self.in_flight is not None:
                    self.in_flight.begin()
            return pending

    def continued(self, messages: Sequence[dict[str, Any]], llm: str | None) -> ModelCall | None:
        """The call to an llm whose messages and answer most of these messages are, if it has its tokens."""
        with self._lock:
            calls = [call for call in self.calls if call.llm == llm and call.prompt_token_ids and call.token_ids]
        before = [call for call in calls if _is_continued(call, messages)]
        return max(before, key=lambda call: len(call.messages), default=None)

    def _settle(self, pending: PendingCall) -> None:
        """Marks the request of a call as no longer in flight."""
        pending.leave = None  # refers to the request
        if pending in self._pending:
            del self._pending[pending]
            if self.in_flight is not None:
                self.in_flight.end()

    def activity(self) -> str:
        """The oldest request in flight and its age, for people who wait for the episode."""
        with self._lock:
            pending, failed = [*self._pending], dict(self.failed_attempts)
        if not pending:
            failures = ", ".join(f"{count} x {reason}" for reason, count in failed.items())
            return f"no model call in flight: its own code or a tool{failures and f'; failed calls: {failures}'}"
        oldest = pending[0]
        model = "a model" if oldest.llm is None else f"llms.{oldest.llm}"
        host = urlsplit(oldest.server).netloc.rpartition("@")[2] or oldest.server
        more = f", and {len(pending) - 1} later calls" if len(pending) > 1 else ""
        return f"its call to {model} at {host} has taken {time.monotonic() - oldest.started:.0f} s{more}"

    def abandon(self, pending: PendingCall, reason: str, *, by_server: bool) -> None:
        """Counts a failed request. If the client retries it, that is the same call, with the same seed."""
        with self._lock:
            self._settle(pending)
            self.failed_attempts[reason] += 1
            self.server_failure = reason if by_server else None
            heapq.heappush(self._abandoned[pending.prompt_digest], pending.repetition)
            if self._next_index == pending.indices.stop:  # else a later request already has the next index
                self._next_index = pending.indices.start

    def fail_capture(self, pending: PendingCall, error: CaptureError) -> None:
        """The response of a request lacks what training needs: the episode fails."""
        with self._lock:
            self._settle(pending)
            self.capture_error = error

    def record(self, calls: Sequence[ModelCall], site: CallSite, pending: PendingCall | None = None) -> bool:
        """The calls of a request that is no longer `pending`.

        Returns False, and records nothing, if there are none or the episode has ended.
        """
        with self._lock:
            if pending is not None:
                self._settle(pending)
            if self.closed or not calls:
                return False
            self.calls.extend(calls)
            self.server_failure = None
            with suppress(RuntimeError):  # a thread without an event loop
                caller = (pending and pending.reader) or asyncio.current_task()
                if not site.is_explicit and caller is not None:
                    self._callers.add(caller)
        if self.on_call is not None:
            for call in calls:
                self.on_call(call, site)
        return True

    def note_late_call(self) -> None:
        with self._lock:
            self.late_calls += 1

    def running_callers(self) -> list[asyncio.Task[Any]]:
        """The tasks that made calls, have not ended, and did not enter the episode explicitly.

        After the episode they may be workers that serve other episodes too.
        """
        return [task for task in self._callers if not task.done() and not task.cancelling()]

    def close(self) -> None:
        """Later calls are not recorded."""
        with self._lock:
            left = [pending.leave for pending in self._pending if pending.is_left and pending.leave is not None]
        for leave in left:
            with suppress(CaptureError):  # which is the episode's now
                leave()
        with self._lock:
            self.closed = True
            for pending in [*self._pending]:
                self._settle(pending)
            self.calls.sort(key=attrgetter("index"))


def _is_continued(call: ModelCall, messages: Sequence[dict[str, Any]]) -> bool:
    """Whether messages begin with those of a call and its answer, which may come back without its reasoning."""
    count = len(call.messages)
    if len(messages) <= count + 1 or list(messages[:count]) != call.messages or call.message is None:
        return False
    answer = messages[count]
    if (reasoning := _reasoning(answer)) and reasoning != _reasoning(call.message):
        return False
    return answer.get("role") == "assistant" and all(
        (answer.get(key) or None) == (call.message.get(key) or None) for key in ("content", "tool_calls")
    )


def _reasoning(message: dict[str, Any]) -> Any:
    return message.get("reasoning_content") or message.get("reasoning")
