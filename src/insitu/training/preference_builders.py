"""Preference pairs of a group: of the scored candidates of each turn, or of whole episodes of a row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from insitu.advantages.credit import TrainedCalls
from insitu.collect.conversations import conversations
from insitu.preferences.candidates import Targets, candidates_of, recorded_candidates
from insitu.preferences.pairs import PairOptions, preference_pairs
from insitu.preferences.selection import episode_rows, pair_rows
from insitu.registry import register_trajectory_builder
from insitu.runs.records import side_metadata, sides_of
from insitu.schemas.episodes import CandidateStep as CandidateStep  # also documented here
from insitu.schemas.episodes import DropReason, Episode, EpisodeStatus, ModelCall
from insitu.schemas.episodes import PreferencePair as PreferencePair  # also documented here
from insitu.schemas.finetuning import DPOItem, OpenAIMessage, Trajectory, message_text
from insitu.schemas.groups import GroupRecord
from insitu.schemas.steps import IntermediateStepType
from insitu.training.episodes_builder import CollectingBuilderConfig, EpisodesBuilder


class DPOTrajectoryBuilderConfig(CollectingBuilderConfig, name="dpo_traj_builder"):
    """Makes preference pairs from the candidates that the workflow scores, each reported as a step `TTC_END`."""

    ignores_unknown_keys = True

    ttc_step_name: str = "dpo_candidate_move"
    """Name of the steps that report candidates."""
    exhaustive_pairs: bool = True
    """true: all pairs of a turn with different scores; false: only the best candidate with the worst."""
    min_score_diff: float = Field(default=0.0, ge=0)
    """Drop pairs whose scores differ by less. Equal scores never make a pair."""
    max_pairs_per_turn: int | None = Field(default=None, ge=1)
    """Pairs of a turn to keep, those with the largest difference first, and repetitions last; none: all."""
    reward_from_score_diff: bool = True
    """Reward of a pair in tables and plots. true: the difference of its scores; false: the score of the chosen one."""
    require_multiple_candidates: bool = True
    """true: a turn with one candidate is counted as dropped; false: it is expected."""

    @property
    def pair_options(self) -> PairOptions:
        multiple = self.require_multiple_candidates
        return PairOptions(self.exhaustive_pairs, self.min_score_diff, self.max_pairs_per_turn, multiple)


class DPOFromGroupsConfig(CollectingBuilderConfig, name="dpo_from_groups"):
    """Makes preference pairs from whole episodes of a row, by their rewards."""

    num_generations: int = Field(default=8, ge=2)
    """Episodes per row and epoch (the group size)."""
    exhaustive_pairs: bool = False
    """true: all pairs of a row's episodes with different rewards; false: only the best with the worst."""
    min_reward_diff: float = Field(default=0.0, ge=0)
    """Drop pairs whose rewards differ by less. Equal rewards never make a pair."""
    max_pairs_per_row: int | None = Field(default=None, ge=1)
    """Pairs of a row to keep, those with the largest difference first, and repetitions last; none: all."""

    @property
    def pair_options(self) -> PairOptions:
        return PairOptions(self.exhaustive_pairs, self.min_reward_diff, self.max_pairs_per_row)


def candidate_pairs(
    group: GroupRecord, config: DPOTrajectoryBuilderConfig, trained: TrainedCalls, stored: Path | None = None
) -> GroupRecord:
    """The group with a trajectory for each pair of candidates of a turn; `stored` is the run that recorded it.

    Sets the candidates of its episodes, and the reason of those without one.
    """
    pairs: list[Trajectory] = []
    for episode in (episode for episode in group.episodes if episode.outcome is EpisodeStatus.OK):
        targets = Targets(trained.of(episode), trained.functions, text=not trained.llms, only_text=trained.as_text)
        if stored is not None:
            episode.candidates, untargeted = recorded_candidates(episode.candidates, targets)
        else:
            episode.candidates, untargeted = candidates_of(episode.steps, episode.calls, config.ttc_step_name, targets)
        episode.candidates = [replace(c, example_id=episode.key.row_id) for c in episode.candidates]
        if not episode.candidates and not untargeted:
            episode.reason, episode.error = DropReason.NO_CANDIDATES, _no_candidates(episode, config, stored)
            group.dropped[str(DropReason.NO_CANDIDATES)] += 1
        of_episode, dropped = preference_pairs(episode.candidates, config.pair_options)
        group.dropped.update(untargeted + dropped)
        pairs += [_candidate_pair(episode, number, pair, config) for number, pair in enumerate(of_episode)]
    return _with_pairs(group, pairs)


