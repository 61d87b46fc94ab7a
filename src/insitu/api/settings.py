"""Keywords, functions and rows as the settings that a YAML file would hold."""

import copy
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson

from insitu.collect.datasets import file_format
from insitu.config import moved_path, read_settings
from insitu.config.code import place_of
from insitu.config.resolved import nested, without_secrets
from insitu.config.short_form import OF_ADAPTER, PARTS, expanded, merged
from insitu.config.yaml_loader import dump_yaml, override
from insitu.disk.files import write_file
from insitu.errors import ConfigError, a_type
from insitu.runs.checkpoints import NAMES
from insitu.schemas.components import CodeRef

Settings = dict[str, Any]

STUDENT = "student"
KEYS = {
    "seed": "general.seed",
    "model": "{trainer_adapter}.model",
    "temperature": "{student}.temperature",
    "max_tokens": "{student}.max_tokens",
    "max_concurrency": "eval.general.max_concurrency",
    "epochs": "finetuning.num_epochs",
    "generations": "{trajectory_builder}.num_generations",
    "rows_per_epoch": "{trajectory_builder}.rows_per_epoch",
    "method": "{trainer_adapter}.training.method",
    "learning_rate": "{trainer_adapter}.training.learning_rate",
    "validation_interval": "finetuning.validation.interval",
}
"""Keywords and the keys of a file that they stand for."""
_VALIDATED = ("finetuning.validation.dataset", "finetuning.validation.config_file")
_OPTIONS = {"--resume": "resume=True", "--force": "--force of the command line", "--checkpoint": "checkpoint"}
WRITTEN = "# Written by insitu: these settings as a file.\n"
_ROWS = ("rows.jsonl", "held_out.jsonl")
"""The files of rows that are written."""
_NOT_WRITTEN = "# Its rows are not in "
_SESSION = "session"
"""The module that a file names for code that was typed into an interactive session or a notebook."""


def short_settings(model: str | None) -> Settings:
    """The settings that a call begins with, in the short form."""
    evaluation: Settings = {"general": {}, "evaluators": {}}
    return {"general": {}, "llms": {STUDENT: {"_type": "policy"}}, "eval": evaluation, "finetuning": {"model": model}}


