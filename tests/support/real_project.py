"""The project of the tests with a real model: it writes a plain file, an agent and rows for a method of training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from real_model import real_model

EPOCHS, ROWS, GENERATIONS, HELD_OUT = 2, 3, 4, 2
AGENT = '''
import insitu


async def answer(question: str, model: insitu.Model) -> str:
    return await model.ask(question)


def score(answer: str) -> float:
    """Differs between almost any two answers, so that all groups train."""
    return sum(map(ord, answer)) % 97 / 96
'''
PRODUCTS = ("kettle", "desk lamp", "tent", "printer", "toaster", "ladder")
QUESTION = "Which product is this message about? Message: The {} that you sent me broke after two days."
LORA = {"rank": 8, "alpha": 16}
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "all weights": {"training": {"learning_rate": 1e-5}},
    "LoRA": {"training": {"learning_rate": 1e-4, "lora": LORA}, "adapter": {"dtype": "float32"}},
    "bfloat16 LoRA": {"training": {"learning_rate": 1e-4, "lora": LORA}, "adapter": {"dtype": "bfloat16"}},
    "DPO": {
        "training": {"method": "dpo", "learning_rate": 1e-5},
        "builder": {"_type": "dpo_from_groups"},
        "trainer": {"_type": "insitu_dpo_trainer"},
    },
    "SFT": {"training": {"method": "sft", "learning_rate": 1e-5}, "trainer": {"_type": "insitu_sft_trainer"}},
}
"""What each changes in the blocks of the file. The default dtype of adapters depends on the processor."""


class Recorded(NamedTuple):
    """A project that was trained."""

    method: str
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def checkpoint(self, version: int) -> Path:
        return self.run / f"backend/checkpoints/step_{version:06d}"


Runs = Callable[[str], Recorded]


def project(folder: Path, method: str, **blocks: dict[str, Any]) -> Path:
    """A project in a folder; `blocks` change those of the method further."""
    parts = {
        name: METHODS[method].get(name, {}) | blocks.get(name, {})
        for name in ("training", "adapter", "builder", "trainer")
    }
    config = {
        "general": {"seed": 3},
        "llms": {"student": {"_type": "policy", "max_tokens": 8}},
        "workflow": {"_type": "python", "function": "agent:answer", "model": "student"},
        "eval": {
            "general": {
                "max_concurrency": 16,
                "episode_timeout": 600,
                "dataset": {"_type": "jsonl", "file_path": "rows.jsonl"},
            },
            "evaluators": {"score": {"_type": "python", "function": "agent:score"}},
        },
        "trajectory_builders": {
            "episodes": {"_type": "insitu_traj_builder", "num_generations": GENERATIONS, **parts["builder"]}
        },
        "trainer_adapters": {
            "backend": {
                "_type": "insitu_trainer_adapter",
                "model": str(real_model()),
                "training": parts["training"],
                "keep": {"every": 1},
                **parts["adapter"],
            }
        },
        "trainers": {"trainer": {"_type": "insitu_trainer", **parts["trainer"]}},
        "finetuning": {
            "enabled": True,
            "trainer": "trainer",
            "trajectory_builder": "episodes",
            "trainer_adapter": "backend",
            "reward_function": {"name": "score"},
            "num_epochs": EPOCHS,
            "output_dir": "run",
            "validation": {"dataset": "held_out.jsonl", "interval": 1},
        },
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "agent.py").write_text(AGENT)
    for name, products in (("rows.jsonl", PRODUCTS[:ROWS]), ("held_out.jsonl", PRODUCTS[ROWS : ROWS + HELD_OUT])):
        rows = [{"id": number, "question": QUESTION.format(product)} for number, product in enumerate(products)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
