"""The check of every key of a parsed file, which raises all its problems together."""

import copy
import logging
import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from insitu.config.code import import_module, load_code
from insitu.config.keys import (
    holds_secret,
    key_names,
    key_problems,
    may_be_empty,
    references,
    secret_values,
    takes_reward,
)
from insitu.config.resolved import nested
from insitu.config.short_form import OF_ADAPTER, PARTS, expanded
from insitu.config.yaml_loader import expand, value_type
from insitu.errors import ConfigError, did_you_mean, key_of, not_found
from insitu.registry import frameworks, of_framework, registry
from insitu.schemas.components import WORKFLOW, CodeRef, TypedBaseModel, frozen
from insitu.schemas.config import Config, EvalGeneralConfig, GeneralConfig, file_name_problem, matching_llms, warn_once
from insitu.schemas.evaluation import EvaluatorBaseConfig
from insitu.schemas.finetuning import FinetuneConfig
from insitu.schemas.kinds import DATASET, EVALUATOR, EXECUTOR, FUNCTION, FUNCTION_GROUP, KINDS, Kind
from insitu.wire.redaction import hide_url_secrets, remember_environment, remember_secret, remember_settings

logger = logging.getLogger(__name__)

_COMPONENT_SECTIONS = tuple(kind for kind in KINDS if "." not in kind.section)
SECTIONS = ("general", "workflow", "eval", "finetuning", *(k.section for k in _COMPONENT_SECTIONS))
_CALLABLE = (FUNCTION.section, FUNCTION_GROUP.section)
_WITHOUT_EFFECT = {
    "": ("authentication", "embedders", "memory", "middleware", "object_stores", "optimizer", "retrievers"),
    "general": ("front_end", "telemetry", "use_uvloop"),
    "eval.general": ("profiler", "workflow_alias"),
    "eval.general.output": ("cleanup",),
}
"""Keys of the toolkit's files, by section, that change nothing here. A component that asks the builder for a part of
these sections gets an error."""
_MISSPELT = 0.85
"""Similarity from which on a key that does not exist is taken for a misspelt one."""
_SECRET = re.compile(
    r"secret|passw|credential|authorization|api_?key|(^|[._])(key|token)$|[._](env|env_vars|environment|headers)\.",
    re.IGNORECASE,
)
_STRUCTURES = dict.fromkeys(("model_type", "dict_type", "dataclass_type"), "a mapping") | {"list_type": "a list"}
"""What pydantic's errors of these types ask for."""
_UNRECOGNISED = (
    "{file}: {keys}: a secret that is a number or shorter than 8 characters is hidden only where settings are shown; "
    "it cannot be recognised in logs, files and messages. Use a longer one"
)


def _evaluator_name_problem(name: str) -> str | None:
    """Why `<name>_output.json` cannot be the file of an evaluator's scores."""
    if name.startswith("-"):
        return "begins with -, which says in the name of a reward that less is better"
    return "is the name of another file: workflow_output.json" if name == "workflow" else file_name_problem(name)


