"""The seam between the server and what samples: requests, weight versions, the interface of a sampler.

`inference.engine` samples in this process; `integrations/vllm` asks vLLM servers.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from torch import nn

from insitu.backend.compute import ComputeThread
from insitu.backend.inference.structured import Grammar
from insitu.backend.inference.tokenizer import ChatTokenizer, CompletionText
from insitu.backend.model import LoadedModel
from insitu.errors import RequestRefused
from insitu.schemas.episodes import GREEDY_TEMPERATURE
from insitu.schemas.lora import LoRASettings

MAX_IN_FLIGHT = 8192
"""Completions running or waiting, from which on requests are refused."""
MAX_TEMPERATURE = 1e6
"""Beyond this float32 overflows; the distribution is uniform long before."""
Temperature = Annotated[float, Field(ge=GREEDY_TEMPERATURE, le=MAX_TEMPERATURE)]
"""What logits are divided by."""
MAX_TOP_LOGPROBS = 20
"""The OpenAI API's limit."""
LOGITS_NOT_FINITE = "the model's logits are not finite: its weights are unusable, or too large for its dtype"


class WeightVersion(NamedTuple):
    """A version of a policy's weights; None is the latest. The policy "" is the backend's own."""

    version: int | None = None
    policy: str = ""


LATEST = WeightVersion()


def canonical(version: int, policy: str) -> WeightVersion:
    """Version 0 of every policy is the loaded model."""
    return WeightVersion(version, policy if version else "")


def eos_token_ids(module: nn.Module) -> set[int]:
    """End-of-turn token ids from the model's config and generation config."""
    ids: set[int] = set()
    for source in (getattr(module, "generation_config", None), module.config):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return ids


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled, by vLLM's names; defaults have no effect.

    `top_logprobs`: number of most likely tokens reported per token. `logit_bias` has (token, bias) of distinct tokens.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    top_logprobs: int = 0
    skip_special_tokens: bool = True
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def end_token_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end the completion."""
        ends = frozenset[int]() if self.ignore_eos else eos_token_ids
        return self.stop_token_ids | ends if self.stop_token_ids else ends


class GenerationRequest(NamedTuple):
    """One completion to sample."""

    prompt: list[int]
    params: SamplingParams


@dataclass(slots=True)
class SampledToken:
    """`top` holds the most likely tokens as (id, logprob), if requested."""

    id: int
    logprob: float
    top: list[tuple[int, float]] | None = None


@dataclass(slots=True)
class SampledTokens(Sequence[SampledToken]):
    """Sampled tokens as columns: lists of numbers are read and written at once, an object for each token is not."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]] | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[SampledToken]:
        return map(SampledToken, self.ids, self.logprobs, self.tops)

    def __getitem__(self, at: Any) -> Any:
        kind: Any = SampledTokens if isinstance(at, slice) else SampledToken
        return kind(self.ids[at], self.logprobs[at], self.tops[at])

    def extend(self, more: "SampledTokens") -> None:
        self.ids += more.ids
        self.logprobs += more.logprobs
        self.tops += more.tops

    def append(self, token: SampledToken) -> None:
        self.ids.append(token.id)
        self.logprobs.append(token.logprob)
        self.tops.append(token.top)


@dataclass(slots=True)
class OutputDelta:
    """New text and tokens of a completion, or all of them without streaming; the last delta has a finish reason."""

    version: int
    text: str
    tokens: SampledTokens
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """What the request had asked to stop at: the stop string, or the token of `stop_token_ids`."""


Deliver = Callable[[int, OutputDelta | BaseException], None]


