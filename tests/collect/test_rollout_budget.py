"""The rollout budget: waves, replacements and skipped rows are planned, whenever episodes end."""

import json
import random
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from equal_runs import differences
from factories import digits_project, read_lines, write_rows
from hypothesis import given
from hypothesis import strategies as st
from processes import run, run_project, start_project, wait_until

from insitu.algorithms.budget import Budget, Spending, choose_rows, draw_reserve, lacks_variance
from insitu.builder import Builder
from insitu.collect.collector import Member, PlayedGroup, Rollouts
from insitu.errors import ConfigError
from insitu.schemas.episodes import Episode, EpisodeKey, EpisodeStatus
from insitu.schemas.evaluation import EvalInputItem, EvaluationRunOutput
from insitu.training.budget import KnownGroups, PlannedRows
from insitu.training.episodes_builder import EpisodesBuilder, EpisodesBuilderConfig

SPENDING = {"planned_episodes", "extra_episodes", "saved_episodes", "replaced_groups", "skipped_rows"}
GENERATIONS, ROWS, EPOCHS = 4, 4, 4

# decisions


def play(
    rewards: dict[tuple[str, int], float | None], planned: int, budget: Budget | None, size: int, order: random.Random
) -> tuple[list[list[tuple[str, int]]], dict[str, PlayedGroup]]:
    """Plays episodes that end in any order; returns, for each that has ended, those that could then begin."""
    rows = [EvalInputItem(id=str(number)) for number in range(planned)]
    rollouts = Rollouts([(row, g) for row in rows for g in range(size)], budget, lambda episode: episode.reward)
    running: list[Member] = [*rollouts]
    begun = [[(str(row.id), generation) for row, generation in running]]
    ended: dict[str, PlayedGroup] = {}
    while running:
        row, generation = running.pop(order.randrange(len(running)))
        row_id = str(row.id)
        key = EpisodeKey("run", 1, row_id, generation)
        episode = Episode(key, EpisodeStatus.OK, reward=rewards[row_id, generation])
        if (group := rollouts.add(episode)) is not None:
            ended[row_id] = group
        new = [*rollouts]
        begun.append([(str(row.id), generation) for row, generation in new])
        running += new
    assert not rollouts.groups
    return begun, ended


def outcome(ended: dict[str, PlayedGroup]) -> dict[str, tuple[list[tuple[int, float | None]], int, str | None]]:
    return {
        row: (sorted((e.key.generation, e.reward) for e in group.episodes), group.saved, group.replaced_by)
        for row, group in ended.items()
    }


@given(st.data())
def test_the_same_is_played_in_any_order(data: st.DataObject) -> None:
    waves = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    planned, spare, size = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 6)), sum(waves)
    values = st.sampled_from([0.0, 0.0, 1.0, None])
    rewards = {(str(row), g): data.draw(values) for row in range(planned + spare) for g in range(size)}
    reserve = [EvalInputItem(id=str(planned + number)) for number in range(spare)]
    budget = Budget(tuple(waves), reserve, planned)
    begun, ended = play(rewards, planned, budget, size, random.Random(data.draw(st.integers())))
    _, again = play(rewards, planned, budget, size, random.Random(data.draw(st.integers())))
    assert outcome(ended) == outcome(again)
    played = [episode for each in begun for episode in each]
    assert len(played) == len({*played}), "no episode begins twice"
    spending = Spending.of(budget, planned * size)
    for row, group in ended.items():
        spending.add(group.saved, size if group.replaced_by is not None else 0)
        alike = lacks_variance([e.reward for e in group.episodes if e.reward is not None])
        assert group.saved == 0 or alike
        assert group.replaced_by is None or alike
        generations = sorted(e.key.generation for e in group.episodes)
        assert generations == [*range(len(generations))]
        assert len(generations) in {sum(waves[:number]) for number in range(1, len(waves) + 1)}
        if len(waves) > 1 and lacks_variance([r for g in range(waves[0]) if (r := rewards[row, g]) is not None]):
            assert group.saved == size - waves[0]
    assert spending.episodes == len(played) == sum(len(group.episodes) for group in ended.values())
    replaced = [group.replaced_by for group in ended.values() if group.replaced_by is not None]
    assert {*ended} == {str(row) for row in range(planned)} | {*replaced}
    assert spending.replaced_groups == len(replaced) == len({*replaced})


def test_without_a_budget_all_begin_at_once_in_the_planned_order() -> None:
    rewards: dict[tuple[str, int], float | None] = {(str(row), g): 1.0 for row in range(3) for g in range(2)}
    begun, ended = play(rewards, 3, None, 2, random.Random(0))
    assert begun[0] == [("0", 0), ("0", 1), ("1", 0), ("1", 1), ("2", 0), ("2", 1)]
    assert not any(begun[1:])
    assert {(group.saved, group.replaced_by) for group in ended.values()} == {(0, None)}


