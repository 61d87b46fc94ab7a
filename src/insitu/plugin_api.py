"""Everything a plugin needs: registration, components, data models and the context of a run.

from insitu.plugin_api import Builder, FunctionBaseConfig, LLMRef, register_function

Of the interfaces and data models it has all names. Integrations add names with entry points of the group
`insitu.plugin_api`.
"""

from typing import Any

from insitu.agents.frameworks import ToolSteps as ToolSteps
from insitu.algorithms.selection import apply_curriculum as apply_curriculum
from insitu.builder import Builder as Builder, EvalBuilder as EvalBuilder, WorkflowBuilder as WorkflowBuilder
from insitu.collect.evaluation import EvaluationRun as EvaluationRun
from insitu.collect.evaluators import BaseEvaluator as BaseEvaluator
from insitu.collect.episodes import Executor as Executor
from insitu.schemas.evaluation import Outcome as Outcome
from insitu.formats.forced_calls import (
    CallGrammar as CallGrammar,
    CallSyntax as CallSyntax,
    ToolFunction as ToolFunction,
)
from insitu.formats.registry import ReasoningFormat as ReasoningFormat, ToolFormat as ToolFormat
from insitu.formats.tool_calls import ToolCall as ToolCall, parsed_call as parsed_call
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
from insitu.schemas.components import *
from insitu.schemas.episodes import DropReason as DropReason, Episode as Episode
from insitu.schemas.episodes import ModelCall as ModelCall, Needs as Needs, TrainingRow as TrainingRow
from insitu.schemas.evaluation import *
from insitu.schemas.finetuning import *
from insitu.schemas.installed import entry_points
from insitu.schemas.parts import TokenBatch as TokenBatch, TokenLoss as TokenLoss
from insitu.schemas.steps import *
from insitu.training.interfaces import *
from insitu.training.jobs import JobAdapter as JobAdapter
from insitu.training.logs import suppress_logs as suppress_logs
from insitu.training.trackers import Step as Step, Table as Table, TrackedRun as TrackedRun, Tracker as Tracker
from insitu.workflow.context import Context as Context
from insitu.workflow.function_groups import FunctionGroup as FunctionGroup
from insitu.workflow.function_groups import register_function_group as register_function_group
from insitu.workflow.functions import Function as Function, FunctionInfo as FunctionInfo
from insitu.workflow.functions import register_function as register_function
from insitu.workflow.llms import ModelClient as ModelClient
from insitu.workflow.context import IntermediateStepManager as IntermediateStepManager


def __getattr__(name: str) -> Any:
    points = entry_points("insitu.plugin_api")
    if name not in points.names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return points[name].load()
