"""The tic-tac-toe example: its rules and exact values, the talk with the player, its scores, its data and its model."""

import importlib
import itertools
import json
import random
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from insitu.schemas.evaluation import EvalInput, EvalInputItem

EXAMPLE = Path(__file__).parents[2] / "examples" / "tic_tac_toe"
sys.path.insert(0, str(EXAMPLE))

from tic_tac_toe import board as rules  # noqa: E402
from tic_tac_toe import prompts, solver  # noqa: E402
from tic_tac_toe.board import EMPTY  # noqa: E402
from tic_tac_toe.evaluators import ScoreConfig, ValueLostConfig, score, value_lost_per_move  # noqa: E402
from tic_tac_toe.game import GameResult, Start, play_game  # noqa: E402

WINS = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {0, 3, 6}, {1, 4, 7}, {2, 5, 8}, {0, 4, 8}, {2, 4, 6}]


def brute_force() -> dict[tuple[int, ...], int]:
    """The outcome under best play (1: X wins, 0: draw, -1: O wins) of every reachable position.

    Written without the example's code: a position is nine numbers (1, -1, 0), and all lines of play are followed.
    """
    outcomes: dict[tuple[int, ...], int] = {}

    def has_won(cells: tuple[int, ...], side: int) -> bool:
        return any(all(cells[i] == side for i in line) for line in WINS)

    def search(cells: tuple[int, ...], side: int) -> int:
        if cells in outcomes:
            return outcomes[cells]
        if has_won(cells, -side):
            result = -side
        elif 0 not in cells:
            result = 0
        else:
            replies = [search((*cells[:i], side, *cells[i + 1 :]), -side) for i in range(9) if cells[i] == 0]
            result = side * max(side * reply for reply in replies)
        outcomes[cells] = result
        return result

    search((0,) * 9, 1)
    return outcomes


@pytest.fixture(scope="module")
def exact() -> dict[str, int]:
    letters = {1: "X", -1: "O", 0: "."}
    return {"".join(letters[cell] for cell in cells): outcome for cells, outcome in brute_force().items()}


def random_move(board: str) -> dict[int, float]:
    return solver.moves(board, 0.0)


def perfect_move(board: str) -> dict[int, float]:
    return solver.moves(board, 1.0)


def both_sides(player: solver.Strategy, opponent: solver.Strategy) -> float:
    return sum(solver.value(mark, player, opponent) for mark in "XO") / 2


# Exact values


def test_solver_agrees_with_brute_force_everywhere(exact: dict[str, int]) -> None:
    assert set(solver.positions()) == set(exact)
    assert len(exact) == 5478
    for board, outcome in exact.items():
        assert solver.minimax(board) == (outcome + 1) / 2
        assert solver.values("X", 1.0)[board] == pytest.approx((outcome + 1) / 2)
        assert solver.values("O", 1.0)[board] == pytest.approx((1 - outcome) / 2)


@pytest.mark.slow
def test_value_lost_is_seen_from_the_side_that_moves(exact: dict[str, int]) -> None:
    for board in exact:
        if rules.is_over(board):
            continue
        side = 1 if rules.to_move(board) == "X" else -1
        for square in rules.free_squares(board):
            after = exact[rules.place(board, square)]
            assert solver.value_lost(board, square, 1.0) == pytest.approx(side * (exact[board] - after) / 2)
        for skill in (0.0, 0.5):
            losses = [solver.value_lost(board, square, skill) for square in rules.free_squares(board)]
            assert min(losses) == pytest.approx(0)


def test_known_scores() -> None:
    assert both_sides(random_move, random_move) == pytest.approx(0.5)
    assert solver.value("X", random_move, random_move) == pytest.approx(0.648412698)
    assert both_sides(perfect_move, random_move) == pytest.approx(0.936, abs=5e-4)
    assert sum(solver.values(mark, 0.0)[EMPTY] for mark in "XO") / 2 == pytest.approx(0.980, abs=5e-4)
    assert both_sides(random_move, perfect_move) == pytest.approx(0.0637, abs=5e-5)
    assert both_sides(perfect_move, perfect_move) == pytest.approx(0.5)


def test_an_opponent_of_some_skill_is_a_mixture() -> None:
    board = "XX.OO...."  # X wins immediately with square 3 (index 2)
    assert solver.moves(board, 1.0)[2] == 1
    assert solver.moves(board, 0.25) == pytest.approx({2: 0.25 + 0.75 / 5} | dict.fromkeys((5, 6, 7, 8), 0.75 / 5))


