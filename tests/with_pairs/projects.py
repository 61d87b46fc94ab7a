"""Makes the project of a case, and runs it as its front says."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from factories import CUSTOMIZATION_CONFIG, FakeNeMo, read_lines
from matrix import GROUP_RELATIVE, Case
from processes import HANGS, forked_python, run, serving, start, wait_until
from tiny_models import save_tiny_model

GENERATIONS, EPOCHS = 4, 2
FAILURE = "this row fails in half of its episodes"
TOKEN = "token-of-the-backend-7Qd2"
PASSWORD = "password-of-the-user-9Kx4"
SECRETS = (TOKEN, PASSWORD)
"""They are in the environment and in files of the user, and must not be in a file of a run."""
HERE = Path(__file__).parent
ART = HERE.parents[1] / ".environments/art/0.5.18/bin"
"""The environment of ART's client, which excludes ours."""
TRACKER = """
import json
from insitu.plugin_api import Tracker


class Recording(Tracker):
    def start(self, run, continued):
        self.path = run.folder / "recording.jsonl"

    def log(self, step):
        with self.path.open("a") as file:
            file.write(json.dumps({"epoch": step.epoch, "metrics": step.metrics}) + "\\n")

    def finish(self, status):
        pass
"""
"""An installed tracker that writes what it gets."""


