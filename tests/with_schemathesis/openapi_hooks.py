"""Hooks of schemathesis, which imports this module: job bodies as JSON Lines, and names that exist on the server.

Generated names would nearly always be refused before the code behind them is reached. Half of them become those of the
model that `test_openapi.py` has created, INSITU_FUZZ_MODEL_ID being its id.
"""

import json
import os
import random

import schemathesis

BODIES = {"base_model": "model", "name": "fuzzed", "project": "p", "model_id": os.environ["INSITU_FUZZ_MODEL_ID"]}
PATHS = {"id": os.environ["INSITU_FUZZ_MODEL_ID"], "model": "policy"}
_rng = random.Random(os.environ["INSITU_FUZZ_SEED"])


@schemathesis.serializer("application/x-ndjson")
def lines(ctx, value):
    """A list is one line per item; another value is the settings of a job, which a row follows."""
    records = value if isinstance(value, list) else [value, {"token_ids": [1, 2], "loss_mask": [0, 1]}]
    return "\n".join(json.dumps(record) for record in records).encode(errors="replace")


def _named(value, names):
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: names[key] if key in names and _rng.random() < 0.5 else _named(item, names) for key, item in value.items()
    }


@schemathesis.hook
def map_body(ctx, body):
    named = _named(body, BODIES)
    if isinstance(named, dict) and isinstance(named.get("model"), str) and _rng.random() < 0.5:
        named["model"] = _rng.choice(("policy", "fuzzed", "fuzzed@0"))
    return named


@schemathesis.hook
def map_path_parameters(ctx, path_parameters):
    return _named(path_parameters, PATHS)
