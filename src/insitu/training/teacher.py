"""The teacher of on-policy distillation: gives each sampled token of an episode its log-probability.

    teacher: {base_url: "http://gpu-1:8000/v1", model: Qwen/Qwen2.5-32B-Instruct}
    teacher: {adapter: self, context: "The expected answer is {expected}."}         # self-distillation

It is asked once an episode is scored, while others still play. What it says is recorded with the calls.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from string import Formatter
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from insitu.collect.watchdog import doing
from insitu.config import Config
from insitu.errors import BackendError, ConfigError, InsituError, RequestRefused, TrajectoryError
from insitu.runs.checkpoints import find_checkpoint
from insitu.runs.records import as_text
from insitu.schemas.components import MayChange
from insitu.schemas.episodes import DropReason, Episode, ModelCall
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.training.interfaces import Trainer
from insitu.wire.connection import Connection
from insitu.wire.prompt_logprobs import JSON, Logprobs, Text, logprobs_of_texts, longest, part_of

_FIELDS = {"expected", "reasoning"}
_TEMPLATE_KEYS = ("chat_template_kwargs", "reasoning_effort")
"""Parameters of a chat completion that its prompt depends on."""
_PROBES = 512
"""Tokens of the vocabulary whose texts are tokenized to compare two tokenizers."""
_NO_ROUTE = (404, 405, 501)
_SHOWN = 5
_SAME = "the same"


class TeacherConfig(BaseModel):
    """A model that says how likely it finds the tokens that the policy samples. Set `base_url` or `adapter`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    base_url: str | None = None
    """URL up to and including `/v1` of a server with `prompt_logprobs`, such as vLLM or `insitu backend`."""
    model: str | None = None
    """With `base_url`: the name of the teacher there. It must have the tokenizer of the model under training."""
    api_key: SecretStr | None = None
    """With `base_url`: API key."""
    adapter: Literal["self"] | None = None
    """`self`: the model under training is its own teacher."""
    version: Literal["current", "initial"] = "current"
    """With `adapter: self`: the weights that sampled a call, or those that training started from."""
    context: str | None = None
    """A text that only the teacher sees, at the end of the last message of a user. `{expected}` in it is the expected
    answer of the row, `{reasoning}` what the evaluator says about the episode."""
    coefficient: float = Field(default=1.0, gt=0)
    """Factor of the teacher's term of an advantage: its log-probability of the token minus that of the policy."""
    baseline: Literal["leave_one_out", "none"] = "leave_one_out"
    """Subtracted from the teacher's term of a token: the mean of those of all other trained tokens of its group."""
    reward_coefficient: float = Field(default=0.0, ge=0)
    """Factor of the advantages of the rewards, which are added; 0: the rewards are recorded and not trained."""
    read_timeout: MayChange[float] = Field(default=60.0, gt=0)
    """Seconds without data from the teacher after which a request has failed."""
    retry_timeout: MayChange[float] = Field(default=600.0, ge=0)
    """Seconds for which a request is retried while the teacher does not respond. The episode is then dropped."""

    @model_validator(mode="after")
    def _check_combination(self) -> "TeacherConfig":
        if (self.base_url is None) == (self.adapter is None):
            raise ValueError("set exactly one of base_url (of a server) and adapter (self: the model under training)")
        if self.base_url is not None:
            if not self.base_url.startswith(("http://", "https://")):
                raise ValueError(f"base_url is {self.base_url!r}; it must begin with http:// or https://")
            if self.model is None:
                raise ValueError("model is missing: the name of the teacher at base_url")
        misplaced = ("version",) if self.adapter is None else ("model", "api_key")
        if unused := sorted(self.model_fields_set.intersection(misplaced)):
            raise ValueError(f"{', '.join(unused)}: allowed with {'adapter' if self.adapter is None else 'base_url'}")
        if self.adapter is not None and self.version == "current" and self.context is None:
            raise ValueError("adapter: self at the current version says what the policy says; set context, or version")
        if self.context is not None:
            self._check_context(self.context)
        return self

    @staticmethod
    def _check_context(context: str) -> None:
        try:
            names = [name for _, name, _, _ in Formatter().parse(context) if name is not None]
        except ValueError as error:
            raise ValueError(f"context: {error}; write a brace that is meant as {{{{ or }}}}") from None
        if unknown := sorted({*names} - _FIELDS):
            raise ValueError(f"context: {{{unknown[0]}}} is not known; allowed: {{expected}}, {{reasoning}}")


