"""Reads recorded episodes from a run directory, with their calls, training rows and training status."""

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from insitu.advantages.estimator import rows_of
from insitu.disk.files import read_object
from insitu.errors import ConfigError, InsituError, install_command
from insitu.runs.files import ADVANTAGES, BACKEND_FOLDER, METRICS, STARTED_FILE
from insitu.runs.stored import RunFolder, StoredGroup
from insitu.schemas.episodes import ModelCall, TrainingRow

_SUGGESTIONS = 5
_DECODED_TOGETHER, _CONTEXT = 24, 4
"""Tokens that are decoded with those before them, as the text of a token may depend on these."""
_OPTIONS = {"episode": "--episode", "epoch": "--epoch", "row_id": "--row", "generation": "--generation"}
"""Keys of `episodes.jsonl.gz` -> options that filter by them, the most specific first."""


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
    def outcomes(self) -> set[str]:
        """What `--outcome` selects it by: `ok` or `failed`, its training status, and its reason code."""
        return {self.record["outcome"], str(self.status), *([self.reason] if self.reason else [])}

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


class RunFiles(RunFolder):
    """The files of a finished, running or interrupted run. Raises ConfigError if the folder has none."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._groups = {(group.epoch, group.row_id): (group, record) for group, record in self.group_records()}
        self._epochs = {metrics["epoch"]: metrics for metrics in self.lines(METRICS)}

    def find(self, **filters: str | int | None) -> list[dict[str, Any]]:
        """Lines of `episodes.jsonl.gz` with these values. Raises ConfigError with similar values if there are none."""
        given = {key: value for key, value in filters.items() if value is not None}
        groups = [group for group, _ in self._groups.values()]
        records = self.episode_records(group for group in groups if _may_have(group, given))
        if found := [record for record in records if given.items() <= record.items()]:
            return found
        raise self._none_found(list(self.episode_records(groups)), given)

    def _none_found(self, records: list[dict[str, Any]], given: Mapping[str, str | int]) -> ConfigError:
        if not records:
            return ConfigError(f"{self.folder} has no episode yet")
        applied: list[str] = []
        for key, option in _OPTIONS.items():
            if (value := given.get(key)) is None:
                continue
            existing = list(dict.fromkeys(str(record[key]) for record in records))
            records = [record for record in records if record[key] == value]
            if not records:
                subject = f"no episode with {' and '.join(applied)}" if applied else "no episode"
                return ConfigError(f"{self.folder}: {subject} has {option} {value!r}; {suggest(str(value), existing)}")
            applied.append(f"{option} {value!r}")
        raise AssertionError(f"{self.folder} has an episode with {given}")

    def load(self, record: Mapping[str, Any]) -> RecordedEpisode:
        """The complete episode of a line of `episodes.jsonl.gz`."""
        name = record["episode"]
        group, _ = self._groups[record["epoch"], record["row_id"]]
        training = next(self.records(ADVANTAGES, name), None)
        calls = self.calls(group).get(name, [])
        rescores = [*self.rescores(episode=name).values()]
        return self._episode(record, training, calls=calls, settings=self.settings(), rescores=rescores)

    def summaries(self, records: list[dict[str, Any]]) -> Iterator[RecordedEpisode]:
        """Many episodes, without calls and settings."""
        training = {line["episode"]: line for line in self.records(ADVANTAGES)}
        return (self._episode(record, training.get(record["episode"])) for record in records)

    def tokenizer(self) -> Path | None:
        return find_tokenizer(self.folder)

    def _episode(self, record: Mapping[str, Any], training: Mapping[str, Any] | None, **fields: Any) -> RecordedEpisode:
        _, group = self._groups[record["epoch"], record["row_id"]]
        epoch = self._epochs.get(record["epoch"])
        return RecordedEpisode(record, training=training, group=group, epoch=epoch, **fields)


def _may_have(group: StoredGroup, given: Mapping[str, str | int]) -> bool:
    """Whether a group can have an episode with these values; the names of episodes contain epoch and row."""
    return (
        given.get("epoch", group.epoch) == group.epoch
        and given.get("row_id", group.row_id) == group.row_id
        and f"/{group.epoch}/{group.row_id}/" in str(given.get("episode", f"/{group.epoch}/{group.row_id}/"))
    )


SORT_KEYS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "reward": lambda record: -math.inf if record["reward"] is None else record["reward"],
    "seconds": lambda record: record["seconds"],
    "tokens": lambda record: record["sampled_tokens"],
    "calls": lambda record: record["calls"],
}
"""By what episodes can be sorted, the largest first."""


def select(episodes: Sequence[RecordedEpisode], outcome: str | None, min_reward: float | None) -> list[RecordedEpisode]:
    """The episodes with this outcome and at least this reward; raises ConfigError if there are none."""
    selected = [e for e in episodes if outcome is None or outcome in e.outcomes]
    if not selected:
        counts = Counter(label for e in episodes for label in sorted(e.outcomes))
        existing = ", ".join(f"{label} ({n})" for label, n in counts.most_common())
        raise ConfigError(f"no episode has --outcome {outcome!r}; available: {existing}")
    if min_reward is None:
        return selected
    rewards = [e.record["reward"] for e in selected if e.record["reward"] is not None]
    if not any(reward >= min_reward for reward in rewards):
        highest = f"the highest is {max(rewards):g}" if rewards else "none has a reward"
        raise ConfigError(f"no episode has --min_reward {min_reward:g}; {highest}")
    return [e for e in selected if e.record["reward"] is not None and e.record["reward"] >= min_reward]


def find_tokenizer(run: Path) -> Path | None:
    """The folder of a tokenizer: one that the run's backend has written, or that of the model it started from.

    None if the backend was not a child process of the run, or started from a model of the Hub.
    """
    backend = run / BACKEND_FOLDER
    written = next((backend / "checkpoints").glob("*/tokenizer.json"), None)
    if written is not None:
        return written.parent
    try:
        model = Path(str(read_object(backend / STARTED_FILE)["model"]))
    except (InsituError, KeyError):
        return None
    return model if (model / "tokenizer.json").is_file() else None


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


def suggest(value: str, existing: list[str]) -> str:
    """Similar values, or else the first ones."""
    similar = [name for name in existing if value in name] or difflib.get_close_matches(value, existing, _SUGGESTIONS)
    if similar:
        return f"similar: {', '.join(similar[:_SUGGESTIONS])}{' ...' * (len(similar) > _SUGGESTIONS)}"
    more = f" ... ({len(existing)} in total)" if len(existing) > _SUGGESTIONS else ""
    return f"available: {', '.join(existing[:_SUGGESTIONS])}{more}"