class Validator:
    """Checks one file."""

    def __init__(self, path: Path, working_dir: Path) -> None:
        self.path = path
        self.working_dir = working_dir
        self.problems: list[str] = []
        self.present: set[tuple[str, str]] = set()
        self.blocks: dict[tuple[str, str], TypedBaseModel] = {}
        self.from_environment: dict[str, str] = {}
        self.short_keys: dict[str, str] = {}

    def run(self, contents: dict[str, Any]) -> Config:
        contents = self._expanded(contents)
        data = expand(contents, self.problems, self.from_environment)
        remember_environment({name: os.environ.get(name, "") for name in self.from_environment.values()})
        if unrecognised := remember_settings(data):
            warn_once(_UNRECOGNISED.format(file=self.path, keys=", ".join(unrecognised)))
        self._fail_if_any()
        data = self._with_effect(data)
        for key in data:
            if key not in SECTIONS:
                self.problems.append(not_found("section", str(key), SECTIONS))
        general = self._model(GeneralConfig, data.get("general"), "general")
        if general is None:
            self._fail_if_any()
        folder = ((self.working_dir / self.path).resolve().parent / (general.folder or "")).resolve()
        if not folder.is_dir():
            self.problems.append(f"general.folder: {folder} is not a folder")
        for module in general.plugins:
            self._import(partial(import_module, module, "general.plugins", folder))
        general = frozen(self._with_component(general, data.get("general"), "executor", EXECUTOR))
        for kind in _COMPONENT_SECTIONS:
            for name, block in self._mapping_of(data.get(kind.section), kind.section).items():
                self._store(kind, name, block, f"{kind.section}.{name}")
        if data.get("workflow") is not None:
            self._store(FUNCTION, WORKFLOW, data["workflow"], "workflow")
        evaluation = self._mapping_of(data.get("eval"), "eval", allowed=("general", "evaluators"))
        settings = self._model(EvalGeneralConfig, evaluation.get("general"), "eval.general") or EvalGeneralConfig()
        settings = frozen(self._with_component(settings, evaluation.get("general"), "dataset", DATASET))
        for name, block in self._mapping_of(evaluation.get("evaluators"), "eval.evaluators").items():
            self._store(EVALUATOR, name, block, f"eval.evaluators.{name}")
        section = data.get("finetuning")
        if isinstance(section, dict) and section.pop("run_configuration", None) is not None:
            self._unused("finetuning.run_configuration", "the command line")
        finetuning = frozen(self._model(FinetuneConfig, section, "finetuning") or FinetuneConfig())
        reward = {"reward": finetuning.reward_function}
        blocks = {
            key: frozen(block.model_copy(update=reward) if takes_reward(type(block)) else block)
            for key, block in self.blocks.items()
        }
        variables = frozenset(self.from_environment.values())
        sections = general, settings, finetuning, MappingProxyType(blocks)
        config = Config(*sections, folder, str(self.path), contents, variables, self.working_dir)
        self._references(config)
        self._evaluators(config)
        self._fail_if_any()
        return config

    def _expanded(self, contents: dict[str, Any]) -> dict[str, Any]:
        """The documented form. Problems of a file in the short form name the keys that it has."""
        try:
            documented = expanded(contents)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None
        if documented is not contents and not contents.get("trainer_adapters"):
            block = f"trainer_adapters.{PARTS['trainer_adapter'][0]}"
            self.short_keys = {f"{block}.{key}": f"finetuning.{key}" for key in OF_ADAPTER}
        return documented

    def _with_effect(self, data: dict[str, Any]) -> dict[str, Any]:
        """The contents without the keys that have no effect here, which a warning lists."""
        data, found = copy.deepcopy(data), []
        for where, keys in _WITHOUT_EFFECT.items():
            node = nested(data, where) if where else data
            for key in keys if isinstance(node, dict) else ():
                if key in node:
                    del node[key]
                    found.append(f"{where}.{key}".lstrip("."))
        if found:
            warn_once(f"{self.path}: {', '.join(found)}: without effect in insitu")
        return data

    def _with_component(self, section: Any, node: Any, key: str, kind: Kind) -> Any:
        """A section whose key in the file, `node`, holds a component without a name, with that checked."""
        block = node.get(key) if isinstance(node, dict) else None
        return section.model_copy(update={key: None if block is None else self._component(kind, block, kind.section)})

    def _fail_if_any(self) -> None:
        if self.problems:
            text = "\n".join([f"{self.path}:", *(f"  {p}" for p in self.problems)])
            for key, short in self.short_keys.items():
                text = text.replace(key, short)
            raise ConfigError(text)

    def _import(self, load: Callable[[], Any]) -> None:
        try:
            load()
        except ConfigError as error:
            self.problems.append(str(error))

    def _store(self, kind: Kind, name: Any, block: Any, where: str) -> None:
        self.present.add((kind.section, str(name)))
        checked = self._component(kind, block, where)
        if checked is not None:
            self.blocks[kind.section, str(name)] = checked
            for secret in secret_values(checked):
                remember_secret(secret)
        if kind is EVALUATOR and (problem := _evaluator_name_problem(str(name))) is not None:
            self.problems.append(f"eval.evaluators: {str(name)!r:.80} {problem}")

    def _mapping_of(self, node: Any, where: str, allowed: tuple[str, ...] | None = None) -> dict[str, Any]:
        if node is None:
            return {}
        if not isinstance(node, dict):
            self.problems.append(f"{where} must be a mapping, not {value_type(node)}")
            return {}
        for key in node:
            if allowed is not None and key not in allowed:
                self.problems.append(not_found(f"{where}: key", str(key), allowed))
        return node

    def _component(self, kind: Kind, block: Any, where: str) -> TypedBaseModel | None:
        if not isinstance(block, dict) or not isinstance(block.get("_type"), str):
            section, _, name = where.rpartition(".")
            if name == "_type":
                self.problems.append(f"{section} has a block for each name: {{NAME: {{_type: {block}}}}}")
                return None
            near = did_you_mean(name, [each for at, each in self.blocks if at == kind.section])
            problem = f"{where} must be a mapping with the key _type (the name of a registered component)"
            self.problems.append(problem + near)
            return None
        registration = registry.find(kind, block["_type"])
        if registration is None:
            self.problems.append(registry.unknown(kind, f"{where}: _type", block["_type"]))
            return None
        existing = frameworks() if registration.frameworks else ()
        for name in registration.frameworks:
            if name not in existing:
                self.problems.append(not_found(f"{where}: the framework of _type {block['_type']!r},", name, existing))
            else:
                how = f"whose _type {block['_type']!r} is registered with the framework"
                self._import(partial(of_framework, name, where, how))
        if "reward" in block and takes_reward(registration.config_type):
            self._unused(f"{where}.reward", "finetuning.reward_function")
            block = {key: value for key, value in block.items() if key != "reward"}
        return self._model(registration.config_type, block, where)

    def _unused(self, key: str, setter: str) -> None:
        logger.warning("%s: %s is ignored: %s sets it", self.path, key, setter)

    def _model(self, model: type[BaseModel], node: Any, where: str) -> Any:
        node = {} if node is None else node
        if not isinstance(node, dict):
            self.problems.append(f"{where} must be a mapping, not {value_type(node)}")
            return None
        self.problems.extend(key_problems(model, self._known(model, node, where), where))
        try:
            return model.model_validate(node)
        except ValidationError as error:
            known = [each for each in error.errors(include_url=False) if each["type"] != "extra_forbidden"]
            self.problems.extend(self._sentence(where, each, model) for each in known)
            return None

    def _known(self, model: type[BaseModel], node: dict[str, Any], where: str) -> dict[str, Any]:
        """The keys of a block that are checked: all, or those that exist and misspelt ones."""
        if not (issubclass(model, TypedBaseModel) and model.ignores_unknown_keys):
            return node
        ignored = {}
        for key in node:
            problem = next(key_problems(model, {key: None}, where), None)
            if problem is not None and not get_close_matches(str(key), key_names(model), n=1, cutoff=_MISSPELT):
                logger.warning("%s: %s; it is ignored", self.path, problem)
                ignored[key] = problem
        return {key: value for key, value in node.items() if key not in ignored}

    def _sentence(self, where: str, error: Any, model: type[BaseModel]) -> str:
        key = key_of([where, *error["loc"]])
        message = error["msg"].removeprefix("Value error, ")
        if error["type"] == "missing":
            return f"{key} is missing"
        for taken, variable in self.from_environment.items():
            if f"{key}.".startswith(f"{taken}."):  # pydantic appends the member of a union to the key
                return f"{key}: {message} (the value of ${{{variable}}})"
        if error["type"] in _STRUCTURES:
            hint = " ({} takes its defaults)" if may_be_empty(model, error["loc"]) else ""
            return f"{key} must be {_STRUCTURES[error['type']]}{hint}, not {value_type(error['input'])}"
        if holds_secret(model, error["loc"]) or _SECRET.search(key) or isinstance(error["input"], dict | list):
            return f"{key}: {message}"
        return f"{key}: {message} (got {hide_url_secrets(repr(error['input'])):.200})"

    def _references(self, config: Config) -> None:
        for name in {*config.names(FUNCTION)} & {*config.names(FUNCTION_GROUP)}:
            self.problems.append(f"function_groups: {name!r} is a key of functions, too: a tool would be either")
        blocks = {"workflow" if n == WORKFLOW else f"{section}.{n}": b for (section, n), b in config.blocks.items()}
        for where, block in {**blocks, "finetuning": config.finetuning}.items():
            for key, ref in references(block, where):
                if isinstance(ref, CodeRef):
                    self._import(partial(load_code, ref, key, config.folder))
                else:
                    self._exists(key, ref.section, ref)
        finetuning = config.finetuning
        for key in ("trainer", "trajectory_builder", "trainer_adapter"):
            self._exists(f"finetuning.{key}", f"{key}s", getattr(finetuning, key))
        if finetuning.reward_function is not None:
            self._exists("finetuning.reward_function.name", "eval.evaluators", finetuning.reward_function.name)
        for evaluator in finetuning.training_evaluators or ():
            self._exists("finetuning.training_evaluators", "eval.evaluators", evaluator)
        for function in finetuning.target_functions:
            if function != WORKFLOW:
                self._exists("finetuning.target_functions", "functions", function)
        models, target = config.model_names(), finetuning.target_model
        if target is not None and not matching_llms(target, models):
            names = dict.fromkeys([*models, *(m for m in models.values() if m)])
            self.problems.append(not_found("finetuning.target_model:", target, names))

    def _evaluators(self, config: Config) -> None:
        """Checks that the model under training does not grade itself, and that no score depends on itself."""
        trained = config.trained_llms() if config.finetuning.enabled else ()
        needed: dict[str, set[str]] = {}
        for name in config.names(EVALUATOR):
            block, where = config.block(EVALUATOR, name), f"eval.evaluators.{name}"
            needed[where] = {f"{ref.section}.{ref}" for _, ref in references(block, "")}
            if isinstance(block, EvaluatorBaseConfig):
                self._import(partial(block.check_trained, where, trained))
        try:
            TopologicalSorter(needed).prepare()
        except CycleError as error:
            self.problems.append(f"{' -> '.join(reversed(error.args[1]))}: each needs the next")

    def _exists(self, where: str, section: str, name: str | None) -> None:
        minus = "-" * (section == "eval.evaluators" and str(name).startswith("-"))
        names = sorted(minus + n for s, n in self.present if s == section and n != WORKFLOW)
        if section in _CALLABLE:  # a plugin's reference to one of them may be to any
            groups = sorted(n for s, n in self.present if s == FUNCTION_GROUP.section)
            names = [*dict.fromkeys([*names, *groups])]
            if name is not None and any(name.startswith(f"{group}{mark}") for group in groups for mark in (".", "__")):
                return  # what a group has is known once it is built
        if name is not None and name not in names:
            self.problems.append(not_found(f"{where}:", name, names) + f" under {section}")
