"""What the lines of a run's files hold: episodes, model calls, and the point from which a run continues.

`RunProgress` is the state after the last complete epoch: where a run continues. `EpochState` is what is known of the
earlier epochs only after them: where a fork can begin. The journal has the finished episodes of the epoch in progress,
which are not run again. Lines of the other files that were written after that point are removed when the run
continues, and written again.
"""

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter, itemgetter
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field

from insitu.advantages.credit import CallAdvantages
from insitu.algorithms.selection import CurriculumState
from insitu.disk.json_files import Block, dump_json, to_json
from insitu.runs.files import PROGRESS_HISTORY
from insitu.schemas.episodes import (
    FORMAT_VERSION,
    CandidateStep,
    DropReason,
    Episode,
    EpisodeKey,
    EpisodeStatus,
    ModelCall,
    StepLog,
)
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import TrainingJobStatus, Trajectory, ValidationConfig, message_text
from insitu.schemas.steps import IntermediateStep, IntermediateStepType

Phase = Literal["collected", "submitted"]
_Validation = TypeVar("_Validation", bound=Mapping[str, Any])
RunStatus = Literal["running", "completed", "interrupted", "failed", "forked"]

_KEY_FIELDS = ("epoch", "row_id", "generation", "attempt")
_key_values = itemgetter(*_KEY_FIELDS)
_EPISODE_FIELDS = (
    *("outcome", "reason", "error", "output", "reward", "step_rewards", "rewarded_functions", "scores", "reasoning"),
    *("failed_requests", "seconds"),
)
_episode_values = attrgetter(*_EPISODE_FIELDS)
_CALL_FIELDS = tuple(field.name for field in fields(ModelCall))
_call_values = attrgetter(*_CALL_FIELDS)
_NOT_STORED = ("example_id", "raw_metadata")  # the first is that of the episode
_CANDIDATE_FIELDS = tuple(field.name for field in fields(CandidateStep) if field.name not in _NOT_STORED)


def episode_record(episode: Episode) -> dict[str, Any]:
    """The record of one episode, from which every table, plot and total is derived."""
    versions: set[int] = set()
    prompt_tokens = sampled_tokens = 0
    prompt: list[int] | None = None
    for call in episode.calls:
        if not call.choice or call.prompt_token_ids != prompt:  # the choices of a request share their prompt
            prompt_tokens += len(call.prompt_token_ids or ())
        prompt = call.prompt_token_ids
        sampled_tokens += len(call.token_ids or ())
        if call.policy_version is not None:
            versions.add(call.policy_version)
    return {
        "episode": episode.key.text(),
        **dict(zip(_KEY_FIELDS, episode.key[1:5], strict=True)),
        **dict(zip(_EPISODE_FIELDS, _episode_values(episode), strict=True)),
        "seconds": round(episode.seconds, 4),
        "policy_versions": sorted(versions),
        "calls": len(episode.calls),
        "prompt_tokens": prompt_tokens,
        "sampled_tokens": sampled_tokens,
        **({"candidates": [*map(_candidate_record, episode.candidates)]} if episode.candidates else {}),
        **({"source": episode.source} if episode.source else {}),
    }


def restore_episode(record: Mapping[str, Any], calls: list[ModelCall]) -> Episode:
    """The episode of a line of `episodes.jsonl.gz`, without its steps and costs, which are not recorded."""
    own = _key_values(record)
    run_id = record["episode"].removesuffix("/" + "/".join(map(str, own)))
    values = {name: record[name] for name in _EPISODE_FIELDS}
    values["outcome"] = EpisodeStatus(record["outcome"])
    values["reason"] = DropReason(record["reason"]) if record["reason"] else None
    candidates = [_restore_candidate(candidate, calls) for candidate in record.get("candidates", ())]
    key, source = EpisodeKey(run_id, *own), record.get("source")
    return Episode(key, calls=calls, candidates=candidates, source=source, **values)


def _candidate_record(candidate: CandidateStep) -> dict[str, Any]:
    """Without the prompt if a call has it."""
    record = {name: getattr(candidate, name) for name in _CANDIDATE_FIELDS}
    if candidate.call is not None:
        del record["prompt"]
    return record


