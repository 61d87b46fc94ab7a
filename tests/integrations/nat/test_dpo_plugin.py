"""A preference example as a package for the toolkit has it: two players, one without a model, on NeMo Customizer.

Its model is behind an endpoint that returns text only, and its services are those of `fake_nemo`.
"""

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from factories import pip_install
from fake_nemo import FakeNeMo
from fake_openai import FakeOpenAI
from marks import slow_but
from processes import run

PACKAGE = Path(__file__).parents[2] / "support/dpo_plugin"
KEY, TOKEN = "key-of-the-endpoint", "token-of-the-store"


class TextEndpoint(FakeOpenAI):
    """Answers 1, 2 or 3 in turn to each prompt, and refuses requests for more than text."""

    def __init__(self) -> None:
        super().__init__(token_ids=False, logprobs=False, policy_version=None)
        self._asked = Counter[str]()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if more := {"logprobs", "top_logprobs", "return_token_ids"} & asked.keys():
            return web.json_response({"error": {"message": f"unknown parameters: {sorted(more)}"}}, status=400)
        return await super()._complete(request)

    def _choice(self, body: dict[str, Any], text: str, index: int, number: int) -> dict[str, Any]:
        self._asked[prompt := str(body["messages"])] += 1
        message = {"role": "assistant", "content": f"I add {self._asked[prompt] % 3 + 1}"}
        return {"index": index, "message": message, "finish_reason": "stop"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pip_install(PACKAGE, tmp_path_factory.mktemp("dpo_plugin"))


@pytest.fixture
def endpoint() -> Iterator[TextEndpoint]:
    with TextEndpoint() as server:
        yield server


@pytest.fixture
def nemo() -> Iterator[FakeNeMo]:
    with FakeNeMo() as services:
        services.token = TOKEN
        yield services


def finetune(
    folder: Path, installed: Path, endpoint: TextEndpoint, nemo: FakeNeMo, *options: str
) -> subprocess.CompletedProcess[str]:
    """The package's own file, with its addresses and keys from the environment."""
    for name in ("config.yml", "data"):
        source = PACKAGE / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    addresses = {"LLM_URL": endpoint.base_url, "ENTITY_HOST": nemo.entity_host, "DATASTORE_HOST": nemo.datastore_host}
    keys = {"LLM_KEY": KEY, "DATASTORE_TOKEN": TOKEN, "PYTHONPATH": str(installed), "PYTHONWARNINGS": "error"}
    return run("finetune", "--config_file", "config.yml", *options, folder=folder, COLUMNS="200", **addresses, **keys)


def test_the_package_knows_nothing_of_insitu() -> None:
    assert not [
        p.name for p in PACKAGE.rglob("*") if p.suffix in (".py", ".toml", ".yml") and "insitu" in p.read_text()
    ]


@pytest.mark.parametrize("builder", slow_but(["race_counted_pairs"], ["dpo_traj_builder", "race_counted_pairs"]))
def test_from_the_package_to_a_trained_model(
    tmp_path: Path, installed: Path, endpoint: TextEndpoint, nemo: FakeNeMo, builder: str
) -> None:
    done = finetune(tmp_path, installed, endpoint, nemo, "-o", "trajectory_builders.dpo_builder._type", builder)
    assert done.returncode == 0, done.stderr
    assert ("evaluated 12 games" in done.stderr) == (builder == "race_counted_pairs")
    assert "trajectory_builders.dpo_builder: key 'custom_step_name' does not exist" in done.stderr
    assert done.stderr.count("; it is ignored") == 1
    assert "job cust-0 is completed: model race/race-moves-" in done.stdout

    [job] = nemo.jobs.values()
    assert (job["problem"], job["dataset"]) == (None, {"namespace": "race", "name": "race-moves"})
    records = [r for part in ("training", "validation") for r in nemo.records("race/race-moves", part)]
    responses = [{record["chosen_response"], record["rejected_response"]} for record in records]
    of_model = [pair for pair in responses if all(text.startswith("I add ") for text in pair)]
    of_script = [pair for pair in responses if pair <= {"1", "2", "3"}]
    assert len(of_model) + len(of_script) == len(records)
    assert min(len(of_model), len(of_script)) >= 12
    assert len(records) > 60  # about 105: the answers are drawn at random
    assert all(record["prompt"].startswith("The total is ") for record in records)

    run_folder = tmp_path / ".tmp/finetuning"
    final = json.loads((run_folder / "final_metrics.json").read_text())
    assert final["pairs"] == {"collected": len(records), "trained": len(records)}
    assert not final["dropped"].keys() & {"capture_error", "untargeted_candidate", "unsampled_candidate"}
    written = b"".join(path.read_bytes() for path in run_folder.rglob("*") if path.is_file())
    for secret in (KEY, TOKEN):
        assert secret not in done.stdout + done.stderr
        assert secret.encode() not in written
