"""The quickstart from Python: the same player, rewards and settings as in grpo.yml, and the same scores.

python examples/tic_tac_toe/train.py
"""

from tic_tac_toe.evaluators import gained
from tic_tac_toe.game import GameResult, Start, play_game

import insitu


async def play(start: Start, model: insitu.Model, seed: int) -> GameResult:
    return await play_game(start, "random", lambda dialogue, board: model.ask(dialogue), max_retries=1, seed=seed)


def score(game: GameResult) -> insitu.Score:
    return insitu.Score(
        game.score, game.outcome, [gained(answer, game.skill, unplayable=0.3) for answer in game.answers]
    )


run = insitu.finetune(
    *(play, score),
    train="train.jsonl",
    held_out="validation.jsonl",
    model="model",
    epochs=12,
    max_tokens=8,
    learning_rate=1.5e-3,
    max_concurrency=128,
    validation_interval=4,
    trainer_adapters={"backend": {"training": {"schedule": "linear", "warmup": 0.15, "mini_batch_size": 64}}},
    trainers={"grpo": {"credit": "step", "discount": 0.0}},
    output_dir="runs/tic_tac_toe_python",
)
print(run)