def _restore_candidate(record: Mapping[str, Any], calls: Sequence[ModelCall]) -> CandidateStep:
    prompt = record["prompt"] if record["call"] is None else calls[record["call"]].messages
    return CandidateStep(**{**record, "prompt": prompt})


_ROW_CHARACTERS = 2000
"""The length of a question or an expected answer in the line of a group; the calls have the whole prompt."""
_EXCERPT = 200


def row_record(row: EvalInputItem) -> dict[str, Any]:
    """What the line of a group says of its dataset row; of a list of messages the last one."""
    question = row.input_obj
    if isinstance(question, list) and question and isinstance(question[-1], dict):
        question = message_text(question[-1])
    texts = {"question": as_text(question), "expected": as_text(row.expected_output_obj)}
    limit = _ROW_CHARACTERS
    return {name: text and text[:limit] + " ..." * (len(text) > limit) for name, text in texts.items()}


def as_text(value: Any) -> str | None:
    """A text as it is, anything else as JSON; None for null."""
    return value if value is None or isinstance(value, str) else dump_json(value).decode()


def excerpt(value: Any) -> str | None:
    """The beginning of a value as one line, for lists."""
    text = as_text(value)
    return None if text is None else " ".join(text[: 4 * _EXCERPT].split())[:_EXCERPT]


