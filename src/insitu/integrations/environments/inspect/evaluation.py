"""`insitu eval FILE --task TASK`: the settings that evaluate a model of the file on a task of inspect_ai."""

from typing import Any

from insitu.config import Config
from insitu.integrations.environments.inspect.workflow import InspectConfig, description
from insitu.schemas.components import LLMRef
from insitu.schemas.evaluation import TaskEvaluation

_SHARED = ("roles", "python", "options", "workers")
"""What the task has in common with one that the file trains on."""


def settings(config: Config, task: str, llm: str, arguments: dict[str, Any]) -> TaskEvaluation:
    """Evaluates the llm on all samples, and keeps inspect's log beside the scores."""
    own = next((block for block in config.blocks.values() if isinstance(block, InspectConfig)), None)
    shared = {} if own is None else {key: getattr(own, key) for key in _SHARED if key in own.model_fields_set}
    logs = config.eval.folder / "inspect"
    block = InspectConfig(task=task, args=arguments, model=LLMRef(llm), logs=logs, **shared)
    task_info = description(block, config)
    scores = {name.replace("/", "_"): {"_type": "inspect", "part": name} for name in task_info["scores"]}
    values: dict[str, Any] = {
        "workflow": {"_type": "inspect", **block.model_dump(mode="json", exclude_unset=True, exclude={"type"})},
        "eval.general.dataset": {"_type": "inspect"},
        "eval.evaluators": scores or {"score": {"_type": "inspect"}},
    }
    if config.finetuning.reward_function is not None:
        values["finetuning.reward_function"] = {"name": next(iter(values["eval.evaluators"]))}
    return TaskEvaluation(values, task_info["epochs"] or 1, logs)
