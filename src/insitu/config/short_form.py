"""The short form of a file: `finetuning: {model: NAME}` in place of the three parts of training."""

import copy
from collections.abc import Mapping
from typing import Any

from insitu.errors import ConfigError

PARTS = {
    "trainer": ("grpo", "insitu_trainer"),
    "trajectory_builder": ("episodes", "insitu_traj_builder"),
    "trainer_adapter": ("backend", "insitu_trainer_adapter"),
}
"""The name and `_type` of the block of each part, unless the file has others."""
_ADAPTER = "trainer_adapter"
OF_ADAPTER = ("model", "training")
"""Keys of `finetuning` that stand for those of the adapter's block."""
MAX_TOKENS = 256
"""The longest completion of the model under training, unless the file says: else a small model talks until its context
is full."""


def expanded(data: dict[str, Any]) -> dict[str, Any]:
    """The documented form of a file in the short form; any other as it is.

    The file may have blocks without `_type`, which are completed: `-o trainers.grpo.credit step`. Raises ConfigError
    if it has a trainer adapter as well.
    """
    section = data.get("finetuning")
    if not isinstance(section, dict) or not any(key in section for key in OF_ADAPTER):
        return data
    finetuning = {"enabled": True, **{key: value for key, value in section.items() if key not in OF_ADAPTER}}
    given = {key: section[key] for key in OF_ADAPTER if section.get(key) is not None}
    _check_adapter(section, given, data.get(f"{_ADAPTER}s"))
    result = {**data, "finetuning": finetuning}
    for kind, (default, type_name) in PARTS.items():
        blocks, named = data.get(f"{kind}s") or {}, finetuning.get(kind)
        if not isinstance(blocks, dict) or (str(named) not in blocks if named else len(blocks) > 1):
            continue  # the check reports it
        name = named or next(iter(blocks), default)
        block = {"_type": type_name, **(given if kind == _ADAPTER else {})}
        result[f"{kind}s"] = {**blocks, name: merged(block, blocks.get(name) or {})}
        finetuning[kind] = name
    _set_reward(finetuning, data.get("eval"))
    if isinstance(llms := data.get("llms"), dict):
        result["llms"] = {name: _limited(block) for name, block in llms.items()}
    return result


def _limited(llm: Any) -> Any:
    """The block of a model under training with a limit of its completions; any other as it is."""
    is_policy = isinstance(llm, dict) and llm.get("_type") == "policy"
    return {**llm, "max_tokens": llm.get("max_tokens", MAX_TOKENS)} if is_policy else llm


def _check_adapter(section: Mapping[str, Any], given: Mapping[str, Any], blocks: Any) -> None:
    keys = " and ".join(f"finetuning.{key}" for key in given)
    default, _ = PARTS[_ADAPTER]
    if "model" not in section:
        block = section.get(_ADAPTER) or default
        raise ConfigError(f"{keys} needs finetuning.model; without it, set {_ADAPTER}s.{block}.training")
    names = [name for name, block in _items(blocks) if name != default or "_type" in dict(_items(block))]
    is_named = section.get(_ADAPTER) is not None
    complete = [f"finetuning.{_ADAPTER}"] if is_named else [f"{_ADAPTER}s.{name}" for name in names]
    if given and complete:
        raise ConfigError(f"{keys} and {complete[0]} are both given; give one of them")


def _set_reward(finetuning: dict[str, Any], evaluation: Any) -> None:
    """Makes the sole evaluator the reward, unless the file names one."""
    evaluators = dict(_items(evaluation)).get("evaluators")
    reward = finetuning.get("reward_function") or {}
    if isinstance(evaluators, dict) and len(evaluators) == 1 and isinstance(reward, dict):
        finetuning["reward_function"] = {"name": next(iter(evaluators)), **reward}


def _items(node: Any) -> list[tuple[str, Any]]:
    return [*node.items()] if isinstance(node, dict) else []


def merged(before: Any, values: Any) -> Any:
    """Nested settings with other values, which take precedence."""
    if not isinstance(before, Mapping) or not isinstance(values, Mapping):
        return copy.deepcopy(values)
    return {**before, **{key: merged(before.get(key), value) for key, value in values.items()}}