def natural(text: str) -> str:
    """A key that sorts row 2 before row 10."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), text)


SIDES = ("chosen", "rejected")
"""The sides of a preference pair."""


def side_metadata(side: str, episode: str, calls: Iterable[ModelCall]) -> dict[str, Any]:
    """What the metadata of a pair say of a side: the episode and calls that are trained as it."""
    return {f"{side}_episode": episode, f"{side}_calls": [call.index for call in calls]}


def sides_of(pair: Trajectory) -> list[tuple[str, str, list[int]]]:
    """The sides of a preference pair with their episodes and calls; none of another trajectory."""
    about = pair.metadata or {}
    return [(s, about[f"{s}_episode"], about[f"{s}_calls"]) for s in SIDES if f"{s}_episode" in about]


def training_records(
    epoch: int,
    collected: Iterable[Trajectory],
    drop_reasons: Mapping[str, str],
    advantages: Iterable[tuple[Trajectory, CallAdvantages]],
    selected: Iterable[Trajectory] = (),
) -> list[dict[str, Any]]:
    """The lines of `advantages.jsonl` of an epoch: how each episode was trained, or why it was dropped.

    An advantage is None if the backend computes it. Of a call with an advantage for each token, `advantages` has the
    mean and `token_advantages` all. `sides` says what an episode is trained as where there are no advantages: as sides
    of preference pairs, or, of the `selected` ones with rows, as desirable or not or the best of its row.
    """
    by_id = {t.id: {str(t.calls[k].index): a for k, a in sorted(of_calls.items())} for t, of_calls in advantages}
    labels = {t.id: _label(t) for t in selected if t.rows and t.id not in by_id}
    records: dict[str, dict[str, Any]] = {}
    for t in collected:
        dropped = drop_reasons.get(str(t.id)) or (t.metadata or {}).get("dropped")
        sides = sides_of(t)
        for side, episode, calls in sides:
            record = records.setdefault(
                episode, {"epoch": epoch, "episode": episode, "dropped": dropped, "advantages": {}, "sides": []}
            )
            record["sides"].append({"side": side, "calls": calls, "dropped": dropped, **_pair(t, side)})
            record["dropped"] = record["dropped"] and dropped
        if sides:
            continue
        of_calls = by_id.get(t.id, {})
        by_token = {index: a for index, a in of_calls.items() if isinstance(a, list)}
        means = of_calls | {index: fmean(values) for index, values in by_token.items()}
        records[str(t.id)] = {"epoch": epoch, "episode": t.id, "dropped": dropped, "advantages": means}
        records[str(t.id)] |= {"token_advantages": by_token} if by_token else {}
        if (label := labels.get(t.id)) is not None:
            calls = [t.calls[k].index for k in t.trained_calls]
            records[str(t.id)]["sides"] = [{"side": label, "calls": calls, "dropped": None}]
    return [*records.values()]


def membership(episode: str, group: Mapping[str, Any]) -> int:
    """1: an episode with a reward is in its group of `groups.jsonl`; 2: it is in a pair, needing none; 0: it is not."""
    paired = group.get("paired")
    return 2 * (episode in paired) if paired is not None else int(episode in group["episodes"])


def _label(trajectory: Trajectory) -> str:
    """What an episode without advantages is trained as."""
    preferred = {row.preferred for row in trajectory.rows}
    return "best" if preferred <= {None} else "desirable" if True in preferred else "undesirable"


def _pair(pair: Trajectory, side: str) -> dict[str, Any]:
    """A preference pair as one of its sides sees it; `margin` is by how much the chosen side scored higher."""
    about = pair.metadata or {}
    [other] = [name for name in SIDES if name != side]
    scores = {"score": about[f"{side}_score"], "other_score": about[f"{other}_score"], "margin": about["score_diff"]}
    return {"pair": pair.id, "other": about[f"{other}_episode"], "other_calls": about[f"{other}_calls"], **scores}


def call_records(episode: str, calls: Sequence[ModelCall]) -> list[dict[str, Any]]:
    """Calls as stored: `continues` is the index of an earlier call whose messages and tokens are a prefix of this.

    `messages` and `prompt_token_ids` then hold only the rest, so that the size of a conversation is linear in its
    length, not quadratic. `continues_prompt` is the same for text completions, of whose prompt the rest is stored.
    `restore_calls` is the inverse.
    """
    records = []
    prompts: list[Any] = [call.messages[0].get("content") if len(call.messages) == 1 else None for call in calls]
    for index, call in enumerate(calls):
        record = {"episode": episode, **dict(zip(_CALL_FIELDS, _call_values(call), strict=True))}
        for name in ("teacher_logprobs", "sent_logprobs"):
            if record[name] is None:
                del record[name]
        messages, prompt = call.messages, prompts[index]
        for earlier in range(index - 1, -1, -1):
            before, start = calls[earlier], prompts[earlier]
            n = len(before.messages)
            if n < len(messages) and messages[:n] == before.messages:
                key, rest = "continues", messages[n:]
            elif (
                (isinstance(start, str) and isinstance(prompt, str))
                and 0 < len(start) < len(prompt)
                and prompt.startswith(start)
            ):
                key, rest = "continues_prompt", [{**messages[0], "content": prompt[len(start) :]}]
            else:
                continue
            if call.prompt_token_ids is not None:
                tokens = before.all_token_ids
                if before.token_ids is None or call.prompt_token_ids[: len(tokens)] != tokens:
                    continue
                record["prompt_token_ids"] = call.prompt_token_ids[len(tokens) :]
            record["messages"], record[key] = rest, earlier
            break
        records.append(record)
    return records


def restore_calls(records: Iterable[dict[str, Any]]) -> list[ModelCall]:
    """The calls of one episode from its lines of `calls.jsonl.gz`."""
    calls: list[ModelCall] = []
    for record in records:
        values = {name: record[name] for name in _CALL_FIELDS if name in record}
        key = next((key for key in ("continues", "continues_prompt") if key in record), None)
        if key is not None:
            before = calls[record[key]]
            if key == "continues":
                values["messages"] = before.messages + values["messages"]
            else:
                [rest] = values["messages"]
                values["messages"] = [{**rest, "content": before.messages[0]["content"] + rest["content"]}]
            if values["prompt_token_ids"] is not None:
                values["prompt_token_ids"] = before.all_token_ids + values["prompt_token_ids"]
        values["functions"] = tuple(values["functions"])
        calls.append(ModelCall(**values))
    return calls


class StoredGroup(NamedTuple):
    """A group of a run, and where its lines are."""

    epoch: int
    row_id: str
    size: int
    """The number of its episodes, with those that were dropped."""
    episodes: Block
    calls: Block
    rows: Sequence[str] = ()
    """Those of its episodes, which may be others than `row_id`; the index does not say."""


def format_problem(header: Mapping[str, Any]) -> str | None:
    """What is wrong with the first line of a file, in words that follow the file's name; None if nothing is."""
    if header == {"format": FORMAT_VERSION}:
        return None
    return f"has format {header.get('format', 'unknown')}; supported: {FORMAT_VERSION}"


def new_run_id(prefix: str = "insitu_run") -> str:
    return f"{prefix}_{uuid.uuid4().hex[:8]}"


