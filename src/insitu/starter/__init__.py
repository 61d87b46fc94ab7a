"""The project that `insitu init` writes.

In: a folder, and perhaps a framework or a model. Out: an agent with tools, a score, rows, a file, a README and tests,
which train as they are. The files are in `project/` and `agents/`, and `model/` is the model that they start from.
"""

import json
import re
import shutil
from importlib.resources import as_file, files
from pathlib import Path

from insitu.disk.files import new_folder
from insitu.errors import ConfigError, install_command
from insitu.registry import not_found

_HERE = files(__package__)
_SUFFIX = ".py.txt"
_FILLED_IN = ("README.md.txt", "config.yml.txt")
_PLAIN = "plain"
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
    "training": "{learning_rate: 1.0e-5, schedule: linear, lora: {rank: 16, alpha: 32}}",
    "model_row": "",
}


def frameworks() -> list[str]:
    """The agent frameworks that there is a project for."""
    names = (file.name.removesuffix(_SUFFIX) for file in (_HERE / "agents").iterdir() if file.name.endswith(_SUFFIX))
    return sorted({*names, *_ALIASES} - {_PLAIN})


def write_project(folder: Path, framework: str | None = None, model: str | None = None) -> list[str]:
    """Writes the project into a folder that does not exist or is empty; returns the names of its files.

    `model` replaces the small model that comes with it. Raises ConfigError for a folder that has files, and for an
    unknown framework.
    """
    if framework is not None and framework not in frameworks():
        raise ConfigError(not_found("--framework:", framework, frameworks()))
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"NAME: {folder} exists already; nothing is overwritten, give another name")
    if not folder.resolve().parent.is_dir():
        raise ConfigError(f"NAME: {folder.resolve().parent} is not a folder")
    agent = (_HERE / "agents" / f"{_ALIASES.get(framework or '', framework or _PLAIN)}{_SUFFIX}").read_text("utf-8")
    values = {
        **(_OF_STARTER if model is None else {**_OF_OTHERS, "model": json.dumps(model), "about_model": _about(model)}),
        "workflow": _workflow(agent, framework),
        "name": folder.name if re.fullmatch(r"[\w.-]+", folder.name, re.ASCII) else json.dumps(folder.name),
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


def _workflow(agent: str, framework: str | None) -> str:
    function = "build" if "\ndef build(" in agent else "answer"
    used = f", framework: {framework}" if framework else ""
    return f'{{_type: python, function: "agent:{function}", model: student{used}}}'


def _about(model: str) -> str:
    return f"Training starts from `{model}`, with LoRA. A GPU makes that fast; on a CPU, lower `num_generations` first."
