"""Registers the three components of the ART plugin."""

import asyncio
from collections.abc import AsyncIterator

from insitu.adapters.art.config import ARTTrainerAdapterConfig, ARTTrainerConfig, ARTTrajectoryBuilderConfig
from insitu.adapters.art.library import load_art
from insitu.adapters.art.trainer import ARTTrainer
from insitu.adapters.art.trainer_adapter import ARTTrainerAdapter
from insitu.adapters.art.trajectory_builder import ARTTrajectoryBuilder
from insitu.builder import Builder
from insitu.registry import register_trainer, register_trainer_adapter, register_trajectory_builder


@register_trajectory_builder(config_type=ARTTrajectoryBuilderConfig)
async def art_trajectory_builder(
    config: ARTTrajectoryBuilderConfig, builder: Builder
) -> AsyncIterator[ARTTrajectoryBuilder]:
    made = ARTTrajectoryBuilder(config, builder)
    try:
        yield made
    finally:
        await made.stop()


@register_trainer_adapter(config_type=ARTTrainerAdapterConfig)
async def art_trainer_adapter(config: ARTTrainerAdapterConfig, builder: Builder) -> AsyncIterator[ARTTrainerAdapter]:
    await asyncio.to_thread(load_art)  # seconds: the event loop goes on meanwhile
    made = ARTTrainerAdapter(config)
    try:
        yield made
    finally:
        await made.close()


@register_trainer(config_type=ARTTrainerConfig)
async def art_trainer(config: ARTTrainerConfig, builder: Builder) -> AsyncIterator[ARTTrainer]:
    yield ARTTrainer(config, builder)
