"""Whether a run may continue: what is compared with the run on disk, and with what the backend serves."""

import json
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from factories import digits_project

from insitu.builder import Builder
from insitu.collect.evaluation import held_out_scoring
from insitu.config import Config, load_config
from insitu.config.resolved import code_of, leaves, resolved_config
from insitu.errors import BackendError, ConfigError, InsituError
from insitu.runs.reader import RunReader
from insitu.runs.records import RunProgress, journal_record
from insitu.runs.resume import ResumableRun, check_same_run
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus
from insitu.schemas.finetuning import FinetuneRunConfig, TrainingJobStatus
from insitu.training.native.config import resolve_model

OLD, NEW = {"file": "held_out.jsonl", "sha256": "1"}, {"file": "moved.jsonl", "sha256": "2"}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(digits_project(tmp_path) / "config.yml")


def started_with(folder: Path, config: Config, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"config": resolved_config(config), **changes}
    (folder / "run.json").write_text(json.dumps(settings, default=str))
    return folder


def test_a_run_that_is_moved_aside_can_be_continued(tmp_path: Path, config: Config, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    builder, said = Builder(config), []
    for status, epoch in (("running", 1), ("completed", config.finetuning.num_epochs - 1)):
        started_with(Path("run"), config)
        progress = RunProgress(run_id="r", status=status, epoch=epoch, policy_version=epoch)
        Path("run/progress.json").write_text(progress.model_dump_json())
        Path("run/episodes.jsonl.gz").touch()
        run = ResumableRun("r2")
        said += run.open_folder(Path("run"), builder, {})
        run.store.close()
        rmtree("run")
    assert said == [
        "moved the earlier run in run, which was not complete, to run.1: --resume run.1 continues it",
        "moved the earlier run in run to run.2",
    ]


@pytest.mark.parametrize(("changed", "more"), [(10, ""), (12, "; and 2 more")])
def test_the_first_ten_changes_are_listed(tmp_path: Path, config: Config, changed: int, more: str) -> None:
    run = started_with(tmp_path, config)
    settings = json.loads((run / "run.json").read_text())
    training = settings["config"]["trainer_adapters"]["backend"]["training"]
    names = [key for key, value in leaves(training) if value is not None and "." not in key][:changed]
    assert len(names) == changed
    training |= dict.fromkeys(names, "other")
    (run / "run.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError) as raised:
        check_same_run(run, config, {}, force=False)
    said = str(raised.value)
    assert said.count(" was 'other' and is ") == 10
    assert said.partition(f"{more}. Set them as they were, or give --force")[2]
    assert len(check_same_run(run, config, {}, force=True)) == changed


def test_a_key_that_is_newer_than_the_run_is_a_change_only_if_it_is_set(tmp_path: Path, config: Config) -> None:
    run = started_with(tmp_path, config)
    settings = json.loads((run / "run.json").read_text())
    del settings["config"]["trainer_adapters"]["backend"]["training"]["clip_low"]
    (run / "run.json").write_text(json.dumps(settings))
    assert check_same_run(run, config, {}, force=False) == []
    config = load_config(Path(config.source), [("trainer_adapters.backend.training.clip_low", "0.1")])
    with pytest.raises(ConfigError, match=r"other settings: [\w.]+\.clip_low was None and is 0\.1\. Set"):
        check_same_run(run, config, {}, force=False)


@pytest.mark.parametrize(
    ("name", "before", "now", "is_other"),
    [
        ("held_out", OLD, NEW, True),
        ("held_out", {**OLD, "file": "elsewhere.jsonl"}, OLD, False),
        ("held_out", None, NEW, False),  # it is validated from now on
        ("held_out", OLD, None, False),
        ("dataset", None, NEW, True),
        ("dataset", OLD, None, True),
    ],
)
def test_inputs_are_compared_by_content(
    tmp_path: Path, config: Config, name: str, before: Any, now: Any, is_other: bool
) -> None:
    run = started_with(tmp_path, config, **{name: before})
    if not is_other:
        assert check_same_run(run, config, {name: now}, force=False) == []
        return
    was, place = (of["file"] if of else "none" for of in (before, now))
    with pytest.raises(ConfigError, match=f"dataset was {was} and is {place}[;.]"):
        check_same_run(run, config, {name: now}, force=False)
    if before and now:
        with pytest.raises(ConfigError, match=r"dataset held_out\.jsonl has changed"):
            check_same_run(run, config, {name: {**now, "file": "held_out.jsonl"}}, force=False)


def test_code_of_scores_may_not_change_and_that_of_agents_is_said(tmp_path: Path, write: Any) -> None:
    python = {"workflow": "changed_agent.py:answer", "score": "changed_scores.py:exact"}
    write("def answer(question): return question", "changed_agent.py")
    write("def exact(answer): return 1.0", "changed_scores.py")
    blocks = {name: {"_type": "python", "function": function} for name, function in python.items()}
    file = write({"workflow": blocks["workflow"], "eval": {"evaluators": {"exact": blocks["score"]}}})
    run = started_with(tmp_path, load_config(file), code=code_of(load_config(file)))
    write("def answer(question): return question.upper()", "changed_agent.py")
    assert check_same_run(run, load_config(file), {}, force=False) == ["the code of workflow has changed"]
    write("def exact(answer): return 0.5", "changed_scores.py")
    with pytest.raises(ConfigError, match=r"other settings: the code of eval\.evaluators\.exact has changed"):
        check_same_run(run, load_config(file), {}, force=False)
    assert len(check_same_run(run, load_config(file), {}, force=True)) == 2


def test_code_of_scores_in_a_file_of_its_own_may_not_change(tmp_path: Path, write: Any) -> None:
    write("def exact(answer): return 1.0", "held_scores.py")
    score = {"_type": "python", "function": "held_scores.py:exact"}
    held_out = write({"eval": {"evaluators": {"exact": score}}}, "held_out.yml")
    config = load_config(write({"finetuning": {"validation": {"config_file": str(held_out)}}}))
    started = started_with(tmp_path / "run", config, held_out_scoring=held_out_scoring(config))
    assert check_same_run(started, config, {"held_out_scoring": held_out_scoring(config)}, force=False) == []
    write("def exact(answer): return 0.5", "held_scores.py")
    origin = {"held_out_scoring": held_out_scoring(config)}
    with pytest.raises(ConfigError, match=rf"other settings: an evaluator in {held_out} has changed"):
        check_same_run(started, config, origin, force=False)


async def test_what_is_known_of_earlier_epochs_is_a_line_each(tmp_path: Path, config: Config) -> None:
    """The file that is written again after every epoch does not grow with them."""
    folder, run, sizes = tmp_path / "run", ResumableRun("r"), []
    builder = Builder(config, request=FinetuneRunConfig(config_file=config, resume=True))
    run.open_folder(folder, builder, {})
    started_with(folder, config)
    await run.commit(policy_version=0)
    for epoch in range(1, 8):
        run.rewards.append({"epoch": epoch, "avg_reward": epoch / 8})
        run.store.write("reward_history.json", run.rewards)
        job = TrainingJobStatus(run_id="r", backend="b", status="completed", message=str(epoch)) if epoch != 2 else None
        await run.commit(epoch=epoch, policy_version=epoch, job=job)
        sizes.append((folder / "progress.json").stat().st_size)
    run.store.write("reward_history.json", [*run.rewards, {"epoch": 8, "avg_reward": 1.0}])  # of an epoch that was cut
    run.unlock()
    assert max(sizes) - min(sizes) <= 5 * len(run.progress.sizes), "digits of sizes"
    continued = ResumableRun("other")
    continued.open_folder(folder, builder, {})
    continued.unlock()
    assert (continued.jobs, continued.rewards) == (run.jobs, run.rewards)
    assert [job.message for job in continued.jobs] == ["1", "3", "4", "5", "6", "7"]
    assert continued.version_after(2) == 2
    run.store.path.joinpath("reward_history.json").write_text("[3]")
    with pytest.raises(InsituError, match=r"reward_history\.json is damaged: 0 is 3: Input should be a JSON object"):
        RunReader(folder).rewards(7)


@pytest.mark.parametrize(
    ("status", "reasons", "submitted", "kept"),
    [
        ("failed", [DropReason.EVALUATOR_ERROR] * 2, 0, 0),  # and would fail again
        ("failed", [DropReason.EVALUATOR_ERROR, None], 0, 2),
        ("failed", [DropReason.EVALUATOR_ERROR] * 2, 1, 2),  # it is all that the job got
        ("running", [DropReason.EVALUATOR_ERROR] * 2, 0, 2),  # it was killed: they are the first of the epoch
    ],
)
@pytest.mark.parametrize("ahead", [0, 3])
async def test_an_epoch_of_which_nothing_could_be_trained_is_run_again(
    tmp_path: Path, config: Config, status: str, reasons: list[DropReason | None], submitted: int, kept: int, ahead: int
) -> None:
    """Its episodes are in no file any more, as the next process may be killed; those of the epoch after it are."""
    builder, run = Builder(config, request=FinetuneRunConfig(config_file=config, resume=True)), ResumableRun("r")
    run.open_folder(tmp_path / "run", builder, {})
    started_with(tmp_path / "run", config)
    run.progress = run.progress.model_copy(update={"submitted_epoch": submitted, "status": status})
    await run.commit(policy_version=0)
    played = EpisodeStatus.OK
    episodes = [Episode(EpisodeKey("r", 1, "0", n), played, reason=reason) for n, reason in enumerate(reasons)]
    episodes += [Episode(EpisodeKey("r", 2, "0", n), played) for n in range(ahead)]
    run.store.append("journal.jsonl", map(journal_record, episodes))
    run.unlock()
    continued = ResumableRun("other")
    (said,) = continued.open_folder(tmp_path / "run", builder, {})
    continued.unlock()
    assert [len(continued.finished(epoch)) for epoch in (1, 2)] == [kept, ahead]
    recorded = RunReader(tmp_path / "run").journal(1)
    assert [each.key for each in recorded] == [each.key for epoch in (1, 2) for each in continued.finished(epoch)]
    of = " and ".join(str(epoch) for epoch, number in ((1, kept), (2, ahead)) if number)
    assert said == "run r continues after epoch 0" + f" and {kept + ahead} episodes of epoch {of}" * bool(of)


async def test_what_was_recorded_with_token_ids_is_played_again_without(tmp_path: Path, config: Config) -> None:
    """After `redact` was added with --force, as those that are played now are not recorded: a job would get both."""
    builder = Builder(config, request=FinetuneRunConfig(config_file=config, resume=True, force=True))
    run = ResumableRun("r")
    run.open_folder(tmp_path / "run", builder, {})
    started_with(tmp_path / "run", config)
    await run.commit(policy_version=0)
    run.store.append("journal.jsonl", [journal_record(Episode(EpisodeKey("r", 1, "0", 0), EpisodeStatus.OK))])
    run.unlock()
    config.finetuning.redact.append("token_ids")
    continued = ResumableRun("other")
    said = continued.open_folder(tmp_path / "run", builder, {})
    continued.unlock()
    assert continued.finished(1) == RunReader(tmp_path / "run").journal(1) == []
    assert said == ["run r continues after epoch 0", *said[1:]]


def test_a_start_that_failed_does_not_name_the_model_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there was a run to continue."""
    monkeypatch.chdir(tmp_path)
    config = load_config(digits_project(tmp_path) / "config.yml")
    builder = Builder(config, request=FinetuneRunConfig(config_file=config, resume=True))
    (config.run_dir / "backend").mkdir(parents=True)
    (config.run_dir / "backend/started_from.json").write_text('{"model": "org/first"}')
    assert resolve_model("org/second", builder) == "org/second"
    with pytest.raises(ConfigError, match="second"):
        resolve_model("./models/second", builder)


@pytest.mark.parametrize("force", [False, True])
async def test_code_of_the_training_may_not_change(tmp_path: Path, config: Config, force: bool) -> None:
    def settings(digest: str) -> dict[str, Any]:
        return {"training": {"objective": {"_type": "python", "function": "mine:loss", "sha256": digest}}}

    folder, run = tmp_path / "run", ResumableRun("r")
    builder = Builder(config, request=FinetuneRunConfig(config_file=config, resume=True, force=force))
    run.open_folder(folder, builder, {})
    assert run.changed_code(settings("a")) == []
    started_with(folder, config, **settings("a"))
    await run.commit(policy_version=0)
    run.unlock()
    continued = ResumableRun("other")
    continued.open_folder(folder, builder, {})
    assert continued.changed_code(settings("a")) == []
    if force:
        changed = ["changed since the run was started: the code of training.objective"]
        assert continued.changed_code(settings("b")) == changed
    else:
        with pytest.raises(ConfigError, match=r"other code: that of training\.objective has changed\. Restore it"):
            continued.changed_code(settings("b"))
    continued.unlock()


async def test_which_versions_a_backend_may_serve(tmp_path: Path, config: Config) -> None:
    """Those that the run had, and one more where an earlier process may have trained the warm-up."""
    async with Builder(config) as builder:
        run = ResumableRun("r")
        run.open_folder(tmp_path / "run", builder, {})
        try:
            run.progress = RunProgress(run_id="r", epoch=2, policy_version=3)
            for version, warms_up in ((3, False), (4, True), (None, False)):
                run.check_version(version, warms_up=warms_up)
            for version, warms_up in ((2, True), (4, False), (5, True)):
                with pytest.raises(BackendError, match=f"was at policy version 3, but the backend serves .* {version}"):
                    run.check_version(version, warms_up=warms_up)
            run.progress = run.progress.model_copy(update={"warmed_up": True})
            with pytest.raises(BackendError, match="version 4: it has lost weights"):
                run.check_version(4, warms_up=True)
        finally:
            run.unlock()
