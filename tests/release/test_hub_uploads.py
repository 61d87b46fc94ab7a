"""`finetuning.hub`: a run uploads its checkpoints and tries again what failed; what is missing is said before."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from factories import digits_project
from fake_nemo import FakeNeMo, Repository
from marks import slow_but
from processes import HANGS, run, start

TOKEN = "hf_secretsecretsecret"
VALIDATION = ("--validation_dataset", "validation.jsonl", "--validation_interval", "1")


def train(folder: Path, hub: FakeNeMo, settings: dict[str, Any], *arguments: str) -> str:
    """What a run of two epochs prints on standard error."""
    variables = {
        "HF_ENDPOINT": f"{hub.datastore_host}/v1/hf",
        "HF_HOME": str(folder / "hf"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
    }
    options = ("-o", "finetuning.hub", json.dumps(settings), *arguments)
    with start("finetune", "--config_file", "config.yml", *options, folder=folder, **variables) as process:
        _, errors = process.communicate(HANGS)
        assert process.wait() == 0, errors
    return errors


@pytest.mark.parametrize("push", slow_but({"best"}, ("best", "last")))
def test_a_run_uploads_its_checkpoints(tmp_path: Path, push: str) -> None:
    digits_project(tmp_path, rows=4, held_out=8)
    with FakeNeMo(lfs_bytes=20_000) as hub:
        hub.token = TOKEN
        earlier = {"adapter_config.json": b"{}", "model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"}
        hub.repositories["me/agent"] = Repository(files=earlier)
        hub.fail("commit", 500)  # the first upload is lost
        errors = train(tmp_path, hub, {"repo": "me/agent", "push": push, "private": False}, *VALIDATION)
        uploaded = hub.repositories["me/agent"]
    source = tmp_path / "run"
    best = json.loads((source / "best.json").read_text())
    chosen = Path(best["checkpoint"]).name if push == "best" else "step_000002"
    assert uploaded.visibility == "public"
    assert uploaded.commits[-1] == f"{chosen} of the run run"
    done = run("export", source, tmp_path / "out", "--checkpoint", chosen)
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {**written, "README.md": b"", "notes.txt": b"mine"} == {**uploaded.files, "README.md": b""}
    assert uploaded.files["README.md"].decode().startswith("---\nlibrary_name: transformers\n")
    assert "model-index" in uploaded.files["README.md"].decode()
    assert "finetuning.hub" not in errors, "the second attempt worked"
    assert TOKEN not in (source / "trackers/hub.log").read_text()
    assert not [*source.glob(".hub-*")]


@pytest.mark.slow
def test_a_run_that_has_uploaded_nothing_says_so(tmp_path: Path) -> None:
    digits_project(tmp_path, rows=2, held_out=2)
    still = ("-o", "trainer_adapters.backend.training.learning_rate", "0", "-o", "finetuning.num_epochs", "1")
    with FakeNeMo() as hub:
        hub.token = TOKEN
        errors = train(tmp_path, hub, {"repo": "me/agent"}, *VALIDATION, *still)
        assert hub.repositories["me/agent"].commits == []
    assert "finetuning.hub: hub has failed: BackendError: the last checkpoint was not uploaded: " in errors
    assert "these weights were not trained" in errors


@pytest.mark.slow
def test_an_upload_that_fails_to_the_end_is_a_warning(tmp_path: Path) -> None:
    digits_project(tmp_path, rows=4)
    with FakeNeMo() as hub:
        hub.token = TOKEN
        hub.fail("commit", 403, times=99)
        errors = train(tmp_path, hub, {"repo": "me/agent", "push": "last"})
    assert "finetuning.hub: hub has failed: BackendError: the last checkpoint was not uploaded: " in errors
    assert TOKEN not in errors


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"repo": "me/agent"},
            "finetuning.hub.push: best needs the key finetuning.validation; allowed without it: last",
        ),
        ({"repo": "not a name"}, "finetuning.hub.repo: 'not a name' is not the name of a repository: "),
        ({"repo": "me/agent", "push": "first"}, "finetuning.hub.push"),
        ({"push": "last"}, "finetuning.hub.repo"),
    ],
)
def test_what_cannot_be_uploaded_is_said_before_a_run(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    digits_project(tmp_path, rows=4)
    options = ("-o", "finetuning.hub", json.dumps(settings))
    done = run("validate", "--config_file", tmp_path / "config.yml", *options, folder=tmp_path, HF_TOKEN=TOKEN)
    assert done.returncode == 2
    assert says in done.stderr


def test_an_adapter_of_a_local_model_and_a_missing_token_are_refused(tmp_path: Path) -> None:
    digits_project(tmp_path, rows=4)
    lora = ("-o", "trainer_adapters.backend.training", "{lora: {rank: 4}}")
    for options, token, says in (
        (lora, TOKEN, "is on this machine only; add merge: true"),
        ((), "", "no token of the Hugging Face Hub; set HF_TOKEN"),
    ):
        hub = ("-o", "finetuning.hub", "{repo: me/agent, push: last}", *options)
        variables = (
            {"HF_TOKEN": token, "HF_HOME": str(tmp_path)} if token else {"HF_TOKEN": "", "HF_TOKEN_PATH": os.devnull}
        )
        done = run("validate", "--config_file", tmp_path / "config.yml", *hub, folder=tmp_path, **variables)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
