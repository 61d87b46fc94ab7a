"""Training on preferences, desirable episodes and the best ones, and the warm-up, on a real backend."""

import io
import json
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from factories import read_lines
from marks import slow_after
from rich.console import Console
from test_inspection import show
from test_preference_builders import file
from test_view import shown as served_folder
from tiny_backend import Served

from insitu.errors import ConfigError, TrajectoryError
from insitu.runs.reader import RunReader
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.training.runtime import finetuning_main
from insitu.training.warm_up import read_demonstrations

ASK = {"_type": "preference_ask", "llm": "player"}


def project(write: Any, served: Served, method: str, builder: dict[str, Any], **changes: Any) -> Path:
    write([{"id": f"r{i}", "question": f"row {i}", "answer": "sure"} for i in range(2)], "rows.jsonl")
    content = file(served, builder, **changes)
    content["llms"]["player"] = {"_type": "policy", "max_tokens": 3}
    training = {"method": method, "learning_rate": 1e-3}
    content["trainer_adapters"]["a"]["training"] = training
    content["trainers"]["t"] = {"_type": f"insitu_{method}_trainer"}
    if method == "grpo":
        content["trainers"]["t"] = {"_type": "insitu_trainer"}
    output = str(write("", "run/x").parent)
    content["finetuning"] |= {"target_model": None, "num_epochs": 2, "output_dir": output}
    return write(content)


async def train(path: Path, *overrides: tuple[str, str]) -> tuple[list[dict[str, Any]], str]:
    console = Console(file=io.StringIO(), width=200)
    await finetuning_main(FinetuneRunConfig(config_file=path, override=overrides), console)
    return read_lines(path.parent / "run/training_metrics.jsonl"), console.file.getvalue()


@pytest.mark.slow
async def test_each_round_of_dpo_collects_with_the_newest_weights(write: Any, served: Served) -> None:
    lines, printed = await train(project(write, served, "dpo", {"_type": "dpo_traj_builder"}))
    assert [line["policy_version"] - lines[0]["policy_version"] for line in lines] == [0, 1]
    for line in lines:
        assert 0 < line["pairs"] <= line["num_trajectories"]
        assert line["num_trajectories"] == line["pairs"] + line["dropped"].get("duplicate_pair", 0)
        assert {"loss", "rewards/accuracies", "rewards/margins", "logps/chosen"} <= line.keys()
    assert "preference pairs" in printed
    run = write("", "run/x").parent
    settings = json.loads((run / "run.json").read_text())
    assert settings["training"]["dpo"]["beta"] == 0.1
    assert settings["deduplicate_pairs"] is True
    [first, *_] = [line for line in read_lines(run / "episodes.jsonl.gz") if "episode" in line]
    assert first["outcome"] == "ok"


@pytest.mark.slow
async def test_at_most_max_pairs_are_trained(write: Any, served: Served) -> None:
    path = project(write, served, "dpo", {"_type": "dpo_traj_builder"})
    lines, _ = await train(path, ("trainers.t.max_pairs", "2"), ("trainers.t.deduplicate_pairs", "false"))
    for line in lines:
        assert line["pairs"] == 2
        assert line["dropped"]["max_pairs"] == line["num_trajectories"] - 2


async def test_an_epoch_whose_candidates_are_alike_trains_nothing_and_the_run_continues(
    write: Any, served: Served
) -> None:
    path = project(write, served, "dpo", {"_type": "dpo_traj_builder", "min_score_diff": 99.0})
    with pytest.raises(TrajectoryError, match=r"^no epoch trained anything: .* small_difference ") as failed:
        await train(path)
    async with served_folder(path.parent / "run") as page:
        summary = (await page.get("run"))["summary"]
    assert summary["status"] == "failed"
    assert summary["error"] == f"TrajectoryError: {failed.value}", "without a file and a line of ours"
    lines = read_lines(path.parent / "run/training_metrics.jsonl")
    assert [(line["epoch"], line["num_trajectories"], line["avg_reward"]) for line in lines] == [
        (1, 0, None),
        (2, 0, None),
    ]


async def test_candidates_that_cannot_be_compared_are_explained(write: Any, served: Served) -> None:
    path = project(write, served, "dpo", {"_type": "dpo_traj_builder"})
    problem = r"^epoch 1: no preference pair can be trained on; dropped: 4 single_candidate"
    with pytest.raises(TrajectoryError, match=problem):
        await train(path, ("ttc_strategies.sample.n", "1"))


