"""The seam between the server and what samples: weight versions, completions, and the interface of a sampler.

`inference.engine` samples in this process; `vllm` asks vLLM servers.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import nn

from insitu.backend.inference.sampling import GenerationRequest, SamplingParams
from insitu.backend.inference.tokenizer import ChatTokenizer, IncrementalDetokenizer, StopChecker
from insitu.errors import RequestRefused
from insitu.schemas.training_jobs import LoRASettings

MAX_IN_FLIGHT = 8192
"""Completions running or waiting, from which on requests are refused."""


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


@dataclass(slots=True)
class SampledToken:
    """`top` holds the most likely tokens as (id, logprob), if requested."""

    id: int
    logprob: float
    top: list[tuple[int, float]] | None = None


@dataclass(slots=True)
class OutputDelta:
    """New text and tokens of a completion, or all of them without streaming; the last delta has a finish reason."""

    version: int
    text: str
    tokens: list[SampledToken]
    finish_reason: str | None = None


@dataclass(slots=True, eq=False)
class Completion:
    """The tokens of a completion so far, and where it ends.

    `detokenizer` and `stop_checker` are set only if it streams or has stop strings.
    """

    prompt: list[int]
    params: SamplingParams
    tokens: list[SampledToken] = field(default_factory=list, kw_only=True)
    detokenizer: IncrementalDetokenizer | None = field(default=None, kw_only=True)
    stop_checker: StopChecker | None = field(default=None, kw_only=True)

    def detokenize(self, tokenizer: ChatTokenizer) -> None:
        """From now on, `append` returns text and finds stop strings."""
        self.detokenizer = IncrementalDetokenizer(tokenizer)
        self.stop_checker = StopChecker(self.params.stop)

    def append(self, token: SampledToken, tokenizer: ChatTokenizer, max_length: int) -> tuple[str, str | None]:
        """Adds a token; returns the text that is now final, and the finish reason if the completion ends."""
        self.tokens.append(token)
        if token.id in tokenizer.eos_token_ids and not self.params.ignore_eos:
            return self._flush(), "stop"
        text = ""
        if self.detokenizer is not None and self.stop_checker is not None:
            text = self.stop_checker.add(self.detokenizer.add(token.id))
            if self.stop_checker.matched:
                return text, "stop"
        if len(self.tokens) >= self.params.max_tokens or len(self.prompt) + len(self.tokens) >= max_length:
            return text + self._flush(), "length"
        return text, None

    def add_text(self, output: OutputDelta, tokenizer: ChatTokenizer) -> OutputDelta:
        """Completes the only delta of a completion whose text was not needed while it was sampled."""
        if self.detokenizer is None:
            ids = [token.id for token in output.tokens]
            # The token that ended the turn is not part of the text, whether it is a special token or not.
            output.text = tokenizer.decode(ids[:-1] if output.finish_reason == "stop" else ids)
        return output

    def _flush(self) -> str:
        if self.detokenizer is None or self.stop_checker is None:
            return ""
        return self.stop_checker.add(self.detokenizer.flush()) + self.stop_checker.flush()


def check_in_flight(count: int, limit: int) -> None:
    """Raises RequestRefused (429) if too many completions are in flight already."""
    if count >= limit:
        raise RequestRefused(f"{count} completions are waiting already", status=429, code="queue_full")


class Sampler(Protocol):
    """Completes prompts by the weights of any version that is served; awaited on the event loop."""

    tokenizer: ChatTokenizer
    vocab_size: int
    num_completed: int
    """Completions delivered since the start."""

    @property
    def max_length(self) -> int:
        """Maximum tokens of a prompt and its completion."""
        ...

    @property
    def version(self) -> int:
        """Latest version of the backend's own policy."""
        ...

    @property
    def num_requests(self) -> tuple[int, int]:
        """Running and waiting completions, approximately."""
        ...

    async def start(self) -> None:
        """Serves version 0. Raises BackendError if the model cannot be sampled from."""

    async def close(self) -> None: ...

    def check(self, lora: LoRASettings | None) -> None:
        """Raises RequestRefused if weights trained with these adapters (None: all weights) could not be served."""

    async def publish(self, weights: WeightVersion, module: nn.Module | None = None) -> None:
        """Makes this version, which is on disk, the latest of its policy, for requests from now on.

        Requests in flight keep theirs. `module` has the same weights, if they are in memory.
        """

    async def versions_in_use(self, policy: str) -> set[int]:
        """The versions of a policy that unfinished requests sample from."""
        ...

    async def retire(self, weights: WeightVersion) -> None:
        """Stops serving a version (None: the whole policy) that was deleted."""

    async def complete(
        self, requests: Sequence[GenerationRequest], weights: WeightVersion = LATEST
    ) -> list[OutputDelta]:
        """One completion per request, all by the same weights."""
        ...

    async def prompt_logprobs(self, prompt: Sequence[int], weights: WeightVersion = LATEST) -> list[float]:
        """The log-probability of each token of a prompt but the first, given those before it.

        Raises RequestRefused if this sampler cannot compute them.
        """
        ...

    def stream(
        self, requests: Sequence[GenerationRequest], weights: WeightVersion = LATEST
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Like `complete`, but yields (choice index, delta) as tokens are sampled."""
        ...
