"""The agent of the pairs: a short conversation of two turns, each answer of which earns its mean digit.

A row's question says what happens: {"say": text}; with "fails" an error in every second generation, with "alike" the
same answer in all episodes of the first epoch, which so trains nothing.
"""

from insitu.plugin_api import (
    Builder,
    EvaluatorInfo,
    IntermediateStepPayload,
    IntermediateStepType,
    TTCEventData,
    register_evaluator,
    register_function,
)
from insitu.schemas.components import FunctionBaseConfig, FunctionRef, LLMRef
from insitu.schemas.evaluation import EvalInput, EvalOutput, EvalOutputItem, EvaluatorBaseConfig
from insitu.workflow.context import Context, current_scope
from insitu.workflow.functions import FunctionInfo


def is_first_epoch() -> bool:
    scope = current_scope()
    return scope is not None and scope.key is not None and scope.key.epoch <= 1


def mean_digit(text: str) -> float:
    """In [0, 1]; 0 without digits."""
    digits = [int(c) for c in text if c in "0123456789"]
    return sum(digits) / len(digits) / 9 if digits else 0.0


class ReplyConfig(FunctionBaseConfig, name="reply"):
    """One turn; with several candidates each is reported and the first is taken."""

    llm: LLMRef
    candidates: int = 1


@register_function(config_type=ReplyConfig)
async def reply(config: ReplyConfig, builder: Builder):
    llm = await builder.get_llm(config.llm)

    async def answer(dialogue: list) -> str:
        context = Context.get()
        count = config.candidates
        response = await llm.complete(dialogue, **({"n": count} if count > 1 else {}))
        texts = [choice.message.content or "" for choice in response.choices]
        for index, text in enumerate(texts if count > 1 else ()):
            data = TTCEventData(
                input=dialogue,
                output=text,
                turn_id=f"turn {len(dialogue)}",
                candidate_index=index,
                score=mean_digit(text),
            )
            step = IntermediateStepPayload(
                event_type=IntermediateStepType.TTC_END, name="dpo_candidate_move", data=data
            )
            context.intermediate_step_manager.push_intermediate_step(step)
        context.reward(mean_digit(texts[0]))
        return texts[0]

    yield FunctionInfo.from_fn(answer, description="answers once")


class TalkConfig(FunctionBaseConfig, name="talk"):
    reply: FunctionRef


@register_function(config_type=TalkConfig)
async def talk(config: TalkConfig, builder: Builder):
    turn = await builder.get_function(config.reply)

    async def converse(question: dict) -> str:
        messages: list = []
        texts: list[str] = []
        plays = question.setdefault("plays", [])
        plays.append(1)
        if plays != [1]:
            raise RuntimeError("another episode has changed this row")
        for number in range(2):
            messages.append({"role": "user", "content": f"{question['say']} {number}"})
            texts.append(await turn.ainvoke(list(messages)))
            messages.append({"role": "assistant", "content": texts[-1]})
        if question.get("fails") and Context.get().seed % 2:
            raise RuntimeError("this row fails in half of its episodes")
        if question.get("alike") and is_first_epoch():
            return "5"
        return " ".join(texts)

    yield FunctionInfo.from_fn(converse, description="talks twice")


class ShareConfig(EvaluatorBaseConfig, name="digit_share"):
    """The mean digit of the whole conversation."""


@register_evaluator(config_type=ShareConfig)
async def digit_share(config: ShareConfig, builder: Builder):
    async def evaluate(data: EvalInput) -> EvalOutput:
        items = [EvalOutputItem(id=item.id, score=mean_digit(str(item.output_obj))) for item in data.eval_input_items]
        return EvalOutput(eval_output_items=items)

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="mean digit")


def by_rank(rewards: list[float], episodes: list) -> list[list[float]]:
    """Advantages from -1 to 1 by rank, one for each trained call."""
    order = sorted(range(len(rewards)), key=lambda index: rewards[index])
    rank = {index: 2 * place / max(1, len(rewards) - 1) - 1 for place, index in enumerate(order)}
    return [[rank[index]] * len(episode.trained_calls) for index, episode in enumerate(episodes)]
