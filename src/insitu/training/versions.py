"""Checks that the weights that are sampled are those that are trained, and that training moves them."""

from insitu.errors import BackendError
from insitu.schemas.finetuning import PolicyEndpoint, TrajectoryCollection


def check_sampled(collection: TrajectoryCollection, served: PolicyEndpoint | None) -> None:
    """Raises BackendError if a call to train on was not sampled from the served policy version.

    If a call reports no version, its requested model name must match.
    """
    if served is None or served.version is None:
        return
    name = served.model.removesuffix(f"@{served.version}")
    for trajectory in (t for group in collection.trajectories for t in group):
        for call in (trajectory.calls[index] for index in trajectory.trained_calls):
            version = call.policy_version
            unreported = version is None and call.model in (name, f"{name}@{served.version}")
            if version != served.version and not unreported:
                raise BackendError(
                    f"episode {trajectory.id}: a call to train on requested model {call.model!r} and was sampled at "
                    f"policy version {version}, but the adapter trains {name!r}, which is at version "
                    f"{served.version}; use an llm of _type: policy"
                )


def new_version(epoch: int, before: int | None, served: PolicyEndpoint | None) -> int | None:
    """The version served after a job, None if unknown. Raises BackendError if it is still the one `before` it."""
    version = served.version if served is not None else None
    if before is not None and version == before:
        raise BackendError(
            f"epoch {epoch}: the job completed, but the backend still serves policy version {version}, so the next "
            "epoch would sample from the old weights"
        )
    return version
