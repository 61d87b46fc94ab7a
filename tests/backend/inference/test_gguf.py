"""A GGUF file is a model: it is loaded, trained and merged as a folder is, and what cannot be read is named."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from factories import recorded_run
from small_gguf import save_small_gguf

from insitu.algorithms.memory_budget import model_shape
from insitu.backend.learner.batches import Row
from insitu.backend.learner.learner import Learner
from insitu.backend.model import LoadedModel, load_model
from insitu.disk.gguf_files import gguf_header, model_sizes, weights_location
from insitu.disk.model_files import model_digest
from insitu.errors import BackendError
from insitu.release.model_export import export_model, open_source
from insitu.schemas.lora import LoRASettings
from insitu.schemas.training_jobs import TrainingSettings

pytestmark = pytest.mark.skipif(not hasattr(transformers, "GgufConfig"), reason="the extra needs transformers 5.19")
TOKENS = torch.tensor([[1, 5, 7, 2, 9]])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def loaded(file: Path) -> LoadedModel:
    return load_model(str(file), "cpu")


def test_weights_are_those_that_the_package_restores(file: Path, loaded: LoadedModel) -> None:
    (stored,) = [each for each in gguf.GGUFReader(file).tensors if each.name == "blk.1.ffn_down.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type))
    assert torch.equal(loaded.module.state_dict()["model.layers.1.mlp.down_proj.weight"], expected)
    assert loaded.max_length == 8192
    assert gguf_header(file).chat_template == loaded.tokenizer.chat_template


def test_its_sizes_are_known_before_it_is_loaded(file: Path, loaded: LoadedModel) -> None:
    """So that what a run needs is planned as for a folder."""
    sizes, config = model_sizes(str(file)), loaded.module.config.to_dict()
    assert sizes is not None
    assert sizes.parameters == sum(each.numel() for each in loaded.module.parameters())
    known = {key: value for key, value in sizes.config.items() if value is not None}
    assert known == {key: config[key] for key in known}
    assert len(known) == 7
    shapes = [
        model_shape(each, sizes.parameters) for each in (sizes.config, config | {"dtype": None, "torch_dtype": None})
    ]
    assert shapes[0] is not None
    assert shapes[0] == shapes[1]


def train(loaded: LoadedModel, folder: Path, **settings: Any) -> Path:
    """The checkpoint of a job of one row."""
    learner = Learner(loaded, folder)
    row = Row(np.array([1, 5, 7, 2]), np.array([2, 3]), np.full(2, -1.0, np.float32), np.ones(2, np.float32))
    for _ in learner.run(TrainingSettings(learning_rate=1e-3, **settings), [row]):
        pass
    return learner.folder(1)


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    result: torch.Tensor = load_model(str(folder), "cpu").module(input_ids=TOKENS).logits
    return result


@pytest.mark.slow
def test_checkpoints_of_adapters_name_the_file_and_are_merged_into_its_weights(
    file: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    adapter = train(loaded, tmp_path / "training", lora=LoRASettings(rank=4, alpha=64))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(file)
    run = recorded_run(tmp_path / "run", [0.0], [1.0], lora=True)
    merged = export_model(open_source(run, adapter), tmp_path / "merged", merge=True)
    assert (merged / "model.safetensors").is_file()
    trained = logits(adapter)
    torch.testing.assert_close(logits(merged), trained, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert (trained - loaded.module(input_ids=TOKENS).logits).abs().max() > 0.01


def test_a_checkpoint_of_all_weights_is_a_folder_that_needs_no_file(loaded: LoadedModel, tmp_path: Path) -> None:
    checkpoint = train(loaded, tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    assert "quantization_config" not in config
    assert (checkpoint / "model.safetensors").stat().st_size > 4 * 2 * 576 * 1536 * 3  # the feed-forward in float32
    assert load_model(str(checkpoint), "cpu").tokenizer.chat_template == loaded.tokenizer.chat_template


@pytest.mark.parametrize(
    ("kept", "problem"),
    [
        (3, "{file} is not a GGUF file: it begins with b'GGU', not b'GGUF'"),
        (1000, "no model could be read from {file}"),
        (1_000_000, "no model could be read from {file}"),
    ],
)
def test_a_damaged_file_is_named(file: Path, tmp_path: Path, kept: int, problem: str) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(BackendError) as caught:
        load_model(str(damaged), "cpu")
    assert str(caught.value).startswith(problem.format(file=damaged))


def test_a_release_of_transformers_without_it_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(BackendError, match=r"needs transformers 5\.19 or later: pip install -e '\.\[gguf\]'"):
        weights_location(file)


def test_without_the_package_the_error_says_how_to_install_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(BackendError, match=r"needs the package gguf: pip install -e '\.\[gguf\]'"):
        load_model(str(file), "cpu")


def test_other_files_are_not_models(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(BackendError, match=r"is a file; a model is a folder with a config\.json, a \.gguf file"):
        load_model(str(tmp_path / "model.bin"), "cpu")


def test_the_digest_changes_with_the_file(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes()[:-1] + b"!")
    assert model_digest(file) != model_digest(other)
