"""What `insitu init --environment inspect:TASK` writes."""

from pathlib import Path

from insitu.integrations.environments.inspect.pool import describe
from insitu.starter import EnvironmentProject

_SAMPLES = 64


def project(task: str) -> EnvironmentProject:
    """The blocks of a file for a task of a file or an installed package. Raises ConfigError if it cannot be loaded."""
    file, at, name = task.partition("@")
    if Path(file).is_file():  # the project is in another folder
        task = f"{Path(file).resolve()}{at}{name}"
    about = describe(None, {"task": task, "args": {}, "folder": str(Path.cwd()), "seed": 0})
    scores = ", ".join(f"`{score}`" for score in about["scores"])
    return EnvironmentProject(
        workflow={"task": task, "model": "student"},
        dataset={"limit": _SAMPLES} if len(about["rows"]) > _SAMPLES else {},
        about=(
            f"The task has {len(about['rows'])} samples, of which `limit` of the dataset chooses the first, and these "
            f"scores: {scores}. The reward is the first one; `part: NAME` reads another."
        ),
    )
