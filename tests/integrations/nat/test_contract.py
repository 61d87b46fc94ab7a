"""The documented models, field by field: defaults, bounds, validators, and leniency in Python.

What a field does is shown where it takes effect; the effects here belong to no other file's subject.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from insitu.schemas.evaluation import (
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluationRunConfig,
    EvaluationRunOutput,
)
from insitu.schemas.finetuning import (
    CurriculumLearningConfig,
    DPOItem,
    EpisodeItem,
    EpisodeItemRole,
    FinetuneConfig,
    FinetuneRunConfig,
    OpenAIMessage,
    RewardFunctionConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from insitu.schemas.steps import (
    IntermediateStep,
    IntermediateStepPayload,
    IntermediateStepType,
    InvocationNode,
    StreamEventData,
    TraceMetadata,
    TTCEventData,
    UsageInfo,
)
from insitu.training.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder

JOB = {"run_id": "r", "backend": "b"}
RUNNING = {**JOB, "status": "running"}
INPUT = {"eval_input": {"eval_input_items": []}}
PREFERENCE = {"prompt": "p", "chosen_response": "c", "rejected_response": "r"}
NO_VALUE = dict.fromkeys
ROLES = ("user", "assistant", "system", "function", "tool", "environment", "other")
STATES = ("pending", "running", "completed", "failed", "canceled")
TRACED = (
    *("chat_responses", "chat_inputs", "tool_inputs", "tool_outputs", "tool_info", "span_inputs", "span_outputs"),
    *("provided_metadata", "tools_schema"),
)

# model, what it needs, the documented value of everything else
DEFAULTS: list[tuple[type[BaseModel], dict[str, Any], dict[str, Any]]] = [
    (
        FinetuneConfig,
        {},
        {
            "enabled": False,
            **NO_VALUE(("trainer", "trajectory_builder", "trainer_adapter", "reward_function", "target_model")),
            "target_functions": ["<workflow>"],
            "curriculum_learning": CurriculumLearningConfig(),
            "num_epochs": 1,
            "output_dir": Path("./.tmp/nat/finetuning/"),
            "run_configuration": None,
        },
    ),
    (
        CurriculumLearningConfig,
        {},
        {
            "enabled": False,
            "initial_percentile": 0.3,
            "increment_percentile": 0.2,
            "expansion_interval": 5,
            "min_reward_diff": 0.1,
            "sort_ascending": False,
            "random_subsample": None,
        },
    ),
    (
        FinetuneRunConfig,
        {},
        {
            **NO_VALUE(("config_file", "dataset", "endpoint", "validation_dataset", "validation_config_file")),
            "result_json_path": "$",
            "endpoint_timeout": 300,
            "override": (),
            "validation_interval": 5,
        },
    ),
    (RewardFunctionConfig, {"name": "score"}, {}),
    (TrainingJobRef, JOB, {"metadata": None}),
    (TrainingJobStatus, RUNNING, NO_VALUE(("progress", "message", "metadata"))),
    (EpisodeItem, {"role": "user", "content": "hi"}, NO_VALUE(("logprobs", "metadata"))),
    (OpenAIMessage, {"role": "user", "content": "hi"}, {}),
    (DPOItem, PREFERENCE, {}),
    (Trajectory, {"reward": 1.0}, {"episode": [], "shaped_rewards": None, "metadata": None}),
    (TrajectoryCollection, {"trajectories": [], "run_id": "r"}, {}),
    (
        EvaluationRunConfig,
        {"config_file": "c.yml"},
        {
            "dataset": None,
            "result_json_path": "$",
            "skip_workflow": False,
            "skip_completed_entries": False,
            "endpoint": None,
            "endpoint_timeout": 300,
            "reps": 1,
            "override": (),
            "write_output": True,
        },
    ),
    (
        EvaluationRunOutput,
        INPUT,
        {
            "workflow_output_file": None,
            "evaluator_output_files": [],
            "workflow_interrupted": False,
            "evaluation_results": [],
            "usage_stats": None,
            "profiler_results": None,
        },
    ),
    (
        EvalInputItem,
        {"id": 7},
        {
            **NO_VALUE(("input_obj", "expected_output_obj", "output_obj", "full_dataset_entry")),
            "expected_trajectory": [],
            "trajectory": [],
        },
    ),
    (EvalInput, {"eval_input_items": []}, {}),
    (EvalOutputItem, {"id": 7}, NO_VALUE(("score", "reasoning", "error"))),
    (EvalOutput, {}, {"average_score": None, "eval_output_items": []}),
    (InvocationNode, {"function_id": "1", "function_name": "f"}, NO_VALUE(("parent_id", "parent_name"))),
    (StreamEventData, {}, NO_VALUE(("input", "output", "chunk", "payload"))),
    (TTCEventData, {}, NO_VALUE(("input", "output", "turn_id", "turn_index", "candidate_index", "score"))),
    (TraceMetadata, {}, NO_VALUE(TRACED)),
    (
        IntermediateStepPayload,
        {"event_type": "LLM_START"},
        NO_VALUE(["span_event_timestamp", "framework", "name", "tags", "metadata", "data", "usage_info"]),
    ),
    (
        IntermediateStep,
        {"payload": {"event_type": "LLM_START"}},
        {"parent_id": "root", "function_ancestry": InvocationNode(function_id="root", function_name="root")},
    ),
]
KEEPS_UNKNOWN = (EvalInputItem, EvalOutputItem, InvocationNode, StreamEventData, TTCEventData, TraceMetadata)


@pytest.mark.parametrize(("model", "needed", "defaults"), DEFAULTS, ids=lambda v: getattr(v, "__name__", ""))
def test_defaults_needs_and_leniency(model: type[BaseModel], needed: dict[str, Any], defaults: dict[str, Any]) -> None:
    made = model(**needed)
    assert {name: getattr(made, name) for name in defaults} == defaults
    for name in needed:
        with pytest.raises(ValidationError, match=name):
            model(**{k: v for k, v in needed.items() if k != name})
    lenient = model(**needed, unheard_of=1)
    assert getattr(lenient, "unheard_of", None) == (1 if model in KEEPS_UNKNOWN else None)


BOUNDS: list[tuple[type[BaseModel], dict[str, Any], str, list[Any], list[Any]]] = [
    (FinetuneConfig, {}, "num_epochs", [1], [0, -1, 1.5]),
    (FinetuneConfig, {}, "target_functions", [["f"]], [[], "f"]),
    *(
        (CurriculumLearningConfig, {}, name, [1e-9, 1.0], [0, 1.001, -0.1])
        for name in ("initial_percentile", "increment_percentile", "random_subsample")
    ),
    (CurriculumLearningConfig, {}, "expansion_interval", [1], [0, 0.5]),
    (FinetuneRunConfig, {"config_file": "c"}, "validation_interval", [1], [0]),
    (EvaluationRunConfig, {"config_file": "c"}, "reps", [1], [0]),
    (RewardFunctionConfig, {"name": "r"}, "on_failure", ["exclude", -1.5, "0"], ["penalty"]),
    (TrainingJobStatus, RUNNING, "progress", [None, 0, 100], [-0.1, 100.1]),
    (
        TrainingJobStatus,
        JOB,
        "status",
        ["pending", "running", "completed", "failed", "canceled"],
        ["cancelled", "done"],
    ),
    (EpisodeItem, {"content": ""}, "role", [r for r in ROLES if r != "assistant"], ["bot"]),
    (IntermediateStepPayload, {}, "event_type", list(IntermediateStepType), ["LLM"]),
]


@pytest.mark.parametrize(("model", "needed", "name", "allowed", "refused"), BOUNDS, ids=lambda v: str(v)[:40])
def test_bounds(
    model: type[BaseModel], needed: dict[str, Any], name: str, allowed: list[Any], refused: list[Any]
) -> None:
    for value in allowed:
        model(**needed, **{name: value})
    for value in refused:
        with pytest.raises(ValidationError, match=name):
            model(**needed, **{name: value})


@pytest.mark.parametrize("enabled", [True, "true", "on", 1])
def test_an_enabled_block_names_its_three_components(enabled: Any) -> None:
    names = {"trainer": "t", "trajectory_builder": "b", "trainer_adapter": "a"}
    assert FinetuneConfig(enabled=enabled, **names).enabled
    for left_out in names:
        given = {k: v for k, v in names.items() if k != left_out}
        with pytest.raises(ValueError, match=rf"does not name: {left_out}(\n| \[)"):
            FinetuneConfig(enabled=enabled, **given)
    with pytest.raises(ValueError, match="does not name: trainer, trajectory_builder, trainer_adapter"):
        FinetuneConfig(enabled=enabled, trainer="")


@pytest.mark.parametrize("enabled", [False, "false", "off", 0])
def test_a_block_that_is_not_enabled_need_name_nothing(enabled: Any) -> None:
    assert not FinetuneConfig(enabled=enabled).enabled


def test_an_assistants_item_has_logprobs() -> None:
    with pytest.raises(ValueError, match="logprobs must be given for an item of role assistant"):
        EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="hi")
    assert EpisodeItem(role="assistant", content="hi", logprobs=[]).logprobs == []
    assert {role.value for role in EpisodeItemRole} == {*ROLES}


def test_preferences_and_dialogues_are_both_episodes() -> None:
    messages = [OpenAIMessage(role="user", content="p")]
    preference = DPOItem(**{**PREFERENCE, "prompt": messages})
    assert preference.prompt == messages
    assert Trajectory(episode=[preference], reward=0).episode == [preference]
    said = EpisodeItem(role="assistant", content="hi", logprobs={"content": []})
    group = [Trajectory(episode=[said], reward=1, shaped_rewards=[0.5], metadata={"a": 1})]
    assert TrajectoryCollection(trajectories=[group], run_id="r").trajectories[0][0].episode == [said]


def test_states_are_texts() -> None:
    assert TrainingStatusEnum.CANCELED == "canceled"
    assert TrainingJobStatus(**RUNNING).model_dump(mode="json")["status"] == "running"


def test_a_payload_keeps_what_it_is_given() -> None:
    kept = IntermediateStepPayload(
        event_type=IntermediateStepType.TTC_END,
        metadata={"reward": 1, "nested": {"a": 2}},
        data=TTCEventData(turn_id="t", candidate_index=2, score=0.5, mine=3),
        usage_info=UsageInfo(),
        unheard_of=1,
    )
    assert kept.metadata == {"reward": 1, "nested": {"a": 2}}
    assert isinstance(kept.data, TTCEventData)
    assert (kept.data.turn_id, kept.data.candidate_index, kept.data.mine) == ("t", 2, 3)  # type: ignore[attr-defined]
    typed = TraceMetadata(tools_schema=[1], mine=2)
    plain = IntermediateStepPayload(event_type="CUSTOM_START", metadata=typed, data=StreamEventData(input=1, mine=2))
    assert plain.metadata is typed
    assert type(plain.data) is StreamEventData
    assert plain.data.mine == 2  # type: ignore[attr-defined]
    from_dict = IntermediateStepPayload(event_type="CUSTOM_END", data={"input": 1, "mine": 2}, UUID="u")
    assert isinstance(from_dict.data, StreamEventData)
    assert (from_dict.data.input, from_dict.UUID) == (1, "u")


def test_each_payload_has_a_time_and_a_name_of_its_own() -> None:
    one, other = (IntermediateStepPayload(event_type="TASK_START") for _ in range(2))
    assert one.UUID != other.UUID
    assert 0 <= other.event_timestamp - one.event_timestamp < 5


@pytest.mark.parametrize("kind", list(IntermediateStepType))
def test_an_event_has_a_category_and_a_state(kind: IntermediateStepType) -> None:
    category, _, state = kind.value.partition("_")
    payload = IntermediateStepPayload(event_type=kind)
    assert payload.event_category == category
    assert payload.event_state == {"NEW_TOKEN": "CHUNK"}.get(state, state)


def test_a_step_shows_its_payload() -> None:
    payload = IntermediateStepPayload(event_type="SPAN_CHUNK", name="n", framework="langchain", tags=["t"], UUID="u")
    node = InvocationNode(function_id="1", function_name="f", parent_id="0", parent_name="g")
    step = IntermediateStep(parent_id="p", function_ancestry=node, payload=payload)
    for name in (*IntermediateStepPayload.model_fields, "event_category", "event_state"):
        assert getattr(step, name) == getattr(payload, name)
    assert (step.parent_id, step.function_ancestry.function_name) == ("p", "f")


# the interfaces: what must be written, and what the base classes do

WRITTEN = {
    TrajectoryBuilder: {"start_run", "finalize", "log_progress"},
    TrainerAdapter: {"is_healthy", "submit", "status", "wait_until_complete", "log_progress"},
    Trainer: {"run_epoch", "run", "get_metrics", "cleanup", "log_progress"},
}


def written(base: type, *arguments: Any, **others: Any) -> Any:
    """An object whose class has written all there is to write."""
    return type("Mine", (base,), dict.fromkeys(WRITTEN[base], lambda *_: None))(*arguments, **others)


@pytest.mark.parametrize("base", WRITTEN, ids=lambda base: base.__name__)
def test_what_must_be_written(base: type) -> None:
    assert base.__abstractmethods__ == WRITTEN[base]  # type: ignore[attr-defined]


async def test_a_trainer_initializes_both_of_its_components() -> None:
    builder = written(TrajectoryBuilder, trajectory_builder_config=TrajectoryBuilderConfig())
    adapter = written(TrainerAdapter, adapter_config=TrainerAdapterConfig())
    trainer = written(Trainer, trainer_config=TrainerConfig(), unheard_of=1)
    assert builder.run_config is adapter.run_config is trainer.run_config is None
    for name in ("curriculum_config", "trajectory_builder", "trainer_adapter", "_curriculum_state"):
        assert getattr(trainer, name) is None

    await trainer.bind_components(builder, adapter)
    run = FinetuneConfig(reward_function={"name": "score"}, curriculum_learning={"initial_percentile": 0.4})
    await trainer.initialize(run)
    assert (trainer.trajectory_builder, trainer.trainer_adapter) == (builder, adapter)
    assert builder.run_config is adapter.run_config is trainer.run_config is run
    assert builder.trajectory_builder_config.reward is adapter.adapter_config.reward is run.reward_function
    assert trainer.curriculum_config is run.curriculum_learning
    assert trainer._curriculum_state == {
        "current_percentile": 0.4,
        "last_expansion_epoch": -1,
        "total_groups": 0,
        "included_groups": set(),
    }
    trainer._curriculum_state["included_groups"] |= {"b", "a"}
    assert trainer.get_curriculum_state()["included_groups"] == ["a", "b"]
    with pytest.raises(NotImplementedError, match="apply_curriculum_learning"):
        trainer.apply_curriculum_learning(TrajectoryCollection(trajectories=[], run_id="r"), 1)


@pytest.mark.parametrize(("score", "reward"), [(0.5, 0.5), (True, 1.0), ("0.25", 0.25), (None, 0.0)])
async def test_the_default_reward_is_the_score(score: Any, reward: float) -> None:
    builder = written(TrajectoryBuilder, TrajectoryBuilderConfig())
    assert await builder.compute_reward(EvalOutputItem(id=1, score=score)) == reward


async def test_outside_a_run_there_is_nothing_to_evaluate() -> None:
    builder, trainer = written(TrajectoryBuilder, TrajectoryBuilderConfig()), written(Trainer, TrainerConfig())
    builder.run_config = trainer.run_config = FinetuneConfig()
    with pytest.raises(ValueError, match=r"run_eval\(\) needs finetuning\.run_configuration"):
        await builder.run_eval()
    with pytest.raises(ValueError, match="validation needs a dataset"):
        await trainer.run_validation_evaluation(1, "r")
