"""Loads a YAML file into a Config: overrides, environment variables, and a check of every key."""

import copy
import logging
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insitu import registry as reg
from insitu.advantages.targeting import matching_llms
from insitu.config.code import import_module, load_code
from insitu.config.keys import holds_secret, is_set_by_run, references, secret_values, unknown_keys
from insitu.config.yaml_loader import expand, override, parse_yaml, type_name
from insitu.disk.file_names import file_name_problem
from insitu.errors import ConfigError
from insitu.registry import Kind, not_found, registry
from insitu.schemas.components import WORKFLOW, CodeRef, FunctionBaseConfig, TypedBaseModel
from insitu.schemas.finetuning import FinetuneConfig, TrainerAdapterConfig
from insitu.schemas.parts import key_of
from insitu.wire.redaction import hide_url_secrets, remember_environment, remember_secret, remember_settings

logger = logging.getLogger(__name__)

_STRICT = ConfigDict(extra="ignore", use_attribute_docstrings=True, arbitrary_types_allowed=True)
_COMPONENT_SECTIONS = tuple(kind for kind in reg.KINDS if "." not in kind.section)
SECTIONS = ("general", "workflow", "eval", "finetuning", *(k.section for k in _COMPONENT_SECTIONS))
_SECRET = re.compile(r"secret|passw|credential|authorization|api_?key|(^|[._])(key|token)$", re.IGNORECASE)
_UNRECOGNISED = (
    "{file}: {keys}: a secret that is a number or shorter than 8 characters is hidden only where settings are shown; "
    "it cannot be recognised in logs, files and messages. Use a longer one"
)


class GeneralConfig(BaseModel):
    """The section `general`."""

    model_config = _STRICT

    seed: int = 0
    """Seed for dataset order, sampling, subsampling and, on CPU, training."""
    folder: Path | None = None
    """The folder for relative paths that do not exist in the working directory, and for modules, in place of the YAML
    file's; relative to that."""
    plugins: list[str] = Field(default_factory=list)
    """Modules imported before the file is checked; the file's own folder is importable."""
    executor: Any = None
    """Where episodes run: a block whose `_type` is `local` (in this process, the default) or `ray` (on a cluster)."""


class OutputConfig(BaseModel):
    """The block `eval.general.output`."""

    model_config = _STRICT

    dir: Path = Path(".tmp/insitu/eval")
    """Folder for the files of an evaluation, relative to the working directory."""


class EvalGeneralConfig(BaseModel):
    """The section `eval.general`."""

    model_config = _STRICT

    max_concurrency: int = Field(default=8, ge=1)
    """Maximum number of episodes in flight."""
    output_dir: Path | None = None
    """Folder for the files of an evaluation, relative to the working directory; none: `output.dir`."""
    output: OutputConfig | None = None
    """Alternative to `output_dir`."""
    episode_timeout: float | None = Field(default=None, gt=0)
    """Time limit for one attempt at an episode, in seconds; none: no limit."""
    retries: int = Field(default=0, ge=0)
    """Retries of an episode after a transient error (timeout, backend unavailable)."""
    evaluator_timeout: float | None = Field(default=600.0, gt=0)
    """Time limit for scoring, in seconds per episode. An evaluator that gets many episodes together has that much time
    for each `max_concurrency` of them; none: no limit."""
    stall_warning: float | None = Field(default=300.0, gt=0)
    """Seconds after which a run in which no episode completes, and no training job makes progress, says what it is
    waiting for; it is repeated as often. None: never."""
    stall_timeout: float | None = Field(default=None, gt=0)
    """Seconds after which such a run ends with exit code 1; none: it waits for ever."""
    dataset: Any = None
    """The dataset: a block whose `_type` is the file's format."""

    def scoring_limit(self, episodes: int) -> float | None:
        """Seconds for one call of an evaluator with this many episodes."""
        if self.evaluator_timeout is None:
            return None
        return self.evaluator_timeout * math.ceil(episodes / self.max_concurrency)

    @property
    def folder(self) -> Path:
        return self.output_dir or (self.output or OutputConfig()).dir