@dataclass(slots=True, eq=False)
class Completion:
    """The tokens of a completion so far, and where it ends; `text` is set only if it streams or has stop strings."""

    prompt: list[int]
    params: SamplingParams
    tokens: SampledTokens = field(default_factory=SampledTokens, kw_only=True)
    text: CompletionText | None = field(default=None, kw_only=True)
    stop_reason: str | int | None = field(default=None, kw_only=True)

    def detokenize(self, tokenizer: ChatTokenizer) -> None:
        """From now on, `append` returns text and finds stop strings."""
        self.text = CompletionText(tokenizer, self.params.stop, skip_special_tokens=self.params.skip_special_tokens)

    def append(self, token: SampledToken, tokenizer: ChatTokenizer, max_length: int) -> tuple[str, str | None]:
        """Adds a token; returns the text that is now final, and the finish reason if the completion ends."""
        self.tokens.append(token)
        if token.id in self.params.end_token_ids(tokenizer.eos_token_ids):
            ends_turn = not self.params.ignore_eos and token.id in tokenizer.eos_token_ids
            self.stop_reason = None if ends_turn else token.id
            return self._flush(), "stop"
        text = ""
        if self.text is not None:
            text = self.text.add(token.id)
            if self.text.stopped:
                self.stop_reason = self.text.stopped
                return text, "stop"
        if len(self.tokens) >= self.params.max_tokens or len(self.prompt) + len(self.tokens) >= max_length:
            return text + self._flush(), "length"
        return text, None

    def extend(self, tokens: SampledTokens, tokenizer: ChatTokenizer, max_length: int) -> tuple[str, str | None]:
        """Adds tokens up to the end of the completion, as `append` does one by one."""
        if self.text is None:  # then only the last one matters
            room = min(self.params.max_tokens, max_length - len(self.prompt)) - len(self.tokens)
            ends = self.params.end_token_ids(tokenizer.eos_token_ids)
            last = min(len(tokens), room) - 1
            if not ends.isdisjoint(tokens.ids):
                last = min(last, next(at for at, token_id in enumerate(tokens.ids) if token_id in ends))
            self.tokens.extend(tokens[:last])
            tokens = tokens[last : last + 1]
        text, finish_reason = "", None
        for token in tokens:
            new, finish_reason = self.append(token, tokenizer, max_length)
            text += new
            if finish_reason is not None:
                break
        return text, finish_reason

    def _flush(self) -> str:
        return self.text.flush() if self.text is not None else ""


class ServedVersions:
    """The latest version of each policy, and the older ones that stay loaded: the last `kept` that were requested."""

    def __init__(self, kept: int = 2) -> None:
        self.latest: dict[str, int] = {"": 0}
        self._kept = kept
        self._loaded: int | None = None
        self._recent: OrderedDict[WeightVersion, None] = OrderedDict()

    def resolve(self, weights: WeightVersion) -> WeightVersion:
        version = self.latest.get(weights.policy, 0) if weights.version is None else weights.version
        return canonical(version, weights.policy)

    def is_latest(self, weights: WeightVersion) -> bool:
        return weights == self.resolve(WeightVersion(None, weights.policy))

    def stays(self, weights: WeightVersion) -> bool:
        return self.is_latest(weights) or weights in self._recent

    def keep_loaded(self, count: int | None) -> None:
        """Keeps so many of the versions requested by number, also those that were the latest then; None: the default.

        A run that samples from earlier versions requests the latest by number, which others come after.
        """
        self._loaded = count

    def request(self, weights: WeightVersion, *, by_number: bool = True) -> None:
        if not self.is_latest(weights) or (by_number and self._loaded is not None):
            self._recent[weights] = None
            self._recent.move_to_end(weights)
            self._forget()

    def publish(self, weights: WeightVersion) -> None:
        assert weights.version is not None
        self.latest[weights.policy] = weights.version
        self._forget()

    def _forget(self) -> None:
        older = [each for each in self._recent if not self.is_latest(each)]
        kept = self._kept if self._loaded is None else self._loaded
        for each in older[: len(older) - kept] if len(older) > kept else ():
            del self._recent[each]

    def retire(self, weights: WeightVersion) -> None:
        """Forgets a version, or with None the whole policy."""
        if weights.version is None:
            self.latest.pop(weights.policy, None)
        for each in list(self._recent):
            if each.policy == weights.policy and weights.version in (None, each.version):
                del self._recent[each]


