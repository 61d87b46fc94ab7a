"""The toolkit's import paths: every documented name, one module under two names, and room for an installed original."""

import importlib
import inspect
import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from marks import slow_after

ROOT = Path(__file__).resolve().parents[3]
NAMES = {
    "nat.data_models.finetuning": """RewardFunctionConfig TrainerConfig TrajectoryBuilderConfig TrainerAdapterConfig
        TrainerConfigT TrajectoryBuilderConfigT TrainerAdapterConfigT TrainingJobRef TrainingStatusEnum
        TrainingJobStatus EpisodeItemRole EpisodeItem OpenAIMessage DPOItem Trajectory TrajectoryCollection
        CurriculumLearningConfig FinetuneRunConfig FinetuneConfig""",
    "nat.data_models.common": "TypedBaseModel BaseModelRegistryTag",
    "nat.data_models.intermediate_step": """IntermediateStep IntermediateStepPayload IntermediateStepType
        IntermediateStepState IntermediateStepCategory StreamEventData TTCEventData TraceMetadata UsageInfo
        ToolSchema TokenUsageBaseModel""",
    "nat.profiler.callbacks.token_usage_base_model": "TokenUsageBaseModel",
    "nat.data_models.config": "Config",
    "nat.data_models.invocation_node": "InvocationNode",
    "nat.data_models.component_ref": """LLMRef FunctionRef FunctionGroupRef TrainerRef TrainerAdapterRef
        TrajectoryBuilderRef TTCStrategyRef""",
    "nat.data_models.function": "FunctionBaseConfig FunctionGroupBaseConfig",
    "nat.data_models.evaluator": "EvalInput EvalInputItem EvaluatorBaseConfig",
    "nat.data_models.evaluate_runtime": "EvaluationRunConfig EvaluationRunOutput",
    "nat.data_models.ttc_strategy": "TTCStrategyBaseConfig",
    "nat.builder.builder": "Builder EvalBuilder",
    "nat.builder.workflow_builder": "WorkflowBuilder",
    "nat.builder.context": "Context",
    "nat.builder.function": "Function FunctionGroup",
    "nat.builder.function_info": "FunctionInfo",
    "nat.builder.framework_enum": "LLMFrameworkEnum",
    "nat.builder.evaluator": "EvaluatorInfo",
    "nat.builder.intermediate_step_manager": "IntermediateStepManager",
    "nat.cli.register_workflow": """register_function register_function_group register_llm_provider register_evaluator
        register_trainer register_trainer_adapter register_trajectory_builder register_ttc_strategy""",
    "nat.eval.config": "EvaluationRunOutput EvaluationRunConfig",
    "nat.eval.evaluate": "EvaluationRun EvaluationRunConfig",
    "nat.eval.evaluator.evaluator_model": "EvalInput EvalInputItem EvalOutput EvalOutputItem",
    "nat.eval.evaluator.base_evaluator": "BaseEvaluator",
    "nat.plugins.eval.runtime.evaluate": "EvaluationRun EvaluationRunConfig",
    "nat.plugins.eval.data_models.evaluator_io": "EvalInput EvalInputItem EvalOutput EvalOutputItem",
    "nat.plugins.eval.evaluator.base_evaluator": "BaseEvaluator",
    "nat.finetuning": "TrajectoryBuilder TrainerAdapter Trainer",
    "nat.finetuning.interfaces": "TrajectoryBuilder TrainerAdapter Trainer",
    "nat.finetuning.interfaces.trajectory_builder": "TrajectoryBuilder",
    "nat.finetuning.interfaces.trainer_adapter": "TrainerAdapter",
    "nat.finetuning.interfaces.finetuning_runner": "Trainer",
    "nat.finetuning.finetuning_runtime": "run_finetuning finetuning_main run_finetuning_sync",
    "nat.cli.commands.finetune": "finetune_command",
    "nat.data_models.component": "TypedBaseModel ComponentEnum ComponentGroup",
    "nat.finetuning.utils.parsers.base_parser": "parse_to_openai_messages",
    "nat.finetuning.utils.parsers.langchain_parser": "parse_to_openai_message",
    "nat.finetuning.utils.parsers.llama_index_parser": "parse_to_openai_message",
    "nat.finetuning.utils.parsers.adk_parser": "parse_to_openai_message",
    "nat.plugins.langchain.langchain_parser": "parse_to_openai_message",
    "nat.plugins.llama_index.llama_index_parser": "parse_to_openai_message",
    "nat.plugins.adk.adk_parser": "parse_to_openai_message",
    "nat.plugins.openpipe.config": """ARTTrajectoryBuilderConfig ARTBackendConfig ARTTrainerAdapterConfig
        ARTTrainerConfig""",
    "nat.plugins.openpipe.register": "",
    "nat.plugins.openpipe.trainer": "ARTTrainer",
    "nat.plugins.openpipe.trainer_adapter": "ARTTrainerAdapter",
    "nat.plugins.openpipe.trajectory_builder": "ARTTrajectoryBuilder",
    "nat.plugins.customizer": """DPOTrajectoryBuilderConfig NeMoCustomizerTrainer NeMoCustomizerTrainerConfig
        NeMoCustomizerTrainerAdapter NeMoCustomizerTrainerAdapterConfig NeMoCustomizerHyperparameters
        DPOSpecificHyperparameters NIMDeploymentConfig""",
    "nat.plugins.customizer.register": "NeMoCustomizerTrainer DPOTrajectoryBuilder",
    "nat.finetuning.utils.parsers.common": "",
    "nat.plugins.customizer.dpo": """DPOTrajectoryBuilderConfig NeMoCustomizerTrainer NeMoCustomizerTrainerConfig
        NeMoCustomizerTrainerAdapter NeMoCustomizerTrainerAdapterConfig NeMoCustomizerHyperparameters
        DPOSpecificHyperparameters NIMDeploymentConfig""",
    "nat.plugins.customizer.dpo.config": """DPOTrajectoryBuilderConfig NeMoCustomizerTrainerConfig
        NeMoCustomizerTrainerAdapterConfig NeMoCustomizerHyperparameters DPOSpecificHyperparameters
        NIMDeploymentConfig""",
    "nat.plugins.customizer.dpo.register": "",
    "nat.plugins.customizer.dpo.trainer": "NeMoCustomizerTrainer",
    "nat.plugins.customizer.dpo.trainer_adapter": "NeMoCustomizerTrainerAdapter",
    "nat.plugins.customizer.dpo.trajectory_builder": """DPOTrajectoryBuilderConfig DPOTrajectoryBuilder CandidateStep
        PreferencePair""",
    "nat.experimental.test_time_compute.models.ttc_item": "TTCItem",
    "nat.experimental.test_time_compute.models.stage_enums": "StageTypeEnum PipelineTypeEnum",
    "nat.experimental.test_time_compute.models.strategy_base": "StrategyBase",
    "nat.utils.io.suppress_logs": "suppress_logs",
    "nat.utils.io.supress_logs": "suppress_logs",
}
NAMES["nat.plugin_api"] = " ".join(sorted({name for names in NAMES.values() for name in names.split()}))
IMPORTS = (ROOT / "tests" / "data" / "documented_imports.txt").read_text()
STATEMENTS = IMPORTS.replace("\n    ", " ").replace("\n)", ")").splitlines()