def _with_pairs(group: GroupRecord, pairs: list[Trajectory]) -> GroupRecord:
    """The group with these trajectories; sets the reason of the episodes that are in none."""
    paired = {name for pair in pairs for _, name, _ in sides_of(pair)}
    for episode in group.episodes:
        if episode.reason is None and episode.key.text() not in paired:
            episode.reason = DropReason.NO_PAIR
    return group._replace(trajectories=pairs)


def _no_candidates(episode: Episode, config: DPOTrajectoryBuilderConfig, stored: Path | None) -> str:
    if stored is not None:
        return f"{stored} has recorded no candidates of it; dpo_from_groups pairs whole episodes"
    names = {str(s.name) for s in episode.steps if s.event_type is IntermediateStepType.TTC_END}
    others = f"those of this episode are named {', '.join(sorted(names))}" if names else "this episode has none"
    return f"no step TTC_END is named {config.ttc_step_name!r} (ttc_step_name); {others}"


def _trajectory(pair: PreferencePair, episode: Episode, name: str, **fields: Any) -> Trajectory:
    """A pair as a trajectory; `fields` are its calls and rows, and what differs."""
    metadata = {
        "dpo_type": "preference_pair",
        "example_id": episode.key.row_id,
        "row_id": episode.key.row_id,
        "generation": episode.key.generation,
        "turn_id": pair.turn_id,
        "chosen_index": pair.chosen.candidate_index,
        "rejected_index": pair.rejected.candidate_index,
        "chosen_score": pair.chosen.score,
        "rejected_score": pair.rejected.score,
        "score_diff": pair.score_diff,
        **fields.pop("metadata", {}),
    }
    fields = {"reward": pair.score_diff, "shaped_rewards": None, "metadata": metadata, **fields}
    return Trajectory.model_construct(episode=[documented_pair(pair)], id=name, **fields)


def _candidate_pair(
    episode: Episode, number: int, pair: PreferencePair, config: DPOTrajectoryBuilderConfig
) -> Trajectory:
    name, chosen = f"{episode.key.text()}/pair {number}", pair.chosen
    metadata: dict[str, Any] = {"turn_index": chosen.turn_index}
    calls: list[ModelCall] = []
    for side, candidate in (("chosen", chosen), ("rejected", pair.rejected)):
        own = [episode.calls[candidate.call]] if candidate.call is not None else []
        calls, metadata = calls + own, metadata | side_metadata(side, episode.key.text(), own)
    fields = {"calls": calls, "trained_calls": [*range(len(calls))], "rows": pair_rows(pair, episode.calls, name)}
    reward = pair.score_diff if config.reward_from_score_diff else chosen.score
    return _trajectory(pair, episode, name, reward=reward, metadata=metadata, **fields)