class Project:
    """The files of a case in a folder, and the servers that it needs."""

    def __init__(self, folder: Path, case: Case, servers: ExitStack) -> None:
        self.folder, self.case, self._servers = folder, case, servers
        self.run = folder / "run"
        folder.mkdir()
        shutil.copy(HERE / "talk_plugin.py", folder)
        fails = {"fails": True} if case["episodes"] == "failing" else {}
        alike = {"alike": True} if case["episodes"] == "alike at first" else {}
        for name, count in {"rows.jsonl": self.rows, "held_out.jsonl": 3}.items():
            rows = [
                {
                    "id": f"{name[0]}{i}",
                    "question": {
                        "say": f"{name[0]}{i}",
                        **(fails if i else {}),
                        **(alike if name == "rows.jsonl" else {}),
                    },
                }
                for i in range(count)
            ]
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        shown = {"messages": [{"role": "user", "content": "r1 0"}, {"role": "assistant", "content": "97"}]}
        (folder / "shown.jsonl").write_text(json.dumps(shown) + "\n")
        self.nemo = servers.enter_context(FakeNeMo()) if case["adapter"] == "customizer" else None
        self._install_tracker(folder / "site")
        config = self._config()
        self._write(config)
        if case["executor"] != "local":
            self._write(config | {"general": config["general"] | {"executor": self._services()}})

    def _install_tracker(self, site: Path) -> None:
        info = site / "recording-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "recording.py").write_text(TRACKER)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recording\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[insitu.trackers]\nrecording = recording:Recording\n")

    def _write(self, config: dict[str, Any]) -> None:
        (self.folder / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))

    def _services(self) -> dict[str, Any]:
        if self.case["executor"] == "ray":
            return {"_type": "ray", "workers": 2}
        count = 2 if self.case["executor"] == "two services" else 1
        command = ("serve", "--config_file", "config.yml", "--port", "0")
        services = [self._servers.enter_context(serving(*command, folder=self.folder)) for _ in range(count)]
        return {"_type": "service", "url": [address for _, address in services]}

    def _config(self) -> dict[str, Any]:
        case = self.case
        tokens = 2 if case["episodes"] == "cut off" else 12
        turn = {"_type": "reply", "llm": "player", "candidates": 3 if case["method"] == "dpo of turns" else 1}
        return {
            "general": {"seed": 3, "plugins": ["talk_plugin"]},
            "llms": {"player": self._llm() | {"max_tokens": tokens, "max_retries": 0}},
            "functions": {"turn": turn},
            "workflow": {"_type": "talk", "reply": "turn"},
            "eval": {
                "general": {"max_concurrency": 8, "dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
                "evaluators": {"score": {"_type": "digit_share"}},
            },
            "trajectory_builders": {"builder": self._builder()},
            "trainer_adapters": {"adapter": self._adapter()},
            "trainers": {"trainer": self._trainer()},
            "finetuning": self._finetuning(),
        }

    def _llm(self) -> dict[str, Any]:
        if self.case["adapter"] not in ("art", "customizer"):
            return {"_type": "policy"}
        self.address = self._servers.enter_context(self._backend())
        name = "policy" if self.nemo is not None else "talker"
        return {"_type": "openai", "base_url": f"{self.address}/v1", "api_key": TOKEN, "model_name": name}

    @contextmanager
    def _backend(self) -> Iterator[str]:
        options = ("--model", self.model, "--port", "0", "--output_dir", self.folder / "served")
        with serving("backend", *options, INSITU_BACKEND_TOKEN=TOKEN) as (_, address):
            yield address

    @property
    def model(self) -> Path:
        folder = self.folder.parent / "model"
        return folder if folder.exists() else save_tiny_model(folder)

    def _builder(self) -> dict[str, Any]:
        of_turns = {"_type": "dpo_traj_builder", "ttc_step_name": "dpo_candidate_move"}
        of_episodes = {"_type": "dpo_from_groups", "exhaustive_pairs": True}
        kinds = {"dpo of turns": of_turns, "dpo of episodes": of_episodes}
        return kinds.get(self.case["method"], {"_type": "insitu_traj_builder"}) | {"num_generations": GENERATIONS}

    def _trainer(self) -> dict[str, Any]:
        case = self.case
        if self.nemo is not None:
            return {"_type": "nemo_customizer_trainer"}
        if case["adapter"] == "art":
            return {"_type": "openpipe_art_trainer"}
        kinds = {"dpo of turns": "insitu_dpo_trainer", "dpo of episodes": "insitu_dpo_trainer"}
        kinds |= {"kto": "insitu_kto_trainer", "sft": "insitu_sft_trainer"}
        trainer: dict[str, Any] = {"_type": kinds.get(case["method"], "insitu_trainer")}
        baselines = {"by rank": {"_type": "python", "function": "talk_plugin:by_rank"}}
        if case["baseline"] != "mean":
            trainer["advantages"] = baselines.get(case["baseline"], {"baseline": case["baseline"]})
        if case["credit"] != "episode":
            trainer["credit"] = case["credit"]
        if case["staleness"] != "0":
            trainer["staleness"] = int(case["staleness"])
        if case["stream"] == "streamed":
            trainer["stream"] = True
        if case["method"] == "warm-up":
            trainer["sft"] = {"rows": "shown.jsonl", "epochs": 30, "learning_rate": 1e-2}
        return trainer

    def _adapter(self) -> dict[str, Any]:
        case = self.case
        if self.nemo is not None:
            hosts = {"entity_host": self.nemo.entity_host, "datastore_host": self.nemo.datastore_host}
            job = {"namespace": "games", "customization_config": CUSTOMIZATION_CONFIG, "poll_interval_seconds": 0.02}
            return {"_type": "nemo_customizer_trainer_adapter", **hosts, **job}
        if case["adapter"] == "art":
            host, _, port = self.address.removeprefix("http://").partition(":")
            server = {"ip": host, "port": int(port), "api_key": TOKEN}
            model = {"name": "talker", "project": "pairs", "base_model": str(self.model)}
            return {
                "_type": "openpipe_art_trainer_adapter",
                "backend": server | model,
                "training": {"learning_rate": 1e-3},
            }
        methods = {"dpo of turns": "dpo", "dpo of episodes": "dpo", "kto": "kto", "sft": "sft"}
        training = {"method": methods.get(case["method"], "grpo"), "learning_rate": 1e-3, "mini_batch_size": 8}
        if case["stream"] == "streamed":
            del training["mini_batch_size"]
        if case["weights"] == "lora":
            training["lora"] = {"rank": 4}
        if case["staleness"] != "0" and case["method"] in GROUP_RELATIVE:
            training["truncated_importance"] = 2.0
        adapter: dict[str, Any] = {"_type": "insitu_trainer_adapter", "training": training}
        if case["adapter"] == "url":
            adapter |= {"url": self._servers.enter_context(self._backend()), "api_key": TOKEN}
        else:
            adapter |= {"model": str(self.model)}
        if case["keep"] != "default":
            adapter["keep"] = {"every": 1} if case["keep"] == "all" else {"last": 1, "best": False}
        if case["processes"] != "1":
            adapter["learner"] = {"processes": int(case["processes"])}
        return adapter

    def _finetuning(self) -> dict[str, Any]:
        case = self.case
        section: dict[str, Any] = {
            "enabled": True,
            "trainer": "trainer",
            "trajectory_builder": "builder",
            "trainer_adapter": "adapter",
            "reward_function": {"name": "score", "on_failure": 0.0 if case["on_failure"] == "number" else "exclude"},
            "num_epochs": EPOCHS,
            "output_dir": "run",
        }
        if case["validation"] != "none":
            section["validation"] = {"dataset": "held_out.jsonl", "interval": 1}
            section["validation"] |= {"beside": True} if case["validation"] == "beside" else {}
        if case["curriculum"] == "on":
            section["curriculum_learning"] = {
                "enabled": True,
                "initial_percentile": 0.5,
                "expansion_interval": 1,
                "min_reward_diff": 0.0,
            }
        if case["report_to"] != "none":
            section["report_to"] = ["recording"]
        return section

    def train(self) -> None:
        """Trains as the front of the case says."""
        front = self.case["front"]
        if front == "python":
            (self.folder / "train.py").write_text("import insitu; insitu.finetune(config='config.yml')")
            command = [ART / "python" if self.uses_art else forked_python(), "train.py"]
            done = subprocess.run(
                command, cwd=self.folder, capture_output=True, text=True, env=os.environ | self.variables
            )
            assert done.returncode == 0, (done.stdout, done.stderr)
            return
        if front == "resumed":
            self._kill_in_the_second_epoch()
        self.succeeds(*(["--resume"] if front == "resumed" else []))
        if front == "forked":
            done = run("runs", "fork", "run", "forked", "--epoch", "1", folder=self.folder)
            assert done.returncode == 0, done.stderr
            self.succeeds("--resume", "forked")

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its commands, whose warnings are errors."""
        secrets = {"INSITU_BACKEND_TOKEN": TOKEN, "SOME_PASSWORD": PASSWORD}
        path = (
            f"{self.folder / 'site'}:{HERE / 'stubs'}" if self.case["executor"] == "ray" else str(self.folder / "site")
        )
        warnings = {} if self.uses_art else {"PYTHONWARNINGS": "error"}
        return {"PYTHONPATH": path, "COLUMNS": "200", **warnings, **secrets}

    @property
    def uses_art(self) -> bool:
        return self.case["adapter"] == "art"

    @property
    def trains_here(self) -> bool:
        """Whether the run knows what each token was trained with."""
        return self.case["adapter"] in ("child", "url")

    def finetune(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        if self.uses_art:
            command = [ART / "insitu", "finetune", "--config_file", "config.yml", *arguments]
            environment = os.environ | self.variables
            return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=environment)
        return run("finetune", "--config_file", "config.yml", *arguments, folder=self.folder, **self.variables)

    def succeeds(self, *arguments: str) -> None:
        done = self.finetune(*arguments)
        assert done.returncode == 0, (done.stdout, done.stderr)

    def _kill_in_the_second_epoch(self) -> None:
        file = self.run / ("pairs.jsonl" if self.nemo else "training_metrics.jsonl")
        arguments = ("finetune", "--config_file", "config.yml")
        if self.uses_art:
            command, environment = [ART / "insitu", *arguments], os.environ | self.variables
            with subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.DEVNULL) as process:
                wait_until(lambda: process.poll() is not None or (file.exists() and file.read_bytes()))
                assert process.poll() is None
                process.kill()
            return
        with start(*arguments, folder=self.folder, **self.variables) as process:
            process.wait_until(lambda: file.exists() and file.read_bytes())
            process.kill()
            process.communicate(HANGS)

    @property
    def runs(self) -> list[Path]:
        """The runs that `train` has made."""
        return [self.run, self.folder / "forked"] if self.case["front"] == "forked" else [self.run]

    @property
    def rows(self) -> int:
        """Rows of an epoch; those of a streamed one are two parts."""
        return 12 if self.case["stream"] == "streamed" else 4

    @property
    def makes_pairs(self) -> bool:
        return self.case["method"].startswith("dpo")

    @property
    def is_group_relative(self) -> bool:
        return self.case["method"] in GROUP_RELATIVE


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "training_metrics.jsonl")
