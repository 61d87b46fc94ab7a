"""The project that `insitu init` writes.

In: a folder, and perhaps a framework, an environment or a model. Out: an agent with tools, a score, rows, a file, a
README and tests, which train as they are; of an environment, which has all but the model, only a file and a README.
The files are in `project/`, `agents/` and `environment/`, and `model/` is the model that they start from.
"""

import json
import re
import shutil
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from insitu.disk.files import check_free, new_folder
from insitu.errors import ConfigError, install_command
from insitu.registry import not_found
from insitu.schemas import parts

_HERE = files(__package__)
_SUFFIX = ".py.txt"
_FILLED_IN = ("README.md.txt", "config.yml.txt")
_PLAIN = "plain"
_ENVIRONMENTS = "environments"
"""Entry points `insitu.environments`: functions that make an `EnvironmentProject` of what is after the colon."""
_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""The model for environments, of which the small one knows nothing."""
_ALIASES = {"langchain": "langgraph"}
_OF_STARTER = {
    "model": "model",
    "max_tokens": "24",
    "epochs": "12",
    "training": "{learning_rate: 1.5e-3, schedule: linear, mini_batch_size: 28}",
    "model_row": "| `model/` | the model that training starts from |\n",
    "about_model": (
        "The model in `model/` has 0.2 million parameters and knows the questions of this project only: with it the "
        "whole loop runs in a minute on a laptop. For an agent of your own, set `model` in `config.yml` to a model of "
        "the Hugging Face Hub, such as `Qwen/Qwen2.5-0.5B-Instruct`, and raise `max_tokens`."
    ),
}
_OF_OTHERS = {
    "max_tokens": "256",
    "epochs": "12",
    "training": "{learning_rate: 1.0e-4, schedule: linear, lora: {rank: 16, alpha: 32}}",
    "model_row": "",
}


_OF_DESK = {
    "dataset": "{_type: jsonl, file_path: train.jsonl}",
    "score": "correct",
    "evaluator": '{_type: python, function: "desk:score"}',
    "validation": "  validation: {dataset: held_out.jsonl, interval: 4}\n",
}


class EnvironmentProject(NamedTuple):
    """The blocks of a file that runs an environment. `extra` installs what it needs; `about` explains the blocks."""

    workflow: dict[str, Any]
    dataset: dict[str, Any]
    evaluator: dict[str, Any]
    extra: str
    about: str


def frameworks() -> list[str]:
    """The agent frameworks that there is a project for."""
    names = (file.name.removesuffix(_SUFFIX) for file in (_HERE / "agents").iterdir() if file.name.endswith(_SUFFIX))
    return sorted({*names, *_ALIASES} - {_PLAIN})


def write_project(
    folder: Path, framework: str | None = None, model: str | None = None, environment: str | None = None
) -> list[str]:
    """Writes the project into a folder that does not exist or is empty; returns the names of its files.

    `model` replaces the small model that comes with it. `environment` is KIND:WHAT, in place of a framework. Raises
    ConfigError for a folder that has files, and for an unknown framework or environment.
    """
    if environment is not None and framework is not None:
        raise ConfigError("--environment and --framework exclude each other: an environment has no agent to write")
    if framework is not None and framework not in frameworks():
        raise ConfigError(not_found("--framework:", framework, frameworks()))
    check_free(folder, "NAME")
    if not folder.resolve().parent.is_dir():
        raise ConfigError(f"NAME: {folder.resolve().parent} is not a folder")
    if environment is not None:
        _write_environment(folder, environment, model or _MODEL)
        return sorted(path.name for path in folder.iterdir())
    agent = (_HERE / "agents" / f"{_ALIASES.get(framework or '', framework or _PLAIN)}{_SUFFIX}").read_text("utf-8")
    values = {
        **_OF_DESK,
        **(_OF_STARTER if model is None else _of_model(model)),
        "workflow": _workflow(agent, framework),
        "name": _name(folder),
        "of_framework": f" in {framework}" if framework else "",
        "install": f"{install_command(framework.replace('_', '-'))}   # in the clone of insitu\n" if framework else "",
    }
    with new_folder(folder) as draft:
        (draft / "agent.py").write_text(agent, "utf-8")
        for file in (_HERE / "project").iterdir():
            if file.name.endswith(".txt"):
                text = file.read_text("utf-8")
                text = text.format(**values) if file.name in _FILLED_IN else text
                (draft / file.name.removesuffix(".txt")).write_text(text, "utf-8")
        if model is None:
            with as_file(_HERE / "model") as saved:
                shutil.copytree(saved, draft / "model")
    return sorted(path.name for path in folder.iterdir())


def _write_environment(folder: Path, environment: str, model: str) -> None:
    kind, _, what = environment.partition(":")
    if kind not in parts.names(_ENVIRONMENTS):
        raise ConfigError(not_found("--environment is KIND:WHAT; the kind", kind, parts.names(_ENVIRONMENTS)))
    if not what:
        raise ConfigError(f"--environment is KIND:WHAT; {environment!r} does not say what comes after `{kind}:`")
    project: EnvironmentProject = parts.load_named(_ENVIRONMENTS, kind)(what)
    values = {
        **_of_model(model),
        **{name: _flow(getattr(project, name)) for name in ("workflow", "dataset", "evaluator")},
        "score": "reward",
        "validation": "",
        "name": _name(folder),
        "environment": f"`{environment}`",
        "about_environment": project.about,
        "install": f"{install_command(project.extra)}   # in the clone of insitu\n",
    }
    with new_folder(folder) as draft:
        for file in ("project/config.yml.txt", "environment/README.md.txt"):
            name = file.partition("/")[2].removesuffix(".txt")
            (draft / name).write_text((_HERE / file).read_text("utf-8").format(**values), "utf-8")


def _flow(block: dict[str, Any]) -> str:
    """A block on one line of YAML."""
    return str(yaml.safe_dump(block, default_flow_style=True, sort_keys=False, width=10_000)).strip()


def _name(folder: Path) -> str:
    return folder.name if re.fullmatch(r"[\w.-]+", folder.name, re.ASCII) else json.dumps(folder.name)


def _of_model(model: str) -> dict[str, str]:
    return {**_OF_OTHERS, "model": json.dumps(model), "about_model": _about(model)}


def _workflow(agent: str, framework: str | None) -> str:
    function = "build" if "\ndef build(" in agent else "answer"
    used = f", framework: {framework}" if framework else ""
    return f'{{_type: python, function: "agent:{function}", model: student{used}}}'


def _about(model: str) -> str:
    return f"Training starts from `{model}`, with LoRA. A GPU makes that fast; on a CPU, lower `num_generations` first."
