"""Names -> factories -> live objects: one mechanism for every kind of component, and the Builder that runs it.

A factory is an async generator that yields one instance and cleans up behind it:

    @register_evaluator(config_type=ExactMatchConfig)
    async def exact_match(config: ExactMatchConfig, builder: Builder):
        yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="1 where the answer is the expected one")

Parts of insitu further to the right are named here as text and imported when first asked for.
"""

from insitu.registry.builder import Builder, EvalBuilder, WorkflowBuilder, name_being_built
from insitu.registry.components import (
    Registry,
    not_found,
    register_dataset_loader,
    register_evaluator,
    register_function,
    register_llm_provider,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
    register_ttc_strategy,
    registry,
)
from insitu.registry.kinds import (
    DATASET,
    EVALUATOR,
    FUNCTION,
    KINDS,
    LLM,
    TRAINER,
    TRAINER_ADAPTER,
    TRAJECTORY_BUILDER,
    TTC_STRATEGY,
    EvaluatorInfo,
    Kind,
    LLMFrameworkEnum,
    PolicyEndpoint,
)

__all__ = [
    "DATASET",
    "EVALUATOR",
    "FUNCTION",
    "KINDS",
    "LLM",
    "TRAINER",
    "TRAINER_ADAPTER",
    "TRAJECTORY_BUILDER",
    "TTC_STRATEGY",
    "Builder",
    "EvalBuilder",
    "EvaluatorInfo",
    "Kind",
    "LLMFrameworkEnum",
    "PolicyEndpoint",
    "Registry",
    "WorkflowBuilder",
    "name_being_built",
    "not_found",
    "register_dataset_loader",
    "register_evaluator",
    "register_function",
    "register_llm_provider",
    "register_trainer",
    "register_trainer_adapter",
    "register_trajectory_builder",
    "register_ttc_strategy",
    "registry",
]