@dataclass
class Project:
    """The settings of a call; `files` are rows that are written into its output folder, by name.

    `not_importable` are functions that no file can name, with the names that they have in it.
    """

    folder: Path
    """Relative paths, and modules, are relative to the working directory or else to this folder."""
    output: Path
    settings: Settings = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    not_importable: list[str] = field(default_factory=list)
    rows_files: list[Path] = field(default_factory=list)
    """The files of rows that are given as paths."""

    @classmethod
    def of(cls, config: str | Path | Mapping[str, Any] | None, caller: Mapping[str, Any]) -> "Project":
        """A project with the settings of `config`, in the folder of its file, or else in that of the calling script."""
        script = _file_of(sys.modules.get(str(caller.get("__name__"))))
        folder = place_of(script)[0] if script is not None else Path.cwd()
        if config is None:
            return cls(folder, Path(), expanded(short_settings(None)))
        if isinstance(config, Mapping):
            return cls(folder, Path(), expanded(copy.deepcopy(dict(config))))
        return cls(Path(config).resolve().parent, Path(), expanded(read_settings(Path(config))))

    def get(self, key: str) -> Any:
        """The value of a dotted key, None if it is not set."""
        return nested(self.settings, key)

    def set(self, key: str, value: Any) -> None:
        """Sets a dotted key, unless the value is None."""
        if value is not None:
            override(self.settings, key, value)

    def set_keywords(self, values: Mapping[str, Any]) -> None:
        """Sets the keys that the keywords of a call stand for, unless they are None."""
        for key, name in self.keywords().items():
            if name in KEYS and name in values:
                self.set(key, values[name])

    def keywords(self) -> dict[str, str]:
        """By what a file or the command line calls them: what the keywords of a call are called."""
        names = {kind: self.block(kind) for kind in PARTS} | {"student": f"llms.{self.student}"}
        keys = {key.format(**names): name for name, key in KEYS.items()}
        return keys | {"finetuning.output_dir": "output_dir", "eval.general.output_dir": "output_dir"} | _OPTIONS

    def block(self, kind: str) -> str:
        """The dotted key of the block that the section `finetuning` names as its `kind` of component."""
        return f"{kind}s.{self.get(f'finetuning.{kind}') or PARTS[kind][0]}"

    @property
    def student(self) -> str:
        """The key of the model under training."""
        llms = self.get("llms") or {}
        policies = [name for name, block in llms.items() if isinstance(block, dict) and block.get("_type") == "policy"]
        return policies[0] if policies else STUDENT

    def merge(self, sections: Mapping[str, Any]) -> None:
        """Adds sections of a file; their keys take precedence."""
        for name, values in self.long_form(sections).items():
            self.settings[name] = merged(self.settings.get(name), values)

    def long_form(self, sections: Mapping[str, Any]) -> Mapping[str, Any]:
        """The sections, with the adapter's keys that the short form has in `finetuning` in the adapter's block."""
        finetuning = sections.get("finetuning")
        if not isinstance(finetuning, Mapping) or finetuning.keys().isdisjoint(OF_ADAPTER):
            return sections
        kind, name = self.block("trainer_adapter").split(".", 1)
        given = {key: finetuning[key] for key in OF_ADAPTER if key in finetuning}
        others = {key: value for key, value in finetuning.items() if key not in given}
        return {**sections, "finetuning": others, kind: merged({name: given}, sections.get(kind) or {})}

    def code(self, code: Any, caller: Mapping[str, Any]) -> CodeRef:
        """A function or object, with the name by which a file can import it."""
        module = _module_of(code, caller)
        name = _name_in(module, code)
        file = _file_of(module)
        if file is None or name is None:
            name = name or getattr(code, "__name__", type(code).__name__).strip("<>")
            self.not_importable.append(f"{_SESSION}:{name}")
            return CodeRef.of(code, self.not_importable[-1])
        root, dotted = place_of(file)
        is_near = root == self.folder or any(part in root.parts for part in ("site-packages", "dist-packages"))
        return CodeRef.of(code, f"{dotted if is_near else os.path.relpath(file.resolve(), self.folder)}:{name}")

    def rows(self, rows: Any, name: str, keyword: str) -> Path | None:
        """The file of rows that are given as a path, mappings, or a table of pandas, polars or datasets.

        Raises ConfigError, naming the keyword and the row, for what no file can hold.
        """
        if rows is None:
            return None
        if isinstance(rows, str | os.PathLike):
            self.rows_files.append(Path(rows))
            return Path(rows)
        for method, arguments in (("to_dicts", ()), ("to_list", ()), ("to_dict", ("records",))):
            if not isinstance(rows, Mapping | list) and hasattr(rows, method):  # of polars, datasets, pandas
                rows = getattr(rows, method)(*arguments)
        if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
            single = "; of a single row: [row]" if isinstance(rows, Mapping) else ""
            raise ConfigError(f"{keyword} is {a_type(rows)}; it must be a path, a list of rows, or a table{single}")
        lines = []
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{keyword}, row {number} must be a mapping of columns, not {row!r:.80}")
            try:
                lines.append(orjson.dumps(dict(row), option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))
            except TypeError as error:
                raise ConfigError(f"{keyword}, row {number} cannot be written as JSON: {error}") from error
        self.files[f"{name}.jsonl"] = b"".join(lines)
        return self.output / f"{name}.jsonl"

    def dataset(self, keyword: str, rows: Any) -> None:
        """The rows that the workflow runs on."""
        if (file := self.rows(rows, "rows", keyword)) is not None:
            changed = {"_type": file_format(file), "file_path": str(file)}
            self.set("eval.general.dataset", {**(self.get("eval.general.dataset") or {}), **changed})

    def follow(self, earlier: Path) -> None:
        """Has the inputs that were in the output folder named where they are now: in that of an `earlier` run."""
        model, stored = f"{self.block('trainer_adapter')}.model", f"{self.block('trajectory_builder')}.episodes_from"
        output, new = earlier.with_suffix(""), [str(self.output / name) for name in self.files]
        rows = ("eval.general.dataset.file_path", *_VALIDATED)
        for key in (*rows, model, stored, f"{stored}.run"):
            value = self.get(key)
            if isinstance(value, str | os.PathLike) and str(value) not in new:
                path = (output if value in NAMES else Path.cwd()) / Path(value).expanduser()
                place = moved_path(path, {output: earlier})
                is_there = place.exists() and not (key in rows and path.exists())  # those of a run that continues
                if place != path and (key == model or is_there):  # `latest` is no file
                    self.set(key, str(place))

    def check_replaced(self, config: str) -> None:
        """Raises ConfigError if the settings, as the file `config`, or rows would replace what a user has written."""
        own = is_written(file := self.output / config)
        lines = file.read_text(encoding="utf-8").splitlines() if own else []
        others = next((line for line in lines if line.startswith(_NOT_WRITTEN)), "")
        inputs = [place for file in self.rows_files for place in (file, self.folder / file) if place.exists()]
        for path in (self.output / name for name in (config, *self.files)):
            if os.path.lexists(path) and (
                not own or path.name in others or any(path.exists() and path.samefile(each) for each in inputs)
            ):
                raise ConfigError(f"output_dir: {path} exists already and is not replaced; give another folder")

    def write_rows(self) -> None:
        """Writes the rows that were not given as files into the output folder."""
        for name, content in self.files.items():
            write_file(self.output / name, content)

    def write_settings(self, path: Path) -> None:
        """Writes the settings without their secrets."""
        head = WRITTEN
        others = [name for name in _ROWS if name not in self.files]
        if others and path.parent == self.output:
            head += f"{_NOT_WRITTEN}{' or '.join(others)}.\n"
        if self.not_importable:
            names = ", ".join(self.not_importable)
            head += f"# {names}: defined where no file can import it; put it into {_SESSION}.py in general.folder.\n"
        shown = without_secrets(self.settings)
        if shown != self.settings:
            head += "# Secrets are hidden: name environment variables in their place, as ${NAME}.\n"
        write_file(path, (head + dump_yaml(shown)).encode())

    def save(self, file: Path) -> None:
        """Writes the settings to `file`, and beside it the rows that were not given as files."""
        settings = copy.deepcopy(self.settings)
        for key in ("eval.general.dataset.file_path", "finetuning.validation.dataset"):
            name = Path(str(nested(settings, key))).name
            if name in self.files:
                rows = saved_rows(file, name)
                write_file(rows, self.files[name])
                override(settings, key, os.path.relpath(rows, self.folder))
        override(settings, "general.folder", os.path.relpath(self.folder, file.resolve().parent))
        replace(self, settings=settings).write_settings(file)


