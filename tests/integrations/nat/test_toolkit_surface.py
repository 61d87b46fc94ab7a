"""What plugin packages use at run time, by the documented paths: steps, context, functions, evaluation, strategies."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nat.builder.builder import Builder, EvalBuilder
from nat.builder.context import Context
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function import Function
from nat.builder.function_info import FunctionInfo
from nat.builder.workflow_builder import WorkflowBuilder
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import FunctionRef
from nat.data_models.evaluator import EvalInput, EvalInputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.data_models.intermediate_step import (
    IntermediateStep,
    IntermediateStepCategory,
    IntermediateStepPayload,
    IntermediateStepState,
    IntermediateStepType,
    StreamEventData,
    TraceMetadata,
    TTCEventData,
    UsageInfo,
)
from nat.data_models.invocation_node import InvocationNode
from nat.eval.config import EvaluationRunConfig, EvaluationRunOutput
from nat.eval.evaluate import EvaluationRun
from nat.eval.evaluator.base_evaluator import BaseEvaluator
from nat.eval.evaluator.evaluator_model import EvalOutput, EvalOutputItem
from nat.experimental.test_time_compute.models.stage_enums import PipelineTypeEnum, StageTypeEnum
from nat.experimental.test_time_compute.models.ttc_item import TTCItem
from pydantic import BaseModel, ConfigDict, ValidationError

from insitu.agents.frameworks import FunctionTool

Type = IntermediateStepType

# --- steps


def test_the_types_of_steps() -> None:
    paired = ("LLM", "TOOL", "WORKFLOW", "TASK", "TTC", "FUNCTION", "CUSTOM", "SPAN")
    expected = {f"{category}_{state}" for category in paired for state in ("START", "END")}
    assert {t.value for t in Type} == expected | {"LLM_NEW_TOKEN", "SPAN_CHUNK"}
    for kind in Type:
        payload = IntermediateStepPayload(event_type=kind)
        assert payload.event_category is IntermediateStepCategory(kind.value.partition("_")[0])
        chunk = kind in (Type.LLM_NEW_TOKEN, Type.SPAN_CHUNK)
        state = "CHUNK" if chunk else kind.value.rpartition("_")[2]
        assert payload.event_state is IntermediateStepState(state)


def test_a_payload_by_itself() -> None:
    before = time.time()
    one, other = (IntermediateStepPayload(event_type=Type.CUSTOM_START) for _ in range(2))
    assert before <= one.event_timestamp <= time.time()
    assert isinstance(one.UUID, str)
    assert one.UUID != other.UUID
    left_out = ("span_event_timestamp", "framework", "name", "tags", "metadata", "data", "usage_info")
    assert [getattr(one, name) for name in left_out] == [None] * len(left_out)
    with pytest.raises(ValidationError):
        IntermediateStepPayload(event_type="NO_SUCH_TYPE")


def test_a_step_shows_its_payload() -> None:
    payload = IntermediateStepPayload(
        event_type=Type.LLM_END,
        event_timestamp=2.0,
        span_event_timestamp=1.0,
        framework=LLMFrameworkEnum.LANGCHAIN,
        name="clerk",
        tags=["a", "b"],
        metadata={"a": 1},
        data=StreamEventData(output="4"),
        usage_info=UsageInfo(num_llm_calls=1),
        UUID="7f",
    )
    node = InvocationNode(function_id="f1", function_name="add", parent_id="f0", parent_name="calculate")
    step = IntermediateStep(parent_id="6e", function_ancestry=node, payload=payload)
    for name in (*IntermediateStepPayload.model_fields, "event_category", "event_state"):
        assert getattr(step, name) == getattr(payload, name)
    assert step.framework == LLMFrameworkEnum.LANGCHAIN
    assert (step.function_ancestry.function_name, step.function_ancestry.parent_name) == ("add", "calculate")
    assert IntermediateStep.model_validate_json(step.model_dump_json()) == step


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"input": 1, "output": 2}, StreamEventData),
        ({"input": 1, "board": "x.o"}, StreamEventData),
        ({"turn_id": "t", "turn_index": 0, "candidate_index": 1, "score": 0.5}, TTCEventData),
        (StreamEventData(input=1, board="x.o"), StreamEventData),
        (StreamEventData(input=1, score="high"), StreamEventData),
        (TTCEventData(input=1, board="x.o"), TTCEventData),
    ],
)
def test_data_stays_what_it_is_with_all_its_keys(data: Any, kind: type) -> None:
    payload = IntermediateStepPayload(event_type=Type.CUSTOM_END, data=data)
    assert type(payload.data) is kind
    given = data if isinstance(data, dict) else data.model_dump()
    assert payload.data.model_dump(include=given.keys()) == given
    assert type(IntermediateStepPayload(**payload.model_dump()).data) is kind


def test_metadata_stays_what_it_is() -> None:
    mapping = {"chat_inputs": ["hi"], "provided_metadata": {"a": 1}}
    payload = IntermediateStepPayload(event_type=Type.CUSTOM_END, metadata=mapping)
    assert payload.metadata == mapping
    names = ["chat_responses", "chat_inputs", "tool_inputs", "tool_outputs", "tool_info", "span_inputs"]
    names += ["span_outputs", "provided_metadata", "tools_schema"]
    metadata = TraceMetadata(**{name: [name] for name in names}, of_my_own=1)
    payload = IntermediateStepPayload(event_type=Type.CUSTOM_END, metadata=metadata)
    assert isinstance(payload.metadata, TraceMetadata)
    assert all(getattr(payload.metadata, name) == [name] for name in names)
    assert payload.metadata.of_my_own == 1


# --- functions


class Sum(BaseModel):
    a: int
    b: int = 1


class ToolConfig(FunctionBaseConfig, name="surface_tool"):
    how: str


async def plain(text: str) -> str:
    return text


async def keyword(*, text: str) -> str:
    return text


async def bare(value):
    return type(value).__name__


async def bag(**arguments: Any) -> dict[str, Any]:
    return arguments


async def optional(total: Sum | None = None) -> str:
    return "none" if total is None else str(total.a + total.b)


async def several(totals: list[Sum]) -> int:
    return sum(t.a for t in totals)


TOOLS = {
    "plain": FunctionInfo.from_fn(plain),
    "keyword": FunctionInfo.from_fn(keyword),
    "bare": FunctionInfo.from_fn(bare, input_schema=Sum),
    "bag": FunctionInfo.from_fn(bag, input_schema=Sum),
    "optional": FunctionInfo.from_fn(optional),
    "several": FunctionInfo.from_fn(several),
}


@register_function(config_type=ToolConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def surface_tool(config: ToolConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    yield TOOLS[config.how]


@pytest.mark.parametrize(
    ("how", "value", "expected"),
    [
        ("plain", {"text": "hi"}, "hi"),  # as the function's own input schema describes it
        ("plain", {"other": "hi"}, '{"other":"hi"}'),
        ("keyword", "hi", "hi"),
        ("keyword", {"text": "hi"}, "hi"),
        ("bare", {"a": 1}, "Sum"),
        ("bare", '{"a": 1}', "Sum"),
        ("bag", {"a": 1}, {"a": 1, "b": 1}),
        ("bag", '{"a": 1, "b": 2}', {"a": 1, "b": 2}),
        ("bag", Sum(a=3), {"a": 3, "b": 1}),
        ("optional", None, "none"),
        ("optional", {"a": 2}, "3"),
        ("optional", {"total": {"a": 2}}, "3"),
        ("several", [{"a": 1}, {"a": 2}], 3),
        ("several", '[{"a": 1}, {"a": 2}]', 3),
        ("several", {"totals": [{"a": 5}]}, 5),
        ("several", [Sum(a=4)], 4),
    ],
)
async def test_inputs_are_what_the_function_declares(how: str, value: Any, expected: Any) -> None:
    async with WorkflowBuilder() as builder:
        function = await builder.add_function("tool", ToolConfig(how=how))
        assert await function.ainvoke(value) == expected
        assert function is await builder.get_function(FunctionRef("tool"))
        assert function.config.how == how


async def test_numbers_of_numpy_in_a_text_answer() -> None:
    async with WorkflowBuilder() as builder:
        function = await builder.add_function("tool", ToolConfig(how="bag"))
        given = {"a": 1, "b": 2}
        assert json.loads(await function.ainvoke(given, to_type=str)) == given
    answer = {"score": np.float32(0.5), "counts": np.arange(3)}

    async def measure(text: str) -> dict[str, Any]:
        return answer

    TOOLS["measure"] = FunctionInfo.from_fn(measure)
    async with WorkflowBuilder() as builder:
        function = await builder.add_function("tool", ToolConfig(how="measure"))
        assert json.loads(await function.ainvoke("", to_type=str)) == {"score": 0.5, "counts": [0, 1, 2]}


def test_the_frameworks() -> None:
    names = {"LANGCHAIN", "LLAMA_INDEX", "CREWAI", "SEMANTIC_KERNEL", "AGNO", "ADK", "STRANDS", "AUTOGEN"}
    assert names < set(LLMFrameworkEnum.__members__)


def test_a_configuration_knows_its_type_and_takes_no_offence() -> None:
    config = ToolConfig(how="plain", of_another_release=1)
    assert (ToolConfig.static_type(), config.type) == ("surface_tool", "surface_tool")
    assert not hasattr(config, "of_another_release")


class FrozenConfig(FunctionBaseConfig, name="surface_frozen"):
    model_config = ConfigDict(frozen=True)


class HookedConfig(FunctionBaseConfig, name="surface_hooked"):
    size: int = 1

    def model_post_init(self, context: Any) -> None:
        self.size *= 2


def test_configurations_of_every_make_know_their_type() -> None:
    assert FrozenConfig().type == "surface_frozen"
    assert (HookedConfig(size=3).size, HookedConfig().type) == (6, "surface_hooked")


# --- evaluation


class StepsConfig(EvaluatorBaseConfig, name="surface_steps"):
    limit: int = 0


class Steps(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        if item.full_dataset_entry["colour"] == "none":
            raise LookupError("no colour")
        names = [step.name for step in item.trajectory]
        return EvalOutputItem(id=item.id, score=np.float32(len(item.output_obj)), reasoning={"names": names})


@register_evaluator(config_type=StepsConfig)
async def surface_steps(config: StepsConfig, builder: EvalBuilder) -> AsyncIterator[EvaluatorInfo]:
    evaluator = Steps(max_concurrency=builder.get_max_concurrency(), tqdm_desc="Counting")
    assert evaluator.max_concurrency == 5
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="length")


class ColourConfig(FunctionBaseConfig, name="surface_colour"):
    pass


@register_function(config_type=ColourConfig)
async def surface_colour(config: ColourConfig, builder: Builder) -> AsyncIterator[Any]:
    async def answer(text: str) -> str:
        assert Context.get().is_evaluating
        assert Context.get().input_message == text
        return text * 2

    yield answer


async def test_an_evaluation_as_a_plugin_asks_for_one(write: Any, tmp_path: Path) -> None:
    general = {"max_concurrency": 5, "output_dir": str(tmp_path / "out")}
    dataset = {"_type": "csv", "file_path": "rows.csv"}
    path = write(
        {
            "workflow": {"_type": "surface_colour"},
            "eval": {"general": {**general, "dataset": dataset}, "evaluators": {"steps": {"_type": "surface_steps"}}},
        }
    )
    write("id,question,answer,colour\n7,ab,AB,red\n8,c,C,none\n", "rows.csv")
    asked = EvaluationRunConfig(config_file=path, dataset=None, result_json_path="$", num_passes=3, of_another=True)
    output = await EvaluationRun(config=asked).run_and_evaluate()
    assert isinstance(output, EvaluationRunOutput)
    assert not output.workflow_interrupted
    first, second = output.eval_input.eval_input_items
    assert (first.id, first.input_obj, first.expected_output_obj, first.output_obj) == ("7", "ab", "AB", "abab")
    assert first.full_dataset_entry == {"id": "7", "question": "ab", "answer": "AB", "colour": "red"}
    [(name, result)] = output.evaluation_results
    assert name == "steps"
    assert [i.score for i in result.eval_output_items] == [4, None]
    assert str(result.eval_output_items[1].error).startswith("LookupError: no colour (")
    assert result.average_score == 4
    assert second.error is None
    assert output.workflow_output_file == tmp_path / "out/workflow_output.json"
    [file] = output.evaluator_output_files
    written = json.loads(file.read_text())["eval_output_items"]
    assert written[0]["score"] == 4.0
    # the start and the end of the workflow, and of its function
    assert written[0]["reasoning"] == {"names": ["<workflow>"] * 4}


def test_the_models_of_an_evaluation_and_their_defaults() -> None:
    config = EvaluationRunConfig(config_file="config.yml")
    defaults = {"dataset": None, "result_json_path": "$", "skip_workflow": False, "skip_completed_entries": False}
    defaults |= {"endpoint": None, "endpoint_timeout": 300, "reps": 1, "override": (), "write_output": True}
    assert {name: getattr(config, name) for name in defaults} == defaults
    assert EvaluationRunConfig(config_file=config).config_file is config
    item = EvalInputItem(id="1")
    assert (item.expected_trajectory, item.trajectory) == ([], [])
    output = EvaluationRunOutput(eval_input=EvalInput(eval_input_items=[item]), of_another_release=1)
    assert (output.usage_stats, output.profiler_results) == (None, None)
    assert EvalOutput(average_score=0.5, eval_output_items=[]).average_score == 0.5
    assert Steps().max_concurrency == 4


# --- test-time compute


def test_candidates_and_the_kinds_of_strategies() -> None:
    item = TTCItem(input="q", output=3, plan="p", feedback="f", score=0.5, metadata={"a": 1}, name="n", seen=[1])
    assert item.seen == [1]
    assert TTCItem().model_dump(exclude_none=True) == {}
    assert {s.value for s in StageTypeEnum} == {"search", "editing", "scoring", "selection", "custom"}
    assert {p.value for p in PipelineTypeEnum} == {"planning", "tool_use", "agent_execution", "custom"}


async def test_a_part_of_the_toolkit_that_is_not_here_is_named() -> None:
    builder = Builder()
    with pytest.raises(AttributeError, match=r"has no get_embedder: .* available: get_evaluator, .*get_tools"):
        await builder.get_embedder("small", wrapper_type=LLMFrameworkEnum.LANGCHAIN)
    assert not hasattr(builder, "get_embedder")


async def test_a_blocking_tool_answers_in_a_thread_and_refuses_to_block_its_loop() -> None:
    async def look(at: str, times: int = 1) -> str:
        return f"blue {at}" * times

    tool = FunctionTool(Function("look", None, FunctionInfo.from_fn(look)), "smolagents")
    assert await asyncio.to_thread(tool.blocking, "sky", times=2) == "blue skyblue sky"
    with pytest.raises(RuntimeError, match=r"look blocks the event loop: run the agent by asyncio\.to_thread"):
        tool.blocking("sky")
