"""The kinds of component, each with its section of the file and the base class of its blocks."""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

from insitu.errors import PluginError
from insitu.schemas import components
from insitu.schemas.components import TypedBaseModel
from insitu.schemas.evaluation import EvaluatorBaseConfig
from insitu.schemas.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig


@dataclass(frozen=True)
class Kind:
    """A kind of component: the section of the file that holds its blocks, and the base class of their configuration."""

    section: str
    base: type[TypedBaseModel]
    replaceable: bool = False
    """Whether a plugin's component may have the name of a built-in one, and then takes its place."""

    @property
    def built_in(self) -> dict[str, str]:
        """The `_type`s that insitu provides, and the module that registers each."""
        return _built_in().get(self.section, {})


@cache
def _built_in() -> dict[str, dict[str, str]]:
    """By section, from the entry points `insitu.<section>` of insitu's own distribution."""
    try:
        points = distribution("insitu").entry_points
    except PackageNotFoundError as error:
        raise PluginError("insitu is not installed (pip install -e .): its components cannot be found") from error
    modules: dict[str, dict[str, str]] = {}
    for point in points:
        if point.group.startswith("insitu."):
            modules.setdefault(point.group.removeprefix("insitu."), {})[point.name] = point.value
    if not modules:
        raise PluginError("insitu's installed metadata lacks its components: reinstall it (pip install -e .)")
    return modules


LLM = Kind("llms", components.LLMBaseConfig)
FUNCTION = Kind("functions", components.FunctionBaseConfig)
FUNCTION_GROUP = Kind("function_groups", components.FunctionGroupBaseConfig)
EVALUATOR = Kind("eval.evaluators", EvaluatorBaseConfig, replaceable=True)
DATASET = Kind("eval.general.dataset", components.DatasetBaseConfig)
EXECUTOR = Kind("general.executor", components.ExecutorBaseConfig)
TTC_STRATEGY = Kind("ttc_strategies", components.TTCStrategyBaseConfig)
TRAJECTORY_BUILDER = Kind("trajectory_builders", TrajectoryBuilderConfig)
TRAINER_ADAPTER = Kind("trainer_adapters", TrainerAdapterConfig)
TRAINER = Kind("trainers", TrainerConfig)

KINDS = tuple(kind for kind in vars().values() if isinstance(kind, Kind))
