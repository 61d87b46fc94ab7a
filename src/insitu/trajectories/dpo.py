"""Configuration of the builder that turns scored candidates into preference pairs."""

from pydantic import Field

from insitu.schemas.finetuning import TrajectoryBuilderConfig


class DPOTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="dpo_traj_builder"):
    """Turns the scored candidates that a workflow emits into preference pairs."""

    ttc_step_name: str = "dpo_candidate_move"
    """Name of the TTC_END steps that hold the candidates."""
    exhaustive_pairs: bool = True
    """true: every pair of candidates of a turn with different scores. false: the best against the worst."""
    min_score_diff: float = Field(default=0.0, ge=0)
    """Smallest difference between the scores of a pair. Equal scores never make a pair."""
    max_pairs_per_turn: int | None = Field(default=None, ge=1)
    """Maximum number of pairs per turn, those with the largest difference first; none: no limit."""
    reward_from_score_diff: bool = True
    """true: the reward of a pair is the difference of its scores. false: the score of the chosen response."""
    require_multiple_candidates: bool = True
    """Leave out turns with a single candidate."""
