"""The toolkit's documented import paths, as aliases of insitu's modules.

A path and its target are the same module object, imported on first use. If the original toolkit is installed, there
are no aliases, because its classes and ours are not interchangeable.
"""

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pkgutil import extend_path
from types import ModuleType
from typing import Any

__path__ = extend_path(__path__, __name__)  # the original is a namespace package: its folders may be elsewhere

PATHS = {
    "nat.plugin_api": "insitu.integrations.nat.plugin_api",
    "nat.builder.builder": "insitu.builder",
    "nat.builder.context": "insitu.workflow.context",
    "nat.builder.evaluator": "insitu.schemas.evaluation",
    "nat.builder.framework_enum": "insitu.schemas.components",
    "nat.builder.function": "insitu.workflow.function_groups",
    "nat.builder.function_info": "insitu.workflow.functions",
    "nat.builder.intermediate_step_manager": "insitu.workflow.context",
    "nat.builder.workflow_builder": "insitu.builder",
    "nat.cli.commands.finetune": "insitu.cli.finetune",
    "nat.cli.register_workflow": "insitu.integrations.nat.plugin_api",
    "nat.data_models.common": "insitu.schemas.components",
    "nat.data_models.component": "insitu.schemas.components",
    "nat.data_models.component_ref": "insitu.schemas.components",
    "nat.data_models.config": "insitu.config",
    "nat.data_models.evaluate_runtime": "insitu.schemas.evaluation",
    "nat.data_models.evaluator": "insitu.schemas.evaluation",
    "nat.data_models.finetuning": "insitu.schemas.finetuning",
    "nat.data_models.function": "insitu.schemas.components",
    "nat.data_models.intermediate_step": "insitu.schemas.steps",
    "nat.data_models.invocation_node": "insitu.schemas.steps",
    "nat.data_models.ttc_strategy": "insitu.schemas.components",
    "nat.eval.config": "insitu.schemas.evaluation",
    "nat.eval.evaluate": "insitu.collect.evaluation",
    "nat.eval.evaluator.base_evaluator": "insitu.collect.evaluators",
    "nat.eval.evaluator.evaluator_model": "insitu.schemas.evaluation",
    "nat.experimental.test_time_compute.models.stage_enums": "insitu.integrations.nat.ttc",
    "nat.experimental.test_time_compute.models.strategy_base": "insitu.integrations.nat.ttc",
    "nat.experimental.test_time_compute.models.ttc_item": "insitu.integrations.nat.ttc",
    "nat.finetuning": "insitu.training.interfaces",
    "nat.finetuning.finetuning_runtime": "insitu.training.runtime",
    "nat.finetuning.interfaces": "insitu.training.interfaces",
    "nat.finetuning.interfaces.finetuning_runner": "insitu.training.interfaces",
    "nat.finetuning.interfaces.trainer_adapter": "insitu.training.interfaces",
    "nat.finetuning.interfaces.trajectory_builder": "insitu.training.interfaces",
    "nat.finetuning.utils.parsers.adk_parser": "insitu.integrations.nat.adk_parser",
    "nat.finetuning.utils.parsers.common": "insitu.integrations.nat.parser_common",
    "nat.finetuning.utils.parsers.base_parser": "insitu.integrations.nat.base_parser",
    "nat.finetuning.utils.parsers.langchain_parser": "insitu.integrations.nat.langchain_parser",
    "nat.finetuning.utils.parsers.llama_index_parser": "insitu.integrations.nat.llama_index_parser",
    "nat.plugins.adk.adk_parser": "insitu.integrations.nat.adk_parser",
    "nat.plugins.customizer": "insitu.integrations.customizer.components",
    "nat.plugins.customizer.register": "insitu.integrations.customizer.components",
    "nat.plugins.customizer.dpo": "insitu.integrations.customizer.components",
    "nat.plugins.customizer.dpo.config": "insitu.integrations.customizer.config",
    "nat.plugins.customizer.dpo.register": "insitu.integrations.customizer.components",
    "nat.plugins.customizer.dpo.trainer": "insitu.integrations.customizer.trainer",
    "nat.plugins.customizer.dpo.trainer_adapter": "insitu.integrations.customizer.trainer_adapter",
    "nat.plugins.customizer.dpo.trajectory_builder": "insitu.training.preference_builders",
    "nat.plugins.eval.data_models.evaluator_io": "insitu.schemas.evaluation",
    "nat.plugins.eval.evaluator.base_evaluator": "insitu.collect.evaluators",
    "nat.plugins.eval.runtime.evaluate": "insitu.collect.evaluation",
    "nat.plugins.langchain.langchain_parser": "insitu.integrations.nat.langchain_parser",
    "nat.plugins.llama_index.llama_index_parser": "insitu.integrations.nat.llama_index_parser",
    "nat.plugins.openpipe.config": "insitu.integrations.art.config",
    "nat.plugins.openpipe.register": "insitu.integrations.art.components",
    "nat.plugins.openpipe.trainer": "insitu.integrations.art.components",
    "nat.plugins.openpipe.trainer_adapter": "insitu.integrations.art.trainer_adapter",
    "nat.plugins.openpipe.trajectory_builder": "insitu.integrations.art.components",
    "nat.profiler.callbacks.token_usage_base_model": "insitu.schemas.steps",
    "nat.utils.io.suppress_logs": "insitu.training.logs",
    "nat.utils.io.supress_logs": "insitu.training.logs",
}
"""Documented path -> module with its names."""

PARENTS = frozenset(path.rsplit(".", n)[0] for path in PATHS for n in range(1, path.count(".")))
"""Packages above the paths. One that is a documented path itself has the names of its target."""


class _Parent(ModuleType):
    """A package that forwards attribute access to its target, except for its own submodules."""

    def __getattr__(self, name: str) -> Any:
        module = _target(self)
        if module is not None and name == "__all__":
            return _public_names(module)
        if module is None or name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(module, name, value) if (module := self._owner(name)) else super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(module, name) if (module := self._owner(name)) else super().__delattr__(name)

    def __dir__(self) -> Iterable[str]:
        module = _target(self)
        return [*super().__dir__(), *(_public_names(module) if module else ())]

    def _owner(self, name: str) -> ModuleType | None:
        child = f"{self.__name__}.{name}"
        return None if name.startswith("_") or child in PATHS or child in PARENTS else _target(self)


def _target(parent: ModuleType) -> ModuleType | None:
    target = PATHS.get(parent.__name__)
    return importlib.import_module(target) if target else None


def _public_names(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


class _Loader:
    def __init__(self) -> None:
        self._own_specs: dict[str, ModuleSpec | None] = {}

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in PARENTS:
            return _Parent(spec.name)
        module = importlib.import_module(PATHS[spec.name])
        self._own_specs.setdefault(module.__name__, module.__spec__)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if not isinstance(module, _Parent):
            module.__spec__ = self._own_specs[module.__name__]  # importlib has replaced it by the alias's


class _Finder:
    def __init__(self) -> None:
        self._loader: Any = _Loader()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in PATHS and fullname not in PARENTS:
            return None
        return ModuleSpec(fullname, self._loader, origin=PATHS.get(fullname), is_package=fullname in PARENTS)


def _original_installed() -> bool:
    return any(finder.find_spec("nat.builder", __path__) for finder in sys.meta_path)


sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != __name__]  # left by a reload
if not _original_installed():
    sys.meta_path.append(_Finder())
