"""Deletes checkpoints: those that a retention policy no longer keeps, and those that a client names."""

import logging
from collections.abc import Awaitable, Callable, Iterable

from insitu.backend.compute import ComputeThread
from insitu.backend.inference.sampler import Sampler, WeightVersion
from insitu.backend.learner.learner import Learner
from insitu.schemas.training_jobs import Retention

logger = logging.getLogger(__name__)

ApplyRetention = Callable[[Learner, Retention], Awaitable[object]]


async def delete_versions(
    sampler: Sampler, compute: ComputeThread, learner: Learner, versions: Iterable[int]
) -> list[int]:
    """Deletes checkpoints except the latest and the loaded model (version 0); returns the deleted versions.

    Raises OSError if one cannot be deleted.
    """
    deleted: list[int] = []

    def delete() -> None:
        for version in sorted(set(versions) & set(learner.versions) - {0, learner.version}):
            learner.delete_checkpoint(version)
            deleted.append(version)

    try:
        await compute.call(delete)  # where no other request deletes meanwhile
    finally:
        for version in deleted:
            await sampler.retire(WeightVersion(version, learner.policy_name))
    return deleted


async def apply_retention(sampler: Sampler, compute: ComputeThread, learner: Learner, keep: Retention) -> list[int]:
    """Deletes what `keep` does not keep, except versions in use; returns the deleted versions.

    A folder that cannot be deleted is reported and tried again after the next job.
    """
    expired = set(learner.expired(keep)) - await sampler.versions_in_use(learner.policy_name)
    try:
        return await delete_versions(sampler, compute, learner, expired)
    except OSError as error:
        logger.warning("an old checkpoint cannot be deleted: %s", error)
        return []