def best_validation(records: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The validation with the highest score, the first of equal ones, of those that are comparable with the latest."""
    return max(comparable_validations(records), key=lambda each: each["avg_reward"], default=None)


def comparable_validations(records: Iterable[_Validation]) -> list[_Validation]:
    """The validations with a score, but those of other rows, or by another evaluator, than the latest."""
    scored = [each for each in records if "error" not in each]
    latest = scored[-1].get("scored_by") if scored else None  # runs of earlier versions do not say
    return [each for each in scored if latest in (None, each.get("scored_by", latest))]


class EarlyStop(BaseModel):
    """The settings of a run that has ended before its last epoch, as its held-out score did not improve."""

    epochs: int
    patience: int


class RunProgress(BaseModel):
    """`progress.json`.

    `epoch` is the last complete one (0: none), `policy_version` the version served after it, `sizes` the bytes that
    each file of lines had then. A run whose process was killed is left as `running`.
    """

    format: int = FORMAT_VERSION
    run_id: str
    status: RunStatus = "running"
    error: str | None = None
    epoch: int = 0
    policy_version: int | None = None
    warmed_up: bool = False
    curriculum: CurriculumState | None = None
    submitted_epoch: int = 0
    """The epoch whose job may have been submitted; its job and episodes are recorded once `epoch` is as high."""
    phase: Phase | None = None
    """How far a run with a single job is. None: it is collecting, or it has a job per epoch."""
    sizes: dict[str, int] = {}
    due_validation: int | None = Field(default=None, exclude_if=lambda epoch: epoch is None)
    """The epoch whose weights are validated while the next one trains."""
    stop: EarlyStop | None = Field(default=None, exclude_if=lambda stop: stop is None)
    """Set if the run has ended early."""

    def trains_further(self, epochs: int, validation: ValidationConfig | None) -> bool:
        """Whether a run of so many epochs has some left; one that ended early has with more epochs or more patience."""
        stop, patience = self.stop, validation.patience if validation is not None else None
        if stop is not None and patience is not None and patience <= stop.patience and epochs <= stop.epochs:
            return False
        return self.epoch < epochs

    def is_complete(self, epochs: int, validation: ValidationConfig | None = None) -> bool:
        """Whether a run with these settings has nothing left to train."""
        return self.status == "completed" and self.phase is None and not self.trains_further(epochs, validation)


class EpochState(BaseModel):
    """A line of `progress_history.jsonl`: the state after an epoch, as in `progress.json`, and its job."""

    epoch: int
    policy_version: int | None
    warmed_up: bool
    curriculum: CurriculumState | None
    sizes: dict[str, int]
    job: TrainingJobStatus | None
    """The last state of its job; None if nothing was trained."""

    @classmethod
    def of(cls, progress: RunProgress, job: TrainingJobStatus | None = None) -> "EpochState":
        sizes = {name: size for name, size in progress.sizes.items() if name != PROGRESS_HISTORY}
        return cls(**progress.model_dump(include=cls.model_fields.keys() - {"sizes"}), sizes=sizes, job=job)

    def restore(self, progress: RunProgress) -> RunProgress:
        """The progress as it was after this epoch."""
        own = {name: getattr(self, name) for name in EpochState.model_fields.keys() & RunProgress.model_fields.keys()}
        return progress.model_copy(update={**own, "stop": None})


def checkpoints_of(jobs: Iterable[TrainingJobStatus]) -> dict[int | None, str | None]:
    """The folder of each version that a job has made, if it has one."""
    made = [job.metadata or {} for job in jobs]
    return {each.get("policy_version"): each.get("checkpoint") for each in made}


def journal_record(episode: Episode) -> dict[str, Any]:
    """A finished episode whose group may be incomplete: with the steps that its group may need."""
    steps = [step for step in episode.steps.reported() if step.event_type is IntermediateStepType.TTC_END]
    return {
        "episode": episode_record(episode),
        "calls": call_records(episode.key.text(), episode.calls),
        "steps": [to_json(step) for step in steps],
        "abandoned_attempts": episode.abandoned_attempts,
    }


def restore_journaled(record: Mapping[str, Any]) -> Episode:
    """The inverse of `journal_record`."""
    episode = restore_episode(record["episode"], restore_calls(record["calls"]))
    episode.steps = StepLog(IntermediateStep.model_validate(step) for step in record["steps"])
    episode.abandoned_attempts = record["abandoned_attempts"]
    return episode
