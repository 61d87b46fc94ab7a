"""`insitu doctor`: a healthy project is only estimated, and of sick ones each sickness is found with its cure."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from factories import MODEL, write_rows
from processes import run, serving

from insitu.doctor.diagnosis import Budget, Diagnosis, examine
from insitu.doctor.findings import Finding, Severity
from insitu.errors import ConfigError
from insitu.schemas.finetuning import FinetuneRunConfig

TOKEN = "t"
ROWS = [
    "You play X. Answer with a free square, as <move>N</move>.\n" + board
    for board in (
        "Rows: 123 456 789\nColumns: 147 258 369\nDiagonals: 159 357",
        "Rows: XO3 456 789\nColumns: X47 O58 369\nDiagonals: X59 357",
        "Rows: X2O 456 789\nColumns: X47 258 O69\nDiagonals: X59 O57",
        "Rows: X23 O56 789\nColumns: XO7 258 369\nDiagonals: X59 357",
        "Rows: X23 4O6 789\nColumns: X47 2O8 369\nDiagonals: XO9 3O7",
    )
]
"""The last one is held out."""


@pytest.fixture(scope="module")
def backend() -> Iterator[str]:
    with serving("backend", "--model", MODEL, "--port", 0, "--token", TOKEN) as (_, address):
        yield address


@pytest.fixture(scope="module")
def other_backend() -> Iterator[str]:
    with serving("backend", "--model", MODEL, "--port", 0, "--token", TOKEN) as (_, address):
        yield address


def project(folder: Path, adapter: dict[str, Any]) -> Path:
    """A healthy project."""
    config: dict[str, Any] = {
        "llms": {"player": {"_type": "policy", "max_tokens": 16, "max_retries": 0}},
        "functions": {"plan": {"_type": "python", "function": "doctor_parts:ask", "model": "player"}},
        "workflow": {"_type": "python", "function": "doctor_parts:ask", "model": "player"},
        "eval": {
            "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
            "evaluators": {"score": {"_type": "python", "function": "doctor_parts:score"}},
        },
        "trajectory_builders": {"episodes": {"_type": "insitu_traj_builder", "num_generations": 4}},
        "trainer_adapters": {"backend": {"_type": "insitu_trainer_adapter", **adapter}},
        "trainers": {"grpo": {"_type": "insitu_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "grpo",
            "trajectory_builder": "episodes",
            "trainer_adapter": "backend",
            "reward_function": {"name": "score"},
            "output_dir": str(folder / "run"),
        },
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "doctor_parts.py").write_text((Path(__file__).parents[1] / "support/doctor_parts.py").read_text())
    write_rows(folder, ROWS[:-1])
    write_rows(folder, ROWS[-1:], "held_out.jsonl")
    return folder / "config.yml"


async def diagnose(folder: Path, backend: str, *overrides: tuple[str, Any], budget: Budget | None = None) -> Diagnosis:
    file = project(folder, {"url": backend, "api_key": TOKEN})
    request = FinetuneRunConfig(config_file=file, override=tuple((key, json.dumps(value)) for key, value in overrides))
    return await examine(request, budget or Budget())


def serious(diagnosis: Diagnosis) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.severity is not Severity.NOTE]


async def test_a_healthy_project(tmp_path: Path, backend: str) -> None:
    """A backend at an address is not trained, so the time of a job is unknown."""
    validation = {"dataset": str(tmp_path / "held_out.jsonl"), "interval": 1}
    diagnosis = await diagnose(tmp_path, backend, ("finetuning.validation", validation))
    assert diagnosis.findings == []
    assert diagnosis.will_learn
    assert diagnosis.budget["episodes_played"] == 16
    assert (diagnosis.played["num_groups"], diagnosis.played["context_length"]) == (4, 256)
    estimate = diagnosis.estimate
    assert estimate.collect_seconds_per_epoch == pytest.approx(diagnosis.budget["seconds_played"])
    assert estimate.validation_seconds == pytest.approx(diagnosis.budget["seconds_played"] / 16)
    assert (estimate.validations, estimate.train_seconds_per_epoch, estimate.total_seconds) == (2, None, None)
    assert not (tmp_path / "run").exists()


async def test_a_trajectory_builder_whose_name_has_a_dot(tmp_path: Path, backend: str) -> None:
    block = {"_type": "insitu_traj_builder", "num_generations": 4}
    named = (("trajectory_builders", {"v1.5": block}), ("finetuning.trajectory_builder", "v1.5"))
    assert (await diagnose(tmp_path, backend, *named)).budget["episodes_played"] == 16


async def test_the_figures_of_pairs_are_those_of_episodes(tmp_path: Path, backend: str) -> None:
    diagnosis = await diagnose(
        tmp_path,
        backend,
        ("eval.evaluators.score.function", "doctor_parts:distinct"),
        ("trajectory_builders.episodes._type", "dpo_from_groups"),
        ("trainers.grpo._type", "insitu_dpo_trainer"),
        ("trainer_adapters.backend.training", {"method": "dpo"}),
    )
    played = diagnosis.played
    assert (played["num_episodes"], played["failed_episodes"], played["num_groups"]) == (16, 0, 4)
    assert 10 <= played["min_reward"] <= played["avg_reward"] <= played["max_reward"] < 11  # a pair's is a difference
    assert serious(diagnosis) == []


@pytest.mark.slow
async def test_workspaces_of_agents_that_fail_are_not_kept(tmp_path: Path, backend: str) -> None:
    """They would be in the folder of the run."""
    command = ["sh", "-c", "echo left > left.txt; exit 3"]
    workflow = {"_type": "command", "llm": "player", "command": command, "workspace": {"copy": "task"}}
    (tmp_path / "task").mkdir()
    diagnosis = await diagnose(tmp_path, backend, ("workflow", workflow))
    assert diagnosis.played["failed_episodes"] == 16
    assert "exit code 3" in "".join(finding.what for finding in diagnosis.findings)
    assert not (tmp_path / "run").exists()


STOPS, HARMS = Severity.STOPS_LEARNING, Severity.HARMS


def python(part: str) -> dict[str, str]:
    return {"_type": "python", "function": f"doctor_parts:{part}"}


def agent(part: str) -> tuple[str, Any]:
    return "workflow", {**python(part), "model": "player"}


def scored_by(part: str) -> tuple[str, Any]:
    return "eval.evaluators.score", python(part)


TRAINING = "trainer_adapters.backend.training"
CURRICULUM = "finetuning.curriculum_learning"


@pytest.mark.parametrize(
    ("override", "code", "severity", "where", "cure"),
    [
        (("llms.player.temperature", 0), "greedy_sampling", STOPS, "llms.player.temperature", "raise it"),
        (("llms.player.top_p", 1e-6), "same_answers", STOPS, "llms.player.temperature", "raise the temperature"),
        (("llms.player.max_tokens", 2), "cut_off", HARMS, "llms.player.max_tokens", "raise it"),
        (scored_by("always_half"), "constant_reward", STOPS, "eval.evaluators.score", "distinguishes good answers"),
        (scored_by("by_row"), "same_reward_in_groups", STOPS, "rows.jsonl", "neither too easy nor too hard"),
        (scored_by("moody"), "changing_scores", HARMS, "eval.evaluators.score", "no randomness"),
        (scored_by("broken"), "evaluator_error", STOPS, "eval.evaluators.score", "correct the evaluator"),
        (scored_by("not_a_number"), "nan_score", STOPS, "eval.evaluators.score", "a finite number"),
        (agent("fail"), "workflow_error", STOPS, "workflow", "correct the agent"),
        (agent("silent"), "no_output", STOPS, "workflow", "is a `return` missing?"),
        (agent("elaborate"), "prompt_too_long", STOPS, "trainer_adapters.backend.model", "shorten the prompts"),
        (agent("by_own_client"), "no_calls", STOPS, "workflow", "call the model of its llm"),
        (agent("rewrite"), "answers_rewritten", HARMS, "workflow", "as it was returned"),
        (("finetuning.target_functions", ["plan"]), "no_target_calls", STOPS, "target_functions (plan)", "<workflow>"),
        (("trainers.grpo.credit", "step"), "no_step_rewards", STOPS, "trainers.grpo.credit", "credit: episode"),
        ((TRAINING, {"learning_rate": 0}), "learning_rate_zero", STOPS, f"{TRAINING}.learning_rate", "raise it"),
        ((TRAINING, {"learning_rate": 5.0}), "learning_rate_high", STOPS, f"{TRAINING}.learning_rate", "lower it"),
        (
            (CURRICULUM, {"enabled": True, "initial_percentile": 1, "min_reward_diff": 2}),
            *("small_reward_differences", STOPS, f"{CURRICULUM}.min_reward_diff", "lower it below"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_sick_project(
    tmp_path: Path,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    override: tuple[str, Any],
    code: str,
    severity: Severity,
    where: str,
    cure: str,
) -> None:
    """Nothing else that is serious is found."""
    monkeypatch.setenv("POLICY", backend)
    diagnosis = await diagnose(tmp_path, backend, override)
    [finding] = serious(diagnosis)
    assert (finding.code, finding.severity) == (code, severity)
    assert where in finding.where
    assert cure in finding.change
    assert diagnosis.will_learn is (severity is HARMS)


async def test_a_conversation_whose_calls_extend_one_another_is_healthy(tmp_path: Path, backend: str) -> None:
    assert not serious(await diagnose(tmp_path, backend, agent("converse")))


@pytest.mark.slow
async def test_an_llm_on_another_server_than_the_trained_one(tmp_path: Path, backend: str, other_backend: str) -> None:
    llm = {"_type": "openai", "base_url": f"{other_backend}/v1", "api_key": TOKEN, "model_name": "policy"}
    [finding] = serious(await diagnose(tmp_path, backend, ("llms.player", {**llm, "max_tokens": 16})))
    assert (finding.code, finding.severity, finding.where) == ("other_server", HARMS, "llms.player.base_url")
    assert backend in finding.what
    assert other_backend in finding.what
    assert "_type: policy" in finding.change


async def test_rows_that_repeat_and_rows_that_are_held_out(tmp_path: Path, backend: str) -> None:
    rows = [{"id": n, "question": ROWS[n % 2]} for n in range(4)]
    file = tmp_path / "repeated.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        ("eval.general.dataset.file_path", str(file)),
        ("finetuning.validation", {"dataset": str(tmp_path / "rows.jsonl")}),
    ]
    repeated, held_out = sorted(
        serious(await diagnose(tmp_path, backend, *overrides)), key=lambda f: f.code, reverse=True
    )
    assert (repeated.code, repeated.severity, repeated.where) == ("repeated_rows", HARMS, str(file))
    assert "2 of 4 rows" in repeated.what
    assert "num_generations" in repeated.change
    assert (held_out.code, held_out.severity) == ("held_out_rows_trained", HARMS)
    assert "2 of 4 held-out rows" in held_out.what
    assert "finetuning.validation.dataset" in held_out.where


@pytest.mark.slow
@pytest.mark.usefixtures("forked_backends")
async def test_a_chat_template_that_changes_earlier_answers(tmp_path: Path) -> None:
    """Like those that strip the thinking of earlier turns."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    template = (MODEL / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("message['content']", "message['content'][-8:]"))
    file = project(tmp_path, {"model": str(model)})
    overrides = tuple((key, json.dumps(value)) for key, value in (agent("converse"),))
    diagnosis = await examine(FinetuneRunConfig(config_file=file, override=overrides), Budget(episodes=8))
    [finding] = serious(diagnosis)
    assert (finding.code, finding.severity) == ("prefix_broken", HARMS)
    assert "all 8 episodes need more than one training row, as call 1 continues call 0" in finding.what
    assert "<move>" in finding.what
    assert finding.where == "trainer_adapters.backend.model (chat template)"


