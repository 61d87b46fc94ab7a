"""What is trained of an epoch: what the curriculum, the selections and the estimator of a trainer leave of it."""

from functools import cached_property, partial
from typing import Any

from insitu.advantages.estimator import AdvantageEstimator, EstimatedEpoch, estimate_epoch
from insitu.algorithms.selection import CurriculumState, apply_curriculum, apply_selection
from insitu.collect.shared_run import UsesBuilder
from insitu.config.code import LoadedPart, call_with
from insitu.schemas.finetuning import TrainerConfig, TrajectoryCollection
from insitu.training.interfaces import ResumableTrainer


class EstimatingTrainer(UsesBuilder, ResumableTrainer):
    """Trainer that selects episodes; a subclass defines `select`, or the estimator that `select` uses."""

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self._selections: dict[str, LoadedPart] = {}  # by their keys in the file

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        if not self.curriculum_config.enabled:
            return trajectory_collection
        config, state, seed = self.curriculum_config, self._curriculum_state, self._full_config.general.seed
        return apply_curriculum(trajectory_collection, config, state, epoch, seed)

    def select(self, collection: TrajectoryCollection) -> EstimatedEpoch:
        """What the epoch trains on, with its rows."""
        metrics: dict[str, Any] = {}
        offered = {"epoch": collection.epoch or 1, "seed": self._full_config.general.seed}
        for key, (function, _) in self._selections.items():
            collection, own = apply_selection(collection, partial(call_with, function, **offered), key)
            metrics |= own
        estimated = estimate_epoch(collection, self._estimator)
        return estimated._replace(metrics={**metrics, **estimated.metrics})

    @cached_property
    def _estimator(self) -> AdvantageEstimator:
        raise NotImplementedError

    def _selection_settings(self) -> dict[str, Any]:
        """The settings that `select` depends on, for the header of the run."""
        selections = [settings for _, settings in self._selections.values()]
        return self._estimator.settings() | ({"selection": selections} if selections else {})

    def get_curriculum_state(self) -> dict[str, Any]:
        return CurriculumState(**self._curriculum_state).model_dump(mode="json")