def is_ours(name: str) -> bool:
    return name == "nat" or name.startswith("nat.")


@pytest.fixture(autouse=True)
def _never_imported() -> Iterator[None]:
    """Each test begins as a process in which nobody has imported `nat` yet."""
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if is_ours(name)}
    yield
    for name in [name for name in sys.modules if is_ours(name)]:
        del sys.modules[name]
    sys.modules.update(before)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | environment, check=False
    )


@pytest.mark.parametrize("path", NAMES)
def test_every_documented_name_is_there(path: str) -> None:
    module = importlib.import_module(path)
    missing = [name for name in NAMES[path].split() if not hasattr(module, name)]
    assert not missing


def test_every_path_is_documented() -> None:
    import nat

    assert nat.PATHS.keys() == NAMES.keys()


@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_import_of_the_documents_runs(statement: str) -> None:
    exec(statement, {})


@pytest.mark.parametrize("order", [1, -1])
def test_in_any_order(order: int) -> None:
    paths = sorted(NAMES)[::order]
    modules = [importlib.import_module(path) for path in paths]
    assert modules == [sys.modules[path] for path in paths]


def test_both_names_are_one_module() -> None:
    import nat.data_models.finetuning as by_path
    from nat.data_models import finetuning as from_parent

    from insitu.schemas import finetuning

    assert by_path is from_parent is finetuning
    assert importlib.import_module("nat.data_models.finetuning") is finetuning
    assert finetuning.__name__ == finetuning.__spec__.name == "insitu.schemas.finetuning"  # type: ignore[union-attr]
    assert isinstance(finetuning.OpenAIMessage(role="user", content="hi"), by_path.OpenAIMessage)