@dataclass
class Config:
    """A checked file. `blocks` holds the validated block of every component, by (section, name).

    `data` is what was checked, before its variables were expanded: `check_config` makes the same of it in another
    process with these `variables` of the environment. During a run, `moved` maps the folders that it has moved aside to
    where they are now.
    """

    general: GeneralConfig = field(default_factory=GeneralConfig)
    eval: EvalGeneralConfig = field(default_factory=EvalGeneralConfig)
    finetuning: FinetuneConfig = field(default_factory=FinetuneConfig)
    blocks: dict[tuple[str, str], TypedBaseModel] = field(default_factory=dict)
    folder: Path = field(default_factory=Path.cwd)
    source: str = "configuration"
    moved: dict[Path, Path] = field(default_factory=dict)
    data: dict[str, Any] | None = field(default=None, repr=False)
    variables: frozenset[str] = frozenset()

    @property
    def max_concurrency(self) -> int:
        return self.eval.max_concurrency

    @property
    def workflow(self) -> FunctionBaseConfig:
        return self.block(reg.FUNCTION, WORKFLOW)  # type: ignore[return-value]

    def names(self, kind: Kind) -> list[str]:
        return [name for section, name in self.blocks if section == kind.section]

    def block(self, kind: Kind, name: str) -> TypedBaseModel:
        """The block called `name`; raises ConfigError listing the existing blocks."""
        try:
            return self.blocks[kind.section, name]
        except KeyError:
            if name == WORKFLOW:
                raise ConfigError(f"{self.source} has no section workflow") from None
            raise ConfigError(not_found(f"{kind.section}:", name, self.names(kind))) from None

    def trained_llms(self) -> frozenset[str]:
        """The keys of `llms` whose calls are trained: those of `target_model`, else every policy, else all."""
        models, target = self.model_names(), self.finetuning.target_model
        if target is not None:
            return frozenset(matching_llms(target, models))
        return frozenset(n for n in models if self.block(reg.LLM, n).type == "policy") or frozenset(models)

    def model_names(self) -> dict[str, str | None]:
        """The model name by key of `llms`; None if only the running backend knows it."""
        adapter = self.blocks.get((reg.TRAINER_ADAPTER.section, str(self.finetuning.trainer_adapter)))
        served = adapter.served_name if isinstance(adapter, TrainerAdapterConfig) else None
        blocks = {name: self.block(reg.LLM, name) for name in self.names(reg.LLM)}
        return {n: getattr(b, "model_name", served if b.type == "policy" else None) for n, b in blocks.items()}

    def find_path(self, path: str | Path, key: str) -> Path:
        """An input file or folder, relative to the working directory or else to the file's own folder.

        Logs a warning if both have one.
        """
        path = Path(path).expanduser()
        candidates = [*dict.fromkeys((Path.cwd() / path, self.folder / path))]  # one, if it is absolute
        found = [candidate for candidate in map(self.moved_path, candidates) if candidate.exists()]
        if not found:
            raise ConfigError(f"{key}: {str(path)!r} does not exist; looked for {' and '.join(map(str, candidates))}")
        if len(found) == 2 and not found[0].samefile(found[1]):
            _warn_once(
                f"{key}: {str(path)!r} names two files: {found[0]} is used, {found[1]} beside the YAML file is not"
            )
        return found[0]

    def moved_path(self, path: Path) -> Path:
        """Where a path of the file is now: the file means what was there before the run moved an earlier one aside."""
        resolved = path.resolve() if self.moved else path
        for before, after in self.moved.items():
            if resolved.is_relative_to(before):
                return after / resolved.relative_to(before)
        return path


def _evaluator_name_problem(name: str) -> str | None:
    """Why `<name>_output.json` cannot be the file of an evaluator's scores."""
    return "is the name of another file: workflow_output.json" if name == "workflow" else file_name_problem(name)


@lru_cache
def _warn_once(message: str) -> None:
    """A path is looked up several times in a run."""
    logger.warning("%s", message)