def test_failed_attempts_and_a_single_reward_say_nothing() -> None:
    assert [lacks_variance(rewards) for rewards in ([], [1.0], [0.0, 0.0], [0.0, 1.0])] == [False, False, True, False]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 30), st.sets(st.integers(0, 8)), st.integers(0, 5))
def test_skipped_rows_give_their_place_to_others(total: int, size: int, start: int, skip: set[int], seed: int) -> None:
    size = min(size, total)

    def row_at(position: int) -> str:
        number, place = divmod(position, total)
        return str(random.Random(f"{seed}|{number}").sample(range(total), total)[place])

    chosen = choose_rows(row_at, start, size, total, lambda row: int(row) in skip)
    rows = [int(row_at(position)) for position in chosen.positions]
    assert len({*rows}) == len(rows)
    assert rows
    assert start < chosen.end <= start + 2 * total
    others = {*range(total)} - skip
    if size < total:
        assert len(rows) == size
        assert not skip.intersection(rows) or others <= {*rows}
    else:
        assert {*rows} == others or (not others and len(rows) == 1)
    if not skip:
        first = list(dict.fromkeys(int(row_at(position)) for position in range(start, start + 2 * total)))
        assert rows == first[:size]
        assert chosen.skipped == 0


def test_no_two_positions_pick_the_same_row() -> None:
    rows = [EvalInputItem(id=number) for number in range(20)]
    reserve = draw_reserve(rows, lambda row: int(row) < 4, 3 * 4, 1, 0)
    budget = Budget((8,), reserve, 4)
    picked = [budget.replacement(position, number) for position in range(4) for number in (1, 2, 3)]
    assert len({row.id for row in picked if row is not None}) == 12
    assert budget.replacement(0, 4) is None
    few = Budget((8,), draw_reserve(rows[:7], lambda row: int(row) < 4, 3 * 4, 1, 0), 4)
    assert [few.replacement(position, 1) is None for position in range(4)] == [False, False, False, True]


@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 3))
def test_rows_are_planned_from_groups_that_are_known_then(
    tmp_path_factory: pytest.TempPathFactory, lag: int, size: int, seed: int
) -> None:
    """Epoch by epoch while lines are appended, and at once from the whole file, which a resumed run has."""
    path = tmp_path_factory.mktemp("run") / "groups.jsonl"
    path.write_text('{"format": 2}\n')
    rows, rng = [EvalInputItem(id=number) for number in range(6)], random.Random(seed)

    def order(number: int) -> list[EvalInputItem]:
        return random.Random(f"{seed}|{number}").sample(rows, len(rows))

    def planner() -> PlannedRows:
        return PlannedRows(rows, order, size, seed, 0.3, KnownGroups(path, lag))

    live, plans = planner(), []
    for epoch in range(1, 8):
        plans.append(live.of_epoch(epoch))
        settled = {str(row.id): rng.random() < 0.6 for row in plans[-1].rows}
        lines = [
            {"epoch": epoch, "row_id": row, "rewards": [1, 1] if alike else [0, 1]} for row, alike in settled.items()
        ]
        lines += [{"epoch": epoch, "row_id": next(iter(settled)), "rewards": [1]}] if epoch == 2 else []
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    resumed = planner()
    assert [[row.id for row in plan.rows] for plan in plans] == [
        [row.id for row in resumed.of_epoch(epoch).rows] for epoch in range(1, 8)
    ]
    assert all(plan.skipped == 0 and not plan.settled for plan in plans[:lag])
    assert planner().of_epoch(7) == plans[-1], "epochs in between are planned on the way"


# whole runs


def project(folder: Path, **budget: Any) -> Path:
    """Twelve rows, of which every other one has equal scores. Its episodes take very different times."""
    folder.mkdir()
    digits_project(folder)
    rows = [{"say": f"Row {n}", "pause": 0.04, **({"score": n % 4 / 2} if n % 2 else {})} for n in range(12)]
    write_rows(folder, rows)
    config = yaml.safe_load((folder / "config.yml").read_text())
    config["trajectory_builders"]["episodes"] |= {"rows_per_epoch": ROWS, "budget": budget}
    config["finetuning"]["num_epochs"] = EPOCHS
    config["trainer_adapters"]["backend"]["training"]["old_logprobs"] = "rollout"
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    return folder


def whole_run(folder: Path, *options: str) -> Path:
    code, _, err = run_project(folder, *options)
    assert code == 0, err
    return folder / "run"


