"""`insitu.finetune` and `insitu.evaluate`: from functions, rows and keywords to a run.

    run = insitu.finetune(answer, score, train="train.jsonl", held_out="held_out.jsonl", model="my_model", epochs=15)

The keywords become the settings that a YAML file would hold, which are checked and then run as the command line does.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from insitu.agents.python import binder
from insitu.api.results import Evaluation, Run
from insitu.api.settings import Project
from insitu.collect.datasets import find_dataset
from insitu.collect.evaluation import held_out_record
from insitu.config import SECTIONS, Config, check_config
from insitu.config.code import stop_import, takes
from insitu.config.resolved import nested
from insitu.disk.files import writable_folder
from insitu.disk.folder_lock import FolderLock
from insitu.errors import ConfigError, InsituError, not_found
from insitu.runs.checkpoints import model_of_run
from insitu.runs.files import holds_run
from insitu.runs.reader import Problems, RunReader
from insitu.runs.resume import check_same_run, find_run
from insitu.runs.store import OUTPUT_DIR, set_aside
from insitu.schemas.evaluation import EvaluationRunConfig
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.schemas.training_jobs import TrainingSettings
from insitu.starter import tiny_training
from insitu.training.logs import suppress_logs
from insitu.training.runtime import check_run, evaluation_main, finetuning_main
from insitu.wire.redaction import remember_environment, results_console
from insitu.workflow.event_loop import run_anywhere

Rows = Any
"""A path (.json .jsonl .csv .parquet .xlsx), a list of mappings, or a table of pandas, polars or datasets."""
CONFIG = "config.yml"


def finetune(
    agent: Any = None,
    score: Any = None,
    *,
    train: Rows = None,
    held_out: Rows = None,
    model: str | None = None,
    epochs: int | None = None,
    generations: int | None = None,
    rows_per_epoch: int | None = None,
    method: str | None = None,
    learning_rate: float | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    url: str | None = None,
    framework: str | None = None,
    reward: str | None = None,
    max_concurrency: int | None = None,
    validation_interval: int | None = None,
    seed: int | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    console: Console | None = None,
    **sections: Any,
) -> Run:
    """Trains the model behind an agent and returns the run.

    `agent` is a function of a row's question, which gets the model in its parameter `model`; a function whose only
    parameter is `model` and that builds an agent; or an agent object of `framework`. It may be asynchronous or not.
    In its place, `url` is that of a service, and the section `workflow` says how it is asked (see `_type: http`).
    `score` is a function of the answer; the `_type` of an evaluator, such as "exact_match"; an evaluator's block; or a
    mapping of these by name, of which `reward` (by default the first) is trained on. `train` and `held_out` are rows;
    `model` is a folder or a name on the Hugging Face Hub. `generations` is the number of episodes per row and epoch.

    `config` is a YAML file, or its contents, that the keywords change; without it they change the defaults. `sections`
    are sections of such a file, whose keys take precedence: `finetuning={"num_epochs": 15}`. `output_dir` is
    `runs/<name of the agent>` by default, and an earlier run in it is moved aside, unless `resume` continues it. The
    settings are written there, as config.yml. Prints progress to `console`, by default standard output.

    Works in a script, and in a notebook, whose event loop runs already. Raises InsituError, as the command line would
    report it: ConfigError before anything is started.
    """
    project, output = _project(finetune, locals(), "train", "finetuning.output_dir", "runs")
    project.set("finetuning.enabled", True)
    set_tiny_training(project, config, sections)
    train, held_out = (list(rows) if isinstance(rows, Iterator) else rows for rows in (train, held_out))  # read twice
    checked = partial(checked_settings, project, ("train", train), held_out, sections)
    with errors_in_words(project, project.keywords()):
        request = start_request(checked, output, resume)
        run_anywhere(lambda: finetuning_main(request, console or results_console()))
    return Run(output, request.config_file)  # type: ignore[arg-type]  # as checked


def evaluate(
    agent: Any = None,
    score: Any = None,
    rows: Rows = None,
    *,
    model: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    repetitions: int = 1,
    temperature: float | None = None,
    max_tokens: int | None = None,
    url: str | None = None,
    framework: str | None = None,
    max_concurrency: int | None = None,
    seed: int | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    console: Console | None = None,
    **sections: Any,
) -> Evaluation:
    """Scores an agent on rows, with `model` or the weights of a `checkpoint`, and returns the scores.

    The other parameters are those of `finetune`. `checkpoint` is a folder of weights, or a run's directory (its best
    weights); it replaces the model of a `config`. Raises InsituError if nothing could be scored, ConfigError before
    anything is started.
    """
    if model is None and config is None and checkpoint is not None:
        model = model_of_run(os.fspath(checkpoint), "checkpoint")
    project, output = _project(evaluate, locals(), "rows", "eval.general.output_dir", "evaluations")
    weights = None if checkpoint is None else Path(checkpoint)
    printed = console or results_console()
    if type(repetitions) is not int or repetitions < 1:
        raise ConfigError(f"repetitions is {repetitions!r}; it must be a whole number of at least 1")
    if holds_run(output):
        raise ConfigError(f"output_dir: {output} holds a run, whose files would be replaced; give another folder")
    with errors_in_words(project, project.keywords()):
        checked = checked_settings(project, ("rows", rows), None, sections, output)
        request = EvaluationRunConfig(config_file=checked, reps=repetitions)
        done = run_anywhere(lambda: evaluation_main(request, weights, printed, printed))
    return Evaluation(output, done)


@contextmanager
def errors_in_words(project: Project, names: Mapping[str, str]) -> Iterator[None]:
    """In the body, errors call keys by these names, those of the call, and name no file that it has written itself."""
    try:
        yield
    except InsituError as error:
        text = str(error).replace(f"{project.output / CONFIG}:\n  ", "").replace(f"{project.output / CONFIG}: ", "")
        for key, name in names.items():
            text = re.sub(rf"(?<![\w./]){re.escape(key)}(?![\w/]|\.\w)", name, text)
        error.args = (text, *error.args[1:])
        raise


def _project(
    call: Callable[..., Any], arguments: Mapping[str, Any], rows: str, output_key: str, parent: str
) -> tuple[Project, Path]:
    """The settings of a call with these arguments, and the output folder, by default in `parent`.

    `rows` is the keyword of its rows. For `finetune` and `evaluate` alone: the caller is theirs.
    """
    caller = sys._getframe(2).f_globals
    stop_import(str(caller.get("__name__")))
    config, agent, score, url = (arguments[name] for name in ("config", "agent", "score", "url"))
    sections, framework, reward = arguments["sections"], arguments["framework"], arguments.get("reward")
    _check_keywords(call, sections)
    given = {"an agent": agent, "a score": score, "rows": arguments[rows], "model": arguments["model"]}
    _check_complete(config, sections, given, url)
    remember_environment(os.environ)
    project = Project.of(config, caller)
    if agent is not None:
        project.settings["workflow"] = agent_block(agent, project.code(agent, caller), framework, project.student)
    if score is not None:
        _set_scores(project, score, reward, caller)
    elif reward is not None:
        project.set("finetuning.reward_function.name", reward)
    _set_external(project, agent, url, sections.get("workflow"))
    output = set_output(project, output_key, arguments["output_dir"], f"{parent}/{_name_of(agent)}")
    project.set_keywords(arguments)
    return project, output


def _check_keywords(function: Callable[..., Any], sections: Mapping[str, Any]) -> None:
    """Raises ConfigError for a keyword that is neither a parameter nor a section of a file."""
    known = [name for name, each in inspect.signature(function).parameters.items() if each.kind is not each.VAR_KEYWORD]
    for name in sections:
        if function is finetune and name in TrainingSettings.model_fields:
            example = f'finetuning={{"training": {{"{name}": ...}}}}'
            raise ConfigError(f"{name} is a key of training, not a keyword; give {example}")
        if name not in SECTIONS:
            raise ConfigError(not_found("the keyword", name, [*known, *SECTIONS]))


def _check_complete(config: Any, sections: Mapping[str, Any], arguments: Mapping[str, Any], url: str | None) -> None:
    """Raises ConfigError if neither a file nor the arguments and sections say what is run."""
    adapters = sections.get("trainer_adapters")
    blocks = [each for each in adapters.values() if isinstance(each, Mapping)] if isinstance(adapters, Mapping) else []
    has_block = any(not each.keys().isdisjoint(("model", "url", "_type")) for each in blocks)
    has_model = has_block or nested(sections, "finetuning.model") is not None
    present = {"an agent": url is not None or "workflow" in sections, "model": has_model}
    missing = [name for name, value in arguments.items() if value is None and not present.get(name)]
    if config is None and missing:
        instead = " (in place of an agent: url= or workflow=, for a service or a program)" * ("an agent" in missing)
        raise ConfigError(f"{', '.join(missing)} must be given{instead}, or config, a file that names them")


def agent_block(agent: Any, code: str, framework: str | None, student: str) -> dict[str, Any]:
    """The section `workflow` for an agent that a file can name as `code`."""
    block: dict[str, Any] = {"_type": "python", "function": code}
    if not callable(agent):
        binder(agent, framework, "the agent")
    if not callable(agent) or takes(agent, "model"):
        block["model"] = student
    if framework is not None:
        block["framework"] = framework
    return block


def _set_external(project: Project, agent: Any, url: str | None, workflow: Any) -> None:
    """An agent that is a service at `url`, or one that the section `workflow` describes; its model is the student."""
    if agent is not None and url is not None:
        raise ConfigError("give an agent or url, not both")
    if url is not None:
        project.settings["workflow"] = {"_type": "http", "url": url, "llm": project.student}
    elif isinstance(workflow, Mapping) and workflow.get("_type") in ("http", "command"):
        project.settings.setdefault("workflow", {"llm": project.student})


def _set_scores(project: Project, score: Any, reward: str | None, caller: Mapping[str, Any]) -> None:
    if isinstance(score, Mapping) and "_type" not in score:
        scores = dict(score)
    else:
        name = score if isinstance(score, str) else getattr(score, "__name__", "score").strip("<>")
        scores = {name: score}
    if not scores:
        raise ConfigError("score is an empty mapping; give at least one score")
    for name, one in scores.items():
        if isinstance(one, str):
            one = {"_type": one}
        elif not isinstance(one, Mapping):
            one = {"_type": "python", "function": project.code(one, caller)}
        project.set(f"eval.evaluators.{name}", dict(one))
    project.set("finetuning.reward_function.name", reward or next(iter(scores)))


def set_tiny_training(project: Project, config: Any, sections: Mapping[str, Any]) -> None:
    """Sets how a tiny model is trained, if no file and no other setting says it."""
    block = project.block("trainer_adapter")
    model, key, given = project.get(f"{block}.model"), f"{block}.training", project.long_form(sections)
    if config is None and isinstance(model, str) and project.get(key) is None and nested(given, key) is None:
        places = (Path(model).expanduser(), project.folder / model)
        project.set(key, tiny_training(str(next((place for place in places if place.exists()), model))))


def _name_of(agent: Any) -> str:
    name = getattr(agent, "__name__", None) or type(agent).__name__
    return "run" if agent is None else str(name).strip("<>")


def set_output(project: Project, key: str, path: str | os.PathLike[str] | None, default: str) -> Path:
    """The output folder: the one given, that of the settings, or the default."""
    output = Path(path if path is not None else project.get(key) or default).expanduser()
    project.set(key, str(output))
    return output.resolve()


def start_request(checked: Callable[..., Config], output: Path, resume: bool) -> FinetuneRunConfig:
    """The run in `output`, whose files are written once nothing refuses it."""
    earlier = Problems().attempt(lambda: _moved_for(output), None) if resume else None
    with TemporaryDirectory(prefix="insitu-") as draft:  # nothing is moved aside for settings that cannot be run
        config = checked(Path(draft), earlier=earlier)
        run_anywhere(lambda: _check(FinetuneRunConfig(config_file=config, resume=resume)))
        is_continued = resume and find_run(output, "--resume") is not None
        continued = _inputs(config, output, Path(draft)) if is_continued else None
    if continued is None:
        earlier = set_aside(output) or earlier
    with nullcontext() if continued is None else FolderLock(output, OUTPUT_DIR):
        return FinetuneRunConfig(config_file=checked(output, continued, earlier), resume=resume)


def _moved_for(run: Path) -> Path | None:
    """Where the earlier run in this folder was moved to, if this one has its weights or episodes."""
    files = RunReader(run)
    stored = files.settings().get("episodes_from") or {}
    places = [Path(place) for place in (stored.get("run", ""), files.started_from() if files.own_backend else "")]
    parents = (folder for place in places for folder in (place, *place.parents) if folder.suffix[1:].isdecimal())
    return next((folder for folder in parents if folder.with_suffix("") == run), None)


async def _check(request: FinetuneRunConfig) -> None:
    async with suppress_logs("insitu"):  # the run gives the warnings
        await check_run(request)


def _inputs(config: Config, run: Path, draft: Path) -> dict[str, Any]:
    """The datasets of a call that continues `run`, as run.json names them; by their names if they are in `draft`."""
    recorded = RunReader(run).settings(required=True)
    own = config.eval.dataset is not None and not recorded.get("episodes_from")  # else those of the run replayed
    dataset = find_dataset(config).record() if own else recorded.get("dataset")
    records = {"dataset": dataset, "held_out": held_out_record(config)}
    for record in filter(None, records.values()):
        if Path(record.get("file", "")).parent == draft:  # which is deleted before a message names it
            record["file"] = Path(record["file"]).name
    return records


def checked_settings(
    project: Project,
    rows: tuple[str, Rows],
    held_out: Rows,
    sections: Mapping[str, Any],
    folder: Path,
    continued: Mapping[str, Any] | None = None,
    earlier: Path | None = None,
) -> Config:
    """The checked settings, as a file and with its rows, of this keyword, in the output folder.

    An `earlier` run in it was moved to this place, for this run or the one that it continues.
    With the inputs of a run that is `continued` there, raises ConfigError if they or the settings are not its own,
    before anything is written; nothing is if that run is complete. Raises ConfigError rather than replace other files.
    """
    project.output = folder
    project.dataset(*rows)
    if (file := project.rows(held_out, "held_out", "held_out")) is not None:
        project.set("finetuning.validation.dataset", str(file))
    project.merge(sections)
    if earlier is not None:
        project.follow(earlier)
    project.set("general.folder", os.path.relpath(project.folder, folder))
    project.check_replaced(CONFIG)
    writable_folder(folder, "output_dir")
    config = check_config(project.settings, folder / CONFIG)
    if continued is not None:
        check_same_run(folder, config, continued, force=False)
        progress = find_run(folder, "--resume")
        finetuning = config.finetuning
        if progress is not None and progress.is_complete(finetuning.num_epochs, finetuning.validation):
            return config
    project.write_settings(folder / CONFIG)  # checked first, which makes its secrets known
    project.write_rows()
    return config
