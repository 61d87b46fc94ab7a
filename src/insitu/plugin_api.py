"""Everything a plugin needs: registration, components, data models and the context of a run.

from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function

Integrations add names with entry points of the group `insitu.plugin_api`.
"""

from importlib.metadata import entry_points
from typing import Any

from insitu.algorithms.curriculum import (
    apply_curriculum as apply_curriculum,
)
from insitu.agents.frameworks import ToolSteps as ToolSteps
from insitu.builder import (
    Builder as Builder,
    EvalBuilder as EvalBuilder,
    WorkflowBuilder as WorkflowBuilder,
)
from insitu.collect.evaluators import (
    BaseEvaluator as BaseEvaluator,
)
from insitu.collect.evaluation import EvaluationRun as EvaluationRun
from insitu.collect.executors import Executor as Executor
from insitu.training.interfaces import (
    GroupTrainer as GroupTrainer,
    PairTrainer as PairTrainer,
    ResumableAdapter as ResumableAdapter,
    ResumableTrainer as ResumableTrainer,
    RewardAdapter as RewardAdapter,
    RowAdapter as RowAdapter,
    SingleJobTrainer as SingleJobTrainer,
    Trainer as Trainer,
    TrainerAdapter as TrainerAdapter,
    TrajectoryBuilder as TrajectoryBuilder,
)
from insitu.training.jobs import (
    JobAdapter as JobAdapter,
)
from insitu.registry import (
    register_dataset_loader as register_dataset_loader,
    register_evaluator as register_evaluator,
    register_executor as register_executor,
    register_llm_provider as register_llm_provider,
    register_trainer as register_trainer,
    register_trainer_adapter as register_trainer_adapter,
    register_trajectory_builder as register_trajectory_builder,
    register_ttc_strategy as register_ttc_strategy,
)
from insitu.schemas.components import (
    BaseModelRegistryTag as BaseModelRegistryTag,
    DatasetBaseConfig as DatasetBaseConfig,
    EvaluatorRef as EvaluatorRef,
    ExecutorBaseConfig as ExecutorBaseConfig,
    FunctionBaseConfig as FunctionBaseConfig,
    FunctionRef as FunctionRef,
    LLMBaseConfig as LLMBaseConfig,
    LLMFrameworkEnum as LLMFrameworkEnum,
    LLMRef as LLMRef,
    TrainerAdapterRef as TrainerAdapterRef,
    TrainerRef as TrainerRef,
    TrajectoryBuilderRef as TrajectoryBuilderRef,
    TTCStrategyBaseConfig as TTCStrategyBaseConfig,
    TTCStrategyRef as TTCStrategyRef,
    TypedBaseModel as TypedBaseModel,
)
from insitu.schemas.episodes import (
    DropReason as DropReason,
    Episode as Episode,
    ModelCall as ModelCall,
    TrainingRow as TrainingRow,
)
from insitu.schemas.evaluation import (
    EvalInput as EvalInput,
    EvalInputItem as EvalInputItem,
    EvalOutput as EvalOutput,
    EvalOutputItem as EvalOutputItem,
    EvaluationRunConfig as EvaluationRunConfig,
    EvaluationRunOutput as EvaluationRunOutput,
    EvaluatorBaseConfig as EvaluatorBaseConfig,
    EvaluatorInfo as EvaluatorInfo,
)
from insitu.schemas.finetuning import (
    CurriculumLearningConfig as CurriculumLearningConfig,
    DPOItem as DPOItem,
    EpisodeItem as EpisodeItem,
    EpisodeItemRole as EpisodeItemRole,
    FinetuneConfig as FinetuneConfig,
    FinetuneRunConfig as FinetuneRunConfig,
    OpenAIMessage as OpenAIMessage,
    PolicyEndpoint as PolicyEndpoint,
    RewardFunctionConfig as RewardFunctionConfig,
    TrainerAdapterConfig as TrainerAdapterConfig,
    TrainerAdapterConfigT as TrainerAdapterConfigT,
    TrainerConfig as TrainerConfig,
    TrainerConfigT as TrainerConfigT,
    TrainingJobRef as TrainingJobRef,
    TrainingJobStatus as TrainingJobStatus,
    TrainingStatusEnum as TrainingStatusEnum,
    Trajectory as Trajectory,
    TrajectoryBuilderConfig as TrajectoryBuilderConfig,
    TrajectoryBuilderConfigT as TrajectoryBuilderConfigT,
    TrajectoryCollection as TrajectoryCollection,
)
from insitu.schemas.objectives import (
    TokenBatch as TokenBatch,
    TokenLoss as TokenLoss,
)
from insitu.schemas.steps import (
    IntermediateStep as IntermediateStep,
    IntermediateStepCategory as IntermediateStepCategory,
    IntermediateStepPayload as IntermediateStepPayload,
    IntermediateStepState as IntermediateStepState,
    IntermediateStepType as IntermediateStepType,
    InvocationNode as InvocationNode,
    StreamEventData as StreamEventData,
    TraceMetadata as TraceMetadata,
    TTCEventData as TTCEventData,
    UsageInfo as UsageInfo,
)
from insitu.training.logs import (
    suppress_logs as suppress_logs,
)
from insitu.training.trackers import (
    Step as Step,
    Table as Table,
    TrackedRun as TrackedRun,
    Tracker as Tracker,
)
from insitu.workflow.context import (
    Context as Context,
)
from insitu.workflow.functions import (
    Function as Function,
    FunctionInfo as FunctionInfo,
    register_function as register_function,
)
from insitu.workflow.llms import ModelClient as ModelClient
from insitu.workflow.steps import (
    IntermediateStepManager as IntermediateStepManager,
)


def __getattr__(name: str) -> Any:
    points = entry_points(group="insitu.plugin_api")
    if name not in points.names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return points[name].load()
