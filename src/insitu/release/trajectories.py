"""Writes the recorded episodes of a run in the formats of other tools.

preferences    TRL's conversational preferences: prompt, chosen, rejected
kto            TRL's unpaired preferences: prompt, completion, label
sft            TRL's language modeling: messages
openai         the finetuning format of OpenAI's API: messages, tools
parquet        a table with a row per episode (see `parquet`)
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.advantages.credit import TrainedCalls
from insitu.collect.conversations import (
    Dialogue,
    Messages,
    dialogues,
    is_text,
    openai_messages,
    scored_group,
    template_messages,
)
from insitu.disk.files import new_file
from insitu.disk.json_files import LineFile, dump_lines
from insitu.errors import ConfigError, TrajectoryError
from insitu.preferences.pairs import Duplicates, preference_pairs
from insitu.preferences.selection import best_of_group, desirable
from insitu.release.parquet import write_table
from insitu.runs.files import ADVANTAGES, CALLS, EPISODES, GROUPS, PAIRS, RESCORES, RUN_FILES
from insitu.runs.replay import StoredRun
from insitu.schemas.episodes import DropReason, Episode, EpisodeStatus, PreferencePair
from insitu.schemas.finetuning import Trajectory
from insitu.training.preference_builders import DPOFromGroupsConfig, DPOTrajectoryBuilderConfig, episode_candidate
from insitu.training.report import counts
from insitu.training.trainers import SFTTrainerConfig

Records = Iterator[dict[str, Any]]
Group = list[tuple[Episode, Trajectory]]
PairTexts = tuple[Messages, Messages, Messages]
"""The prompt of a pair, the chosen completion and the rejected one."""


@dataclass(frozen=True)
class ExportOptions:
    """Which episodes are written, and how; None: as the builder or trainer of the same purpose does by default."""

    pairs: str | None = None
    """`candidates` or `episodes`; None: candidates if the run has recorded some."""
    best: int | None = None
    min_reward: float | None = None


ALLOWED = {
    "preferences": ("pairs",),
    "kto": (),
    "sft": ("best", "min_reward"),
    "openai": ("best", "min_reward"),
    "parquet": (),
}
"""The formats, and the options that each takes."""

_RECORDED = frozenset((*RUN_FILES, CALLS, GROUPS, ADVANTAGES, PAIRS, RESCORES))
"""Files of a run that `--force` does not replace: an export could not be repeated without them."""


def export(
    run: StoredRun, format: str, target: Path, options: ExportOptions = ExportOptions(), overwrite: bool = False
) -> "Exporter":
    """Writes a file with all records, or none; returns what wrote it, with its counts.

    Raises ConfigError if the options do not fit the format or the file exists, TrajectoryError if there is no record.
    """
    for name, value in vars(options).items():
        if value is not None and name not in ALLOWED[format]:
            takers = " and ".join(f for f, names in ALLOWED.items() if name in names)
            raise ConfigError(f"--{name} has no effect with --format {format}; it is for {takers}")
    if target.exists() and not target.is_file():
        what = "a folder" if target.is_dir() else "no regular file"
        raise ConfigError(f"--output: {target} is {what}, and is not replaced; give another name")
    if target.exists() and not overwrite:
        raise ConfigError(f"--output: {target} exists already; --force replaces it")
    if target.exists() and target.name in _RECORDED and (target.parent / EPISODES).is_file():
        raise ConfigError(f"--output: {target} is a file of a run, which is not replaced; choose another name")
    if not target.parent.is_dir():
        raise ConfigError(f"--output: the folder {target.parent} does not exist")
    exporter = Exporter(run, options)
    with new_file(target, overwrite) as draft:
        if format == "parquet":
            exporter.written = write_table(run, draft)
        else:
            exporter.write_lines(draft, exporter.records_of(format))
        if not exporter.written:
            why = f": {counts(exporter.dropped)}" if exporter.dropped else ""
            first = f"; the first: {exporter.first_error}" if exporter.first_error else ""
            raise TrajectoryError(f"nothing of {run.folder} can be written as {format}{why}{first}")
    return exporter


class Exporter:
    """Turns the groups of a run into records, and counts what it leaves out."""

    def __init__(self, run: StoredRun, options: ExportOptions) -> None:
        self.run = run
        self.options = options
        self.written = 0
        self.dropped: Counter[str] = Counter()
        """What was left out, by reason."""
        self.first_error: str | None = None
        """The error of the first untrainable episode."""
        self._seen = Duplicates()
        settings = run.files.settings()
        self._run_id = settings.get("run_id")
        self._trained = TrainedCalls(**(settings.get("targets") or {}), as_text=True)

    def write_lines(self, path: Path, records_of: Callable[[list[Episode]], Records]) -> None:
        with closing(LineFile(path)) as file:
            for stored in self.run.selected:
                records = [*records_of(self.run.load(stored))]
                file.append(dump_lines(records))
                self.written += len(records)

    def records_of(self, format: str) -> Callable[[list[Episode]], Records]:
        """The function that turns a group into the records of a format."""
        if format != "preferences":
            return {"kto": self._kto, "sft": self._sft, "openai": self._openai}[format]
        between = self.options.pairs
        if between is None:
            recorded = any("candidates" in record for record in self.run.files.episode_records(self.run.selected))
            between = "candidates" if recorded else "episodes"
        return self._candidate_pairs if between == "candidates" else self._episode_pairs

    def _candidate_pairs(self, episodes: list[Episode]) -> Records:
        """Pairs of each turn, as `dpo_traj_builder` makes them."""
        options = DPOTrajectoryBuilderConfig().pair_options
        for episode in episodes:
            if episode.outcome is not EpisodeStatus.OK:
                self._drop(episode.reason or DropReason.WORKFLOW_ERROR, episode)
                continue
            if not episode.candidates:
                self._drop(DropReason.NO_CANDIDATES)
            pairs, dropped = preference_pairs(episode.candidates, options)
            self.dropped.update(dropped)
            for pair in pairs:
                call = pair.chosen.call
                tools = episode.calls[call].tools if call is not None else None
                yield from self._preference(pair, _candidate_messages(pair, episode), tools, (episode, episode))

    def _episode_pairs(self, episodes: list[Episode]) -> Records:
        """Pairs of the episodes of a row, as `dpo_from_groups` makes them."""
        played = {episode.key.generation: (episode, t) for episode, t in self._trainable(episodes)}
        candidates = [episode_candidate(episode, t) for episode, t in played.values()]
        said = {index: _first_dialogue(t) for index, (_, t) in played.items()}
        options = DPOFromGroupsConfig().pair_options
        pairs, dropped = preference_pairs(candidates, options, lambda c: said[c.candidate_index].completion)
        self.dropped.update(dropped)
        for pair in pairs:
            best, worst = (pair.chosen.candidate_index, pair.rejected.candidate_index)
            texts = (said[best].prompt, said[best].completion, said[worst].completion)
            yield from self._preference(pair, texts, said[best].tools, (played[best][0], played[worst][0]))

    def _preference(
        self, pair: PreferencePair, texts: PairTexts, tools: Messages | None, episodes: tuple[Episode, Episode]
    ) -> Records:
        if self._seen.repeats([*texts, tools]):
            self._drop(DropReason.DUPLICATE_PAIR)
        elif not is_text(message for messages in texts for message in messages):
            self._drop(DropReason.NOT_TEXT)
        else:
            prompt, chosen, rejected = map(template_messages, texts)
            yield {
                "prompt": prompt,
                "chosen": chosen,
                "rejected": rejected,
                **_tools(tools),
                "score_chosen": pair.chosen.score,
                "score_rejected": pair.rejected.score,
                **self._origin(episodes[0]),
                "rejected_episode": episodes[1].key.text(),
                "turn": pair.turn_id,
            }

    def _kto(self, episodes: list[Episode]) -> Records:
        """Desirable and undesirable dialogues, as `insitu_kto_trainer` labels them."""
        group = self._trainable(episodes)
        labels = desirable([t for _, t in group], None) if group else []
        for (episode, trajectory), label in zip(group, labels, strict=True):
            if label is None:
                self._drop(DropReason.NO_VARIANCE)
                continue
            for dialogue in self._text_dialogues(trajectory):
                yield {
                    "prompt": template_messages(dialogue.prompt),
                    "completion": template_messages(dialogue.completion),
                    "label": label,
                    **_tools(dialogue.tools),
                    **self._origin(episode),
                }

    def _sft(self, episodes: list[Episode]) -> Records:
        """The dialogues of the best episodes of a row, as `insitu_sft_trainer` chooses them."""
        for episode, trajectory in self._best(episodes):
            for dialogue in self._text_dialogues(trajectory):
                messages = template_messages(dialogue.messages)
                yield {"messages": messages, **_tools(dialogue.tools), **self._origin(episode)}

    def _openai(self, episodes: list[Episode]) -> Records:
        """A record for OpenAI's API, which refuses further keys."""
        for _, trajectory in self._best(episodes):
            for dialogue in dialogues(trajectory.calls, trajectory.trained_calls):
                tools = {"tools": dialogue.tools} if dialogue.tools else {}
                yield {"messages": openai_messages(dialogue), **tools}

    def _best(self, episodes: list[Episode]) -> Group:
        group = self._trainable(episodes)
        count = self.options.best or SFTTrainerConfig().best_per_row
        chosen = best_of_group([t for _, t in group], count, self.options.min_reward)
        best = [(episode, t) for episode, t in group if any(t is one for one in chosen)]
        self.dropped[str(DropReason.NOT_BEST)] += len(group) - len(best)
        return best

    def _trainable(self, episodes: list[Episode]) -> Group:
        """The episodes with a reward and calls to train. Token ids are not needed, as they are trained as text."""
        group = scored_group(episodes, self._trained)
        self.dropped.update(group.dropped)
        made = {str(trajectory.id): trajectory for trajectory in group.trajectories}
        self._note_errors(episode for episode in group.episodes if episode.key.text() not in made)
        return [(episode, made[episode.key.text()]) for episode in group.episodes if episode.key.text() in made]

    def _text_dialogues(self, trajectory: Trajectory) -> Iterator[Dialogue]:
        for dialogue in dialogues(trajectory.calls, trajectory.trained_calls):
            if is_text(dialogue.messages):
                yield dialogue
            else:
                self._drop(DropReason.NOT_TEXT)

    def _origin(self, episode: Episode) -> dict[str, Any]:
        return {
            "run": self._run_id,
            "episode": episode.key.text(),
            "row_id": episode.key.row_id,
            "reward": episode.reward,
            "reward_from": self.run.reward,
        }

    def _drop(self, reason: DropReason, episode: Episode | None = None) -> None:
        self.dropped[str(reason)] += 1
        self._note_errors([episode] if episode is not None else [])

    def _note_errors(self, left_out: Iterable[Episode]) -> None:
        errors = (f"{episode.key.text()}: {episode.error}" for episode in left_out if episode.error is not None)
        self.first_error = self.first_error or next(errors, None)


def _first_dialogue(trajectory: Trajectory) -> Dialogue:
    """The dialogue of the first trained call."""
    first = trajectory.calls[trajectory.trained_calls[0]]
    candidates = dialogues(trajectory.calls, trajectory.trained_calls)
    return next(dialogue for dialogue in candidates if any(call is first for call in dialogue.calls))


def _candidate_messages(pair: PreferencePair, episode: Episode) -> PairTexts:
    """What was sampled, or the reported texts if that is not known of both sides."""
    sides = (pair.chosen, pair.rejected)
    prompt = pair.chosen.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    sampled = [episode.calls[side.call].message for side in sides if side.call is not None]
    if len(sampled) == 2 and sampled[0] is not None and sampled[1] is not None:
        return messages, [sampled[0]], [sampled[1]]
    chosen, rejected = ([{"role": "assistant", "content": side.response}] for side in sides)
    return messages, chosen, rejected


def _tools(tools: Messages | None) -> dict[str, str]:
    """As JSON, which TRL parses: the schemas of different tools do not fit into one column."""
    return {"tools": json.dumps(tools)} if tools else {}
