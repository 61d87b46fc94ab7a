"""One vLLM server: the requests to it, the weights it has, and whether it can be used."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from insitu.backend import SAMPLER_KEY_VARIABLE
from insitu.backend.inference.sampler import LOGITS_NOT_FINITE, Completion, SampledTokens, SamplingParams, WeightVersion
from insitu.errors import BackendError, BackendUnavailable, InsituError, RequestRefused
from insitu.integrations.vllm.servers import StartedServer
from insitu.schemas.episodes import GREEDY_TEMPERATURE
from insitu.wire.connection import Connection, event_data, is_transient, retry_after
from insitu.wire.http_format import MALFORMED, error_message
from insitu.wire.json_values import gc_paused
from insitu.wire.redaction import redact

logger = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
STARTED_WITH = "default"
"""vLLM's name of the weights that it was started with."""
HEALTH_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 2.0
"""vLLM closes idle connections after 5 seconds; a request on one that it is just closing would fail."""
LOAD_SECONDS = 600.0
"""Loading weights and waiting for running completions may take long."""


class Overloaded(BackendUnavailable):
    """The server works, and has too much to do."""


class WrongWeights(BackendUnavailable):
    """The server has other weights than it was asked for."""


class Replica:
    """`name` is how messages call it; `ready` says whether it may get completions, `problem` why not.

    `base` are its full weights: None for those that it was started with. `adapters` are the names of LoRA adapters.
    """

    def __init__(self, name: str, url: str, api_key: str | None = None, server: StartedServer | None = None) -> None:
        self.name = name
        self.server = server
        """If this process starts it."""
        self.starts = 0
        """How often it was started again since it was last ready."""
        self.failures = 0
        """Attempts to use it since then, the next one at `retry_at`."""
        self.retry_at = 0.0
        self.ready, self.problem = False, "it has not been checked yet"
        self.model = ""
        self.can_load_adapters = self.can_reload = False
        self.base: WeightVersion | None = None
        self.tag: str | None = None
        """vLLM's name of `base`; None if it does not name weights."""
        self.adapters: dict[WeightVersion, str] = {}
        self.in_flight: Counter[WeightVersion] = Counter()
        self.lock = asyncio.Lock()
        """Held while its weights change."""
        self._reported = False
        """Whether the log says that it is left out."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connection, self._health = (
            Connection(name, headers, HEALTH_SECONDS, 0.0, connector=_connector(server)) for _ in range(2)
        )
        """Health checks have a connection that leaving the server out does not close: it would fail them."""
        self._connection.verified = True  # what cannot be parsed is a transient error

    def take_back(self) -> None:
        """Gives it completions from now on."""
        if self._reported:
            logger.warning("%s is used again", self.name)
        self.ready, self.problem, self._reported = True, "", False

    @property
    def load(self) -> int:
        """Unfinished completions."""
        return self.in_flight.total()

    @contextmanager
    def serving(self, weights: WeightVersion) -> Iterator[None]:
        """Counts a completion."""
        self.in_flight[weights] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight[weights] -= 1
            if not self.load:
                self._idle.set()

    async def leave_out(self, problem: str) -> None:
        """Gives it no completions until it has been checked again; ends those that it has, and changes of weights."""
        if not self._reported:
            logger.warning("%s is left out: %s", self.name, problem)
        self.ready, self.problem, self._reported = False, problem, True
        await self._connection.close()

    async def close(self) -> None:
        await self._connection.close()
        await self._health.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.close)

    async def check_health(self) -> None:
        """Raises BackendUnavailable if it does not respond."""
        async with self._health.open("GET", self._url + "/health") as response:
            await self._check("/health", response)

    async def responds(self) -> bool:
        try:
            await self.check_health()
        except InsituError:
            return False
        return True

    async def inspect(self, max_length: int) -> None:
        """Finds out what it offers. Raises BackendError if that is not enough."""
        try:
            status, body = await self._request("GET", "/version")
            orjson.loads(body)["version"]
        except MALFORMED:
            problem = f"GET /version is answered with {status} and {body[:60]!r}"
            raise BackendError(f"{self.name} is not a vLLM server: {problem}") from None
        try:
            models = (await self._json("GET", "/v1/models"))["data"]
            served = next(each for each in models if not each.get("parent"))
        except RequestRefused as error:
            if error.status != 401:
                raise
            raise BackendError(f"{self.name} needs its API key: set api_key, or {SAMPLER_KEY_VARIABLE}") from None
        self.model, length = served["id"], served["max_model_len"]
        if length < max_length:
            problem = f"allows {length} tokens of prompt and completion, but this model {max_length}"
            change = f"start it with --max-model-len {max_length}, or set max_length to {length}"
            raise BackendError(f"{self.name} {problem}: {change}")
        if not await self._returns_token_ids():
            raise BackendError(f"{self.name} cannot return token ids: start it with --enable-scale-out")
        self.can_load_adapters = await self._has_adapters()
        self.can_reload = await self._has("/collective_rpc") and await self._has("/weight_info")

    async def weight_tag(self) -> str | None:
        """The server's name of its full weights; None if it does not name them."""
        return (await self._json("GET", "/weight_info"))["weight_version"] if self.can_reload else None

    async def load_adapter(self, weights: WeightVersion, folder: Path, name: str) -> None:
        """Names are never used twice: vLLM takes cached keys of the prompt to be those of the adapter's name."""
        await self._json("POST", LOAD_ADAPTER, {"lora_name": name, "lora_path": str(folder)}, LOAD_SECONDS)
        models = (await self._json("GET", "/v1/models"))["data"]
        if not any(each["id"] == name and each["root"] == str(folder) for each in models):
            raise BackendError(f"{self.name} does not list the adapter {name}, which it said it had loaded")
        self.adapters[weights] = name

    async def unload_adapter(self, weights: WeightVersion) -> None:
        try:
            await self._json("POST", UNLOAD_ADAPTER, {"lora_name": self.adapters.pop(weights)})
        except BackendError as error:  # it is not used any more
            logger.warning("%s: %s", self.name, error)

    async def forget_adapters(self, prefix: str) -> None:
        """Unloads those whose names begin with `prefix`."""
        self.adapters.clear()
        for each in (await self._json("GET", "/v1/models"))["data"]:
            if each["id"].startswith(prefix):
                await self._json("POST", UNLOAD_ADAPTER, {"lora_name": each["id"]})

    async def reload(self, base: WeightVersion | None, folder: str, tag: str) -> None:
        """Replaces all weights by those in a folder, once running completions have ended."""
        self.ready, self.problem = False, "its weights are being replaced"
        await self._idle.wait()
        self.tag = None
        await self._json("POST", "/update_weight_version", {"new_version": f"{tag}-loading"})
        await self._json("POST", "/pause?mode=wait", None, LOAD_SECONDS)
        call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._json("POST", "/collective_rpc", call, LOAD_SECONDS)
        await self._json("POST", "/reset_prefix_cache")
        await self._json("POST", "/update_weight_version", {"new_version": tag})
        await self._json("POST", "/resume")
        if (now := await self.weight_tag()) != tag:
            raise BackendError(f"{self.name} serves the weights {now!r} after {tag!r} were loaded")
        self.base, self.tag = base, tag

    def check_weights(
        self, event: dict[str, Any], choice: dict[str, Any], model: str, tag: str | None, *, is_named: bool
    ) -> None:
        """Raises WrongWeights if a choice names other full weights than `tag`, or its event, if `is_named`, not the
        model."""
        tags = weight_tags(choice)
        if tags - {tag or STARTED_WITH} or (is_named and event.get("model") != model):
            problem = f"other weights than asked for: {event.get('model', model)}, {sorted(tags)}"
            raise WrongWeights(f"{self.name} has sampled from {problem}")

    async def check_unnamed_weights(self, choice: dict[str, Any], tag: str | None) -> None:
        """Asks for the weights of a completion whose answer does not name them, as it was ended by us."""
        if tag is not None and not weight_tags(choice) and (now := await self.weight_tag()) != tag:
            raise WrongWeights(f"{self.name} has the weights {now!r}, and had {tag!r} before a completion")

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """A response that is not streamed; it comes when all its tokens have been sampled."""
        return await self._json("POST", GENERATE, body, math.inf)

    async def generate_events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a response, a single one if it is not streamed. Closing the iterator aborts the completion."""
        if not body["stream"]:
            yield await self.generate(body)
            return
        async with self._open("POST", GENERATE, body, math.inf) as response:
            await self._check(GENERATE, response)
            async for line in self._connection.lines(response):
                if (data := event_data(line)) is None:
                    continue
                if data == b"[DONE]":
                    return
                event = self._parsed(GENERATE, data)
                if "error" in event:
                    raise BackendUnavailable(f"{self.name} failed: {str(error_message(event))[:500]}")
                yield event

    async def _returns_token_ids(self) -> bool:
        """The route may be there, and closed."""
        try:
            await self._json("POST", GENERATE, {})
        except RequestRefused as error:
            return error.status not in (403, 404, 405)
        return True

    async def _has_adapters(self) -> bool:
        """The route may be there although the server was started without adapters."""
        try:
            await self._json("POST", LOAD_ADAPTER, {"lora_name": "insitu-check", "lora_path": "/nonexistent/insitu"})
        except InsituError as error:
            return "No adapter found" in str(error)
        return False

    async def _has(self, path: str) -> bool:
        return (await self._request("GET", path))[0] != 404

    async def _json(self, method: str, path: str, body: Any = None, silence: float | None = None) -> dict[str, Any]:
        async with self._open(method, path, body, silence) as response:
            await self._check(path, response)
            data = await response.read()
        return self._parsed(path, data) if data[:1] == b"{" else {}

    async def _request(self, method: str, path: str) -> tuple[int, bytes]:
        async with self._open(method, path) as response:
            return response.status, await response.read()

    def _open(self, method: str, path: str, body: Any = None, silence: float | None = None) -> Any:
        data = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        return self._connection.open(method, self._url + path, data, headers, silence)

    def _parsed(self, path: str, data: bytes) -> dict[str, Any]:
        with gc_paused():  # two objects a token
            return self._connection.parsed(path, data, lambda data: {**orjson.loads(data)})

    async def _check(self, path: str, response: aiohttp.ClientResponse) -> None:
        """Raises the error of a response whose status is not 200."""
        if response.status == 200:
            return
        data = await response.read()
        try:
            body = orjson.loads(data)
            reason = str(error_message(body) or body)[:500]
        except MALFORMED:
            reason = data[:200].decode(errors="replace")
        message = redact(f"{self.name} answers {path} with {response.status}: {reason}")
        if response.status == 429:
            raise Overloaded(message, retry_after=retry_after(response.headers))
        if is_transient(response.status):
            raise BackendUnavailable(message, retry_after=retry_after(response.headers))
        raise RequestRefused(message, status=response.status)


def _connector(server: StartedServer | None) -> Callable[[], aiohttp.BaseConnector]:
    """A connection for each completion, over TCP or the socket of a server that this process has started."""
    if server is None:
        return lambda: aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    return lambda: aiohttp.UnixConnector(str(server.socket), limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)


_MAX_SEED = 2**63 - 1
_LARGEST_LOGPROB = 1e-3
"""0 but for rounding."""
_NOT_FINITE = -9999.0
"""What vLLM writes for a log-probability that is not a number."""


def request_body(model: str, completion: Completion, eos_token_ids: frozenset[int], stream: bool) -> dict[str, Any]:
    """Token ids that end a turn are ours: vLLM's own (`ignore_eos`) are those of its generation config."""
    params = completion.params
    return {
        "model": model,
        "token_ids": completion.prompt,
        "stream": stream,
        "sampling_params": {
            "seed": params.seed & _MAX_SEED,
            "max_tokens": params.max_tokens,
            "min_tokens": min(params.min_tokens, params.max_tokens),
            "temperature": 0.0 if params.temperature < GREEDY_TEMPERATURE else params.temperature,
            "top_p": params.top_p,
            "ignore_eos": True,
            "stop_token_ids": sorted(params.end_token_ids(eos_token_ids)),
            # vLLM counts the sampled token among these, wherever it ranks.
            "logprobs": params.top_logprobs + 1 if params.top_logprobs else 0,
            "detokenize": False,
            **_shaping(params),
        },
    }


