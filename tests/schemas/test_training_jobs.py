"""The learning rates of jobs that name none."""

from typing import Any

import pytest

from insitu.integrations.art.config import ARTTrainerAdapterConfig
from insitu.schemas.training_jobs import TrainingOptions, TrainingSettings


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, 1e-5),
        ({"lora": {"rank": 8}}, 1e-4),
        ({"lora": {"rank": 8}, "learning_rate": 1e-5}, 1e-5),
        ({"learning_rate": 2e-3}, 2e-3),
    ],
)
def test_the_default_depends_on_what_is_trained(options: dict[str, Any], rate: float) -> None:
    chosen = TrainingOptions(**options)
    assert chosen.learning_rate == rate
    assert TrainingSettings(**chosen.effective()).learning_rate == rate


def test_the_documented_rate_of_art_stays() -> None:
    config = ARTTrainerAdapterConfig(backend={"ip": "localhost", "port": 7623})
    assert config.training.learning_rate == 5e-5
