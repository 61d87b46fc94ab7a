"""What can be registered: each kind of component, where its blocks stand, and the types that cross a factory."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from insitu.schemas.components import (
    DatasetBaseConfig,
    FunctionBaseConfig,
    LLMBaseConfig,
    TTCStrategyBaseConfig,
    TypedBaseModel,
)
from insitu.schemas.evaluation import EvalInput, EvalOutput, EvaluatorBaseConfig
from insitu.schemas.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig


@dataclass(frozen=True)
class Kind:
    """A kind of component: the section of the file its blocks stand in, and the base of their configuration.

    `built_in` maps each `_type` of our own to the module that registers it. `finish` ("module:function") makes what
    the factory yielded into the live object: `finish(name, config, yielded)`.
    """

    section: str
    base: type[TypedBaseModel]
    built_in: dict[str, str] = field(default_factory=dict, hash=False)
    finish: str | None = None


LLM = Kind("llms", LLMBaseConfig, dict.fromkeys(("openai", "nim", "policy"), "insitu.workflow.llms"))
FUNCTION = Kind(
    "functions",
    FunctionBaseConfig,
    dict.fromkeys(("command", "http"), "insitu.gateway.agents"),
    finish="insitu.workflow.functions:as_function",
)
EVALUATOR = Kind("eval.evaluators", EvaluatorBaseConfig)
DATASET = Kind(
    "eval.general.dataset",
    DatasetBaseConfig,
    dict.fromkeys(("json", "jsonl", "csv", "parquet", "xls"), "insitu.evaluation.datasets"),
)
TTC_STRATEGY = Kind("ttc_strategies", TTCStrategyBaseConfig, {"best_of_n_selection": "insitu.toolkit.ttc"})
TRAJECTORY_BUILDER = Kind(
    "trajectory_builders",
    TrajectoryBuilderConfig,
    {
        "insitu_traj_builder": "insitu.trajectories.builder",
        "openpipe_art_traj_builder": "insitu.adapters.art.register",
    },
)
TRAINER_ADAPTER = Kind(
    "trainer_adapters",
    TrainerAdapterConfig,
    {
        "insitu_trainer_adapter": "insitu.adapters.insitu_backend",
        "openpipe_art_trainer_adapter": "insitu.adapters.art.register",
    },
)
TRAINER = Kind(
    "trainers",
    TrainerConfig,
    {"insitu_trainer": "insitu.training.loop", "openpipe_art_trainer": "insitu.adapters.art.register"},
)

KINDS = (LLM, FUNCTION, EVALUATOR, DATASET, TTC_STRATEGY, TRAJECTORY_BUILDER, TRAINER_ADAPTER, TRAINER)


class LLMFrameworkEnum(StrEnum):
    """Agent frameworks whose own model object `get_llm(name, wrapper_type=...)` can give."""

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


@dataclass(frozen=True)
class EvaluatorInfo:
    """What an evaluator's factory yields: `evaluate_fn` scores all the items it is given."""

    config: EvaluatorBaseConfig
    evaluate_fn: Callable[[EvalInput], Awaitable[EvalOutput]]
    description: str = ""


@dataclass(frozen=True)
class PolicyEndpoint:
    """Where the model under training is served. `model` names the newest weights; `version` is theirs now.

    `current_model` is for servers on which that name changes with every version: it gives the one of the moment.
    """

    base_url: str
    model: str
    api_key: str = "none"
    version: int | None = None
    current_model: Callable[[], str] | None = None
