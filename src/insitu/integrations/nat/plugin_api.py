"""What a plugin imports from the documented `nat.plugin_api`: our plugin API, and the names of the other paths.

The names that take seconds to import are loaded when they are asked for.
"""

import importlib
from typing import Any

from insitu.config import Config as Config
from insitu.integrations.nat.ttc import *  # noqa: F403
from insitu.plugin_api import *  # noqa: F403
from insitu.workflow.function_groups import FunctionGroup as FunctionGroup

_CUSTOMIZER = "insitu.integrations.customizer"
LAZY = {
    "insitu.training.runtime": ("finetuning_main", "run_finetuning", "run_finetuning_sync"),
    "insitu.integrations.nat.base_parser": ("parse_to_openai_message", "parse_to_openai_messages"),
    "insitu.integrations.art.config": (
        *("ARTBackendConfig", "ARTTrainerAdapterConfig", "ARTTrainerConfig", "ARTTrajectoryBuilderConfig"),
    ),
    "insitu.integrations.art.components": ("ARTTrainer", "ARTTrajectoryBuilder"),
    "insitu.integrations.art.trainer_adapter": ("ARTTrainerAdapter",),
    "insitu.training.preference_builders": ("DPOTrajectoryBuilder", "DPOTrajectoryBuilderConfig"),
    "insitu.schemas.episodes": ("CandidateStep",),
    "insitu.preferences.pairs": ("PreferencePair",),
    f"{_CUSTOMIZER}.config": (
        *("DPOSpecificHyperparameters", "NIMDeploymentConfig", "NeMoCustomizerHyperparameters"),
        *("NeMoCustomizerTrainerAdapterConfig", "NeMoCustomizerTrainerConfig"),
    ),
    f"{_CUSTOMIZER}.trainer": ("NeMoCustomizerTrainer",),
    f"{_CUSTOMIZER}.trainer_adapter": ("NeMoCustomizerTrainerAdapter",),
    "insitu.cli.finetune": ("finetune_command",),
}
"""Module -> names."""


def __getattr__(name: str) -> Any:
    module = next((module for module, names in LAZY.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
