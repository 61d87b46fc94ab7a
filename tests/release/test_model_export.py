"""`insitu export`: what it writes loads with transformers and peft, gives the checkpoint's logits, and is uploaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import ROOT, digits_project, read_lines, recorded_run, write_rows
from fake_nemo import FakeNeMo
from processes import run, run_project

from insitu.backend.model import load_model
from insitu.disk.model_files import read_record

TOKENS = torch.tensor([[1, 5, 7, 2, 9]])
EPOCHS = 5


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_run(tmp_path_factory.mktemp("full") / "run", [0.0, 0.5], [1.0, 0.5], [0.5, 0.5])


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_run(tmp_path_factory.mktemp("lora") / "run", [0.0, 0.5], [1.0, 0.5], lora=True)


def export(*arguments: Any, **variables: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    done = run("export", *arguments, **variables)
    return done.returncode, (done.stdout + done.stderr).strip()


@torch.no_grad()
def logits(module: Any) -> torch.Tensor:
    return module(input_ids=TOKENS).logits


def checkpoint_logits(folder: Path) -> torch.Tensor:
    return logits(load_model(str(folder), "cpu").module)


def test_a_package_has_no_checkpoint(tmp_path: Path) -> None:
    code, text = export("config.yml", tmp_path / "out", "--as", "verifiers", "--merge", "--checkpoint", "best")
    assert code == 2
    assert "--checkpoint, --merge cannot be used with --as verifiers" in text


def test_a_package_is_of_rows_and_scores_without_a_shape(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "question": "1"}\n{"id": "b", "question": "2"}\n')
    settings = """
