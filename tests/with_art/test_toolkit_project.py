"""The project of a package that was written for the toolkit, trained through ART."""

import json
from pathlib import Path

import pytest
import yaml
from art_runs import ROOT, backend, each_release, finetune
from factories import read_lines
from tiny_models import save_tiny_model
from toolkit_project import OWN, PROJECT, ROWS

PACKAGE = ROOT / "tests/support/toolkit_plugin/src"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("desk")
    with backend(save_tiny_model(folder / "model", max_position_embeddings=4096), folder / "backend") as address:
        yield address


@each_release
def test_it_is_evaluated_and_trained(release: str, address: str, tmp_path: Path) -> None:
    """`nat eval` and `nat finetune` of the documents' blocks, their default of `beta` among them."""
    host, port = address.removeprefix("http://").split(":")
    name = f"desk-{release}"
    art = {
        "ip": host,
        "port": int(port),
        "name": name,
        "project": "desk",
        "base_model": "model",
        "init_args": {"max_seq_length": 4096},
    }
    served = {"_type": "openai", "model_name": name, "base_url": f"{address}/v1", "api_key": "default", "max_tokens": 8}
    file = {
        "llms": {"clerk": served},
        **PROJECT,
        **OWN,
        "general": {**PROJECT["general"], "plugins": ["answer_desk.register", "answer_desk_extras.plugin"]},
        "trajectory_builders": {"desk": {"_type": "openpipe_art_traj_builder", "num_generations": 4}},
        "trainer_adapters": {
            "desk": {"_type": "openpipe_art_trainer_adapter", "backend": art, "training": {"beta": 0.1}}
        },
        "trainers": {"desk": {"_type": "openpipe_art_trainer"}},
    }
    (tmp_path / "config.yml").write_text(yaml.safe_dump(file))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    for command in ("finetune", "eval"):
        done = finetune(release, Path("config.yml"), folder=tmp_path, command=command, PYTHONPATH=str(PACKAGE))
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr.count("without effect") == 1
    metrics = read_lines(tmp_path / "run/training_metrics.jsonl")
    assert [(m["policy_version"], m["job"], m["num_trajectories"]) for m in metrics] == [
        (1, "completed", 8),
        (2, "completed", 8),
    ]
    assert (tmp_path / "out/use_output.json").exists()