def episode_pairs(group: GroupRecord, config: DPOFromGroupsConfig, *, as_text: bool = False) -> GroupRecord:
    """The group with a trajectory for each pair of its episodes with different rewards; `as_text`: without rows."""
    by_id = {trajectory.id: trajectory for trajectory in group.trajectories}
    played = {e.key.generation: (e, t) for e in group.episodes if (t := by_id.get(e.key.text())) is not None}
    candidates = [episode_candidate(e, t) for e, t in played.values()]
    own = {generation: [] if as_text else episode_rows(t) for generation, (_, t) in played.items()}
    # all that is trained of an episode; its text is that of its first conversation
    said = {generation: [(row.token_ids, row.loss_mask) for row in rows] for generation, rows in own.items()}
    pairs, dropped = preference_pairs(candidates, config.pair_options, lambda c: said[c.candidate_index] or c.response)
    made = []
    for number, pair in enumerate(pairs):
        (episode, best), (_, worst) = (played[side.candidate_index] for side in (pair.chosen, pair.rejected))
        name = f"{best.id}/pair {number}"
        calls = [*best.calls, *worst.calls]
        trained = [*best.trained_calls, *(len(best.calls) + k for k in worst.trained_calls)]
        sides = (("chosen", best), ("rejected", worst))
        marks = ((pair.chosen, {"pair": name, "preferred": True}), (pair.rejected, {"pair": name, "preferred": False}))
        rows = [row.model_copy(update=mark) for side, mark in marks for row in own[side.candidate_index]]
        metadata = [side_metadata(side, str(t.id), [t.calls[k] for k in t.trained_calls]) for side, t in sides]
        fields = {"calls": calls, "trained_calls": trained, "rows": rows, "metadata": metadata[0] | metadata[1]}
        made.append(_trajectory(pair, episode, name, **fields))
    return _with_pairs(group._replace(dropped=group.dropped + dropped), made)


@register_trajectory_builder(config_type=DPOTrajectoryBuilderConfig)
class DPOTrajectoryBuilder(EpisodesBuilder):
    """Collects episodes and pairs the candidates of each of their turns; a trajectory is one pair."""

    needs_reward = False
    makes_pairs = True
    config: DPOTrajectoryBuilderConfig

    def pairs(self, group: GroupRecord) -> GroupRecord:
        folder = self.stored.folder if self.stored is not None else None
        return candidate_pairs(group, self.config, self.trained, folder)


@register_trajectory_builder(config_type=DPOFromGroupsConfig)
class DPOFromGroupsBuilder(EpisodesBuilder):
    """Collects groups of episodes and pairs those of a row by their rewards; a trajectory is one pair."""

    makes_pairs = True
    config: DPOFromGroupsConfig

    def pairs(self, group: GroupRecord) -> GroupRecord:
        return episode_pairs(group, self.config, as_text=self.trained.as_text)


def documented_pair(pair: PreferencePair) -> DPOItem:
    """The texts of a pair."""
    prompt = _documented_prompt(pair.chosen.prompt)
    return DPOItem(prompt=prompt, chosen_response=pair.chosen.response, rejected_response=pair.rejected.response)


def _documented_prompt(prompt: list[dict[str, Any]] | str) -> list[OpenAIMessage] | str:
    if isinstance(prompt, str):
        return prompt
    return [OpenAIMessage(role=str(m.get("role")), content=message_text(m)) for m in prompt]


def episode_candidate(episode: Episode, trajectory: Trajectory) -> CandidateStep:
    """A whole episode as a candidate of its row: the first trained call's prompt, and what follows it."""
    first = episode.calls[trajectory.trained_calls[0]]
    return CandidateStep(
        example_id=episode.key.row_id,
        turn_id=episode.key.row_id,
        candidate_index=episode.key.generation,
        prompt=first.messages,
        response=_text_after(first, episode.calls),
        score=trajectory.reward,
    )


def _text_after(first: ModelCall, calls: list[ModelCall]) -> str:
    """The completion of the first call; in a longer conversation all that follows its prompt, with roles."""
    [turns] = [each for each in conversations(calls) if any(turn.call is first for turn in each)]
    after = turns[len(first.messages) :]
    if len(after) == 1:
        return message_text(after[0].message)
    return "\n\n".join(f"{turn.message.get('role')}: {message_text(turn.message)}" for turn in after)