ALL = {"waves": [2, 2], "replace": 2, "retry_solved": 0.4}
STALE = ("-o", "trainers.grpo.staleness", "1", "-o", "trainer_adapters.backend.keep.last", "4")


def groups_of(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "groups.jsonl")[1:]


def check_accounts(run: Path) -> list[dict[str, Any]]:
    """Everything that was planned was played, or is counted as saved; returns the metrics."""
    metrics, groups = read_lines(run / "training_metrics.jsonl"), groups_of(run)
    episodes = read_lines(run / "episodes.jsonl.gz")[1:]
    for line in metrics:
        of_epoch = [group for group in groups if group["epoch"] == line["epoch"]]
        played = sum(episode["epoch"] == line["epoch"] for episode in episodes)
        assert line["planned_episodes"] + line["extra_episodes"] - line["saved_episodes"] == played
        assert played == sum(group["num_episodes"] for group in of_epoch)
        assert line["saved_episodes"] == sum(group.get("saved", 0) for group in of_epoch)
        replaced = [group["replaced_by"] for group in of_epoch if "replaced_by" in group]
        assert line["replaced_groups"] == len(replaced)
        assert line["extra_episodes"] == GENERATIONS * len(replaced)
        assert {*replaced} <= {group["row_id"] for group in of_epoch}
        assert max(Counter(group["row_id"] for group in of_epoch).values()) == 1
        assert all(group["num_episodes"] + group.get("saved", 0) == GENERATIONS for group in of_epoch)
        silent = [group for group in of_epoch if len({*group["rewards"]}) == 1]
        assert line["dropped"].get("no_variance", 0) == sum(len(group["rewards"]) for group in silent)
        assert all(group in silent for group in of_epoch if "saved" in group or "replaced_by" in group)
        assert all("row" in group for group in of_epoch)
    return metrics


def test_equal_groups_end_between_waves_and_are_replaced(tmp_path: Path) -> None:
    run = whole_run(project(tmp_path / "project", waves=[2, 2], replace=2))
    metrics = check_accounts(run)
    assert sum(line["saved_episodes"] for line in metrics) > 0
    assert sum(line["replaced_groups"] for line in metrics) > 0
    assert all(line["planned_episodes"] == GENERATIONS * ROWS and line["skipped_rows"] == 0 for line in metrics)
    constant = [group for group in groups_of(run) if int(group["row_id"]) % 2]
    assert constant
    assert all(group["num_episodes"] == 2 for group in constant)
    lines = [line for line in groups_of(run) if "replaced_by" in line]
    assert len({(line["epoch"], line["replaced_by"]) for line in lines}) == len(lines)


@pytest.mark.slow
def test_the_console_counts_what_was_saved(tmp_path: Path) -> None:
    code, out, err = run_project(project(tmp_path / "project", **ALL))
    assert code == 0, err
    assert "  budget: waves [2, 2], replace 2, retry_solved 0.4\n" in out + err
    assert re.search(
        r" [1-9]\d* saved episodes, [1-9]\d* extra episodes, [1-9]\d* replaced groups, [1-9]\d* skipped rows", out + err
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), pytest.param(STALE, marks=pytest.mark.slow)], ids=["synchronous", "stale"])
def test_a_repeated_run_plays_the_same(tmp_path: Path, options: tuple[str, ...]) -> None:
    first = whole_run(project(tmp_path / "a", **ALL), *options)
    metrics = check_accounts(first)
    assert sum(line["skipped_rows"] for line in metrics) > 0
    second = whole_run(project(tmp_path / "b", **ALL), *options, "-o", "eval.general.max_concurrency", "3")
    assert [line for line in differences(first, second, {"digest"}) if "max_concurrency" not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), pytest.param(STALE, marks=pytest.mark.slow)], ids=["synchronous", "stale"])
def test_a_killed_run_is_resumed_to_the_bit(tmp_path: Path, options: tuple[str, ...]) -> None:
    whole = whole_run(project(tmp_path / "whole", **ALL), *options)
    killed, rng = project(tmp_path / "killed", **ALL), random.Random(1)
    journal, partial = killed / "run/journal.jsonl", 0
    for number in range(5):
        seen, many = {changed(journal)}, rng.randint(3, 14)
        with start_project(killed, *options, *(["--resume"] if number else [])) as process:

            def has_changed_often(seen: set[int] = seen, many: int = many, process: Any = process) -> bool:
                seen.add(changed(journal))
                return len(seen) > many or process.poll() is not None

            wait_until(has_changed_often)
            process.send_signal(signal.SIGKILL)
            process.wait()
        partial += journal.stat().st_size > 100
    assert partial, "some were killed with finished episodes in the journal"
    whole_run(killed, *options, "--resume")
    told = ("events.jsonl: event resumed", "backend/jobs/")  # a job that was canceled has a record
    assert [line for line in differences(whole, killed / "run", {"digest"}) if not line.startswith(told)] == []
    check_accounts(killed / "run")


def changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.slow
def test_a_budget_that_saves_nothing_changes_nothing(tmp_path: Path) -> None:
    """Neither does the block without keys, nor is a key written without the block."""
    saving = project(tmp_path / "budget")
    plain = project(tmp_path / "plain")
    config = yaml.safe_load((plain / "config.yml").read_text())
    del config["trajectory_builders"]["episodes"]["budget"]
    (plain / "config.yml").write_text(yaml.safe_dump(config))
    runs = [whole_run(folder) for folder in (saving, plain)]
    assert differences(*runs, SPENDING | {"budget", "digest"}) == []
    assert all(SPENDING.isdisjoint(line) for line in read_lines(runs[1] / "training_metrics.jsonl"))


@pytest.mark.slow
def test_a_fork_plans_the_same_rows(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", **ALL)
    first = whole_run(folder)
    forked = run("runs", "fork", "run", "forked", "--epoch", "3", folder=folder)
    assert forked.returncode == 0, forked.stderr
    second = whole_run(folder, "-o", "finetuning.output_dir", "forked", "--resume").with_name("forked")
    plans = [[(g["epoch"], g["row_id"], g["rewards"]) for g in groups_of(each)] for each in (first, second)]
    assert sorted(plans[0]) == sorted(plans[1])
    assert check_accounts(first)[-1]["skipped_rows"] == check_accounts(second)[-1]["skipped_rows"] > 0


@pytest.mark.slow
def test_validation_plays_all_of_its_rows(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", **ALL)
    write_rows(folder, [{"say": "Held out", "score": 1}] * 3, "validation.jsonl")
    run = whole_run(folder, "--validation_dataset", "validation.jsonl", "-o", "finetuning.validation.reps", "2")
    history = json.loads((run / "validation_history.json").read_text())
    assert {record["num_examples"] for record in history} == {6}


def with_trainer(folder: Path, trainer: dict[str, Any]) -> None:
    config = yaml.safe_load((folder / "config.yml").read_text())
    config["trainers"]["grpo"] = trainer
    (folder / "config.yml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("budget", "trainer", "problem"),
    [
        ({"waves": [2, 3]}, {}, "budget.waves [2, 3] are 5 attempts; allowed: as many as num_generations, 4"),
        ({"waves": [1, 3]}, {}, "budget.waves [1, 3]: a single attempt"),
        ({"waves": [4, 0]}, {}, "trajectory_builders.episodes.budget.waves.1"),
        ({"replace": -1}, {}, "trajectory_builders.episodes.budget.replace"),
        ({"retry_solved": 0}, {}, "trajectory_builders.episodes.budget.retry_solved"),
        ({"replace": 1}, {"_type": "insitu_kto_trainer"}, "episodes.budget: insitu_kto_trainer also trains rows"),
        ({"replace": 1}, {"_type": "insitu_sft_trainer"}, "episodes.budget: insitu_sft_trainer also trains rows"),
        ({"replace": 1}, {"_type": "insitu_trainer", "credit": "step"}, "episodes.budget compares the rewards"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, budget: dict[str, Any], trainer: dict[str, Any], problem: str
) -> None:
    folder = project(tmp_path / "project", **budget)
    if trainer:
        with_trainer(folder, trainer)
    code, _, err = run_project(folder)
    assert code == 2
    assert problem in err


class OwnEvaluation(EpisodesBuilder):
    async def run_eval(self) -> EvaluationRunOutput:
        raise NotImplementedError


def test_a_builder_that_plays_by_itself_has_no_budget() -> None:
    config = EpisodesBuilderConfig(budget={"replace": 1})
    with pytest.raises(ConfigError, match="budget: with run_eval no episodes are planned"):
        OwnEvaluation(config, Builder())


def test_combinations_that_contradict_are_refused(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", retry_solved=0.5)
    code, _, err = run_project(folder, "-o", "finetuning.curriculum_learning.enabled", "true")
    assert (code, "budget.retry_solved is 0.5, but finetuning.curriculum_learning" in err) == (2, True), err
    code, _, err = run_project(folder, "-o", "trajectory_builders.episodes.episodes_from", "run")
    assert (code, "episodes.budget: with episodes_from" in err) == (2, True), err
    code, _, err = run_project(folder, "-o", "trajectory_builders.episodes._type", "dpo_from_groups")
    assert (code, "episodes: key 'budget' does not exist" in err) == (2, True), err