eval: {general: {dataset: {_type: jsonl, file_path: rows.jsonl}}, evaluators: {right: {_type: exact_match}}}
finetuning: {reward_function: {name: right, shape: SHAPE}}
"""
    file, out = tmp_path / "config.yml", tmp_path / "rows"
    out.mkdir()  # an empty folder may exist
    file.write_text(settings.replace("SHAPE", "{_type: overlong, arguments: {max_tokens: 9, buffer: 3}}"))
    code, text = export(file, out, "--as", "verifiers")
    assert (code, [*out.iterdir()]) == (2, [])
    assert "finetuning.reward_function.shape reads episodes, which another trainer does not have" in text
    file.write_text(settings.replace("SHAPE", "null").replace("rows.jsonl", "none.jsonl"))
    code, text = export(file, out, "--as", "verifiers")
    assert (code, [*out.iterdir()]) == (2, [])
    assert "none.jsonl" in text
    file.write_text(settings.replace("SHAPE", "null"))
    code, text = export(file, out, "--as", "verifiers")
    assert (code, text) == (
        0,
        f"taskset rows of 2 rows: pip install {out}, then vf-eval rows --env.agent.runtime.type subprocess",
    )
    assert {path.name for path in (out / "rows/project").iterdir()} == {"config.yml", "rows.jsonl"}
    code, text = export(file, out, "--as", "verifiers")
    assert (code, text) == (2, f"error: OUT: {out} exists already and is not an empty folder; give another name")


def test_all_weights_load_with_transformers(full: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "out").mkdir()  # an empty folder may exist
    assert export(full, tmp_path / "out") == (0, f"exported step_000001 of {full} to {tmp_path / 'out'} (model)")
    assert export(full, tmp_path / "latest", "--checkpoint", "latest", "--merge")[0] == 0
    for name, step in (("out", 1), ("latest", 2)):
        expected = checkpoint_logits(full / f"backend/checkpoints/step_00000{step}")
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / name)), expected)
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template
    assert {path.name for path in tmp_path.iterdir()} == {"out", "latest"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_load_with_peft(adapters: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    saved = checkpoint_logits(adapters / "backend/checkpoints/step_000001")
    assert export(adapters, tmp_path / "a") == (0, f"exported step_000001 of {adapters} to {tmp_path / 'a'} (adapter)")
    base = AutoModelForCausalLM.from_pretrained(adapters.parent / "run-base")
    assert not torch.allclose(logits(base), saved, atol=1e-3)
    assert torch.equal(logits(PeftModel.from_pretrained(base, str(tmp_path / "a"))), saved)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a")), saved)

    assert export(adapters, tmp_path / "m", "--merge") == (
        0,
        f"exported step_000001 of {adapters} to {tmp_path / 'm'} (model)",
    )
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "m")), saved, atol=1e-5)
    assert not list((tmp_path / "m").glob("adapter*"))
    assert load_model(str(tmp_path / "m"), "cpu").tokenizer.chat_template


def test_a_base_with_pickled_weights_is_not_merged(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path / "run", [0.0, 0.5], [1.0, 0.5], lora=True)
    base = tmp_path / "run-base"
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    code, printed = export(recorded, tmp_path / "out", "--merge")
    assert code == 1
    assert f"{base} has pytorch_model.bin but no model.safetensors: pickled weights are not read" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [(), ("--merge",)])
@pytest.mark.parametrize("kind", ["full", "adapters"])
def test_the_card_says_how_the_model_was_trained_and_nothing_of_this_machine(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, options: tuple[str, ...]
) -> None:
    from huggingface_hub import ModelCard

    source: Path = request.getfixturevalue(kind)
    assert export(source, tmp_path / "out", *options)[0] == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not names & {"training.json", "optimizer.safetensors"}
    card = ModelCard.load(tmp_path / "out" / "README.md")
    is_adapter = kind == "adapters" and not options
    assert card.data.library_name == ("peft" if is_adapter else "transformers")
    assert card.data.tags == ["insitu", "grpo", *(["lora"] if kind == "adapters" else [])]
    assert card.data.base_model is None, "the base is a folder of this machine"
    assert card.data.eval_results is not None
    (result,) = card.data.eval_results
    assert (card.data.model_name, result.dataset_name, result.metric_value) == ("out", "held-out rows", 0.75)
    for text in (
        "| method | GRPO (group-relative policy optimization, arXiv:2402.03300) |",
        "## Use",
        "vllm serve",
        "rows.jsonl",
        "e" * 64,
        "| seed | 3 |",
        "`insitu_run_run`, configured by `agent.yml`",
        "| command | `insitu finetune agent.yml -o eval.general.dataset.file_path rows.jsonl -o llms.m.n '[1]'` |",
        '"learning_rate": 0.01',
        "| before training | 0.250 |",
        "| these weights (epoch 1) | 0.750 |",
        "`run-base`",
        "LoRA adapters of rank 4, alpha 32" if kind == "adapters" else "| trained weights | all |",
    ):
        assert text in card.content, text
    for path in (tmp_path / "out").iterdir():
        if path.name != "adapter_config.json":  # peft finds a local base model there
            assert str(source.parent).encode() not in path.read_bytes(), path
    ordinary = (tmp_path / "out/README.md").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {ordinary}


def test_what_cannot_be_exported_is_said_in_a_sentence(full: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    cases: list[tuple[tuple[Any, ...], int, str]] = [
        ((full, taken), 2, f"error: OUT: {taken} exists already and is not an empty folder; give another name"),
        (
            (full, taken / "file"),
            2,
            f"error: OUT: {taken / 'file'} exists already and is not an empty folder; give another name",
        ),
        ((tmp_path, "out"), 2, f"error: RUN_DIR: {tmp_path} holds no run of insitu finetune"),
        (
            (full, "out", "--checkpoint", "step_000007"),
            2,
            f"error: --checkpoint: {full}/backend/checkpoints/step_000007 was deleted or never made; checkpoints "
            "there: step_000001, step_000002 (the key `keep` of the trainer adapter says which are kept)",
        ),
        ((full, "out", "--checkpoint", "first"), 2, "'first' is not a checkpoint; allowed: best, latest, step_N"),
        ((full, "out", "--push", "not a name"), 2, "--push: 'not a name' is not the name of a repository: "),
    ]
    for arguments, code, says in cases:
        done, text = export(*arguments)
        assert done == code, text
        assert says in text
    assert {path.name for path in tmp_path.iterdir()} == {"taken"}


def test_damaged_weights_and_initial_weights_are_not_exported(tmp_path: Path) -> None:
    source = recorded_run(tmp_path / "run", [1.0, 1.0], [0.0, 0.0])
    assert export(source, tmp_path / "out") == (
        2,
        f"error: --checkpoint: the checkpoint is the best of {source}: 1.0 at epoch 0, before training: "
        "these weights were not trained; `latest` is the newest version",
    )
    weights = source / "backend/checkpoints/step_000001/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, text = export(source, tmp_path / "out", "--checkpoint", "latest")
    assert code == 1
    assert text.startswith(f"failed: {weights} is damaged: its SHA-256 is not that in training.json")
    shutil.rmtree(source / "backend/checkpoints")
    assert "were not trained; a backend at a url keeps its own elsewhere" in export(source, tmp_path / "out")[1]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run-base"}


def fresh(*arguments: Any, **variables: str) -> tuple[int, str]:
    """In a fresh interpreter: huggingface-hub reads the environment when it is imported."""
    command = [sys.executable, "-m", "insitu", *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).strip()


@pytest.mark.slow
def test_an_export_is_uploaded_to_the_hub(full: Path, adapters: Path, tmp_path: Path) -> None:
    token = "hf_secretsecretsecret"
    with FakeNeMo(lfs_bytes=20_000) as hub:
        hub.token = token
        variables = {"HF_ENDPOINT": f"{hub.datastore_host}/v1/hf", "HF_HOME": str(tmp_path / "hf")}
        code, text = fresh("export", full, tmp_path / "a", "--push", "me/agent", **variables)
        assert (code, text) == (
            2,
            "error: --push: no token of the Hugging Face Hub; set HF_TOKEN or run `hf auth login`",
        )
        variables["HF_TOKEN"] = token
        code, text = fresh("-vv", "export", full, tmp_path / "out", "--push", "me/agent", **variables)
        assert code == 0, text
        assert f"uploaded to {hub.datastore_host}/v1/hf/me/agent" in text
        assert token not in text
        uploaded = hub.repositories["me/agent"]
        written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert uploaded.files == written
        assert uploaded.visibility == "private"
        assert b"# me/agent\n" in written["README.md"]
        assert not any(token.encode() in content for content in written.values())

        hub.fail("commit", 403)
        code, text = fresh("export", full, tmp_path / "kept", "--push", "me/agent", **variables)
        assert code == 1
        assert f"failed: {tmp_path / 'kept'} is complete, but its upload to me/agent failed: " in text
        assert token not in text
        assert (tmp_path / "kept/README.md").exists()
        code, text = fresh("export", adapters, tmp_path / "b", "--push", "me/agent", **variables)
        base = "the adapter's base model run-base is on this machine only; add --merge"
        assert (code, text) == (2, f"error: --push: {base}")
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_a_run_keeps_its_best_checkpoints_and_its_scores_by_row_and_is_promoted(tmp_path: Path) -> None:
    """What was made up in the other tests is what a run writes."""
    digits_project(tmp_path)
    write_rows(tmp_path, [{"say": f"Say {i}"} for i in range(4)])
    write_rows(tmp_path, [{"say": f"Held out {i}"} for i in range(24)], "held_out.jsonl")
    validation = ("--validation_dataset", "held_out.jsonl", "--validation_interval", "1")
    overrides = {
        "finetuning.num_epochs": EPOCHS,
        "trainer_adapters.backend.keep": "{last: 1}",
        "trainer_adapters.backend.training": "{lora: {rank: 4}, learning_rate: 0.01}",
    }
    options = [str(word) for override in overrides.items() for word in ("-o", *override)]
    code, out, err = run_project(tmp_path, *validation, *options)
    assert code == 0, out + err
    source = tmp_path / "run"
    best = json.loads((source / "best.json").read_text())
    kept = {read_record(path).version for path in (source / "backend/checkpoints").iterdir()}  # type: ignore[union-attr]
    assert kept == {best["policy_version"], EPOCHS - 2, EPOCHS - 1, EPOCHS}
    history = json.loads((source / "validation_history.json").read_text())
    form, *lines = read_lines(source / "validation_scores.jsonl")
    assert form == {"format": 2}
    assert [(line["epoch"], line["policy_version"]) for line in lines] == [(n, n) for n in range(EPOCHS + 1)]
    for line, record in zip(lines, history, strict=True):
        assert len(line["scores"]) == 24
        mean = sum(score for (score,) in line["scores"].values()) / 24
        assert mean == pytest.approx(record["avg_reward"])

    done = run("promote", source, tmp_path / "agent")
    assert done.returncode == 0, done.stderr
    assert f"promoted step_{best['policy_version']:06d} of {source} to {tmp_path / 'agent'}: " in done.stdout
    assert f"on 24 held-out rows, a difference of +{best['avg_reward'] - history[0]['avg_reward']:.4g} " in done.stdout
    assert str(ROOT) not in (tmp_path / "agent/README.md").read_text()
    saved = source / f"backend/checkpoints/step_{best['policy_version']:06d}"
    assert torch.equal(checkpoint_logits(tmp_path / "agent"), checkpoint_logits(saved))