class NoContextError(TrajectoryError):
    """An episode lacks what the context of the teacher is made of."""


class Teacher:
    """Scores the trained calls of episodes. `key` is that of its block in the file."""

    def __init__(self, config: TeacherConfig, key: str) -> None:
        self.config, self.key = config, key
        api_key = config.api_key.get_secret_value() if config.api_key is not None else "none"
        self._endpoint = PolicyEndpoint((config.base_url or "").rstrip("/"), config.model or "", api_key)
        self._connection = self._connect(f"the teacher at {self._endpoint.base_url}", self._endpoint)
        self._tokenizer = "that of the model under training" if config.adapter else "not compared yet"

    def settings(self) -> dict[str, Any]:
        """The settings in the header of the run."""
        excluded = {"api_key", "read_timeout", "retry_timeout"}
        own = self.config.model_dump(exclude=excluded | ({"version"} if self.config.adapter is None else set()))
        return {key: value for key, value in own.items() if value is not None} | {"tokenizer": self._tokenizer}

    async def close(self) -> None:
        await self._connection.close()

    def check(self, trainer: Trainer, config: Config) -> None:
        """Raises ConfigError if the components or settings of a run do not go with a teacher."""
        builder = trainer.trajectory_builder
        if not builder.plans_episodes:
            kind = builder.trajectory_builder_config.type
            raise ConfigError(f"{self.key}: {kind} does not play the episodes that a teacher scores; leave it out")
        for name in sorted(config.trained_llms()):
            temperature = config.llm(name).request_settings().get("temperature")
            if temperature not in (None, 1):
                problem = f"llms.{name}.temperature is {temperature:g}, but {self.key} gives the log-probabilities of"
                raise ConfigError(f"{problem} temperature 1, with which those of the policy are compared; allowed: 1")

    async def check_server(self, config: Config, model: str | None) -> None:
        """Raises ConfigError or BackendError unless the teacher can be used; called before a backend is started.

        Its tokenizer is compared if `model`, that of the trainer adapter, is a folder.
        """
        if self.config.adapter is not None:
            return
        try:
            await self._check_logprobs(self._endpoint.model)
            own = await asyncio.to_thread(_tokenizer_of, config, model) if model is not None else None
            if own is not None:
                text = _readable(own.decode(_spread(own.get_vocab_size()), skip_special_tokens=False))
                await self._compare(text, own.encode(text, add_special_tokens=False).ids)
        finally:
            await self.close()

    async def open(self, policy: PolicyEndpoint | None) -> None:
        """Called once the model under training is served. Raises ConfigError if its tokenizer is another one."""
        if self.config.adapter is None:
            if policy is not None and policy.vocab_size is not None and self._tokenizer != _SAME:
                await self._compare_served(policy, policy.vocab_size)
            return
        if policy is None or not (policy.names_versions or self.config.version == "current"):
            what = "serves its newest weights only" if policy is not None else "does not say where it serves the model"
            raise ConfigError(f"{self.key}: the trainer adapter {what}; allowed: version current, or base_url")
        self._endpoint = policy
        await self.close()
        self._connection = self._connect(f"the model under training at {policy.base_url}", policy)
        await self._check_logprobs(policy.model)

    async def _compare_served(self, policy: PolicyEndpoint, vocab_size: int) -> None:
        connection = self._connect(f"the model under training at {policy.base_url}", policy)
        try:
            body = {"model": policy.model, "tokens": _spread(vocab_size)}
            text = _readable(await _post(connection, policy, "detokenize", body, "prompt"))
            own = await _encode(connection, policy, text)
        except RequestRefused as error:
            if error.status not in _NO_ROUTE:
                raise
            self._tokenizer = f"not compared: {policy.base_url} has no /tokenize and /detokenize"
        else:
            await self._compare(text, own)
        finally:
            await connection.close()

    async def _compare(self, text: str, own: Sequence[int]) -> None:
        """Raises ConfigError unless the teacher encodes a text as the model under training does."""
        try:
            theirs = await _encode(self._connection, self._endpoint, text)
        except RequestRefused as error:
            if error.status not in _NO_ROUTE:
                raise
            self._tokenizer = f"not compared: {self._endpoint.base_url} has no /tokenize"
            return
        if theirs != [*own]:
            pairs = enumerate(zip_longest(own, theirs))
            first = next(position for position, (one, other) in pairs if one != other)
            ids = f"as {theirs[first : first + _SHOWN]}, the model under training as {[*own][first : first + _SHOWN]}"
            raise ConfigError(
                f"{self.key}: the teacher {self._endpoint.model!r} at {self._endpoint.base_url} has another tokenizer: "
                f"it encodes a text {ids}; allowed: a teacher with the tokenizer of the model under training"
            )
        self._tokenizer = _SAME

    def _connect(self, server: str, endpoint: PolicyEndpoint) -> Connection:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        return Connection(server, headers, self.config.read_timeout, self.config.retry_timeout)

    async def _check_logprobs(self, model: str) -> None:
        try:
            await logprobs_of_texts(self._connection, self._endpoint.base_url, model, [(0, 1)])
        except RequestRefused as error:
            raise ConfigError(f"{self.key}: {error}") from error
        self._connection.verified = True

    async def __call__(self, episode: Episode, row: EvalInputItem) -> None:
        """Adds the log-probabilities to the trained calls of a scored episode, or drops it with a reason."""
        with doing(lambda: "its teacher has not answered"):
            try:
                await self._score(episode, row)
            except InsituError as error:
                no_context = isinstance(error, NoContextError)
                episode.reason = DropReason.NO_TEACHER_CONTEXT if no_context else DropReason.TEACHER_ERROR
                episode.error, episode.reward = str(error), None

    async def _score(self, episode: Episode, row: EvalInputItem) -> None:
        calls = [episode.calls[index] for index in episode.trained_calls or ()]
        prompts = await self._prompts(calls, self._context(episode, row))
        by_model: dict[str, list[tuple[ModelCall, int, Text]]] = {}
        for call, prompt in zip(calls, prompts, strict=True):
            by_model.setdefault(self._model(call), []).append((call, len(prompt), (*prompt, *(call.token_ids or ()))))
        scores: list[tuple[ModelCall, Logprobs]] = []
        for model, of_model in by_model.items():
            asked = longest(text for _, _, text in of_model)
            found = await logprobs_of_texts(self._connection, self._endpoint.base_url, model, asked)
            scores += [(call, part_of(text, start, asked, found)) for call, start, text in of_model]
        for call, logprobs in scores:
            call.teacher_logprobs = logprobs

    def _model(self, call: ModelCall) -> str:
        """The name of the weights that score a call."""
        endpoint = self._endpoint
        if self.config.version == "initial":
            return f"{endpoint.model}@0"
        pinned = self.config.adapter is not None and endpoint.names_versions and call.policy_version is not None
        return f"{endpoint.model}@{call.policy_version}" if pinned else endpoint.model

    def _context(self, episode: Episode, row: EvalInputItem) -> str | None:
        if self.config.context is None:
            return None
        values = {"expected": as_text(row.expected_output_obj), "reasoning": as_text(episode.reasoning)}
        for _, name, _, _ in Formatter().parse(self.config.context):
            if name is not None and not values[name]:
                has = "row has no expected answer" if name == "expected" else "evaluator gives no reasoning"
                raise NoContextError(f"{self.key}.context has {{{name}}}, but the {has}")
        return self.config.context.format_map(values)

    async def _prompts(self, calls: Sequence[ModelCall], context: str | None) -> list[list[int]]:
        """The prompts of calls as the teacher sees them."""
        if context is None:
            return [call.prompt_token_ids or [] for call in calls]
        if self.config.adapter is not None:  # else the teacher may have another chat template
            first = calls[0]
            if await self._rendered(first, first.messages) != first.prompt_token_ids:
                problem = "its chat template does not give the prompt that the agent sent (is it a text completion?)"
                raise TrajectoryError(f"{self.key}.context: {problem}")
        prompts = [await self._rendered(call, _with_context(call.messages, context)) for call in calls]
        if self.config.adapter is not None and prompts == [call.prompt_token_ids for call in calls]:
            raise TrajectoryError(
                f"{self.key}.context: the chat template leaves it out, so the teacher says nothing new"
            )
        return prompts

    async def _rendered(self, call: ModelCall, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        options = {key: call.sampling[key] for key in _TEMPLATE_KEYS if call.sampling.get(key) is not None}
        tools = {"tools": call.tools} if call.tools else {}
        body = {"model": self._endpoint.model, "messages": messages, **tools, **options}
        return _ids(await _post(self._connection, self._endpoint, "tokenize", body, "tokens"))


async def _post(connection: Connection, endpoint: PolicyEndpoint, route: str, body: dict[str, Any], key: str) -> Any:
    """The value of a key in the response of `/tokenize` or `/detokenize`, as vLLM has them."""
    url = f"{endpoint.base_url.removesuffix('/v1')}/{route}"
    return await connection.request("POST", url, lambda content: orjson.loads(content)[key], orjson.dumps(body), JSON)


async def _encode(connection: Connection, endpoint: PolicyEndpoint, text: str) -> list[int]:
    body = {"model": endpoint.model, "prompt": text, "add_special_tokens": False}
    return _ids(await _post(connection, endpoint, "tokenize", body, "tokens"))


def _ids(tokens: Any) -> list[int]:
    if not isinstance(tokens, list) or not {int}.issuperset(map(type, tokens)):
        raise BackendError(f"/tokenize returned {tokens!r:.80} as token ids")
    return tokens


def _spread(vocab_size: int) -> list[int]:
    """Token ids from the whole vocabulary, and the last ones, which are often special."""
    return sorted({*range(0, vocab_size, max(1, vocab_size // _PROBES)), *range(max(0, vocab_size - 64), vocab_size)})


def _readable(text: str) -> str:
    """Without the parts of characters that single tokens stand for."""
    return text.replace("\ufffd", "")


def _tokenizer_of(config: Config, model: str) -> Any:
    """The tokenizer of a local model; None if it is not a folder with one, or `tokenizers` is not installed."""
    try:
        from tokenizers import Tokenizer

        folder = find_checkpoint(config, model, "the trainer adapter's model").folder
    except (ModuleNotFoundError, ConfigError):
        return None
    file = folder / "tokenizer.json" if folder is not None else None
    return Tokenizer.from_file(str(file)) if file is not None and file.is_file() else None


def _with_context(messages: Sequence[Mapping[str, Any]], context: str) -> list[dict[str, Any]]:
    """The messages with a text at the end of the last one of a user."""
    changed = [dict(message) for message in messages]
    for message in reversed(changed):
        if message.get("role") == "user":
            content, text = message.get("content"), f"\n\n{context}"
            is_parts = isinstance(content, list)
            message["content"] = [*content, {"type": "text", "text": text}] if is_parts else f"{content}{text}"
            return changed
    raise TrajectoryError("the teacher's context belongs into a message of a user, of which the prompt has none")
