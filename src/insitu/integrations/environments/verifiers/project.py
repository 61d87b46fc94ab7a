"""What `insitu init --environment verifiers:ID` writes."""

from insitu.integrations.environments.verifiers.tasksets import taskset_type
from insitu.starter import EnvironmentProject

_TASKS = 64


def project(name: str) -> EnvironmentProject:
    """The blocks of a file for an installed taskset. Raises ConfigError if it is not installed."""
    taskset_type({"id": name}, None)
    return EnvironmentProject(
        workflow={"taskset": {"id": name}, "model": "student"},
        dataset={"limit": _TASKS},
        about=(
            f"The rows are the first {_TASKS} tasks of the taskset `{name}`: raise `limit`, and set the taskset's own "
            "settings beside its `id`. The reward is the sum of its weighted rewards; `part: NAME` reads one of them."
        ),
    )