def load_config(source: Any, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Reads, overrides and checks a file; a Config is returned unchanged.

    Raises ConfigError with every problem of the file.
    """
    if isinstance(source, Config):
        if list(overrides):
            raise ConfigError("overrides apply to a file, not to a loaded configuration")
        return source
    path = Path(source)
    data = read_settings(path)
    for key, value in overrides:
        override(data, key, value)
    return check_config(data, path)


def read_settings(path: Path) -> dict[str, Any]:
    """The contents of a file, unchecked. Raises ConfigError if it cannot be read, or is no mapping of sections."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not UTF-8 text: {error.reason}") from error
    try:
        data = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path} is {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of sections ({', '.join(SECTIONS)})")
    return data


def check_config(data: dict[str, Any], path: Path) -> Config:
    """Checks the contents of the file at `path`; raises ConfigError with all their problems."""
    return _Validator(path).run(data)


class _Validator:
    """Checks a parsed file, and raises all its problems together."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.present: set[tuple[str, str]] = set()
        self.from_environment: dict[str, str] = {}

    def run(self, data: dict[str, Any]) -> Config:
        given = copy.deepcopy(data)
        data = expand(data, self.problems, self.from_environment)
        remember_environment({name: os.environ.get(name, "") for name in self.from_environment.values()})
        if unrecognised := remember_settings(data):
            _warn_once(_UNRECOGNISED.format(file=self.path, keys=", ".join(unrecognised)))
        self._fail_if_any()
        config = Config(folder=self.path.resolve().parent, source=str(self.path), data=given)
        config.variables = frozenset(self.from_environment.values())
        for key in data:
            if key not in SECTIONS:
                self.problems.append(not_found("section", str(key), SECTIONS))
        general = self._model(GeneralConfig, data.get("general"), "general")
        if general is None:
            self._fail_if_any()
        config.general = general
        if general.folder is not None:
            config.folder = config.folder / general.folder
            if not config.folder.is_dir():
                self.problems.append(f"general.folder: {config.folder} is not a folder")
        self._import_plugins(config)
        if general.executor is not None:
            general.executor = self._component(reg.EXECUTOR, general.executor, "general.executor")
        for kind in _COMPONENT_SECTIONS:
            for name, block in self._mapping_of(data.get(kind.section), kind.section).items():
                self._store(config, kind, name, block, f"{kind.section}.{name}")
        if data.get("workflow") is not None:
            self._store(config, reg.FUNCTION, WORKFLOW, data["workflow"], "workflow")
        evaluation = self._mapping_of(data.get("eval"), "eval", allowed=("general", "evaluators"))
        config.eval = self._model(EvalGeneralConfig, evaluation.get("general"), "eval.general") or EvalGeneralConfig()
        settings = evaluation.get("general")
        if isinstance(settings, dict) and settings.get("dataset") is not None:
            config.eval.dataset = self._component(reg.DATASET, settings["dataset"], "eval.general.dataset")
        for name, block in self._mapping_of(evaluation.get("evaluators"), "eval.evaluators").items():
            self._store(config, reg.EVALUATOR, name, block, f"eval.evaluators.{name}")
        finetuning = data.get("finetuning")
        if isinstance(finetuning, dict) and finetuning.pop("run_configuration", None) is not None:
            self._unused("finetuning.run_configuration", "the command line")
        config.finetuning = self._model(FinetuneConfig, finetuning, "finetuning") or FinetuneConfig()
        self._references(config)
        self._fail_if_any()
        return config

    def _fail_if_any(self) -> None:
        if self.problems:
            raise ConfigError("\n".join([f"{self.path}:", *(f"  {p}" for p in self.problems)]))

    def _import_plugins(self, config: Config) -> None:
        for module in config.general.plugins:
            try:
                import_module(module, "general.plugins", config.folder)
            except ConfigError as error:
                self.problems.append(str(error))

    def _store(self, config: Config, kind: Kind, name: Any, block: Any, where: str) -> None:
        self.present.add((kind.section, str(name)))
        checked = self._component(kind, block, where)
        if checked is not None:
            config.blocks[kind.section, str(name)] = checked
            for secret in secret_values(checked):
                remember_secret(secret)
        if kind is reg.EVALUATOR and (problem := _evaluator_name_problem(str(name))) is not None:
            self.problems.append(f"eval.evaluators: {str(name)!r:.80} {problem}")

    def _mapping_of(self, node: Any, where: str, allowed: tuple[str, ...] | None = None) -> dict[str, Any]:
        if node is None:
            return {}
        if not isinstance(node, dict):
            self.problems.append(f"{where} must be a mapping, not {type_name(node)}")
            return {}
        for key in node:
            if allowed is not None and key not in allowed:
                self.problems.append(not_found(f"{where}: key", str(key), allowed))
        return node

    def _component(self, kind: Kind, block: Any, where: str) -> TypedBaseModel | None:
        if not isinstance(block, dict) or not isinstance(block.get("_type"), str):
            self.problems.append(f"{where} must be a mapping with the key _type (the name of a registered component)")
            return None
        registration = registry.find(kind, block["_type"])
        if registration is None:
            self.problems.append(registry.unknown(kind, f"{where}: _type", block["_type"]))
            return None
        known = reg.frameworks() if registration.frameworks else ()
        self.problems += [
            not_found(f"{where}: the framework of _type {block['_type']!r},", name, known)
            for name in registration.frameworks
            if name not in known
        ]
        reward = registration.config_type.model_fields.get("reward")
        if "reward" in block and reward is not None and is_set_by_run("reward", reward):
            self._unused(f"{where}.reward", "finetuning.reward_function")
            block = {key: value for key, value in block.items() if key != "reward"}
        return self._model(registration.config_type, block, where)

    def _unused(self, key: str, setter: str) -> None:
        logger.warning("%s: %s is ignored: %s sets it", self.path, key, setter)

    def _model(self, model: type[BaseModel], node: Any, where: str) -> Any:
        node = {} if node is None else node
        if not isinstance(node, dict):
            self.problems.append(f"{where} must be a mapping, not {type_name(node)}")
            return None
        unknown = list(unknown_keys(model, node, where))
        self.problems.extend(unknown)
        try:
            return model.model_validate(node)
        except ValidationError as error:
            self.problems.extend(
                self._sentence(where, e, holds_secret(model, e["loc"]))
                for e in error.errors(include_url=False)
                if e["type"] != "extra_forbidden"
            )
            return None

    def _sentence(self, where: str, error: Any, secret: bool) -> str:
        key = key_of([where, *error["loc"]])
        message = error["msg"].removeprefix("Value error, ")
        if error["type"] == "missing":
            return f"{key} is missing"
        for taken, variable in self.from_environment.items():
            if f"{key}.".startswith(f"{taken}."):  # pydantic appends the member of a union to the key
                return f"{key}: {message} (the value of ${{{variable}}})"
        if secret or _SECRET.search(key) or isinstance(error["input"], dict | list):
            return f"{key}: {message}"
        return f"{key}: {message} (got {hide_url_secrets(repr(error['input'])):.200})"

    def _references(self, config: Config) -> None:
        blocks = {"workflow" if n == WORKFLOW else f"{section}.{n}": b for (section, n), b in config.blocks.items()}
        for where, block in {**blocks, "finetuning": config.finetuning}.items():
            for key, ref in references(block, where):
                if isinstance(ref, CodeRef):
                    self._importable(key, ref, config.folder)
                else:
                    self._exists(key, ref.section, ref)
        finetuning = config.finetuning
        for key in ("trainer", "trajectory_builder", "trainer_adapter"):
            self._exists(f"finetuning.{key}", f"{key}s", getattr(finetuning, key))
        if finetuning.reward_function is not None:
            reward = finetuning.reward_function.name
            self._exists("finetuning.reward_function.name", "eval.evaluators", reward)
        for evaluator in finetuning.training_evaluators or ():
            self._exists("finetuning.training_evaluators", "eval.evaluators", evaluator)
        for function in finetuning.target_functions:
            if function != WORKFLOW:
                self._exists("finetuning.target_functions", "functions", function)
        models, target = config.model_names(), finetuning.target_model
        if target is not None and not matching_llms(target, models):
            known = dict.fromkeys([*models, *(m for m in models.values() if m)])
            self.problems.append(not_found("finetuning.target_model:", target, known))

    def _importable(self, where: str, ref: str, folder: Path) -> None:
        try:
            load_code(ref, where, folder)
        except ConfigError as error:
            self.problems.append(str(error))

    def _exists(self, where: str, section: str, name: str | None) -> None:
        names = sorted(n for s, n in self.present if s == section and n != WORKFLOW)
        if name is not None and name not in names:
            self.problems.append(not_found(f"{where}:", name, names) + f" under {section}")
