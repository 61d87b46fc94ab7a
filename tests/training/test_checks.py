"""Trained llms that name a server of their own: what is refused before anything is started or moved."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from factories import MODEL, digits_project, write_rows
from fake_openai import FakeOpenAI
from refusals import refusal

from insitu.backend.learner.policy import build_policy
from insitu.backend.model import load_model
from insitu.errors import BackendError
from insitu.schemas.finetuning import FinetuneRunConfig
from insitu.schemas.lora import LoRASettings
from insitu.training.runtime import check_run


def project(folder: Path, llm: str, **adapter: str) -> Path:
    config = digits_project(folder, **adapter) / "config.yml"
    config.write_text(config.read_text().replace("_type: policy", llm))
    write_rows(folder, [{"say": "a"}])
    return folder


def at(url: str, model: str = "m") -> str:
    return f"_type: openai\n    model_name: {model}\n    base_url: {url}"


def test_a_server_beside_the_backend_that_is_started(tmp_path: Path) -> None:
    said = refusal(project(tmp_path, at("http://127.0.0.1:9/v1")))
    assert said == (
        "llms.player is trained, but its _type is openai, so its requests go to another server than the backend that "
        f"trainer_adapters.backend starts; allowed: _type: policy, or model_name: {MODEL}"
    )


def test_a_server_whose_requests_go_to_the_backend(tmp_path: Path) -> None:
    """As they do for the model that training starts from."""
    folder = project(tmp_path, at("http://127.0.0.1:9/v1", str(MODEL)))
    asyncio.run(check_run(FinetuneRunConfig(config_file=folder / "config.yml")))


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_server_without_logprobs(tmp_path: Path, logprobs: bool) -> None:
    with FakeOpenAI(logprobs=logprobs) as server:
        folder = project(tmp_path, at(server.base_url), url="http://127.0.0.1:9")
        if logprobs:
            checked, _ = asyncio.run(check_run(FinetuneRunConfig(config_file=folder / "config.yml")))
            assert checked.trained_llms() == {"player"}
        else:
            said = refusal(folder)
            assert said == f"llms.player.base_url: {server.base_url} returns no logprobs, which training needs"
    (request,) = server.requests
    assert (request["model"], request["max_tokens"]) == ("m", 1)


def test_a_server_that_does_not_answer_yet(tmp_path: Path) -> None:
    with FakeOpenAI() as server:
        url = server.base_url.removesuffix("/v1")
    folder = project(tmp_path, at(f"{url}/v1"), url=url)
    asyncio.run(check_run(FinetuneRunConfig(config_file=folder / "config.yml")))


def test_a_score_that_no_row_has_an_answer_for(tmp_path: Path) -> None:
    folder = digits_project(tmp_path)
    path = folder / "config.yml"
    write_rows(folder, [{"say": "a"}])
    config = yaml.safe_load(path.read_text())
    for block, is_refused in (("exact_match", True), ("regex", False)):
        config["eval"]["evaluators"]["other"] = {"_type": block} | ({} if is_refused else {"pattern": "a"})
        path.write_text(yaml.safe_dump(config))
        if not is_refused:
            asyncio.run(check_run(FinetuneRunConfig(config_file=path)))
            continue
        problem = (
            "eval.evaluators.other: no row has an expected answer; eval.general.dataset.structure.answer_key names its "
            "column, of id, question"
        )
        assert refusal(folder) == problem
        write_rows(folder, [{"say": "a"}], "held_out.jsonl")
        (folder / "answered.jsonl").write_text('{"id": 1, "question": "a", "answer": "b"}\n')
        held_out = ("-o", "finetuning.validation.dataset", "held_out.jsonl")
        assert refusal(folder, *held_out, dataset=Path("answered.jsonl")) == f"validation: {problem}"


def test_adapters_of_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    folder = digits_project(tmp_path, rows=1)
    key = "trainer_adapters.backend.training.lora"
    said = refusal(folder, "-o", key, "{target_modules: [q_porj, nowhere]}")
    assert said.startswith(
        f"{key}.target_modules: the layer 'q_porj' does not exist (did you mean 'q_proj'?); available: "
    )
    for targets in ("[self_attn.q_proj]", "[lm_head]", "'.*q_porj'"):  # patterns are the backend's affair
        overrides = ((key, f"{{target_modules: {targets}}}"),)
        asyncio.run(check_run(FinetuneRunConfig(config_file=folder / "config.yml", override=overrides)))


@pytest.mark.parametrize("targets", ["[q_proj, mlp.down_proj]", "[layers.0.mlp.up_proj]", "'.*k_proj'", "all-linear"])
def test_the_adapters_of_the_memory_plan_are_those_of_peft(tmp_path: Path, targets: str) -> None:
    overrides = (("trainer_adapters.backend.training.lora", f"{{rank: 4, target_modules: {targets}}}"),)
    config = digits_project(tmp_path, rows=1) / "config.yml"
    _, plan = asyncio.run(check_run(FinetuneRunConfig(config_file=config, override=overrides)))
    assert plan is not None
    policy = build_policy(load_model(str(MODEL)), LoRASettings(rank=4, target_modules=yaml.safe_load(targets)), seed=0)
    assert plan.budget.trained == 4 * sum(parameter.numel() for parameter in policy.trainable.values())


@pytest.mark.parametrize("letters", [100, 300])
def test_a_question_that_no_prompt_has_room_for(tmp_path: Path, caplog: Any, letters: int) -> None:
    """Of the model's 256 tokens, each a byte."""
    config = digits_project(tmp_path) / "config.yml"
    (tmp_path / "rows.jsonl").write_text('{"id": 7, "question": "%s"}\n{"id": 8, "question": "?"}\n' % ("a" * letters))
    asyncio.run(check_run(FinetuneRunConfig(config_file=config)))
    problem = f"row '7': its question alone has {letters} tokens, but the model has 256 for prompt and completion"
    assert (problem in caplog.text) is (letters > 256)


