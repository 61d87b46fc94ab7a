"""Files of `insitu trajectories export` load with `datasets` and train in TRL as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from factories import read_lines
from test_export import TARGETS, TOOLS, Run, call, episode, play, user
from tiny_models import byte_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from insitu.release.trajectories import ExportOptions, export
from insitu.runs.replay import StoredRun
from insitu.schemas.episodes import CandidateStep, Episode

pytestmark = pytest.mark.filterwarnings("ignore")  # of the other libraries, on themselves


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "llama")


def with_candidates(row: str) -> Episode:
    """Candidates with tool calls whose arguments differ in names and types, and one without a recorded call."""
    arguments = ['{"at": "sky"}', '{"at": 3, "deep": [1]}', "not JSON"]
    calls = []
    for k, text in enumerate(arguments):
        tool = {"id": str(k), "type": "function", "function": {"name": "look", "arguments": text}}
        asked = {"role": "assistant", "content": None, "tool_calls": [tool]}
        calls.append(call(k, [user(f"{row}?")], asked, ([1, 5], [k]), tools=TOOLS))
    sampled = [CandidateStep("0", k, calls[k].messages, text, float(k), 0, k) for k, text in enumerate(arguments)]
    plain = [CandidateStep("1", k, "and now?", f"text {k}", float(k), 1) for k in range(2)]
    return episode(0, row, calls=calls, reward=1.0, candidates=[*sampled, *plain])


def exported(folder: Path, format: str, *groups: list[Episode], **options: Any) -> Dataset:
    made = Run(folder / "run")
    made.store.write("run.json", {"run_id": "run_1", "targets": TARGETS})
    for group in groups:
        made.add(group[0].key.row_id, *group)
    made.store.close()
    target = folder / f"{format}.{'parquet' if format == 'parquet' else 'jsonl'}"
    export(StoredRun(made.folder), format, target, ExportOptions(**options))
    if format == "parquet":
        return load_dataset("parquet", data_files=str(target), split="train")
    loaded = load_lines(target)
    assert [without_none(record) for record in loaded] == [without_none(line) for line in read_lines(target)]
    return loaded


def load_lines(file: Path) -> Dataset:
    return load_dataset("json", data_files=str(file), split="train")


def without_none(value: Any) -> Any:
    """Tables fill missing keys with None."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def episodes() -> list[list[Episode]]:
    """Rows with a tool call, and one whose calls have no tools."""
    plain = [episode(k, "plain", reward=float(k)) for k in range(2)]
    plain[1].calls[0].message = {"role": "assistant", "content": "8"}
    plain[1].calls[2].messages = [plain[1].calls[0].messages[0], plain[1].calls[0].message, user("again")]
    return [plain, *([play(k, float(k), f"{row} {k}", row) for k in range(2)] for row in ("a", "b", "c"))]


def train(kind: Any, config: Any, model: Path, folder: Path, dataset: Dataset) -> float:
    """The loss of one optimizer step."""
    settings = {"report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 1, "per_device_train_batch_size": 4}
    arguments = config(output_dir=str(folder / "trl"), logging_steps=1, save_strategy="no", **settings)
    policy = AutoModelForCausalLM.from_pretrained(model)
    trainer = kind(policy, args=arguments, train_dataset=dataset, processing_class=byte_tokenizer())
    trainer.train()
    return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize("pairs", ["episodes", "candidates"])
def test_preferences_train_in_dpo_trainer(model: Path, tmp_path: Path, pairs: str) -> None:
    groups = episodes() if pairs == "episodes" else [[with_candidates(row)] for row in "abcd"]
    dataset = exported(tmp_path, "preferences", *groups)
    assert {"prompt", "chosen", "rejected", "episode", "score_chosen"} <= set(dataset.column_names)
    assert train(DPOTrainer, DPOConfig, model, tmp_path, dataset) == pytest.approx(0.6931, abs=1e-3)


def test_kto_trains_in_kto_trainer(model: Path, tmp_path: Path) -> None:
    dataset = exported(tmp_path, "kto", *episodes())
    assert sorted(dataset["label"]) == [False] * 4 + [True] * 4
    assert train(KTOTrainer, KTOConfig, model, tmp_path, dataset) == pytest.approx(0.5, abs=1e-3)


def test_sft_trains_in_sft_trainer(model: Path, tmp_path: Path) -> None:
    dataset = exported(tmp_path, "sft", *episodes(), best=2)
    assert len(dataset) == 8
    assert train(SFTTrainer, SFTConfig, model, tmp_path, dataset) > 1


def test_the_other_formats_load(tmp_path: Path) -> None:
    assert len(exported(tmp_path / "a", "openai", *episodes())) == 4
    table = exported(tmp_path / "b", "parquet", *episodes())
    assert len(table) == 8
    assert {json.loads(calls)[0]["index"] for calls in table["model_calls"]} == {0}