def is_written(file: Path) -> bool:
    """Whether a file of settings was written by insitu."""
    return file.is_file() and file.read_bytes().startswith(WRITTEN.encode())


def saved_rows(file: Path, name: str) -> Path:
    """The rows beside a saved file, such as desk.rows.jsonl of desk.yml."""
    return file.with_name(f"{file.stem}.{name}")


def _module_of(code: Any, caller: Mapping[str, Any]) -> ModuleType | None:
    """The module in which a function was defined, or an object created: as far as can be seen the caller's."""
    own = inspect.isroutine(code) or inspect.isclass(code)
    return sys.modules.get(str(getattr(code, "__module__", "") if own else caller.get("__name__")))


def _file_of(module: ModuleType | None) -> Path | None:
    """The source of a module; none of an interactive session or a notebook."""
    file = getattr(module, "__file__", None)
    return Path(file) if file is not None and file.endswith(".py") and Path(file).is_file() else None


def _name_in(module: ModuleType | None, code: Any) -> str | None:
    """The name of an object in a module, if it has one."""
    qualified = getattr(code, "__qualname__", None)
    if module is None:
        return None
    if isinstance(qualified, str) and "<" not in qualified:
        try:
            return qualified if attrgetter(qualified)(module) is code else None
        except AttributeError:
            return None
    return next((name for name, value in vars(module).items() if value is code and not name.startswith("_")), None)
