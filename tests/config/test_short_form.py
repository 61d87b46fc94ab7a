"""A file in the short form is the documented file that it stands for."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from insitu.config import load_config
from insitu.config.resolved import resolved_config
from insitu.errors import ConfigError
from insitu.schemas.finetuning import FinetuneConfig
from insitu.schemas.kinds import TRAINER

SHORT = {
    "llms": {"student": {"_type": "policy", "max_tokens": 64}},
    "workflow": {"_type": "python", "function": "agent:answer", "model": "student"},
    "eval": {
        "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
        "evaluators": {"correct": {"_type": "exact_match"}},
    },
    "finetuning": {"model": "folder", "training": {"lora": {"rank": 4}}, "num_epochs": 3},
}
LONG = {
    **{key: SHORT[key] for key in ("llms", "workflow", "eval")},
    "trajectory_builders": {"episodes": {"_type": "insitu_traj_builder"}},
    "trainer_adapters": {
        "backend": {"_type": "insitu_trainer_adapter", "model": "folder", "training": {"lora": {"rank": 4}}}
    },
    "trainers": {"grpo": {"_type": "insitu_trainer"}},
    "finetuning": {
        "enabled": True,
        "trainer": "grpo",
        "trajectory_builder": "episodes",
        "trainer_adapter": "backend",
        "reward_function": {"name": "correct"},
        "num_epochs": 3,
    },
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file with these keys changed, by dotted key; None: without it."""
    (tmp_path / "agent.py").write_text("def answer(question, model): return model.ask(question)\n")

    def write(changes: dict[str, Any], form: dict[str, Any] = SHORT) -> Path:
        data: Any = copy.deepcopy(form)
        for key, value in changes.items():
            *sections, last = key.split(".")
            node = data
            for section in sections:
                node = node.setdefault(section, {})
            if value is None:
                del node[last]
            else:
                node[last] = value
        (tmp_path / "config.yml").write_text(yaml.safe_dump(data, sort_keys=False))
        return tmp_path / "config.yml"

    return write


def test_it_stands_for_the_documented_form(write: Write) -> None:
    short = load_config(write({}))
    assert short.data == LONG
    assert resolved_config(short) == resolved_config(load_config(write({}, LONG)))
    assert short.finetuning.model is None
    assert short.finetuning.training is None


@pytest.mark.parametrize(("given", "limit"), [({}, 256), ({"max_tokens": 7}, 7), ({"max_tokens": None}, None)])
def test_completions_of_the_model_under_training_have_a_limit(
    write: Write, given: dict[str, Any], limit: int | None
) -> None:
    judge = {"_type": "openai", "model_name": "judge", "base_url": "http://127.0.0.1:1/v1"}
    short = load_config(write({"llms": {"student": {"_type": "policy", **given}, "judge": judge}}))
    assert short.data["llms"] == {"student": {"_type": "policy", "max_tokens": limit}, "judge": judge}


def test_either_form_may_be_overridden(write: Write) -> None:
    """The keys of the documented form take precedence, as -o of the other file does."""
    overrides = [
        ("finetuning.model", "other"),
        ("finetuning.training.lora.alpha", "8"),
        ("trainer_adapters.backend.training.learning_rate", "1e-3"),
        ("trajectory_builders.episodes.num_generations", "2"),
        ("trainers.grpo.credit", "step"),
    ]
    data = load_config(write({}), overrides).data
    assert data is not None
    training = {"lora": {"rank": 4, "alpha": 8}, "learning_rate": 1e-3}
    assert data["trainer_adapters"] == {
        "backend": {"_type": "insitu_trainer_adapter", "model": "other", "training": training}
    }
    assert data["trajectory_builders"]["episodes"]["num_generations"] == 2
    assert data["trainers"]["grpo"]["credit"] == "step"
    url = [("trainer_adapters.backend.model", "null"), ("trainer_adapters.backend.url", "http://127.0.0.1:1")]
    data = load_config(write({"finetuning.training": None}), url).data
    assert data is not None
    assert data["trainer_adapters"]["backend"]["model"] is None


