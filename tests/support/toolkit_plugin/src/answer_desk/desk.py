"""The workflow: tidies the question, has it answered by another function, and keeps a record in its own steps."""

import uuid

from nat.builder.builder import Builder
from nat.builder.context import Context
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function
from nat.data_models.component_ref import FunctionRef
from nat.data_models.function import FunctionBaseConfig
from nat.data_models.intermediate_step import (
    IntermediateStep,
    IntermediateStepPayload,
    IntermediateStepType,
    StreamEventData,
)
from pydantic import Field

from .models import Question, Reply, question_from_text, text_of_reply


class AnswerDeskConfig(FunctionBaseConfig, name="answer_desk"):
    """Answers a question."""

    tidy: FunctionRef = Field(description="Tidies the question.")
    words: FunctionRef = Field(description="Streams its words.")
    answerer: FunctionRef = Field(description="Answers it; a function that takes a Question.")


@register_function(config_type=AnswerDeskConfig)
async def answer_desk(config: AnswerDeskConfig, builder: Builder):
    tidy = await builder.get_function(config.tidy)
    split = await builder.get_function(config.words)
    answerer = await builder.get_function(config.answerer)

    async def _answer(question: Question) -> Reply:
        context = Context.get()
        manager = context.intermediate_step_manager
        heard: list[IntermediateStep] = []
        subscription = manager.subscribe(heard.append)
        step_id = str(uuid.uuid4())
        text = await tidy.ainvoke(question.text, to_type=str)
        words = [word async for word in split.astream(text)]
        manager.push_intermediate_step(
            IntermediateStepPayload(
                event_type=IntermediateStepType.CUSTOM_START,
                UUID=step_id,
                name="desk_record",
                tags=["record"],
                data=StreamEventData(input=context.input_message, words=words),
            )
        )
        answer = await answerer.ainvoke({"text": text, "drafts": question.drafts})
        active = context.active_function
        manager.push_intermediate_step(
            IntermediateStepPayload(
                event_type=IntermediateStepType.CUSTOM_END,
                UUID=step_id,
                name="desk_record",
                metadata={
                    "words": len(words),
                    "function": active.function_name,
                    "caller": active.parent_name,
                    "evaluating": context.is_evaluating,
                    "tidied_by": tidy.config.type,
                },
                data=StreamEventData(input=context.input_message, output=answer),
            )
        )
        subscription.unsubscribe()
        return Reply(
            text=answer if isinstance(answer, str) else answer.text,
            words=words,
            steps_heard=len(heard),
            asked_by=active.function_name,
        )

    yield FunctionInfo.from_fn(
        _answer, input_schema=Question, description="Answers.", converters=[question_from_text, text_of_reply]
    )