def test_a_workflow_that_is_given_no_model(tmp_path: Path) -> None:
    """It is no error in a service, nor if the service's is the only one."""
    folder = digits_project(tmp_path, workflow={"_type": "python", "function": "alone.py:answer"})
    path, endpoint = folder / "config.yml", "http://127.0.0.1:9"
    (folder / "alone.py").write_text("def answer(question: dict) -> str:\n    return str(question)\n")
    write_rows(folder, [{"say": "a"}])
    config = yaml.safe_load(path.read_text())
    del config["workflow"]["llm"]
    path.write_text(yaml.safe_dump(config))
    assert refusal(folder) == (
        "workflow: it is given no model, so nothing that it does can be trained: give alone.py:answer a parameter "
        "`model`, an insitu.Model, and call the model through it"
    )
    for _ in range(2):
        with pytest.raises(BackendError, match="no answer from the workflow service"):
            asyncio.run(check_run(FinetuneRunConfig(config_file=path, endpoint=endpoint)))
        path.write_text(yaml.safe_dump({key: value for key, value in config.items() if key != "workflow"}))
    asyncio.run(check_run(FinetuneRunConfig(config_file=path)))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Nothing is created to find out."""
    folder, (path, text) = digits_project(tmp_path), (tmp_path / "config.yml", "")
    write_rows(folder, [{"say": "a"}])
    text = path.read_text()
    for target, said in (
        ("/proc/new/run", "cannot write to /proc/new/run: "),
        ("taken", "taken is a file, not a folder"),
    ):
        (folder / "taken").write_text("")
        config = yaml.safe_load(text)
        config["finetuning"]["output_dir"] = target if target.startswith("/") else str(folder / target)
        path.write_text(yaml.safe_dump(config))
        assert said in refusal(folder)
    path.write_text(text)
    before = sorted(folder.rglob("*"))
    asyncio.run(check_run(FinetuneRunConfig(config_file=path)))
    assert sorted(folder.rglob("*")) == before
