"""Whole runs over ART's protocol whose connection is damaged at random, as `test_chaos` has them over our own."""

import os

import pytest
from art_runs import backend, each_release, finetune
from chaos_proxy import ChaosProxy
from factories import digits_project, write_rows
from test_chaos import EPOCHS, GENERATIONS, ROWS, check_run
from tiny_backend import Served
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    log = folder / "log"
    with backend(save_tiny_model(folder / "model"), folder, "--token", Served.token, log=log) as address:
        yield Served(address, log)


@each_release
@pytest.mark.parametrize("seed", range(int(os.environ.get("CHAOS_SEEDS", "1"))))
def test_a_run_ends_and_trains_only_what_was_sampled_once(release, seed, served, tmp_path):
    before = len(served.samples())
    with ChaosProxy(served.address, seed) as proxy:
        patience = {"read_timeout": 1, "retry_timeout": 20, "lost_reply_timeout": 5}
        server = {"ip": "127.0.0.1", "port": int(proxy.address.rpartition(":")[2]), "api_key": served.token}
        digits_project(
            tmp_path,
            _type="openpipe_art_trainer_adapter",
            backend={**server, "name": f"chaos-{release}-{seed}", "base_model": "model", **patience},
            training={"learning_rate": 1e-3},
        )
        write_rows(tmp_path, [{"say": f"Row {i}", "stream": bool(i % 2)} for i in range(ROWS)])
        types = {"trajectory_builders.episodes": "traj_builder", "trainers.grpo": "trainer"}
        keys = {f"{part}._type": f"openpipe_art_{name}" for part, name in types.items()}
        keys |= {"trajectory_builders.episodes.num_generations": GENERATIONS, "finetuning.num_epochs": EPOCHS}
        keys |= {"eval.general.retries": 2, "llms.player.max_retries": 3, "llms.player.timeout": 2}
        options = [text for key, value in keys.items() for text in ("-o", key, str(value))]
        done = finetune(release, tmp_path / "config.yml", *options, folder=tmp_path)
    summary = check_run(tmp_path / "run", done.returncode, done.stderr, served, proxy, before)
    print(f"seed {seed}, ART {release}: {summary}")