async def test_a_run_records_the_absolute_path_of_its_file(
    write: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one could name another file in the directory in which the run is read. And it records its options."""
    path = project(write, served, "sft", {"_type": "insitu_traj_builder", "num_generations": 1}, workflow=ASK)
    monkeypatch.chdir(path.parent)
    options = [("finetuning.reward_function.name", "score"), ("finetuning.num_epochs", "1")]
    secret = ("llms.judge", "{_type: openai, model_name: j, base_url: http://127.0.0.1:9/v1, api_key: k}")
    await train(Path(path.name), *options, secret, ("finetuning.output_dir", "run"))
    settings = json.loads((path.parent / "run/run.json").read_text())
    assert settings["source"] == str(path)
    assert settings["override"] == {**dict(options), "llms.judge": "***", "finetuning.output_dir": "run"}
    assert RunReader(path.parent / "run").overrides() == options


async def test_whole_episodes_are_paired_by_their_rewards(write: Any, served: Served) -> None:
    builder = {"_type": "dpo_from_groups", "num_generations": 4}
    path = project(write, served, "dpo", builder, workflow=ASK)
    lines, printed = await train(path, ("finetuning.reward_function.name", "score"))
    assert [line["pairs"] for line in lines] == [2, 2]
    folder = path.parent / "run"
    async with served_folder(folder) as page:
        assert (await page.get("run"))["epochs"] == lines
    said = re.findall(
        r"^epoch (\d)/2  reward (\S+) std (\S+)  (\d+) preference pairs  variance in (\d+) % .* collect (\S+) s",
        printed,
        re.M,
    )
    episodes = [line for line in read_lines(folder / "episodes.jsonl.gz") if "episode" in line]
    history = json.loads((folder / "reward_history.json").read_text())
    for line, entry, words in zip(lines, history, said, strict=True):
        rows = [[e for e in episodes if (e["epoch"], e["row_id"]) == (line["epoch"], row)] for row in ("r0", "r1")]
        groups = [[e["reward"] for e in row if e["reward"] is not None] for row in rows]
        rewards = [reward for group in groups for reward in group]
        assert line["num_episodes"] == len(rewards) == 8
        assert line["avg_reward"] == pytest.approx(fmean(rewards))
        assert line["scores"] == {"score": pytest.approx(fmean(rewards))}
        assert (line["min_reward"], line["max_reward"]) == (min(rewards), max(rewards))
        assert line["reward_std"] == pytest.approx(fmean(map(stdev, groups)))
        assert entry["avg_reward"] == line["avg_reward"]
        varied = sum(len({*group}) > 1 for group in groups)
        assert line["frac_reward_zero_std"] == 1 - varied / 2
        pairs, collecting = 2, line["seconds"]["collect"]
        told = [line["epoch"], fmean(rewards), fmean(map(stdev, groups)), pairs, 100 * varied / 2, collecting]
        assert [*map(float, words)] == pytest.approx(told, rel=0.05, abs=0.05)  # they are rounded
        listed = shown(folder, "--epoch", line["epoch"])
        assert sorted(each for each in listed.values() if each.startswith("trained")) == [
            *(["trained  chosen"] * 2),
            *(["trained  rejected"] * 2),
        ]
        assert {each for each in listed.values() if not each.startswith("trained")} <= {"dropped: no_pair"}
        chosen = next(name for name, status in listed.items() if status == "trained  chosen")
        described = show(folder, "--episode", chosen).out
        assert "trained with 2 of 2 calls as chosen\n" in described
        assert "pair 0: chosen this episode (" in described
        assert " rejected insitu_run_" in described
        assert ", margin " in described


@pytest.mark.parametrize(
    ("method", "builder", "expected"),
    slow_after(
        2, [("kto", {"num_generations": 3}, 6), ("sft", {"num_generations": 3}, 2), ("sft", {"num_generations": 1}, 2)]
    ),
)
async def test_episodes_are_trained_without_pairs(
    write: Any, served: Served, method: str, builder: dict[str, Any], expected: int
) -> None:
    path = project(write, served, method, {"_type": "insitu_traj_builder", **builder}, workflow=ASK)
    lines, _ = await train(path, ("finetuning.reward_function.name", "score"))
    for line in lines:
        assert line["filtered_trajectories"] == expected - line["dropped"].get("no_variance", 0)
        assert line["dropped"].get("not_best", 0) == (2 * builder["num_generations"] - 2 if method == "sft" else 0)
        assert line["loss"] > 0
    as_what = set(shown(path.parent / "run", "--outcome", "trained").values())
    assert as_what <= ({"trained  best"} if method == "sft" else {"trained  desirable", "trained  undesirable"})
    assert as_what


def shown(folder: Path, *options: Any) -> dict[str, str]:
    """What `insitu trajectories show` lists as the status of each episode."""
    lines = (line.split("  ", 1) for line in show(folder, *options).out.splitlines())
    return {name: rest.partition("call")[2].lstrip("s").strip() for name, rest in lines}


SHOWN = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}'


def test_the_last_demonstration_may_lack_its_newline(tmp_path: Path) -> None:
    (tmp_path / "shown.jsonl").write_text(f"{SHOWN}\n\n{SHOWN}")
    assert len(read_demonstrations(tmp_path / "shown.jsonl", "rows")) == 2
    with pytest.raises(ConfigError, match=r"^rows: .* cannot be read: Is a directory"):
        read_demonstrations(tmp_path, "rows")


def test_exported_dialogues_are_demonstrations(tmp_path: Path) -> None:
    """The tools as TRL takes them, and the `weight` of OpenAI's API."""
    asked, tools = {"role": "user", "content": "hi"}, [{"type": "function", "function": {"name": "look"}}]
    first, second = ({"role": "assistant", "content": text} for text in ("yo", "yes"))
    for_trl = {"messages": [asked, first, asked, second], "tools": json.dumps(tools)}
    for_openai = {"messages": [asked, first | {"weight": 0}, asked, second], "tools": tools}
    file = tmp_path / "shown.jsonl"
    file.write_text(f"{json.dumps(for_trl)}\n{json.dumps(for_openai)}\n")
    rows = read_demonstrations(file, "rows")
    assert [(row.tools, row.trained_messages) for row in rows] == [(tools, None), (tools, [3])]


async def test_demonstrations_are_imitated_before_the_first_epoch(write: Any, served: Served) -> None:
    user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
    write([{"messages": [user, assistant]}] * 3, "shown.jsonl")
    path = project(write, served, "grpo", {"_type": "insitu_traj_builder", "num_generations": 3}, workflow=ASK)
    warm_up = (("trainers.t.sft", "{rows: shown.jsonl, epochs: 2}"), ("finetuning.num_epochs", "1"))
    [line], printed = await train(path, *warm_up, ("finetuning.reward_function.name", "score"))
    done = json.loads((path.parent / "run/warm_up.json").read_text())
    assert (done["rows"], done["steps"], done["policy_version"] + 1) == (3, 2, line["policy_version"])
    assert "warm-up: 3 dialogues  loss " in printed


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("", r"shown.jsonl has no dialogues"),
        ("[]\n", r"shown.jsonl, line 1"),
        ('{"messages": []}\n', r"shown.jsonl, line 1: messages: List should have at least 2 items"),
        (None, r"'shown.jsonl' does not exist"),
        (f"{SHOWN}\n\n{SHOWN[:-9]}", r"shown.jsonl, line 3 is not JSON"),
        (f"{SHOWN}\n{SHOWN.replace('assistant', 'user')}\n", "line 2: messages: no message of the role assistant"),
        (SHOWN.replace('"role": "user", ', ""), r"shown.jsonl, line 1: messages.0.role: Field required"),
        (SHOWN.replace('"hi"', "3"), r"shown.jsonl, line 1: messages.0.content.str: Input should be a valid string"),
        (SHOWN.replace(', "content": "yo"', ""), r"line 1: messages.1: .* has neither content nor tool_calls"),
    ],
)
async def test_demonstrations_that_cannot_be_read(write: Any, served: Served, rows: str | None, problem: str) -> None:
    if rows is not None:
        write(rows, "shown.jsonl")
    path = project(write, served, "grpo", {"_type": "insitu_traj_builder"}, workflow=ASK)
    with pytest.raises(ConfigError, match=rf"^trainers\.t\.sft\.rows: .*{problem}"):
        await train(path, ("trainers.t.sft.rows", "shown.jsonl"), ("finetuning.reward_function.name", "score"))