@pytest.mark.parametrize(("part", "codes"), [("score", []), ("always_half", ["constant_reward"])])
async def test_a_trajectory_builder_of_a_plugin(tmp_path: Path, backend: str, part: str, codes: list[str]) -> None:
    """It plays a few rows as often as it does, and writes its evaluations elsewhere."""
    overrides = [
        ("general", {"plugins": ["doctor_parts"]}),
        ("trajectory_builders.episodes", {"_type": "three_evaluations"}),
        ("eval.general.output_dir", str(tmp_path / "evaluations")),
        scored_by(part),
    ]
    diagnosis = await diagnose(tmp_path, backend, *overrides, budget=Budget(episodes=3))
    assert [finding.code for finding in serious(diagnosis)] == codes
    assert (diagnosis.budget["rows"], diagnosis.budget["generations"]) == (3, None)
    assert (diagnosis.budget["episodes_played"], diagnosis.played["num_groups"]) == (9, 3)
    seconds = diagnosis.budget["seconds_played"]
    assert diagnosis.estimate.collect_seconds_per_epoch == pytest.approx(seconds / 9 * 12)
    assert not (tmp_path / "evaluations").exists()


async def test_time_that_is_over(tmp_path: Path, backend: str) -> None:
    diagnosis = await diagnose(tmp_path, backend, agent("hang"), budget=Budget(seconds=0.2))
    [finding] = diagnosis.findings
    assert (finding.code, finding.severity) == ("time_over", STOPS)
    assert "--seconds" in finding.change


