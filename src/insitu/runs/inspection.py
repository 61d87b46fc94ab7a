"""A recorded episode with its calls, training rows, training status, and the texts of its tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from insitu.advantages.estimator import rows_of
from insitu.errors import ConfigError, install_command
from insitu.schemas.episodes import ModelCall, TrainingRow

_DECODED_TOGETHER, _CONTEXT = 24, 4
"""Tokens that are decoded with those before them, as the text of a token may depend on these."""


class TrainingStatus(StrEnum):
    """Whether an episode was trained."""

    TRAINED = "trained"
    SENT = "sent"
    """Trained on a server that computes the advantages itself."""
    DROPPED = "dropped"
    PENDING = "not trained yet"
    """Its epoch is still running, or was when the run was interrupted."""
    JOB_FAILED = "job failed"
    UNKNOWN = "not recorded"
    """Its epoch is complete, but the run has no record of its advantages."""

    @classmethod
    def of(cls, *, dropped: bool, epoch_is_over: bool, job: str | None, trained: int, sent: bool) -> "TrainingStatus":
        """The status of an episode from the `job` of its epoch and the number of its `trained` calls.

        `sent`: without advantages.
        """
        if dropped:
            return cls.DROPPED
        if not epoch_is_over:
            return cls.PENDING
        if job != "completed":
            return cls.JOB_FAILED
        if not trained:
            return cls.UNKNOWN
        return cls.SENT if sent else cls.TRAINED


@dataclass(frozen=True)
class RecordedEpisode:
    """An episode and what the run recorded about it.

    `record`, `training` and `group` are its lines in `episodes.jsonl.gz`, `advantages.jsonl` and `groups.jsonl`.
    `epoch` is the metrics line of its epoch, None while that is running, and `settings` the content of `run.json`.
    """

    record: Mapping[str, Any]
    calls: list[ModelCall] = field(default_factory=list)
    training: Mapping[str, Any] | None = None
    group: Mapping[str, Any] | None = None
    epoch: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    rescores: Sequence[Mapping[str, Any]] = ()
    """Its latest line in `rescores.jsonl` of each evaluator."""

    @property
    def advantages(self) -> dict[int, float | None]:
        """Advantages of the trained calls by call index, None if the server computed them."""
        return {int(index): value for index, value in (self.training or {}).get("advantages", {}).items()}

    @property
    def reason(self) -> str | None:
        """Why it was dropped, or else why it failed."""
        dropped: str | None = (self.training or {}).get("dropped")
        return dropped or self.record["reason"]

    @property
    def status(self) -> TrainingStatus:
        in_group = self.group is None or self.record["episode"] in self.group["episodes"]
        return TrainingStatus.of(
            dropped=self.record["reward"] is None or not in_group or bool((self.training or {}).get("dropped")),
            epoch_is_over=self.epoch is not None,
            job=(self.epoch or {}).get("job"),
            trained=len(self.advantages),
            sent=None in self.advantages.values(),
        )

    @property
    def rows(self) -> list[TrainingRow]:
        """The training rows, or for an untrained episode the rows of all its calls."""
        calls = [c for c in self.calls if c.token_ids and c.prompt_token_ids is not None and c.logprobs is not None]
        with_tokens = {call.index for call in calls}
        by_token = {int(index): values for index, values in (self.training or {}).get("token_advantages", {}).items()}
        advantages = {**(self.advantages or dict.fromkeys(with_tokens)), **by_token}
        weights = {
            position: advantages[call.index] or 0.0
            for position, call in enumerate(self.calls)
            if call.index in with_tokens & advantages.keys()
        }
        return rows_of(self.calls, weights, self.record["episode"])

    @property
    def training_summary(self) -> str:
        """Whether and how it was trained, in words."""
        counts = f"trained with {len(self.advantages)} of {len(self.calls)} calls"
        if self.status is TrainingStatus.TRAINED:
            credit, advantages = self.settings.get("credit"), self.settings.get("advantages")
            if not isinstance(advantages, dict):
                return counts
            if "baseline" not in advantages:
                return f"{counts}; advantages by {advantages.get('function', advantages.get('_type'))}"
            discount = "" if credit == "episode" else f"discount {self.settings['discount']:g}, "
            baseline, scale = advantages["baseline"], advantages["scale"]
            return f"{counts}; credit {credit}, {discount}baseline {baseline}, scale {scale}"
        if self.status is TrainingStatus.SENT:
            return f"{counts}, sent with the episode's reward; the server computed the advantages"
        job = (self.epoch or {}).get("job")
        explanation = {
            TrainingStatus.DROPPED: f"dropped: {self.reason}",
            TrainingStatus.PENDING: "not trained yet: its epoch is running or was interrupted",
            TrainingStatus.JOB_FAILED: f"not trained: the job of epoch {self.record['epoch']} is {job}",
            TrainingStatus.UNKNOWN: "unknown whether it was trained: this run has no record of advantages",
        }
        return explanation[self.status]

    def step_reward(self, position: int) -> float | None:
        """The step reward of a call, None if it is a placeholder 0 of a call that cannot be rewarded."""
        rewards, rewarded = self.record["step_rewards"], self.record["rewarded_functions"]
        if not rewards or len(rewards) != len(self.calls):
            return None
        call = self.calls[position]
        function_rewarded = not set(rewarded).isdisjoint(call.functions)
        trained = call.index in self.advantages if self.advantages else call.token_ids is not None
        return rewards[position] if rewards[position] or (function_rewarded and trained) else None


def load_decoder(folder: Path) -> Callable[[Sequence[int]], str]:
    """Token ids to text, special tokens included, by the `tokenizer.json` in a folder; raises ConfigError."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"texts of tokens need the package {error.name!r}: {install_command('local')} in the clone of insitu"
        ) from error
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--tokenizer: {path} does not exist; give the folder of the run's model")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text of each token, which together are the text of all.

    The bytes of a character may be spread over several tokens: the last of them gets it, the others are empty.
    """
    texts: list[str] = []
    window: list[int] = []
    before = ""
    for number, token in enumerate(ids, 1):
        window.append(token)
        text = decode(window) if number == len(ids) else _complete(decode(window))
        texts.append(text[len(before) :] if text.startswith(before) else decode([token]))
        before = text
        if len(window) >= _DECODED_TOGETHER:
            window = window[-_CONTEXT:]
            before = _complete(decode(window))
    return texts


def _complete(text: str) -> str:
    """Without a last character whose further bytes may follow."""
    return text.removesuffix("\ufffd")