async def test_a_demonstration_that_is_too_long_is_named(write: Any, served: Served) -> None:
    write(SHOWN + "\n" + SHOWN.replace("yo", "yo " * 5000), "shown.jsonl")
    path = project(write, served, "grpo", {"_type": "insitu_traj_builder"}, workflow=ASK)
    with pytest.raises(TrajectoryError, match=r"the warm-up on shown\.jsonl was refused: .*row 2: .* tokens"):
        await train(path, ("trainers.t.sft.rows", "shown.jsonl"), ("finetuning.reward_function.name", "score"))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([("trainers.t", "{_type: insitu_trainer}")], "dpo_traj_builder makes preference pairs, but insitu_trainer"),
        (
            [("trainers.t", "{_type: insitu_kto_trainer}")],
            "makes preference pairs, but insitu_kto_trainer trains episo",
        ),
        ([("trainer_adapters.a.training", "{method: grpo}")], "training.method is grpo, but the trainer insitu_dpo_"),
        ([("finetuning.curriculum_learning.enabled", "true")], "but insitu_dpo_trainer has no curriculum"),
        (
            [
                ("trajectory_builders.pairs", "{_type: insitu_traj_builder}"),
                ("finetuning.reward_function.name", "score"),
            ],
            "insitu_traj_builder makes episodes, but insitu_dpo_trainer trains preference pairs",
        ),
        ([("trainer_adapters.a.training.clip_low", "0.1")], "clip_low requires method: grpo, not dpo"),
        ([("trainer_adapters.a.training.kto", "{}")], "kto requires method: kto, not dpo"),
    ],
)
async def test_parts_that_do_not_fit_together_are_refused(
    write: Any, served: Served, overrides: list[tuple[str, str]], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        await train(project(write, served, "dpo", {"_type": "dpo_traj_builder"}), *overrides)