async def test_what_has_ended_in_time_is_judged(tmp_path: Path, backend: str) -> None:
    """Also if no row is complete, and its answers have no limit."""
    parts = agent("hang_once"), scored_by("always_half"), ("llms.player.max_tokens", None)
    rows = ("trajectory_builders.episodes.rows_per_epoch", 2)
    diagnosis = await diagnose(tmp_path, backend, *parts, rows, budget=Budget(seconds=3))
    constant, over = diagnosis.findings
    assert (constant.code, constant.severity) == ("constant_reward", STOPS)
    assert (over.code, over.where) == ("time_over", "llms.player.max_tokens")
    assert over.change.startswith("set it, as answers have no limit")
    assert not diagnosis.will_learn
    assert diagnosis.estimate.episodes_bytes is not None, "of those that have ended"


@pytest.mark.slow
def test_a_job_that_wrecks_the_model(tmp_path: Path) -> None:
    file = project(tmp_path, {"model": str(MODEL), "training": {"learning_rate": 9e-3, "mini_batch_size": 2}})
    done = run("doctor", file, "--episodes", 8, "--json")
    [finding] = json.loads(done.stdout)["findings"]
    assert finding["code"] == "moved_far"


def test_the_command(tmp_path: Path) -> None:
    """It trains on a separate backend, and leaves the folder of the run alone."""
    file = project(tmp_path, {"model": str(MODEL), "training": {"learning_rate": 1e-3}})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text("{}")
    done = run("doctor", file, "--episodes", 8, "--json", PYTHONWARNINGS="error")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said.keys() == {"findings", "estimate", "memory", "budget", "played"}
    assert said["findings"] == []
    assert said["budget"]["episodes_played"] == 8
    estimate = said["estimate"]
    seconds = estimate["collect_seconds_per_epoch"] + estimate["train_seconds_per_epoch"]
    assert estimate["total_seconds"] == pytest.approx(estimate["start_seconds"] + seconds)
    assert estimate["checkpoint_bytes"] > 2 * (MODEL / "model.safetensors").stat().st_size
    assert estimate["backend_memory_bytes"] > estimate["checkpoint_bytes"]
    assert {path.name for path in tmp_path.iterdir()} >= {"run"}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]
    assert not (tmp_path / "run.1").exists()


