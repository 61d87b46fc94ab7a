"""Rows for OpenEnv environments that make their tasks from seeds, and the projects that `insitu init` writes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_openai import FakeOpenAI
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
        await asyncio.to_thread(write_project, tmp_path / "game", environment=f"openenv:{url}")
        config = load_config(tmp_path / "game/config.yml")
        assert len(load_dataset(config)) == 64
        data = yaml.safe_load((tmp_path / "game/config.yml").read_text())
        assert data["workflow"]["url"] == url
        data["llms"]["student"] = {"_type": "openai", "model_name": "fake", "base_url": "http://127.0.0.1:1/v1"}
        (tmp_path / "game/other.yml").write_text(yaml.safe_dump(data))
        async with Builder(load_config(tmp_path / "game/other.yml")) as builder:
            await builder.get_workflow()


async def test_a_project_says_which_key_is_missing(tmp_path: Path) -> None:
    async with FakeOpenEnv(fields={"x": "integer"}).listening() as url:
        await asyncio.to_thread(write_project, tmp_path / "game", environment=f"openenv:{url}")
    about = (tmp_path / "game/README.md").read_text()
    assert "Before you start: workflow.action is missing" in about
    assert "has the fields x (integer), not one text; name a function" in about


async def test_nothing_is_written_for_what_cannot_be_used(tmp_path: Path, server: FakeOpenAI) -> None:
    """No server, another server, a package that is not installed here, and no kind of server at all."""
    async with FakeOpenEnv().listening() as url:
        pass
    for what, problem in (
        (url, f"openenv:{url}: {url} cannot be reached"),
        (server.base_url, "is answered with 404: is it an OpenEnv server"),
        ("http://[", "url: "),
        ("openenv_games:Digits", "workflow.class needs the extra openenv"),
        ("game", "expected a URL, http://HOST:PORT, or a class, MODULE:CLASS"),
    ):
        with pytest.raises(ConfigError) as caught:
            await asyncio.to_thread(write_project, tmp_path / "game", environment=f"openenv:{what}")
        assert problem in str(caught.value)
        assert not (tmp_path / "game").exists()


def test_a_project_needs_something_after_its_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'openenv' does not say what comes after `openenv:`"):
        write_project(tmp_path / "other", environment="openenv")