# The talk with the player


class Script:
    """A player that gives prepared answers and keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[list[dict[str, str]]] = []

    async def __call__(self, dialogue: list[dict[str, str]], board: str) -> str:
        self.asked.append(dialogue)
        return self.answers.pop(0)


def free_in(dialogue: list[dict[str, str]]) -> list[str]:
    """The free squares, read from what the player is shown."""
    rows = next(line for line in dialogue[0]["content"].splitlines() if line.startswith("Rows: "))
    return [character for character in rows if character.isdigit()]


async def first_free(dialogue: list[dict[str, str]], board: str) -> str:
    return prompts.write(int(free_in(dialogue)[0]) - 1)


def test_the_board_is_shown_line_by_line_with_numbers_on_free_squares() -> None:
    assert prompts.show("X...O....") == "Rows: X23 4O6 789\nColumns: X47 2O8 369\nDiagonals: XO9 3O7"


@pytest.mark.parametrize(
    ("answer", "square"),
    [
        ("<move>5</move>", 4),
        ("I take the corner: <move> 9 </move>", 8),
        ("<move>0</move>", None),
        ("<move>12</move>", None),
        ("<move>1</move><move>2</move>", None),
        ("<move>5", None),
        ("5", None),
        ("", None),
        (None, None),
    ],
)
def test_reading_an_answer(answer: str | None, square: int | None) -> None:
    assert prompts.read(answer) == square


def test_what_is_written_can_be_read() -> None:
    assert [prompts.read(prompts.write(square)) for square in range(9)] == list(range(9))


async def test_a_retry_extends_the_dialogue() -> None:
    player = Script("<move>1</move>", "hm", "<move>3</move>")
    game = await play_game(Start(mark="X", board="XXOO....."), "random", player, max_retries=2, seed=0)
    assert [answer.square for answer in game.answers[:2]] == [None, None]
    first, second, third = player.asked[:3]
    assert second[:1] == first
    assert [m["role"] for m in second] == ["user", "assistant", "user"]
    assert second[1]["content"] == "<move>1</move>"
    assert "Square 1 is taken" in second[2]["content"]
    assert third[:3] == second
    assert "not a move" in third[4]["content"]


async def test_too_many_unusable_answers_forfeit_the_game() -> None:
    player = Script("one", "two", "three")
    game = await play_game(Start(mark="X"), "random", player, max_retries=1, seed=0)
    assert (game.outcome, game.score, game.board) == ("forfeit", 0.0, EMPTY)
    assert len(game.answers) == 2
    assert player.answers == ["three"]


async def test_retries_are_counted_for_each_move() -> None:
    player = Script("?", "<move>3</move>")
    game = await play_game(Start(mark="X", board="XX.OO...."), "random", player, max_retries=1, seed=0)
    assert (game.outcome, game.score, game.board) == ("win", 1.0, "XXXOO....")


async def test_games_follow_their_seed_and_opponent() -> None:
    games = [await play_game(Start(mark="O"), "random", first_free, 0, seed) for seed in (1, 1, 2, 3, 4)]
    assert games[0] == games[1]
    assert len({game.board for game in games}) > 1
    against_perfect = [await play_game(Start(mark="O"), "perfect", first_free, 0, seed) for seed in range(50)]
    assert {game.outcome for game in against_perfect} == {"loss"}
    row_decides = await play_game(Start(mark="O", opponent="perfect"), "random", first_free, 0, 0)
    assert row_decides.skill == 1.0


async def test_random_play_scores_what_the_solver_says() -> None:
    rng = random.Random(0)

    async def player(dialogue: list[dict[str, str]], board: str) -> str:
        return prompts.write(int(rng.choice(free_in(dialogue))) - 1)

    games = [await play_game(Start(mark="XO"[seed % 2]), 0.5, player, 0, seed) for seed in range(1500)]
    exactly = both_sides(random_move, lambda board: solver.moves(board, 0.5))
    assert sum(game.score for game in games) / len(games) == pytest.approx(exactly, abs=0.04)


@pytest.mark.parametrize("board", ["XXXOO....", "XOX", "OOO......", "XXX...OOO"])
async def test_a_start_that_no_game_reaches_is_refused(board: str) -> None:
    with pytest.raises(ValueError, match="allowed: a position that a game can reach"):
        await play_game(Start(mark="X", board=board), "random", first_free, 0, 0)


# Scores


async def evaluate(factory, config, *games: GameResult):
    items = [EvalInputItem(id=str(number), output_obj=game) for number, game in enumerate(games)]
    async with asynccontextmanager(factory)(config, None) as info:
        return await info.evaluate_fn(EvalInput(eval_input_items=items))


async def test_score_and_step_scores() -> None:
    # X misses the win at 3 after an unreadable answer, O blocks it, X continues.
    blunder = await play_game(
        Start(mark="X", board="XX.OO....", opponent="perfect"), "random", Script("?", "<move>9</move>"), 1, 0
    )
    assert blunder.outcome == "loss"
    win = await play_game(Start(mark="X", board="XX.OO...."), "perfect", Script("<move>3</move>"), 1, 0)
    config = ScoreConfig(steps="value_lost", unplayable=0.25)
    blundered, won = (await evaluate(score, config, blunder, win)).eval_output_items
    assert (blundered.score, blundered.reasoning, blundered.step_scores) == (0.0, "loss", [-0.25, -1.0])
    assert (won.score, won.step_scores) == (1.0, [0.0])
    # Against a perfect O the five free squares are worth 1, 0.5, 0, 0 and 0: a random one 0.3.
    config = ScoreConfig(steps="value_gained", unplayable=0.25)
    blundered, won = (await evaluate(score, config, blunder, win)).eval_output_items
    assert blundered.step_scores == pytest.approx([-0.25, -0.3])
    assert won.step_scores == pytest.approx([0.7])
    plain = (await evaluate(score, ScoreConfig(), win)).eval_output_items[0]
    assert plain.step_scores is None
    lost = await evaluate(value_lost_per_move, ValueLostConfig(unplayable=0.25), blunder, win)
    assert [item.score for item in lost.eval_output_items] == [0.625, 0.0]


async def test_a_game_is_scored_from_its_json_too() -> None:
    win = await play_game(Start(mark="X", board="XX.OO...."), "perfect", Script("<move>3</move>"), 1, 0)
    for form in (win, win.model_dump(), win.model_dump_json()):
        assert (await evaluate(score, ScoreConfig(), form)).eval_output_items[0].score == 1.0
    unfinished = (await evaluate(score, ScoreConfig(), None)).eval_output_items[0]
    assert unfinished.score is None
    assert unfinished.error


# Data and starting model


def test_the_data_come_from_their_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--output_dir", str(tmp_path)])
    importlib.import_module("make_data").main()
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in EXAMPLE.glob("*.jsonl")}
    for name in made:
        assert (tmp_path / name).read_bytes() == (EXAMPLE / name).read_bytes()


def test_the_shipped_model_is_small_and_loads() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = EXAMPLE / "model"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer.encode("Any text, 漢字 too: X9")) == "Any text, 漢字 too: X9"


def test_an_extended_dialogue_begins_with_the_tokens_of_what_it_extends() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    for board in itertools.islice(solver.positions(), 0, None, 97):
        dialogue = [{"role": "user", "content": prompts.ask(board, rules.to_move(board))}]
        for answer in (prompts.write(4), "", "<move>", "X5O"):
            extended = [
                *dialogue,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": prompts.ask_again("That is not a move.")},
            ]
            before = tokenizer.apply_chat_template(dialogue, add_generation_prompt=True)["input_ids"]
            said = [*tokenizer.encode(answer), tokenizer.eos_token_id]
            after = tokenizer.apply_chat_template(extended, add_generation_prompt=True)["input_ids"]
            assert after[: len(before) + len(said)] == before + said


@pytest.mark.slow
def test_a_prompt_and_an_answer_are_short() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    for board in [*solver.positions()][::10]:
        if not rules.is_over(board):
            dialogue = [{"role": "user", "content": prompts.ask(board, rules.to_move(board))}]
            tokens = tokenizer.apply_chat_template(dialogue, add_generation_prompt=True)["input_ids"]
            assert len(tokens) == 16
    assert len(tokenizer.encode(prompts.write(4))) == 3


def test_the_starting_model_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model = importlib.import_module("make_model")
    for name in ("a", "b"):
        monkeypatch.setattr(sys, "argv", ["make_model.py", "--output_dir", str(tmp_path / name), "--steps", "1"])
        make_model.main()
    for file in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "a" / file).read_bytes() == (EXAMPLE / "model" / file).read_bytes()
    made, kept = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "a", EXAMPLE / "model"))
    assert made == kept | {"transformers_version": made["transformers_version"]}
