"""Which model calls are trained, and which function a call is credited to."""

from collections.abc import Collection, Mapping, Sequence

from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import ModelCall


def is_targeted(functions: Collection[str], targets: Collection[str]) -> bool:
    """Whether a call made inside `functions` was made inside one of `targets` (`<workflow>`: any)."""
    return WORKFLOW in targets or not set(targets).isdisjoint(functions)


def credited_function(functions: Sequence[str], targets: Collection[str]) -> str:
    """The function that a call made inside `functions` (outermost first) is credited to.

    It is the innermost function, or the innermost of the `targets` if these name functions.
    """
    targeted = [name for name in functions if name in targets] if WORKFLOW not in targets else []
    return (targeted or functions or (WORKFLOW,))[-1]


def models_named(target: str, models: Mapping[str, str | None]) -> list[str]:
    """The keys of `models` (key -> model name) that `target` selects: a key, or a model name with or without `@step`.

    Without an exact match, models whose names are not known yet are selected too.
    """
    exact = [key for key, model in models.items() if model == target]
    similar = [k for k, model in models.items() if model is None or _without_step(model) == _without_step(target)]
    return [target] if target in models else exact or similar


def _without_step(model: str) -> str:
    name, _, step = model.rpartition("@")
    return name if name and step.isdecimal() else model


def targeted_calls(
    calls: Sequence[ModelCall], functions: Sequence[str], model: str | None, llms: Collection[str]
) -> list[int]:
    """The indices of the calls that are trained.

    A call is trained if it was made inside one of `functions`, and to the targeted model: `model` is a key of `llms`,
    a model name or `name@step`; `llms` are the keys it selects (see Config.trained_llms).
    """
    return [
        index
        for index, call in enumerate(calls)
        if call.token_ids
        and call.error is None
        and is_targeted(call.functions, functions)
        and _is_model(call, model, llms)
    ]


def _is_model(call: ModelCall, model: str | None, llms: Collection[str]) -> bool:
    if llms and call.llm is not None:
        return call.llm in llms
    if model is None:
        return not llms
    return bool(models_named(model, {call.llm or "": call.model}))
