"""The same evaluation by insitu, in one process: our_evaluation.py CONFIG EPISODES."""

import asyncio
import json
import sys
import time

from insitu.builder import Builder
from insitu.collect.evaluation import EvaluationRun
from insitu.config import load_config
from insitu.schemas.evaluation import EvaluationRunConfig


async def main(file: str, episodes: int) -> None:
    config = load_config(file)
    async with Builder(config) as builder:
        await EvaluationRun(EvaluationRunConfig(config_file=config), builder).run_and_evaluate()  # what is made once
        began = time.process_time()
        output = await EvaluationRun(EvaluationRunConfig(config_file=config), builder).run_and_evaluate()
        seconds = time.process_time() - began
    items = output.eval_input.eval_input_items
    assert len(items) == episodes
    assert not any(item.error for item in items), items[0].error
    rewards = {str(item.id): item.output_obj["reward"] for item in items}
    print(json.dumps({"rewards": rewards, "cpu": seconds / episodes}))


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
