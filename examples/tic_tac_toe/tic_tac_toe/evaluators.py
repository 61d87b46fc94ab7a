"""What a game was worth, and how much of its value each answer gave away."""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from pydantic import Field

from insitu.plugin_api import Builder, EvaluatorInfo, register_evaluator
from insitu.schemas.evaluation import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem, EvaluatorBaseConfig
from tic_tac_toe.game import Answer, GameResult
from tic_tac_toe.solver import value_gained, value_lost


class ScoreConfig(EvaluatorBaseConfig, name="tic_tac_toe_score"):
    """The game's score: win 1, draw 0.5, loss or forfeit 0."""

    steps: Literal["none", "value_lost", "value_gained"] = "none"
    """Also score each answer, for `credit: step`. `value_lost`: minus what it gave away against the best move.
    `value_gained`: what it is worth above a random move, so 0 where all moves are alike and there is nothing to learn.
    """
    unplayable: float = Field(default=0.3, ge=0)
    """What an answer that cannot be played costs in either of them."""


class ValueLostConfig(EvaluatorBaseConfig, name="tic_tac_toe_value_lost"):
    """The value given away by an answer, on average over the game: 0 is play without a mistake."""

    unplayable: float = Field(default=0.3, ge=0)
    """As in `tic_tac_toe_score`."""


def lost(answer: Answer, skill: float, unplayable: float) -> float:
    """Expected score given away against an opponent of that skill, if the best is played ever after."""
    return unplayable if answer.square is None else value_lost(answer.board, answer.square, skill)


def gained(answer: Answer, skill: float, unplayable: float) -> float:
    """Expected score gained over a random move."""
    return -unplayable if answer.square is None else value_gained(answer.board, answer.square, skill)


def game_of(item: EvalInputItem) -> GameResult:
    output: Any = item.output_obj
    return GameResult.model_validate_json(output) if isinstance(output, str) else GameResult.model_validate(output)


def each(judge: Callable[[EvalInputItem], EvalOutputItem]) -> Callable[[EvalInput], Awaitable[EvalOutput]]:
    """An evaluator's function that judges item by item; one without a finished game stays unscored."""

    async def evaluate(items: EvalInput) -> EvalOutput:
        scored = [
            EvalOutputItem(id=item.id, rep=item.rep, error="the game was not finished")
            if item.output_obj is None
            else judge(item)
            for item in items.eval_input_items
        ]
        scores = [item.score for item in scored if item.score is not None]
        return EvalOutput(average_score=sum(scores) / len(scores) if scores else None, eval_output_items=scored)

    return evaluate


@register_evaluator(config_type=ScoreConfig)
async def score(config: ScoreConfig, builder: Builder):
    def judge(item: EvalInputItem) -> EvalOutputItem:
        game = game_of(item)
        steps = None
        if config.steps == "value_lost":
            steps = [-lost(answer, game.skill, config.unplayable) for answer in game.answers]
        elif config.steps == "value_gained":
            steps = [gained(answer, game.skill, config.unplayable) for answer in game.answers]
        return EvalOutputItem(id=item.id, rep=item.rep, score=game.score, reasoning=game.outcome, step_scores=steps)

    yield EvaluatorInfo(config=config, evaluate_fn=each(judge), description="win 1, draw 0.5, loss or forfeit 0")


@register_evaluator(config_type=ValueLostConfig)
async def value_lost_per_move(config: ValueLostConfig, builder: Builder):
    def judge(item: EvalInputItem) -> EvalOutputItem:
        game = game_of(item)
        losses = [lost(answer, game.skill, config.unplayable) for answer in game.answers]
        return EvalOutputItem(
            id=item.id, rep=item.rep, score=sum(losses) / max(len(losses), 1), reasoning=[round(x, 3) for x in losses]
        )

    yield EvaluatorInfo(config=config, evaluate_fn=each(judge), description="mean value lost per answer; 0 is best")
