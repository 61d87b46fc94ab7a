"""The file of a project that was written for the toolkit, around the package `toolkit_plugin`."""

from typing import Any

TOOLS = ["look", "words", "tidy", "shop"]

PROJECT: dict[str, Any] = {
    "general": {
        "use_uvloop": True,
        "telemetry": {"logging": {"console": {"_type": "console", "level": "WARN"}}},
        "front_end": {"_type": "fastapi", "cors": {"allow_origins": ["*"]}},
    },
    "functions": {
        "look": {"_type": "desk_look", "weather": "rainy"},
        "words": {"_type": "desk_words"},
        "tidy": {"_type": "desk_tidy"},
        "agent": {"_type": "desk_agent", "llm_name": "clerk", "tool_names": TOOLS},
    },
    "function_groups": {"shop": {"_type": "desk_shop", "prices": {"tea": 2.5}, "include": ["price", "products"]}},
    "workflow": {"_type": "desk_agent", "llm_name": "clerk", "tool_names": TOOLS},
    "eval": {
        "general": {"output_dir": "out", "dataset": {"_type": "json", "file_path": "rows.json"}},
        "evaluators": {"use": {"_type": "desk_tool_use", "enough": 1}},
    },
}
OWN = {
    "trajectory_builders": {"desk": {"_type": "desk_traj_builder", "num_generations": 3}},
    "trainer_adapters": {"desk": {"_type": "desk_trainer_adapter", "folder": "jobs"}},
    "trainers": {"desk": {"_type": "desk_trainer"}},
    "finetuning": {
        "enabled": True,
        "trainer": "desk",
        "trajectory_builder": "desk",
        "trainer_adapter": "desk",
        "reward_function": {"name": "use"},
        "num_epochs": 2,
        "output_dir": "run",
    },
}
ROWS = [{"id": "a", "question": "tool", "topic": "tools"}, {"id": "b", "question": "seeded", "topic": "seeds"}]
OPTIONS = ("return_token_ids", "logprobs")
