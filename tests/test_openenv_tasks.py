"""Rows for OpenEnv environments that make their tasks from seeds, and the projects that `insitu init` writes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_openenv import FakeOpenEnv

from insitu.builder import Builder
from insitu.collect.datasets import find_dataset, load_dataset
from insitu.config import load_config
from insitu.errors import ConfigError
from insitu.starter import write_project


def test_each_row_is_a_seed(write: Any) -> None:
    dataset = {"_type": "openenv", "episodes": 3, "first_seed": 5}
    config = load_config(write({"eval": {"general": {"dataset": dataset}}}))
    rows = load_dataset(config)
    assert [(row.id, row.input_obj, row.full_dataset_entry["seed"]) for row in rows] == [(n, "", n) for n in (5, 6, 7)]
    assert find_dataset(config).record()["source"] == "openenv"


async def test_a_project_for_a_server(tmp_path: Path) -> None:
    """What is written is valid, and its workflow finds the server."""
    async with FakeOpenEnv().listening() as url:
        write_project(tmp_path / "game", environment=f"openenv:{url}")
        config = load_config(tmp_path / "game/config.yml")
        assert len(load_dataset(config)) == 64
        data = yaml.safe_load((tmp_path / "game/config.yml").read_text())
        assert data["workflow"]["url"] == url
        data["llms"]["student"] = {"_type": "openai", "model_name": "fake", "base_url": "http://127.0.0.1:1/v1"}
        (tmp_path / "game/other.yml").write_text(yaml.safe_dump(data))
        async with Builder(load_config(tmp_path / "game/other.yml")) as builder:
            await builder.get_workflow()


def test_a_project_for_a_class(tmp_path: Path) -> None:
    write_project(tmp_path / "game", environment="openenv:openenv_games:Digits")
    assert yaml.safe_load((tmp_path / "game/config.yml").read_text())["workflow"]["class"] == "openenv_games:Digits"
    with pytest.raises(ConfigError, match="expected a URL, http://HOST:PORT, or a class, MODULE:CLASS"):
        write_project(tmp_path / "other", environment="openenv:game")
    with pytest.raises(ConfigError, match="'openenv' does not say what comes after `openenv:`"):
        write_project(tmp_path / "other", environment="openenv")