def test_pickles_of_either_name() -> None:
    from insitu.schemas.finetuning import OpenAIMessage

    message = OpenAIMessage(role="user", content="hi")
    assert pickle.loads(pickle.dumps(message)) == message
    assert pickle.loads(b"cnat.data_models.finetuning\nOpenAIMessage\n.") is OpenAIMessage
    assert pickle.loads(b"cnat.finetuning\nTrainer\n.").__name__ == "Trainer"


@pytest.mark.parametrize("path", ["nat.finetuning", "nat.finetuning.interfaces.finetuning_runner"])
def test_what_is_patched_under_one_name_is_patched_under_the_other(path: str) -> None:
    """The tests of plugins patch names, at either path."""
    from insitu.training import interfaces

    module, before = importlib.import_module(path), interfaces.Trainer
    for patched in (path, "insitu.training.interfaces"):
        with mock.patch(f"{patched}.Trainer", "another"):
            assert module.Trainer == interfaces.Trainer == "another"
        assert module.Trainer is interfaces.Trainer is before


def test_reloading() -> None:
    import nat.utils.io.suppress_logs as by_path

    from insitu.training import logs

    before = logs.suppress_logs
    try:
        assert importlib.reload(by_path) is logs
        assert by_path.suppress_logs is logs.suppress_logs is not before
        import nat

        importlib.reload(nat)
        assert sum(type(finder).__module__ == "nat" for finder in sys.meta_path) == 1
        assert importlib.import_module("nat.utils.io.supress_logs") is logs
    finally:
        logs.suppress_logs = before


def test_nothing_of_insitu_is_overwritten() -> None:
    import nat

    targets = {name: importlib.import_module(name) for name in nat.PATHS.values()}
    before = {name: dict(vars(module)) for name, module in targets.items()}
    for path in nat.PATHS:
        importlib.import_module(path)
    for name, module in targets.items():
        assert dict(vars(module)) == before[name]
        assert module.__spec__ is not None
        assert module.__spec__.name == module.__name__ == name


