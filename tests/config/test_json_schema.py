"""`insitu schema`: what editors check of a file agrees with what insitu checks."""

import json
from pathlib import Path
from typing import Any

import pytest
from factories import ROOT
from jsonschema import Draft202012Validator
from processes import run

from insitu.config.json_schema import json_schema
from insitu.config.yaml_loader import parse_yaml

FOLDERS = ("examples", "tests/data", "tests/support", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.yml"))
EXAMPLES = [path for path in FILES if "_type" in path.read_text()]


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def problems(validator: Draft202012Validator, data: Any) -> list[str]:
    return [f"{error.json_path}: {error.message:.200}" for error in validator.iter_errors(data)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_files_of_the_repository_are_valid(validator: Draft202012Validator, path: Path) -> None:
    assert problems(validator, parse_yaml(path.read_text())) == []


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 10


def example() -> dict[str, Any]:
    return dict(parse_yaml((ROOT / "examples/tic_tac_toe/grpo.yml").read_text()))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("general", "sed", 1),
        ("finetuning", "num_epoch", 1),
        ("finetuning", "num_epochs", "many"),
        ("trainer_adapters", "backend", {"_type": "insitu_trainer_adapter", "modle": "x"}),
        ("trainer_adapters", "backend", {"_type": "insitu_trainer_adapter", "training": {"learnin_rate": 1}}),
        ("trainer_adapters", "backend", {"model": "x"}),
        ("eval", "evaluator", {}),
    ],
)
def test_what_insitu_refuses_is_marked(validator: Draft202012Validator, section: str, key: str, value: Any) -> None:
    data = example()
    data[section] = {**data.get(section, {}), key: value}
    assert problems(validator, data)


def test_a_section_that_does_not_exist_is_marked(validator: Draft202012Validator) -> None:
    assert problems(validator, {"finetunning": {}})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("functions", "mine", {"_type": "of_a_plugin", "anything": [1, 2]}),
        ("finetuning", "num_epochs", "${EPOCHS:-5}"),
        ("finetuning", "validation", None),
        ("trainer_adapters", "backend", {"_type": "insitu_trainer_adapter", "model": "x", "training": None}),
        ("general", "telemetry", {"logging": {}}),
        ("retrievers", "of_the_toolkit", {"_type": "x"}),
    ],
)
def test_what_insitu_accepts_is_not(validator: Draft202012Validator, section: str, key: str, value: Any) -> None:
    data = example()
    data[section] = {**data.get(section, {}), key: value}
    assert problems(validator, data) == []


def test_it_has_the_descriptions_of_the_reference_and_all_built_in_types() -> None:
    schema = json.loads(run("schema").stdout)
    assert schema["$defs"]["GeneralConfig"]["properties"]["seed"]["description"].startswith("Seed for dataset order")
    chosen = schema["$defs"]["trainers"]["properties"]["_type"]["anyOf"][0]["enum"]
    assert {"insitu_trainer", "insitu_dpo_trainer", "openpipe_art_trainer"} <= {*chosen}
