"""What the configuration of a registered component is made of: a typed base class for each kind, and references.

A component's configuration is a class with a name, the `_type` of its YAML block:

    class GreeterConfig(FunctionBaseConfig, name="greeter"):
        greeting: str = "hello"

    GreeterConfig.static_type()  ->  "greeter"
"""

from enum import StrEnum
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import core_schema

WORKFLOW = "<workflow>"
"""The name under which the block `workflow` is built and targeted."""


class TypedBaseModel(BaseModel):
    """A configuration block; `_type` in YAML, `type` in Python, both the name given to the class.

    Unknown keywords are ignored in Python (plugins rely on it); the YAML file is checked strictly by `config`.
    """

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True, validate_default=False)

    registered_name: ClassVar[str | None] = None
    type: str = Field(default="unknown", alias="_type", validation_alias="_type", repr=False)

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            cls.registered_name = name

    @model_validator(mode="after")
    def _knows_its_type(self) -> Self:
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


class FunctionBaseConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `functions`, or the block `workflow`."""


class DatasetBaseConfig(TypedBaseModel, BaseModelRegistryTag):
    """The block `eval.general.dataset`."""


class TTCStrategyBaseConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `ttc_strategies` (strategies that spend test-time compute)."""


class ComponentRef(str):
    """The name of another block of the same file; `config` checks that it exists."""

    section: ClassVar[str] = ""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())


class LLMRef(ComponentRef):
    """A key of `llms`."""

    section = "llms"


class FunctionRef(ComponentRef):
    """A key of `functions`."""

    section = "functions"


class EvaluatorRef(ComponentRef):
    """A key of `eval.evaluators`."""

    section = "eval.evaluators"


class TrainerRef(ComponentRef):
    """A key of `trainers`."""

    section = "trainers"


class TrainerAdapterRef(ComponentRef):
    """A key of `trainer_adapters`."""

    section = "trainer_adapters"


class TrajectoryBuilderRef(ComponentRef):
    """A key of `trajectory_builders`."""

    section = "trajectory_builders"


class TTCStrategyRef(ComponentRef):
    """A key of `ttc_strategies`."""

    section = "ttc_strategies"


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