def test_many_threads_import_at_once() -> None:
    import nat

    paths = [p for p, target in nat.PATHS.items() if target.startswith(("insitu.schemas", "insitu.registry"))]
    for _ in range(20):
        for name in [name for name in sys.modules if name.startswith("nat.")]:
            del sys.modules[name]
        found: list[Any] = []
        start = threading.Barrier(16)

        def load(shift: int, found: list[Any] = found, start: threading.Barrier = start) -> None:
            start.wait()
            for path in paths[shift:] + paths[:shift]:
                found.append((path, importlib.import_module(path)))

        threads = [threading.Thread(target=load, args=(n // 2,)) for n in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(found) == 16 * len(paths)
        for path, module in found:
            assert module is sys.modules[nat.PATHS[path]]
            assert module.__spec__.name == nat.PATHS[path]


def test_tools_that_look_at_modules() -> None:
    import nat.finetuning
    import nat.plugin_api
    from nat.data_models.finetuning import Trajectory

    assert [*pkgutil.walk_packages(nat.__path__, "nat.")] == []
    assert inspect.getmodule(Trajectory) is sys.modules["insitu.schemas.finetuning"]
    assert inspect.getsource(Trajectory).startswith("class Trajectory")
    assert dict(inspect.getmembers(nat.finetuning, inspect.isclass))["Trainer"] is nat.plugin_api.Trainer
    assert "nat.finetuning" in repr(nat.finetuning)
    starred: dict[str, Any] = {}
    exec("from nat.finetuning import *", starred)
    assert starred["Trainer"] is nat.plugin_api.Trainer
    assert importlib.util.find_spec("nat.finetuning.interfaces.trainer_adapter") is not None
    for parent in ("nat.data_models", "nat.finetuning", "nat.plugins.openpipe"):
        assert inspect.getmodule(importlib.import_module(parent)).__name__ == parent  # type: ignore[union-attr]
        with pytest.raises(AttributeError, match="has no attribute 'nope'"):
            sys.modules[parent].nope  # noqa: B018


def test_what_is_not_there_says_so() -> None:
    for path in ("nat.nope", "nat.data_models.nope", "nat.finetuning.nope"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{path}'"):
            importlib.import_module(path)
    with pytest.raises(ImportError, match="cannot import name 'nope'"):
        exec("from nat.finetuning import nope", {})


def test_the_paths_alone_cost_nothing() -> None:
    done = run("-c", "import sys, nat; print([m for m in sys.modules if m.split('.')[0] in ('insitu', 'pydantic')])")
    assert done.stdout == "[]\n"


STAND_IN = {
    "pyproject.toml": """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"
        [project]
        name = "original-toolkit"
        version = "1"
        [tool.setuptools.packages.find]
        include = ["nat*"]
    """,
    "nat/builder/builder.py": "class Builder: theirs = True\n",
    "nat/data_models/finetuning.py": "class FinetuneConfig: theirs = True\n",
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed what has the paths of the toolkit, as a namespace package."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for name, text in STAND_IN.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(inspect.cleandoc(text))
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    done = run("-m", "pip", "install", *options, "--target", str(target), str(source))
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("place", slow_after(1, ["beside ours", "in the same folder"]))
def test_an_installed_original_wins_and_the_command_line_says_so(original: Path, tmp_path: Path, place: str) -> None:
    folder = original
    if place == "in the same folder":
        folder = tmp_path / "site"
        (folder / "nat").mkdir(parents=True)
        (folder / "nat" / "__init__.py").write_text((ROOT / "src" / "nat" / "__init__.py").read_text())
        for part in ("builder", "data_models"):
            (folder / "nat" / part).symlink_to(original / "nat" / part)
    code = """
        import nat.builder.builder, nat.data_models.finetuning
        assert nat.builder.builder.Builder.theirs and nat.data_models.finetuning.FinetuneConfig.theirs
        try:
            import nat.plugin_api
        except ModuleNotFoundError as error:
            print(error)
    """
    done = run("-c", inspect.cleandoc(code), PYTHONPATH=str(folder))
    assert (done.stdout, done.stderr) == ("No module named 'nat.plugin_api'\n", "")
    said = run("-m", "insitu", "--help", PYTHONPATH=str(folder))
    assert said.returncode == 0
    assert said.stderr == (
        f"note: nat.* is another toolkit ({folder}/nat/builder): insitu does not load plugins written for it\n"
    )


@pytest.mark.slow
def test_a_plugin_may_have_a_folder_of_its_own_below_nat(tmp_path: Path) -> None:
    (tmp_path / "nat" / "plugins" / "theirs").mkdir(parents=True)
    (tmp_path / "nat" / "plugins" / "theirs" / "steps.py").write_text("from nat.plugin_api import Trainer\n")
    code = "from nat.plugins.theirs.steps import Trainer; from nat.plugins.eval.runtime.evaluate import EvaluationRun"
    done = run("-c", f"{code}; print(Trainer.__module__)", PYTHONPATH=str(tmp_path))
    assert (done.stdout, done.stderr) == ("insitu.training.interfaces\n", "")
    assert run("-m", "insitu", "--help", PYTHONPATH=str(tmp_path)).stderr == ""


@pytest.mark.check
def test_type_checkers_see_the_real_types(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    lines = [f"from {path} import {', '.join(names.split())}" for path, names in NAMES.items() if names]
    lines += ["import nat.data_models.finetuning as f", "reveal_type(f.FinetuneConfig().num_epochs)"]
    lines += ["reveal_type(EvaluationRun)", "from nat.finetuning import Nope", "import nat.nope", *STATEMENTS]
    (tmp_path / "user.py").write_text("\n".join(lines))
    cache = request.config.cache.mkdir("mypy")  # type: ignore[union-attr]
    names = ("aiohttp", "anyio", "hypothesis", "matplotlib", "numpy", "openai", "PIL", "polars", "rich", "torch")
    large = ",".join(f"{name}.*" for name in names)
    config = tmp_path / "mypy.ini"  # no documented name has their types, and reading them takes 20 seconds
    config.write_text(f"[mypy]\n[mypy-{large}]\nfollow_imports = skip\n")
    options = ("--strict", "--no-error-summary", f"--config-file={config}", f"--cache-dir={cache}")
    done = run("-m", "mypy", *options, str(tmp_path / "user.py"))
    kinds = [line.split(": ", 1)[1] for line in done.stdout.splitlines()]
    assert kinds[0] == 'note: Revealed type is "int"'
    assert kinds[1].startswith('note: Revealed type is "def (config: insitu.schemas.evaluation.EvaluationRunConfig')
    assert kinds[2] == 'error: Module "nat.finetuning" has no attribute "Nope"  [attr-defined]'
    assert kinds[3].startswith("error: ")
    assert '"nat.nope"' in kinds[3]
    assert kinds[4].startswith("note: ")  # what mypy has to say about missing modules
    assert len(kinds) == 5, done.stdout


def test_the_wheel_holds_the_paths_their_stubs_and_the_page_of_view(tmp_path: Path) -> None:
    import nat

    skipped = shutil.ignore_patterns("*.egg-info", "__pycache__", "nat-stubs")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=skipped)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    static = (file for file in (ROOT / "src/insitu/view/static").rglob("*") if file.is_file())
    page = {str(file.relative_to(ROOT / "src")) for file in static}
    assert "insitu/view/static/index.html" in page
    assert {name for name in names if name.startswith("insitu/view/static/")} == page
    packed = {name for name in names if name.startswith("nat")}
    stubs = {name.removeprefix("nat-stubs/") for name in packed if name.startswith("nat-stubs/")}
    assert packed == {"nat/__init__.py", *(f"nat-stubs/{name}" for name in stubs)}
    assert {"py.typed", "__init__.pyi", "finetuning/interfaces/__init__.pyi", "plugin_api.pyi"} <= stubs
    assert stubs >= {f"{path.partition('.')[2].replace('.', '/')}.pyi" for path in nat.PATHS.keys() - nat.PARENTS}


async def test_the_three_interfaces_can_be_autospecced() -> None:
    """The tests of plugins do so; nothing of ours is replaced here."""
    from nat.finetuning import Trainer, TrainerAdapter, TrajectoryBuilder

    adapter = mock.create_autospec(TrainerAdapter)
    adapter.is_healthy.return_value = True
    assert await adapter.is_healthy() is True
    for interface in (Trainer, TrainerAdapter, TrajectoryBuilder):
        with pytest.raises(AttributeError, match="train_harder"):
            mock.create_autospec(interface).train_harder()
        with pytest.raises(TypeError, match="abstract"):
            interface(None)


def test_any_other_package_called_nat_is_told_too(tmp_path: Path) -> None:
    (tmp_path / "nat").mkdir()
    (tmp_path / "nat" / "__init__.py").write_text("")
    said = run("-m", "insitu", "--help", PYTHONPATH=str(tmp_path))
    assert (said.returncode, said.stderr) == (
        0,
        f"note: nat.* is another toolkit ({tmp_path}/nat): insitu does not load plugins written for it\n",
    )
