"""Deletes checkpoints: those that a retention policy no longer keeps, and those that a client names."""

import logging
from collections.abc import Callable, Iterable

from insitu.backend.inference.engine import Engine, WeightVersion
from insitu.backend.training.learner import Learner
from insitu.schemas.training_jobs import Retention

logger = logging.getLogger(__name__)

ApplyRetention = Callable[[Learner, Retention], object]


def delete_versions(engine: Engine, learner: Learner, versions: Iterable[int]) -> list[int]:
    """Deletes checkpoints except the latest and the loaded model (version 0); returns the deleted versions.

    Runs in the compute thread, where no other request deletes meanwhile.
    """
    deleted = sorted(set(versions) & set(learner.versions) - {0, learner.version})
    for version in deleted:
        learner.delete_checkpoint(version)
        engine.retire(WeightVersion(version, learner.policy_name))
    return deleted


def apply_retention(engine: Engine, learner: Learner, keep: Retention) -> list[int]:
    """Deletes what `keep` does not keep, except versions in use; returns the deleted versions.

    A folder that cannot be deleted is reported and tried again after the next job. Runs in the compute thread.
    """
    expired = set(learner.expired(keep)) - engine.versions_in_use(learner.policy_name)
    try:
        return delete_versions(engine, learner, expired)
    except OSError as error:
        logger.warning("an old checkpoint cannot be deleted: %s", error)
        return []
