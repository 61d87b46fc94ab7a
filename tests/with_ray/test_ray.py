"""Episodes on a Ray cluster of two nodes: the same results, whatever ends while they run, and nothing left behind."""

import hashlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PYTHON, TOKEN, RayCluster, project, ray_cluster, wait_for
from factories import read_lines, write_rows
from fake_openai import FakeOpenAI
from processes import wait_until
from test_resume import EPOCHS, METHODS, VALIDATION, Outcome, is_exercised, outcome

ROWS: list[dict[str, Any]] = [{"say": f"Row {i}"} for i in range(5)]


def weights(folder: Path) -> dict[str, str]:
    files = sorted((folder / "backend/checkpoints").glob("step_*/*.safetensors"))
    assert files
    return {f"{f.parent.name}/{f.name}": hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def episodes(folder: Path) -> dict[tuple[int, str, int], dict[str, Any]]:
    """What is known of each, but times and the name of the run; no episode is there twice."""
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    for record in read_lines(folder / "run/episodes.jsonl.gz")[1:]:
        key = record["epoch"], record["row_id"], record["generation"]
        assert key not in found
        record["episode"] = record["episode"].partition("/")[2]
        if record["error"] is not None:
            record["error"] = record["error"].replace(str(folder), "FOLDER")
        found[key] = {name: value for name, value in record.items() if name != "seconds"}
    return found


def calls_per_episode(folder: Path) -> dict[str, int]:
    names = [r["episode"].partition("/")[2] for r in read_lines(folder / "run/calls.jsonl.gz") if "episode" in r]
    return {name: names.count(name) for name in names}


def check_equal(ended: Outcome, expected: Outcome) -> None:
    for name, value in expected._asdict().items():
        assert getattr(ended, name) == value, name


def trained(cluster: RayCluster, folder: Path, rows: list[dict[str, Any]], *options: Any) -> Path:
    with project(folder):
        write_rows(folder, rows)
        write_rows(folder, [{"say": f"Held out {i}"} for i in range(4)], "validation.jsonl")
        code, out = cluster.run(folder, *options)
        assert code == 0, out
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_the_files_of_a_run_are_those_of_the_local_executor(cluster: RayCluster, tmp_path: Path, method: str) -> None:
    rows = [*ROWS, {"say": "Fail", "raise": "on purpose", "earn": 0.5}]
    options = (*VALIDATION, *EPOCHS, *METHODS[method])
    here = trained(cluster, tmp_path / "here", rows, *options)
    there = trained(cluster, tmp_path / "there", rows, *options, *cluster.executor())
    expected = outcome(here / "run")
    assert method == "snapshots" or is_exercised(method, expected)  # its best version may be one that is left out there
    check_equal(outcome(there / "run"), expected)
    assert weights(there) == weights(here)
    assert episodes(there) == episodes(here)
    assert not cluster.workers()


def marks(folder: Path) -> int:
    """How many episodes have asked their model, and wait."""
    file = folder / "marks"
    return len(file.read_text()) if file.exists() else 0


WAITING = [{"say": f"Row {i}", "wait": True, "earn": 0.1 * i} for i in range(4)]
ONE_EPOCH = (*VALIDATION, "-o", "finetuning.num_epochs", "1", "-o", "eval.general.episode_timeout", "null")


@pytest.fixture(scope="module")
def undisturbed(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process whose episodes do not wait."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with project(folder, "worker"):
        write_rows(folder, WAITING)
        write_rows(folder, [{"say": "Held out"}], "validation.jsonl")
        (folder / "released").touch()
        code, out = cluster.run(folder, *ONE_EPOCH)
        assert code == 0, out
    return folder


@pytest.mark.parametrize("lost", ["worker", "node"])
def test_episodes_of_a_lost_worker_or_node_are_run_again(undisturbed: Path, tmp_path: Path, lost: str) -> None:
    """All 16 episodes are in flight when it ends; no file shows that half of them were run twice."""
    with ray_cluster() as cluster, project(tmp_path / "there", "worker") as folder:
        write_rows(folder, WAITING)
        write_rows(folder, [{"say": "Held out"}], "validation.jsonl")
        with cluster.start(folder, *ONE_EPOCH, *cluster.executor()) as process:
            wait_for(lambda: marks(folder) == 1 + 16, process)
            if lost == "node":
                cluster.tell("remove")
                cluster.tell("add")
            else:
                cluster.workers()[0].kill()
            wait_for(lambda: marks(folder) == 1 + 16 + 8, process)
            (folder / "released").touch()
            out, _ = process.communicate()
        assert process.returncode == 0, out
        assert "has ended; its 8 episodes are run again" in out
    check_equal(outcome(folder / "run"), outcome(undisturbed / "run"))
    assert weights(folder) == weights(undisturbed)
    assert episodes(folder) == episodes(undisturbed)


def test_an_agent_that_ends_its_process_every_time_fails_only_its_own_episodes(
    cluster: RayCluster, tmp_path: Path
) -> None:
    with project(tmp_path / "there", "worker") as folder:
        rows = [{"say": f"Row {i}"} for i in range(3)]
        write_rows(folder, [*rows, {"say": "Die", "exit": True}])
        options = ("-o", "trajectory_builders.episodes.num_generations", "2", *EPOCHS[:2], "1")
        code, out = cluster.run(folder, *options, *cluster.executor(max_losses=2))
        assert code == 0, out
    found = episodes(folder)
    assert len(found) == 4 * 2
    for (_, row, _), episode in found.items():
        if row == "3":
            assert (episode["outcome"], episode["reason"]) == ("failed", "workflow_error")
            assert "its worker has ended 3 times while it ran (max_losses)" in episode["error"]
        else:
            assert (episode["outcome"], episode["attempt"], episode["calls"]) == ("ok", 0, 1)
    assert set(calls_per_episode(folder).values()) == {1}
    assert not cluster.workers()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_worker_behind(cluster: RayCluster, tmp_path: Path, number: int) -> None:
    with project(tmp_path / "there", "worker") as folder:
        write_rows(folder, WAITING)
        write_rows(folder, [{"say": "Held out"}], "validation.jsonl")
        with cluster.start(folder, *ONE_EPOCH, *cluster.executor()) as process:
            wait_for(lambda: marks(folder) == 1 + 16, process)
            process.send_signal(number)
            out, _ = process.communicate()
        assert process.returncode == 130, out
    wait_until(lambda: not cluster.workers())


SECRETS = {
    "FILE_TOKEN": "sk-file-7d1e5c0a",  # the file refers to it
    "PASSED_TOKEN": "sk-passed-4b9f2e",  # pass_env names it
    "SERVICE_PASSWORD": "pw-of-the-service-77",  # in runtime_env.env_vars
}


def test_no_file_of_the_cluster_has_a_secret(tmp_path: Path) -> None:
    """The workers know them all, and their agent prints them and raises an error that has one."""
    with ray_cluster() as cluster, project(tmp_path / "there", "worker") as folder:
        write_rows(folder, [{"say": "Row 0"}, {"say": "Row 1", "show": [*SECRETS]}])
        variables = {name: SECRETS[name] for name in ("FILE_TOKEN", "PASSED_TOKEN")}
        runtime_env = {"env_vars": {"SERVICE_PASSWORD": SECRETS["SERVICE_PASSWORD"], "VISIBLE": "4711-is-no-secret"}}
        options = (
            *("-o", "workflow.token", "${FILE_TOKEN}", "-o", "finetuning.num_epochs", "1"),
            *cluster.executor(pass_env=["PASSED_TOKEN"], runtime_env=runtime_env),
        )
        code, out = cluster.run(folder, *options, **variables)
        assert code == 0, out
        found = episodes(folder)
        assert {e["error"].partition(" (")[0] for e in found.values() if e["error"]} == {"RuntimeError: *** is wrong"}
        assert "shown: *** *** *** ***" in out
        files = [file for file in cluster.folder.rglob("*") if file.is_file()]
        texts = {file: file.read_bytes() for file in files}
    assert any(b"shown: *** *** *** ***" in text for text in texts.values())
    assert any(b"4711-is-no-secret" in text for text in texts.values()), (
        "what Ray is given is not in its files any more"
    )
    for secret in (*SECRETS.values(), TOKEN):
        assert secret not in out
        assert [str(file) for file, text in texts.items() if secret.encode() in text] == []


def test_a_secret_that_ray_would_write_to_files_is_refused(cluster: RayCluster, tmp_path: Path) -> None:
    with project(tmp_path / "there") as folder:
        write_rows(folder, ROWS)
        index = "--index-url https://me:pw-of-the-index@example.com/simple"
        code, out = cluster.run(folder, *cluster.executor(runtime_env={"pip": [index]}))
    assert code == 2
    assert "general.executor.runtime_env.pip holds a secret, and Ray writes it to files" in out
    assert "pw-of-the-index" not in out


def test_a_blocked_worker_is_named(cluster: RayCluster, tmp_path: Path) -> None:
    with project(tmp_path / "there", "worker") as folder:
        write_rows(folder, [{"say": "Row 0"}, {"say": "Row 1", "block": True}, {"say": "Row 2", "wait": True}])
        stalls = ("-o", "eval.general.stall_warning", "2", "-o", "eval.general.stall_timeout", "8")
        code, out = cluster.run(folder, *stalls, *cluster.executor(workers=1))
        place = "is blocked by .*worker_plugin.py, line "
        assert code == 1
        assert re.search(rf"nothing has completed for .*: waiting for row .*{place}".replace(": w", ", w"), out), out
        assert "gave up after eval.general.stall_timeout: 8 s" in out


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no cluster": (
        {"address": "127.0.0.1:9"},
        r"general.executor.address is '127.0.0.1:9', but nothing can be reached there \(.*\): start a Ray cluster",
    ),
    "no address": ({"address": "nowhere"}, "general.executor.address is 'nowhere'; expected auto, or host:port"),
    "ray client": ({"address": "ray://127.0.0.1:10001"}, "the Ray Client protocol cannot carry episodes"),
    "no variable": ({"pass_env": ["NOT_THERE"]}, "general.executor.pass_env names NOT_THERE: no such environment"),
    "no folder": (
        {"runtime_env": {"working_dir": "not_there"}},
        "general.executor.runtime_env.working_dir: 'not_there'",
    ),
    "wrong runtime_env": (
        {"runtime_env": {"conda": {"dependencies": ["pip"]}, "pip": ["six"]}},
        "general.executor: Ray refuses the address or runtime_env: .*conda",
    ),
    "unknown key": (
        {"runtime_env": {"workingdir": "."}},
        r"runtime_env: key 'workingdir' .*did you mean 'working_dir'",
    ),
    "no workers": ({"workers": 0}, r"general.executor.workers: .*greater than or equal to 1 \(got 0\)"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_refused(cluster: RayCluster, refused: Path, settings: dict[str, Any], message: str) -> None:
    code, out = cluster.run(refused, *cluster.executor(**settings))
    assert code == 2, out
    assert re.search(message, out), out
    assert "Traceback" not in out
    assert not (refused / "run").exists()


def test_another_server_is_no_cluster(cluster: RayCluster, refused: Path) -> None:
    with FakeOpenAI() as server:
        address = server.base_url.removeprefix("http://").removesuffix("/v1")
        code, out = cluster.run(refused, *cluster.executor(address=address))
    assert code == 2, out
    assert f"general.executor.address is '{address}'" in out


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project whose runs do not begin."""
    with project(tmp_path_factory.mktemp("refused") / "there") as folder:
        write_rows(folder, ROWS)
        yield folder


def test_the_policy_must_be_reachable_from_all_machines(refused: Path) -> None:
    """It listens on 127.0.0.1, and one of the nodes has another host name, as a machine or a container has."""
    with ray_cluster() as cluster, cluster.other_machine():
        code, out = cluster.run(refused, *cluster.executor(workers=3))
    assert code == 2, out
    place = r"general.executor: the worker with pid \d+ on elsewhere: trainer_adapters.backend: "
    assert re.search(
        place + r"the model is served at http://127.0.0.1:\d+/v1, which is out of reach from there", out
    ), out
    assert "set url or base_url to that" in out


def test_an_evaluation_is_the_same(cluster: RayCluster, refused: Path, tmp_path: Path) -> None:
    """The model is served already; its files are those of an evaluation in one process."""
    found = []
    for name, options in (("here", ()), ("there", cluster.executor())):
        folder = tmp_path / name
        code, out = cluster.run(refused, "-o", "eval.general.output_dir", folder, *options, command="eval")
        assert code == 0, out
        answers = json.loads((folder / "workflow_output.json").read_text())
        found.append(
            {row["id"]: (row["generated_answer"], row["error"], len(row["intermediate_steps"])) for row in answers}
        )
        found.append(json.loads((folder / "score_output.json").read_text()))
    assert found[2:] == found[:2]


def test_a_run_in_one_process_does_not_import_ray(cluster: RayCluster, refused: Path) -> None:
    code = (
        "import sys; sys.argv = ['insitu', 'eval', '--config_file', 'config.yml']\n"
        "from insitu.cli import main\n"
        "try: main()\n"
        "finally: print('imported:', *sys.modules)"
    )
    done = subprocess.run([PYTHON, "-c", code], cwd=refused, capture_output=True, text=True, check=True)
    imported = done.stdout.rpartition("imported:")[2].split()
    assert "insitu.collect.collector" in imported
    assert not {"ray", "insitu.integrations.ray"} & set(imported)


def test_a_workflow_that_workers_cannot_import(cluster: RayCluster, refused: Path, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").touch()
    plugins = ("-o", "general.plugins", "[digits_plugin, only_here]")
    code, out = cluster.run(refused, *plugins, *cluster.executor(), PYTHONPATH=str(tmp_path))
    assert code == 2, out
    assert re.search(r"general.executor: the worker with pid \d+ on \S+: the file cannot be loaded there: ", out), out
    assert "general.plugins: no module named 'only_here'" in out
    assert "or be shipped by general.executor.runtime_env" in out
    shipped = cluster.executor(
        runtime_env={"working_dir": str(refused), "py_modules": [str(tmp_path / "only_here.py")]}
    )
    code, out = cluster.run(refused, "-o", "finetuning.num_epochs", "1", *plugins, *shipped, PYTHONPATH=str(tmp_path))
    assert code == 0, out


def test_the_cost_of_an_episode_for_the_driver(cluster: RayCluster) -> None:
    """CPU time of all threads of the process that trains, for 2,000 episodes of 50 ms, with the cluster and without."""
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    command = [PYTHON, "ray_driver.py", cluster.address]
    environment = {**os.environ, **cluster.environment}
    done = subprocess.run(command, cwd=benchmarks, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    print(figures)
    assert figures["ray"]["episodes"] == figures["alone"]["episodes"] == 2000
    assert figures["ray"]["cpu_ms_per_episode"] < figures["alone"]["cpu_ms_per_episode"]
