"""The documented names of `nat.plugins.customizer`, and the registration of its trainer adapter."""

import asyncio
from collections.abc import AsyncIterator

from insitu.builder import Builder
from insitu.integrations.customizer.config import *  # noqa: F403
from insitu.integrations.customizer.config import NeMoCustomizerTrainerAdapterConfig
from insitu.integrations.customizer.services import load_sdk
from insitu.integrations.customizer.trainer import NeMoCustomizerTrainer as NeMoCustomizerTrainer
from insitu.integrations.customizer.trainer_adapter import NeMoCustomizerTrainerAdapter as NeMoCustomizerTrainerAdapter
from insitu.registry import register_trainer_adapter
from insitu.schemas.episodes import CandidateStep as CandidateStep
from insitu.schemas.episodes import PreferencePair as PreferencePair
from insitu.training.preference_builders import DPOTrajectoryBuilder as DPOTrajectoryBuilder


@register_trainer_adapter(config_type=NeMoCustomizerTrainerAdapterConfig)
async def nemo_customizer_trainer_adapter(
    config: NeMoCustomizerTrainerAdapterConfig, builder: Builder
) -> AsyncIterator[NeMoCustomizerTrainerAdapter]:
    await asyncio.to_thread(load_sdk)  # importing the libraries takes half a second: do it off the event loop
    adapter = NeMoCustomizerTrainerAdapter(config, builder)
    try:
        yield adapter
    finally:
        await adapter.close()