def test_parts_may_be_given(write: Write) -> None:
    other = {"_type": "insitu_trainer", "credit": "step"}
    changes = {"trainers.mine": other, "trainer_adapters.backend": {"dtype": "bfloat16"}}
    config = load_config(write(changes))
    assert config.finetuning.trainer == "mine"
    assert config.names(TRAINER) == ["mine"]
    assert config.data is not None
    assert config.data["trainer_adapters"]["backend"]["dtype"] == "bfloat16"
    several = {**changes, "trainers.other": other}
    with pytest.raises(ConfigError, match=r"does not name: trainer$"):
        load_config(write(several))
    assert load_config(write({**several, "finetuning.trainer": "other"})).finetuning.trainer == "other"


def test_the_reward(write: Write) -> None:
    reward = load_config(write({"finetuning.reward_function": {"on_failure": 0}})).finetuning.reward_function
    assert reward is not None
    assert (reward.name, reward.on_failure) == ("correct", 0)
    two = {"eval.evaluators.short": {"_type": "contains"}}
    assert load_config(write(two)).finetuning.reward_function is None
    named = {**two, "finetuning.reward_function": {"name": "short"}}
    reward = load_config(write(named)).finetuning.reward_function
    assert reward is not None
    assert reward.name == "short"


def test_what_was_refused_still_is(write: Write) -> None:
    assert load_config(write({"finetuning.enabled": False})).finetuning.enabled is False
    with pytest.raises(ValueError, match="does not name: trainer, trajectory_builder, trainer_adapter"):
        FinetuneConfig(enabled=True)
    with pytest.raises(ConfigError, match="does not name: trainer, trajectory_builder, trainer_adapter"):
        load_config(write({"finetuning": {"enabled": True}}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"finetuning.trainer_adapter": "backend"},
            "finetuning.model and finetuning.training and finetuning.trainer_adapter are both given; give one of them",
        ),
        (
            {"trainer_adapters.mine": {"_type": "insitu_trainer_adapter", "model": "x"}, "finetuning.training": None},
            "finetuning.model and trainer_adapters.mine are both given",
        ),
        (
            {"trainer_adapters.backend": {"_type": "insitu_trainer_adapter", "model": "x"}},
            "and trainer_adapters.backend are both given",
        ),
        (
            {"finetuning.model": None},
            "finetuning.training needs finetuning.model; without it, set trainer_adapters.backend.training",
        ),
        ({"finetuning.modell": "x", "finetuning.model": None, "finetuning.training": None}, "did you mean 'model'?"),
        ({"finetuning.training": {"learning_rat": 1}}, "finetuning.training: key 'learning_rat' does not exist"),
        ({"finetuning.training": 3}, "finetuning.training must be a mapping ({} takes its defaults), not a number"),
        ({"finetuning.model": 3}, "finetuning.model: Input should be a valid string (got 3)"),
        ({"trainers": ["grpo"]}, "trainers must be a mapping, not a list"),
        ({"trainers": {"grpo": 3}}, "trainers.grpo must be a mapping with the key _type"),
        (
            {"llms.studnet.temperature": 0.5},
            "llms.studnet must be a mapping with the key _type (the name of a registered component) "
            "(did you mean 'student'?)",
        ),
        (
            {"eval.evaluators": {"_type": "exact_match"}},
            "eval.evaluators has a block for each name: {NAME: {_type: exact_match}}",
        ),
        ({"trainer_adapters": 3}, "trainer_adapters must be a mapping, not a number"),
        ({"eval": 3}, "eval must be a mapping, not a number"),
        ({"finetuning.trainer": "nobody"}, "finetuning.trainer: 'nobody' does not exist"),
    ],
)
def test_mistakes_name_the_keys_of_the_file(write: Write, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(changes))
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"{write(changes)}:")