class Sampler(ABC):
    """Completes prompts by the weights of any version that is served; awaited on the event loop.

    `load_version` gives the module of a version or raises RequestRefused. `max_length`: tokens of a prompt and its
    completion.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        compute: ComputeThread,
        load_version: Callable[[WeightVersion], nn.Module],
        max_length: int,
        kept_versions: int = 2,
    ) -> None:
        self.tokenizer = ChatTokenizer(loaded.tokenizer, eos_token_ids(loaded.module))
        self.vocab_size = loaded.vocab_size
        self.max_length = max_length
        self.length_limit = ""
        """Why `max_length` is less than the model allows, if the memory is the reason."""
        self.num_completed = 0
        """Completions delivered since the start."""
        self._loaded = loaded
        self._compute = compute
        self._load_version = load_version
        self._versions = ServedVersions(kept_versions)

    @property
    def version(self) -> int:
        """Latest version of the backend's own policy."""
        return self._versions.latest[""]

    def keep_loaded(self, count: int | None) -> None:
        """How many older versions stay loaded, see `ServedVersions`."""
        self._versions.keep_loaded(count)

    async def complete(
        self, requests: Sequence[GenerationRequest], weights: WeightVersion = LATEST
    ) -> list[OutputDelta]:
        """One completion per request, all by the same weights."""
        outputs = {index: output async for index, output in self.stream(requests, weights, streamed=False)}
        for index, (_, params) in enumerate(requests):
            if not params.stop:  # its text was not needed while it was sampled
                output = outputs[index]
                # The token that ended the turn is not part of the text, whether it is a special token or not.
                ids = output.tokens.ids[: -1 if output.finish_reason == "stop" else None]
                output.text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        self.num_completed += len(outputs)
        return [outputs[index] for index in range(len(requests))]

    async def stream(
        self, requests: Sequence[GenerationRequest], weights: WeightVersion = LATEST, *, streamed: bool = True
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Like `complete`, but yields (choice index, delta) as tokens are sampled; if not `streamed`, at the end."""
        queue: asyncio.Queue[tuple[int, OutputDelta | BaseException]] = asyncio.Queue()
        async with self._sampling(requests, weights, streamed, lambda *output: queue.put_nowait(output)):
            unfinished = len(requests)
            while unfinished:
                index, output = await queue.get()
                if isinstance(output, BaseException):
                    raise output
                if output.finish_reason is not None:
                    unfinished -= 1
                    self.num_completed += streamed
                yield index, output

    @staticmethod
    def _check_in_flight(count: int, limit: int = MAX_IN_FLIGHT) -> None:
        """Raises RequestRefused (429) if too many completions are in flight already."""
        if count >= limit:
            raise RequestRefused(f"{count} completions are waiting already", status=429, code="queue_full")

    @property
    @abstractmethod
    def num_requests(self) -> tuple[int, int]:
        """Running and waiting completions, approximately."""

    @abstractmethod
    async def start(self) -> None:
        """Serves version 0. Raises BackendError if the model cannot be sampled from."""

    async def close(self) -> None:  # noqa: B027 - optional
        """Ends what it has started; the compute thread is closed by its owner."""

    def check(self, lora: LoRASettings | None) -> None:  # noqa: B027 - optional
        """Raises RequestRefused if weights trained with these adapters (None: all weights) could not be served."""

    @abstractmethod
    async def publish(self, weights: WeightVersion, module: nn.Module | None = None) -> None:
        """Makes this version, which is on disk, the latest of its policy, for requests from now on.

        Requests in flight keep theirs. `module` has the same weights, if they are in memory.
        """

    @abstractmethod
    async def versions_in_use(self, policy: str) -> set[int]:
        """The versions of a policy that unfinished requests sample from."""

    @abstractmethod
    async def retire(self, weights: WeightVersion) -> None:
        """Stops serving a version (None: the whole policy) that was deleted."""

    @abstractmethod
    async def prompt_logprobs(self, prompt: Sequence[int], weights: WeightVersion = LATEST) -> list[float]:
        """The log-probability of each token of a prompt but the first, given those before it.

        Raises RequestRefused if this sampler cannot compute them.
        """

    @abstractmethod
    def _sampling(
        self, requests: Sequence[GenerationRequest], weights: WeightVersion, streamed: bool, deliver: Deliver
    ) -> AbstractAsyncContextManager[None]:
        """Samples while the context is open, and aborts what is unfinished then.

        `deliver` gets the deltas of each choice, a single one if not `streamed`, or the error that ended it.
        """
