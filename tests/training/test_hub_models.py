"""Models of the Hugging Face Hub at a revision, from its cache on this machine; the keys of LoRA that peft has too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import digits_project, write_rows
from fake_hub import fake_hub
from processes import run_project
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from insitu.backend.learner.policy import build_policy, same_adapters
from insitu.backend.model import base_and_adapter, load_model
from insitu.disk.gguf_files import weights_location
from insitu.disk.model_files import downloaded
from insitu.errors import BackendError
from insitu.schemas.lora import LoRASettings

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
EMBEDDING = "model.embed_tokens.weight"
LORA = {"r": 4, "lora_alpha": 8, "use_rslora": True, "init_lora_weights": "gaussian"}


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshots of org/tiny in a cache of the Hub; its two revisions have different weights."""
    folder = tmp_path / "hub/models--org--tiny"
    for number, (name, commit) in enumerate(COMMITS.items()):
        snapshot = save_tiny_model(folder / "snapshots" / commit)
        weights = load_file(snapshot / "model.safetensors")
        weights[EMBEDDING] += number
        save_file(weights, snapshot / "model.safetensors", metadata={"format": "pt"})
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / name).write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder / "snapshots"


@pytest.mark.slow
def test_a_run_starts_from_the_revision_that_its_file_names(cached: Path, tmp_path: Path) -> None:
    """run.json, the adapter and the card of its export say which one that was; a resumed run goes on with it.

    Not in forked processes: huggingface-hub reads its variables when it is imported.
    """

    def insitu(*arguments: Any) -> None:
        command = [sys.executable, "-m", "insitu", *map(str, arguments)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    training = {"learning_rate": 1e-3, "mini_batch_size": 16, "lora": LORA}
    (project := tmp_path / "project").mkdir()
    digits_project(project, model="org/tiny@v2", training=training)
    write_rows(project, [{"say": f"row {number}"} for number in range(3)])
    insitu("finetune", "config.yml")
    insitu("finetune", "config.yml", "--resume", "-o", "finetuning.num_epochs", 2)
    insitu("export", "run", tmp_path / "out")
    recorded = json.loads((project / "run/run.json").read_text())
    expected = {"file": "org/tiny@v2", "sha256": None, "commit": COMMITS["v2"]}
    assert recorded["starting_model"] == expected
    checkpoint = sorted((project / "run/backend/checkpoints").glob("step_*"))[-1]
    adapter = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("org/tiny", "v2")
    assert (adapter["r"], adapter["lora_alpha"], adapter["use_rslora"]) == (4, 8, True)
    assert base_and_adapter(str(checkpoint)) == ("org/tiny@v2", True)
    card = (tmp_path / "out/README.md").read_text()
    assert "base_model: org/tiny\n" in card
    assert COMMITS["v2"] in card
    assert 'AutoModelForCausalLM.from_pretrained("org/tiny", revision="v2")' in card
    assert "vllm serve org/tiny --revision v2 --enable-lora" in card
    insitu("export", "run", tmp_path / "merged", "--merge")
    base = load_file(cached / COMMITS["v2"] / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "merged/model.safetensors")[EMBEDDING], base[EMBEDDING])


def test_what_a_revision_may_be(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert downloaded("org/tiny") == cached / COMMITS["main"]
    for revision in ("v2", COMMITS["v2"]):
        assert downloaded(f"org/tiny@{revision}") == cached / COMMITS["v2"]
        location, options = weights_location(f"org/tiny@{revision}")
        assert (location, options["revision"]) == ("org/tiny", revision)
    assert downloaded("org/tiny@v3") is None
    with pytest.raises(BackendError, match="org/tiny@ ends in @ without a revision"):
        load_model("org/tiny@")
    with_sign = save_tiny_model(tmp_path / "a@b")
    assert load_model(str(with_sign)).source == str(with_sign)
    (project := tmp_path / "project").mkdir()
    digits_project(project, model="org/tiny@v3")
    write_rows(project, [{"say": "a"}])
    with fake_hub("org/else") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub)
        code, _, err = run_project(project, command="validate")
    assert code == 2
    assert f"org/tiny@v3 is neither a folder or file here nor in the cache of the Hugging Face Hub, and {hub}" in err
    assert "has no such model or revision" in err


def test_the_names_of_peft(tmp_path: Path) -> None:
    lora = LoRASettings.model_validate(LORA)
    assert lora == LoRASettings(rank=4, alpha=8, rslora=True, init="gaussian")
    assert LoRASettings.model_validate({"init_lora_weights": True}) == LoRASettings()
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        LoRASettings.model_validate({"r": 4, "rank": 4})
    loaded = load_model(str(save_tiny_model(tmp_path / "model")))
    scales: dict[bool, Any] = {}
    for is_stabilised in (False, True):
        policy = build_policy(loaded, LoRASettings(rank=16, alpha=8, rslora=is_stabilised), seed=0)
        layer = next(each for each in policy.module.modules() if hasattr(each, "lora_A"))
        scales[is_stabilised] = layer.scaling["default"]
    assert scales == {False: 8 / 16, True: 8 / 4}
    assert same_adapters(LoRASettings(init="gaussian"), LoRASettings())
    assert not same_adapters(LoRASettings(rslora=True), LoRASettings())