def test_what_the_command_prints(tmp_path: Path, backend: str) -> None:
    file = project(tmp_path, {"url": backend, "api_key": TOKEN})
    done = run("doctor", "--config_file", file, "-o", "llms.player.temperature", 0)
    assert done.returncode == 1
    what, where, change, *estimate = done.stdout.splitlines()
    assert what.startswith("stops learning: all 4 groups sampled at temperature 0")
    assert what.endswith("[greedy_sampling]")
    assert (where, change[:18]) == ("  where: llms.player.temperature", "  change: raise it")
    assert [line.partition(":")[0].partition(" ")[0] for line in estimate] == [
        "played",
        "reward",
        "most",
        "time",
        "memory",
        "disk",
        "free",
    ]
    done = run("doctor", file, "-o", "llms.player.temprature", 0)
    assert done.returncode == 2
    assert "llms.player" in done.stderr


@pytest.mark.slow
def test_the_quickstart_is_only_estimated(tmp_path: Path) -> None:
    """The quickstart's rows have the same questions, but the opponent is random."""
    file = MODEL.parent / "grpo.yml"
    done = run("doctor", file, "--episodes", 32, folder=tmp_path, PYTHONWARNINGS="error")
    assert (done.returncode, done.stderr) == (0, "")
    played, reward, answers, time, memory, *parts, disk, free = done.stdout.splitlines()
    assert re.fullmatch(r"reward: \S+ on average, variance in \d+ % of groups", reward)
    assert re.match(r"most frequent answers: '.*' \(\d+\), '.*' \(\d+\), '", answers)
    assert played.startswith("played 32 episodes (4 rows x 8, at most 120 s) in ")
    assert re.match(
        r"time: about .*: 12 epochs of .* collecting and .* training, 4 validations of .*, and .* to start$", time
    )
    assert re.match(r"memory: about \d+ MB of \S+ GB that are free \(\S+ GB in all\); keys and values of ", memory)
    assert re.fullmatch(r"  measured +\S+ MB  the backend, in the job of this command", parts[-1])
    assert re.fullmatch(r"disk: about \S+ MB of episodes, \S+ MB of checkpoints", disk)
    assert free.startswith("free disk: ")
    assert not [*tmp_path.iterdir()]


async def test_one_episode_of_a_row_cannot_be_compared(tmp_path: Path, backend: str) -> None:
    """`finetune` refuses the file, too."""
    with pytest.raises(ConfigError, match=r"trajectory_builders.episodes.num_generations is 1"):
        await diagnose(tmp_path, backend, ("trajectory_builders.episodes.num_generations", 1))