def _shaping(params: SamplingParams) -> dict[str, Any]:
    """The parameters that change the distribution, if they do."""
    names = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words")
    values = {name: getattr(params, name) for name in names if getattr(params, name) != _DEFAULTS[name]}
    if params.logit_bias:
        values["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.grammar is not None:
        kind, text, _ = params.grammar
        values["structured_outputs"] = {kind: orjson.loads(text) if kind in ("json", "choice") else text}
    return values


_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}


def sampled_tokens(choice: dict[str, Any], num_top_logprobs: int) -> SampledTokens:
    """The tokens of a choice, or of its part in an event, with their log-probabilities after temperature."""
    content = (choice.get("logprobs") or {}).get("content") or []
    ids = choice.get("token_ids") or []
    if len(content) != len(ids):
        raise BackendUnavailable(f"vLLM returned {len(ids)} tokens with {len(content)} log-probabilities")
    logprobs = [entry["logprob"] for entry in content]
    _check_tokens(ids, logprobs)
    if not num_top_logprobs:
        return SampledTokens(ids, logprobs, [None] * len(ids))
    tops: list[list[tuple[int, float]] | None] = []
    for entry in content:
        ranked = sorted((each for each in entry["top_logprobs"] if each["rank"]), key=lambda each: each["rank"])
        best = (each for each in ranked if each["rank"] <= num_top_logprobs and each["logprob"] > _NOT_FINITE)
        top = [(each["token_id"], each["logprob"]) for each in best]  # those left out of the distribution have none
        _check_tokens([each for each, _ in top], [logprob for _, logprob in top])
        tops.append(top)
    return SampledTokens(ids, logprobs, tops)


def _check_tokens(ids: Sequence[Any], logprobs: Sequence[Any]) -> None:
    """Raises BackendError for what no model samples: it would be trained."""
    if bad := [each for each in ids if type(each) is not int or not 0 <= each < 2**31]:
        raise BackendUnavailable(f"vLLM returned the token {bad[0]!r:.80}; expected a number of the vocabulary")
    if bad := [each for each in logprobs if type(each) not in (int, float) or not each <= _LARGEST_LOGPROB]:
        raise BackendUnavailable(f"vLLM returned the log-probability {bad[0]!r:.80}; expected one of at most 0")
    if min(logprobs, default=0) <= _NOT_FINITE:
        raise BackendError(LOGITS_NOT_FINITE)


def weight_tags(choice: dict[str, Any]) -> set[str]:
    """The versions of the full weights that a finished choice was sampled from; empty if vLLM does not say."""
    return {span["version"] for span in choice.get("weight_versions") or ()}
