"""Base classes of component configurations, one for each kind, and references to other blocks.

The `name` of a configuration class is the `_type` of its YAML block:

    class GreeterConfig(FunctionBaseConfig, name="greeter"):
        greeting: str = "hello"

    GreeterConfig.static_type()  ->  "greeter"
"""

from collections.abc import Callable, Collection, Generator, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, get_args, get_origin
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, core_schema

T = TypeVar("T")

MAY_CHANGE = "may change"
MayChange = Annotated[T, MAY_CHANGE]
"""A field that may change when a run is resumed: the epochs before and after can be compared."""
WORKFLOW = "<workflow>"
"""The name under which the block `workflow` is built and targeted."""


def default_empty_blocks(model: type[BaseModel], values: Any) -> Any:
    """Drops the nulls of fields that hold a model: an empty block (`training:`) has its defaults."""
    if not isinstance(values, dict):
        return values
    fields = model.model_fields
    return {key: value for key, value in values.items() if value is not None or not _is_block(fields.get(key))}


def _is_block(field: FieldInfo | None) -> bool:
    kind = None if field is None or field.is_required() else field.annotation
    members = [
        get_args(member)[0] if get_origin(member) is Annotated else member for member in get_args(kind) or [kind]
    ]
    return all(isinstance(member, type) and issubclass(member, BaseModel) for member in members)


class Block(BaseModel):
    """A block of a file, or one within it, that nothing writes to. `config` refuses keys that it does not have."""

    model_config = ConfigDict(frozen=True)


class Settings(Block):
    """Settings that also travel to a backend, which refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


_frozen: WeakValueDictionary[int, BaseModel] = WeakValueDictionary()
_copies: WeakValueDictionary[int, BaseModel] = WeakValueDictionary()
"""The frozen models, and the copies of models, by id. A mark in a model itself would be part of its contents."""


class WritableModel(BaseModel):
    """A model of the documents, which plugins may write to. What belongs to a checked file is `frozen`.

    Assigning to a field of a frozen one raises pydantic's ValidationError.
    """

    @model_validator(mode="before")
    @classmethod
    def _default_empty_blocks(cls, values: Any) -> Any:
        return default_empty_blocks(cls, values)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields and _frozen.get(id(self)) is self:
            error = InitErrorDetails(type="frozen_instance", loc=(name,), input=value)
            raise ValidationError.from_exception_data(type(self).__name__, [error])
        super().__setattr__(name, value)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, BaseModel):
        return value.__dict__.values()
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def frozen(value: T) -> T:
    """The object, after it and the models in it were frozen."""
    if isinstance(value, WritableModel):
        _frozen[id(value)] = value
    for part in _parts(value):
        frozen(part)
    return value


def writable(value: T) -> T:
    """A copy in which models and collections can be changed; other values are shared."""
    copied: Any = value
    if isinstance(value, BaseModel):
        copied = value.model_copy()
        copied.__dict__.update({name: writable(part) for name, part in copied.__dict__.items()})
        _copies[id(copied)] = copied
    elif type(value) in (list, tuple, set, frozenset):
        copied = type(value)(map(writable, _parts(value)))  # type: ignore[call-arg]
    elif isinstance(value, dict):
        copied = {key: writable(part) for key, part in value.items()}
    return cast(T, copied)


def for_component(value: T) -> T:
    """What a component gets of settings: a copy of what is a checked file's, or a copy itself; else the object."""
    is_of_file = any(models.get(id(value)) is value for models in (_frozen, _copies))
    return writable(value) if is_of_file else value


class TypedBaseModel(WritableModel):
    """A configuration block: `_type` in YAML is `type` in Python.

    Unknown keywords are ignored in Python, which plugins rely on; `config` rejects unknown keys in YAML.
    """

    registered_name: ClassVar[str | None] = None
    ignores_unknown_keys: ClassVar[bool] = False
    """Whether a key of the block that does not exist is a warning, as files written for the toolkit may have some."""
    type: str = Field(default="unknown", alias="_type", validation_alias="_type", repr=False)

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            cls.registered_name = name

    def __await__(self) -> Generator[None, None, Self]:
        """Gives the block itself, so that `builder.get_trainer_config(name)` works with and without `await`."""
        return self
        yield

    @model_validator(mode="after")
    def _set_type(self) -> Self:
        if self.registered_name is not None:
            self.__dict__["type"] = self.registered_name  # a plugin's class may be frozen
        return self

    @classmethod
    def static_type(cls) -> str | None:
        """The `_type` this class is registered under."""
        return cls.registered_name


class BaseModelRegistryTag:
    """Marks a configuration class that belongs to a registry."""


class LLMBaseConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `llms`."""

    def request_settings(self) -> dict[str, Any]:
        """What the requests of the model have in common, as far as its block says so: server, model, sampling."""
        return {key: value for key, value in self if value is not None}


class FunctionBaseConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `functions`, or the block `workflow`."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises ValueError if the block names a column that the dataset does not have."""

    def check_code(self, where: str, folder: Path, llms: Collection[str]) -> None:
        """Raises ConfigError if the code or program that the block names cannot be its function here.

        `where` is the key of the block, `folder` that of the file, and `llms` are the file's models.
        """

    def check_files(self, where: str, find: Callable[[str, str], Path]) -> None:
        """Raises ConfigError if a file or folder that the block names is missing.

        `where` is the key of the block, and `find` gives the place of a path, or raises ConfigError naming a key.
        """

    def lacks_model(self) -> str | None:
        """What to change if the function can call no model; None: it can, or the block does not say."""
        return None

    def question_column(self, folder: Path) -> str | None:
        """The column with the input of rows that have no column `question`; None: there is none.

        `folder` is that of the file.
        """
        return None

    def run_settings(self) -> dict[str, Any]:
        """What the header of a run says of the block."""
        return {}


class FunctionGroupBaseConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `function_groups`: functions that are configured together."""

    include: list[str] = Field(default_factory=list)
    """The functions of the group that exist; none: all but those of `exclude`."""
    exclude: list[str] = Field(default_factory=list)
    """The functions of the group that do not exist."""

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if self.include and self.exclude:
            raise ValueError("include and exclude cannot both be given")
        return self


class DatasetBaseConfig(TypedBaseModel, BaseModelRegistryTag):
    """The block `eval.general.dataset`."""

    @property
    def rows_file(self) -> Path | None:
        """The file of the rows; None if they come from elsewhere."""
        return None


class ExecutorBaseConfig(TypedBaseModel, BaseModelRegistryTag):
    """The block `general.executor`."""


class TTCStrategyBaseConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `ttc_strategies` (strategies that spend test-time compute)."""


class ComponentGroup(StrEnum):
    """The sections of a file that hold components by name."""

    EVALUATORS = "eval.evaluators"
    FUNCTIONS = "functions"
    FUNCTION_GROUPS = "function_groups"
    LLMS = "llms"
    TRAINERS = "trainers"
    TRAINER_ADAPTERS = "trainer_adapters"
    TRAJECTORY_BUILDERS = "trajectory_builders"
    TTC_STRATEGIES = "ttc_strategies"


class ComponentEnum(StrEnum):
    """The kinds of components that a package can register."""

    DATASET_LOADER = "dataset_loader"
    EVALUATOR = "evaluator"
    EXECUTOR = "executor"
    FUNCTION = "function"
    FUNCTION_GROUP = "function_group"
    LLM_PROVIDER = "llm_provider"
    TRAINER = "trainer"
    TRAINER_ADAPTER = "trainer_adapter"
    TRAJECTORY_BUILDER = "trajectory_builder"
    TTC_STRATEGY = "ttc_strategy"
    UNDEFINED = "undefined"


class ComponentRef(str):
    """The name of another block of the same file; `config` checks that it exists."""

    section: ClassVar[str] = ""

    @property
    def component_group(self) -> ComponentGroup:
        """The section that the name is a key of."""
        return ComponentGroup(self.section)

    def __init_subclass__(cls, section: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.section = section or cls.section

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())


class LLMRef(ComponentRef, section="llms"):
    """A key of `llms`."""


class FunctionRef(ComponentRef, section="functions"):
    """A key of `functions`, or `GROUP.NAME` for a function of a group."""


class FunctionGroupRef(ComponentRef, section="function_groups"):
    """A key of `function_groups`."""


class EvaluatorRef(ComponentRef, section="eval.evaluators"):
    """A key of `eval.evaluators`."""


class TrainerRef(ComponentRef, section="trainers"):
    """A key of `trainers`."""


class TrainerAdapterRef(ComponentRef, section="trainer_adapters"):
    """A key of `trainer_adapters`."""


class TrajectoryBuilderRef(ComponentRef, section="trajectory_builders"):
    """A key of `trajectory_builders`."""


class TTCStrategyRef(ComponentRef, section="ttc_strategies"):
    """A key of `ttc_strategies`."""


class CodeRef(ComponentRef):
    """Python code, as MODULE:NAME or FILE.py:NAME; `config` checks that it can be imported.

    `code` is the object itself where Python gave it, which need not be importable then.
    """

    code: Any = None

    @classmethod
    def of(cls, code: Any, name: str) -> Self:
        ref = cls(name)
        ref.code = code
        return ref

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def keep(value: Any, check: Callable[[Any], str]) -> CodeRef:
            return value if isinstance(value, CodeRef) else cls(check(value))

        return core_schema.no_info_wrap_validator_function(keep, core_schema.str_schema())


ConfigT = TypeVar("ConfigT", bound=TypedBaseModel)


class LLMFrameworkEnum(StrEnum):
    """Agent frameworks whose model object `get_llm(name, wrapper_type=...)` can return."""

    LANGCHAIN = "langchain"
    LANGGRAPH = "langgraph"
    LLAMA_INDEX = "llama_index"
    CREWAI = "crewai"
    SEMANTIC_KERNEL = "semantic_kernel"
    AGNO = "agno"
    ADK = "adk"
    STRANDS = "strands"
    AUTOGEN = "autogen"
    OPENAI_AGENTS = "openai_agents"
    PYDANTIC_AI = "pydantic_ai"
    SMOLAGENTS = "smolagents"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
