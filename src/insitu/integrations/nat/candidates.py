"""Strategies that sample several candidates and score them: the source of preferences.

search = await builder.get_ttc_strategy("candidates", PipelineTypeEnum.AGENT_EXECUTION, StageTypeEnum.SEARCH)
judge = await builder.get_ttc_strategy("judge", PipelineTypeEnum.AGENT_EXECUTION, StageTypeEnum.SCORING)
best = await builder.get_ttc_strategy("best", PipelineTypeEnum.AGENT_EXECUTION, StageTypeEnum.SELECTION)

candidates = await judge.ainvoke(await search.ainvoke([TTCItem(input=messages)]))
[chosen] = await best.ainvoke(candidates)
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from insitu.builder import Builder
from insitu.collect.datasets import dataset_config
from insitu.collect.evaluators import parse_score, score
from insitu.errors import WorkflowError, describe_error
from insitu.integrations.nat.ttc import BuiltInStrategy, StageTypeEnum, TTCItem
from insitu.registry import register_ttc_strategy
from insitu.schemas.components import EvaluatorRef, FunctionRef, LLMRef, TTCStrategyBaseConfig
from insitu.schemas.evaluation import EvalInputItem, EvalOutputItem
from insitu.schemas.finetuning import message_text
from insitu.schemas.steps import IntermediateStepPayload, IntermediateStepType, TTCEventData
from insitu.workflow.context import Context, current_scope


class SampleCandidatesConfig(TTCStrategyBaseConfig, name="sample_candidates"):
    """Samples several completions of each item's input."""

    llm: LLMRef
    """The model that answers."""
    n: int = Field(default=4, ge=1)
    """Candidates per item."""
    requests: Literal["one", "each"] = "one"
    """`one`: a single request with the parameter `n`. `each`: a request per candidate, for servers without it."""


@register_ttc_strategy(config_type=SampleCandidatesConfig)
class SampleCandidates(BuiltInStrategy):
    """`input` of an item is a list of messages, or the text of a user message; none: the original prompt.

    Keyword arguments are parameters of the requests (`tools`, say). A candidate's `metadata["message"]` is the whole
    message, with its tool calls.
    """

    config: SampleCandidatesConfig
    stage = StageTypeEnum.SEARCH

    async def build_components(self, builder: Builder) -> None:
        self.llm = await builder.get_llm(self.config.llm)

    async def ainvoke(
        self, items: list[TTCItem], original_prompt: str | None = None, agent_context: str | None = None, **kwargs: Any
    ) -> list[TTCItem]:
        sampled = await asyncio.gather(*(self._sample(item, original_prompt, kwargs) for item in items))
        return [candidate for candidates in sampled for candidate in candidates]

    async def _sample(self, item: TTCItem, original_prompt: str | None, request: dict[str, Any]) -> list[TTCItem]:
        prompt = original_prompt if item.input is None else item.input
        if prompt is None:
            raise WorkflowError("sample_candidates: an item has no input, and no original_prompt was given")
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        n = self.config.n
        if self.config.requests == "one":
            choices = (await self.llm.complete(messages, n=n, **request)).choices
        else:
            completions = await asyncio.gather(*(self.llm.complete(messages, **request) for _ in range(n)))
            choices = [completion.choices[0] for completion in completions]
        if len(choices) != n:
            problem = f"{n} completions were requested from llms.{self.config.llm} and {len(choices)} returned"
            raise WorkflowError(f"sample_candidates: {problem}; set requests: each for a server that ignores n")
        candidates = []
        for message in (choice.message.model_dump(exclude_none=True) for choice in choices):
            update = {"input": messages, "output": message_text(message), "score": None}
            metadata = {**(item.metadata or {}), "message": message}
            candidates.append(item.model_copy(update=update | {"metadata": metadata}))
        return candidates


class ScoreCandidatesConfig(TTCStrategyBaseConfig, name="score_candidates"):
    """Scores the candidates of a turn, and reports each as a step."""

    evaluator: EvaluatorRef | None = None
    """The evaluator whose score counts; it gets the episode's dataset row with the candidate as the output."""
    function: FunctionRef | None = None
    """Instead of an evaluator: a function that takes the candidate's output and returns a number."""
    step_name: str | None = "dpo_candidate_move"
    """Name of the steps `TTC_END`, which `dpo_traj_builder` reads; none: no steps."""

    @model_validator(mode="after")
    def _has_one_scorer(self) -> Self:
        if (self.evaluator is None) == (self.function is None):
            raise ValueError("give either evaluator or function")
        return self


@register_ttc_strategy(config_type=ScoreCandidatesConfig)
class ScoreCandidates(BuiltInStrategy):
    """Candidates that cannot be scored keep `score` None, with the reason in `feedback`.

    All items belong to one turn: the keyword `turn_index`, by default the number of earlier turns in the episode.
    """

    config: ScoreCandidatesConfig
    stage = StageTypeEnum.SCORING

    async def build_components(self, builder: Builder) -> None:
        if self.config.evaluator is not None:
            self.evaluator = await builder.get_evaluator(self.config.evaluator)
            self.limit = builder.config.eval.scoring_limit(1)
            self.answer_key = dataset_config(builder.config).structure.answer_key
        else:
            self.function = await builder.get_function(str(self.config.function))

    async def ainvoke(self, items: list[TTCItem], *args: Any, **kwargs: Any) -> list[TTCItem]:
        scored = await asyncio.gather(*map(self._score, items))
        if self.config.step_name is not None:
            self._report(self.config.step_name, scored, kwargs.get("turn_index"))
        return scored

    async def _score(self, item: TTCItem) -> TTCItem:
        if self.config.evaluator is not None:
            context = Context.get()
            row = context.row if isinstance(context.row, dict) else None
            candidate = EvalInputItem(
                id=context.row_id or "",
                input_obj=item.input,
                expected_output_obj=(row or {}).get(self.answer_key),
                output_obj=item.output,
                full_dataset_entry=row,
            )
            scores = await score(self.evaluator, self.config.evaluator, [candidate], self.limit)
            value, _, problem = parse_score(scores.eval_output_items[0])
        else:
            try:
                value, _, problem = parse_score(EvalOutputItem(id="", score=await self.function.ainvoke(item.output)))
            except Exception as error:  # the scorer's fault costs the candidate, not the episode
                value, problem = None, f"{self.config.function} raised {describe_error(error)}"
        return item.model_copy(update={"score": value, "feedback": problem or item.feedback})

    def _report(self, name: str, items: Sequence[TTCItem], turn_index: int | None) -> None:
        if turn_index is None:
            scope = current_scope()
            earlier = [step.data for step in (scope.steps if scope else ()) if step.name == name]
            turn_index = len({data.turn_index for data in earlier if isinstance(data, TTCEventData)})
        turn: dict[str, Any] = {"turn_id": f"turn {turn_index}", "turn_index": turn_index}
        for index, item in enumerate(items):
            candidate = {name: getattr(item, name) for name in ("input", "output", "score")}
            data = TTCEventData(**candidate, candidate_index=index, **turn)
            payload = IntermediateStepPayload(event_type=IntermediateStepType.TTC_END, name=name, data=data)
            Context.get().intermediate_step_manager.push_intermediate_step(payload)
